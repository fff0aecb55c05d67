"""The device to which weights are read before an engine takes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from burnish.config.model import ModelConfig, PrecisionConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.config.train_engines import DeepSpeedEngine, TorchEngine
from burnish.distributed.process_group import SINGLE, RankGroup
from burnish.models.load import load_tokenizer
from burnish.observe.timeline import Timeline
from burnish.runtime.inline import InlineRuntime
from burnish.train import engines
from burnish.train.engines import load_device
from burnish.train.spec import EngineSpec

GPU, CPU = torch.device("cuda:1"), torch.device("cpu")


class TwoRanks:
    """A process group, as far as it is asked for its size."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


SHARDED = RankGroup(TwoRanks())  # type: ignore[arg-type]
OFFLOADED = TorchEngine(sharding="full", cpu_offload=True)


def spec_of(engine: Any, model: ModelConfig, *, trainable: bool = True) -> EngineSpec:
    train = TrainConfig(train_batch_size=1, engine=engine)
    return EngineSpec(TrainRole.alone("policy", train, model, trainable=trainable))


def test_masters_that_live_on_the_host_never_cross_the_gpu(tiny_config: ModelConfig) -> None:
    """7B in fp32 are 28 GB, on a GPU that fits the 14 GB in bf16 and their activations."""
    for engine in (DeepSpeedEngine(adam_offload=True), DeepSpeedEngine(zero_stage=3), OFFLOADED):
        assert load_device(spec_of(engine, tiny_config), GPU, SHARDED) == CPU


def test_other_engines_load_on_their_compute_device(tiny_config: ModelConfig) -> None:
    plain = spec_of(TorchEngine(), tiny_config)
    assert load_device(plain, GPU, SHARDED) == load_device(plain, GPU, SINGLE) == GPU
    assert load_device(spec_of(OFFLOADED, tiny_config), GPU, SINGLE) == GPU, "nothing is cut"
    frozen = spec_of(DeepSpeedEngine(), tiny_config, trainable=False)
    assert load_device(frozen, GPU, SINGLE) == GPU


@pytest.mark.parametrize("kind", ["language", "scalar"])
def test_the_runtime_loads_on_that_device(
    kind: str, tiny_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Seen(Exception):
        pass

    def load(*_: Any, device: torch.device, **__: Any) -> None:
        raise Seen(device)

    monkeypatch.setattr(engines, "load_causal_lm", load)
    monkeypatch.setattr(engines, "load_scalar_model", load)
    runtime = InlineRuntime(
        load_tokenizer(tiny_config),
        precision=PrecisionConfig(dtype="bf16"),
        device="cpu",
        timeline=Timeline(max_events=1),
    )
    runtime.device = GPU
    spec = spec_of(DeepSpeedEngine(), tiny_config)
    for trainable, device in ((True, CPU), (False, GPU)):
        own = replace(spec, role=replace(spec.role, trainable=trainable))
        with pytest.raises(Seen) as seen:
            if kind == "language":
                runtime.language_model(own)
            else:
                runtime.scalar_model(own, seed=0)
        assert seen.value.args == (device,)
