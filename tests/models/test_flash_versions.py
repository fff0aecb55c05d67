"""FlashAttention 3 in place of torch's operators: when it is taken, and what a run does when it
raises. A fake package registers counting copies of the reference operators with torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.library import Library
from torch.nn import attention as torch_attention
from torch.nn.attention import _registry
from transformers import CONFIG_MAPPING, PretrainedConfig

import burnish.models.attention_kernel as attention_kernel
import burnish.models.flash_reference as reference
from burnish.config.model import ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.models.attention_kernel import Choice, Use, choose_kernel, try_newer
from burnish.models.flash_versions import is_installed, registered, select
from burnish.models.load import load_causal_lm
from burnish.models.sdpa import Kernels
from burnish.plan.hardware import parse_cluster
from burnish.plan.speeds import Speeds
from burnish.plan.work import AttentionWork, Work
from burnish.steps.objectives import sft_objective
from burnish.steps.updates import step_metrics
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch, rows_to_batch

CPU = torch.device("cpu")
A100, H100, B200 = (Kernels((2, 13), x) for x in ((8, 0), (9, 0), (10, 0)))
MODEL = ModelConfig(scratch=ScratchConfig(hidden_size=64, num_heads=4, num_kv_heads=2))


@dataclass
class FakePackage:
    """Kernels that torch registers, with the calls that they computed."""

    calls: list[str] = field(default_factory=list)
    raises: dict[str, Exception] = field(default_factory=dict)
    """Call -> the error that it raises. ``forward``, ``backward`` or ``window``."""
    factor: float = 1.0
    """Factor of its outputs."""
    library: Library | None = None

    def register(self) -> FakePackage:
        if "import" in self.raises:
            raise self.raises["import"]
        self.library = Library("aten", "IMPL")
        for name in ("_flash_attention_forward", "_flash_attention_backward"):
            self.library.impl(
                name,
                vars(FakePackage)[name.rpartition("_")[2]].__get__(self),
                "CPU",
                allow_override=True,
            )
        self.library.impl("_scaled_dot_product_flash_attention_for_cpu", self.dense, "CPU")
        return self

    def remove(self) -> None:
        assert self.library is not None
        self.library._destroy()

    def computes(self, call: str, keywords: Any) -> None:
        self.calls.append(call)
        windowed = (keywords.get("window_size_left") or -1) >= 0
        for kind in (call, *(["window"] if windowed else [])):
            if kind in self.raises:
                raise self.raises[kind]

    def forward(self, *args: Any, **keywords: Any) -> Any:
        self.computes("forward", keywords)
        out, *rest = reference.forward(*args, **keywords)
        return (self.factor * out, *rest)

    def backward(self, *args: Any, **keywords: Any) -> Any:
        self.computes("backward", keywords)
        return reference.backward(*args, **keywords)

    def dense(self, *args: Any, **keywords: Any) -> Any:
        raise RuntimeError("dropout_p must be 0")


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePackage]:
    """A package for FlashAttention 3 on a CPU that torch takes for a Hopper GPU."""
    fake = FakePackage()
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", fake.register)
    monkeypatch.setattr("burnish.train.spec.kernels_of", lambda _: H100)
    try_newer.cache_clear()
    with reference.on_cpu():
        yield fake
        select(None)
        assert registered() is None
    try_newer.cache_clear()


def model(**fields: Any) -> PretrainedConfig:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config: PretrainedConfig = CONFIG_MAPPING["mistral"](
        **(sizes | {"sliding_window": None} | fields)
    )
    return config


def chosen(**fields: Any) -> Choice:
    return choose_kernel("auto", model(**fields), Use("bf16", H100, device=CPU))


def engine(attention: str = "auto", *, dropout: float = 0.0) -> TorchTrainEngine:
    torch.manual_seed(0)
    train = TrainConfig(lr=1e-3, attention=attention)  # type: ignore[arg-type]
    role = TrainRole.alone("policy", train, MODEL, precision=PrecisionConfig(dtype="bf16"))
    return TorchTrainEngine(load_causal_lm(MODEL), EngineSpec(role))


def batch() -> Batch:
    rows = [[3, 4, 5, 6] + [7 + i] * n for i, n in enumerate((3, 9, 1, 14))]
    masks = [[False] * 4 + [True] * (len(row) - 4) for row in rows]
    return rows_to_batch(rows, masks, prompt_lens=[4] * 4, group_ids=[0, 0, 0, 1])


def test_a_package_that_computes_the_trial_is_taken(package: FakePackage) -> None:
    choice = chosen(sliding_window=8)
    assert choice.newer == "FA3" and registered() is None
    assert choice.sentence == "FlashAttention 3 over the lengths of rows"
    assert choice.rate == "newer_attention"
    assert {"forward", "backward"} == set(package.calls)


@pytest.mark.parametrize(
    ("call", "error", "fields", "named"),
    [
        ("import", ImportError("No module named 'flash_attn_interface'"), {}, "not installed"),
        ("import", OSError("undefined symbol"), {}, "OSError: undefined symbol"),
        ("forward", AssertionError("head_dim 16"), {}, "AssertionError: head_dim 16"),
        ("backward", RuntimeError("no backward"), {}, "RuntimeError: no backward"),
        ("window", ValueError("no windows"), {"sliding_window": 8}, "window of 40 tokens"),
    ],
)
def test_torch_operators_stay_if_a_package_lacks_what_the_model_needs(
    call: str, error: Exception, fields: dict[str, Any], named: str, package: FakePackage
) -> None:
    package.raises[call] = error
    choice = chosen(**fields)
    assert choice.kernel == "flash" and choice.newer is None and registered() is None
    assert named in choice.sentence and "torch's own kernels" in choice.sentence
    assert choice.rate == "attention"


def test_the_local_engine_does_not_try_a_package(package: FakePackage) -> None:
    choice = choose_kernel("auto", model(), Use("bf16", H100, device=CPU, own_only=True))
    assert choice.kernel == "flash" and choice.newer is None and package.calls == []


def test_a_window_is_not_needed_by_a_model_without_one(package: FakePackage) -> None:
    package.raises["window"] = ValueError("no windows")
    assert chosen().newer == "FA3"


def test_a_package_with_other_results_is_not_taken(package: FakePackage) -> None:
    package.factor = 1.2
    choice = chosen()
    assert choice.newer is None and "differs" in choice.sentence


def test_running_out_of_memory_is_no_reason(package: FakePackage) -> None:
    package.raises["forward"] = RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
    with pytest.raises(RuntimeError, match="out of memory"):
        chosen()


def test_gpus_without_a_newer_implementation_have_nothing_to_report() -> None:
    for kernels in (A100, Kernels((2, 13), (12, 0)), Kernels((2, 13), (9, 4), hip=True)):
        assert attention_kernel._choose_newer(model(), Use("bf16", kernels)) == (None, "")


def test_torch_without_a_registry_keeps_its_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("activate_flash_attention_impl", "current_flash_attention_impl"):
        monkeypatch.delattr(torch_attention, name)
    with reference.on_cpu():
        choice = chosen()
    assert choice.kernel == "flash" and "cannot use FlashAttention 3" in choice.sentence


def test_an_implementation_of_the_program_stays(package: FakePackage) -> None:
    torch_attention.activate_flash_attention_impl("FA3")
    try:
        choice = chosen()
        assert choice.newer is None and "this program has activated FA3" in choice.sentence
        select(None)
        assert registered() == "FA3"
    finally:
        torch_attention.restore_flash_attention_impl()


def test_a_plan_counts_on_an_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernel, "is_installed", lambda name: name == "FA4")
    assert choose_kernel("auto", model(), Use("bf16", B200)).newer == "FA4"
    assert choose_kernel("auto", model(), Use("bf16", H100)).newer is None
    assert not is_installed("FA3") and not is_installed("FA4")
    speeds, attention = Speeds(parse_cluster("1x1xH100-80GB")), AttentionWork(1e15, 0.0)
    own, newer = (
        speeds.kernel_seconds(Work(), attention, half=True, rate=rate)["attention"]  # type: ignore[arg-type]
        for rate in ("attention", "newer_attention")
    )
    assert own == pytest.approx(1.6 * newer)


def test_training_uses_the_kernels_and_equals_torch_operators(package: FakePackage) -> None:
    ours = engine()
    package.calls.clear()
    ours.forward_backward(batch(), sft_objective())
    # two layers, of an own part and a prefix part each
    assert package.calls == ["forward"] * 4 + ["backward"] * 4
    norm = ours.optim_step().grad_norm
    package.raises["import"] = ImportError("not here")
    select(None)
    other = engine()
    other.forward_backward(batch(), sft_objective())
    assert other.attention.newer is None
    assert other.optim_step().grad_norm == norm  # the same sums


def test_models_of_one_process_have_their_own_kernels(package: FakePackage) -> None:
    """The kernels of a package refuse dropout, so other models and code never see them."""
    qkv = torch.ones(3, 1, 2, 4, 16)
    select("FA3")
    with pytest.raises(RuntimeError, match="dropout_p must be 0"):
        F.scaled_dot_product_attention(*qkv)
    select(None)
    ours, other = engine(), engine("sdpa")
    package.calls.clear()
    ours.forward_backward(batch(), sft_objective())
    assert package.calls
    package.calls.clear()
    other.logprobs(batch())
    F.scaled_dot_product_attention(*qkv)
    assert registered() is None and package.calls == []


@pytest.mark.parametrize("call", ["forward", "backward"])
def test_torch_operators_replace_kernels_that_raise_once_and_are_counted(
    call: str, package: FakePackage, caplog: pytest.LogCaptureFixture
) -> None:
    expected = engine()
    expected.forward_backward(batch(), sft_objective())
    norm = expected.optim_step().grad_norm
    ours = engine()
    package.raises[call] = AssertionError("unspecified launch failure")
    before = package.calls.count(call)
    with caplog.at_level(logging.WARNING, logger="burnish"):
        stats = []
        for _ in range(2):
            ours.forward_backward(batch(), sft_objective())
            stats.append(ours.optim_step())
    assert stats[0].grad_norm == norm
    assert package.calls.count(call) == before + 1
    assert [s.kernel_fallbacks for s in stats] == [1, 1]
    assert step_metrics(stats)["kernel_fallbacks"] == 1
    warnings = [r.getMessage() for r in caplog.records if "FlashAttention 3" in r.getMessage()]
    assert len(warnings) == 1
    assert "launch failure" in warnings[0] and "[35, 4, 16]" in warnings[0]


def test_kernels_of_a_chosen_attention_that_raise_end_the_run(package: FakePackage) -> None:
    ours = engine("flash")
    package.raises["forward"] = AssertionError("unspecified launch failure")
    with pytest.raises(AssertionError, match="launch failure"):
        ours.logprobs(batch())
