"""From a recipe's ``train.engine`` to the engine, and to the way its model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from burnish.config.model import Dtype
from burnish.config.train import DeepSpeedEngine, TorchEngine
from burnish.train.engine import BaseTrainEngine
from burnish.train.fsdp import is_sharded, torch_engine
from burnish.train.process_group import SINGLE, RankGroup
from burnish.train.spec import EngineSpec


def make_engine(
    model: nn.Module,
    spec: EngineSpec,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    ranks: RankGroup = SINGLE,
    device: torch.device | None = None,
) -> BaseTrainEngine:
    """The engine that ``spec.train.engine`` names, over ``model``. ``device``: where it computes;
    None: where the model is (with DeepSpeed: on its own)."""
    if isinstance(spec.train.engine, DeepSpeedEngine):
        from burnish.train.deepspeed import DeepSpeedTrainEngine

        return DeepSpeedTrainEngine(model, spec, tokenizer=tokenizer, ranks=ranks)
    return torch_engine(model, spec, tokenizer=tokenizer, ranks=ranks, device=device)


def load_device(spec: EngineSpec, device: torch.device, ranks: RankGroup = SINGLE) -> torch.device:
    """Return the device on which the model of an engine on ``device`` is loaded.

    The fp32 weights that DeepSpeed and an offloaded FSDP2 start from would fill a GPU on which the
    shards, or the half-precision weights, fit: they stay in host memory.
    """
    engine = spec.train.engine
    sharded = isinstance(engine, TorchEngine) and is_sharded(spec, ranks)
    in_host = isinstance(engine, DeepSpeedEngine) or (sharded and engine.cpu_offload)
    return torch.device("cpu") if in_host and spec.trainable else device


@contextmanager
def loading(spec: EngineSpec, dtype: Dtype, ranks: RankGroup = SINGLE) -> Iterator[None]:
    """Inside, a model that is loaded in ``dtype`` is cut into shards at once if the engine wants
    it so."""
    if not isinstance(spec.train.engine, DeepSpeedEngine):
        yield
        return
    from burnish.train.deepspeed import loading as in_shards

    with in_shards(spec.train.engine, dtype, ranks):
        yield


def shares_weights(spec: EngineSpec) -> bool:
    """Whether the engine's model can be run by others as it is: not where its weights are in
    shards, or its layers cut."""
    engine = spec.train.engine
    if isinstance(engine, DeepSpeedEngine):
        return engine.zero_stage < 3
    return engine.tensor_parallel_size == 1


def reads_own_shards(spec: EngineSpec, ranks: RankGroup = SINGLE) -> bool:
    """Whether each rank reads its own rows of the weights, into a model that is made without
    any."""
    engine = spec.train.engine
    return isinstance(engine, TorchEngine) and engine.sharding == "full" and ranks.size > 1
