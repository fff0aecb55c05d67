"""train.deterministic: where PyTorch's deterministic kernels are selected, and what is refused."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig

import burnish.models.deterministic as deterministic
from burnish.config.model import ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.models.attention_kernel import Use, choose_kernel
from burnish.models.deterministic import WORKSPACE, check_deterministic, deterministic_kernels
from burnish.models.paths import ModelError
from burnish.models.sdpa import Kernels
from burnish.steps.objectives import sft_objective
from burnish.train.base import Outputs
from burnish.train.engines import load_engine
from burnish.train.spec import EngineSpec
from burnish.types import Batch, Stats, rows_to_batch

CPU = torch.device("cpu")
MODEL = ModelConfig(scratch=ScratchConfig(hidden_size=32, num_heads=2, num_kv_heads=1))


def config(**fields: Any) -> PretrainedConfig:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    made: PretrainedConfig = CONFIG_MAPPING["qwen3"](**(sizes | fields))
    return made


def spec(**settings: Any) -> EngineSpec:
    train = TrainConfig(lr=1e-3, **settings)
    return EngineSpec(
        TrainRole.alone("policy", train, MODEL, precision=PrecisionConfig(dtype="fp32"))
    )


def batch() -> Batch:
    return rows_to_batch(
        [[3, 4, 5], [6, 7]], [[False, True, True], [False, True]], prompt_lens=[1, 1]
    )


def write_to_places() -> None:
    """An operation without a deterministic kernel, on every device."""
    torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))


@pytest.mark.parametrize("on", [True, False])
def test_deterministic_kernels_are_selected_within_passes_only(on: bool) -> None:
    engine = load_engine(spec(deterministic=on), scalar=False, device=CPU)
    within = []

    def loss(outputs: Outputs, micro: Batch) -> tuple[Tensor, Stats]:
        within.append(torch.are_deterministic_algorithms_enabled())
        return sft_objective()(outputs, micro)

    engine.forward_backward(batch(), loss)
    engine.measure(batch(), loss)
    assert within == [on, on]
    write_to_places()  # such as sampling does


def test_a_setting_of_the_program_is_restored() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic_kernels(True):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_model_with_deterministic_kernels_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKSPACE, raising=False)
    check_deterministic(config(), CPU)
    assert os.environ[WORKSPACE] == ":4096:8"
    check_deterministic(None, CPU)


def test_a_model_whose_operations_have_none_is_refused_before_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr("burnish.train.engines.load_causal_lm", lambda *a, **k: loaded.append(a))

    def logprobs(*_: Any, **__: Any) -> Any:
        write_to_places()

    monkeypatch.setattr(deterministic, "token_logprobs", logprobs)
    with pytest.raises(ModelError, match="put_") as raised:
        load_engine(
            spec(deterministic=True),
            scalar=False,
            device=CPU,
            random=config(rms_norm_eps=3e-6),  # another key of the cache
        )
    assert "use train.deterministic=false" in str(raised.value) and not loaded


def test_a_model_with_other_bits_in_a_second_pass_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed = deterministic.token_logprobs

    def logprobs(hidden: Tensor, *args: Any, **keywords: Any) -> Any:
        return computed(hidden + 1e-3 * torch.randn(()), *args, **keywords)

    monkeypatch.setattr(deterministic, "token_logprobs", logprobs)
    with pytest.raises(ModelError, match="other bits"):
        check_deterministic(config(rms_norm_eps=4e-6), CPU)


def test_an_operation_without_one_in_a_run_says_which_key_to_change() -> None:
    engine = load_engine(spec(deterministic=True), scalar=False, device=CPU)

    def loss(outputs: Outputs, micro: Batch) -> tuple[Tensor, Stats]:
        write_to_places()
        return sft_objective()(outputs, micro)

    with pytest.raises(RuntimeError, match="put_") as raised:
        engine.forward_backward(batch(), loss)
    assert "train.deterministic=false" in "".join(raised.value.__notes__)
    assert not torch.are_deterministic_algorithms_enabled()


def test_attention_is_torchs_own_and_planned_with_its_measured_rate() -> None:
    h100 = Kernels((2, 13), (9, 0))
    choice = choose_kernel("auto", config(), Use("bf16", h100, deterministic=True))
    assert choice.newer is None and choice.rate == "deterministic_attention"
    assert "deterministic" in choice.sentence and "FlashAttention 3" in choice.sentence
    assert (
        choose_kernel("sdpa", config(), Use("bf16", h100, deterministic=True)).rate == "attention"
    )
