"""Between the upload of a micro-batch and the end of its backward pass, Burnish reads no value back
from the device: each read would wait for all the work that is queued there.

The meta device substitutes the accelerator. Its tensors have no values, so ``item``, ``tolist``,
``nonzero``, ``unique``, indexing with a bool mask and copies to the CPU raise there. A dispatch
mode also finds copies to the device that do not go through ``tensors.upload`` (pinned, and not
waited for).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    masking_utils,
)

import burnish.train.engine as train_engine
from burnish.algorithms.distill import DIVERGENCES, SLOPES, forward_kl
from burnish.config.algorithm import AlgorithmConfig
from burnish.config.model import ModelConfig
from burnish.config.preference_losses import PreferenceLossConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.jobs.distill import distill_objective
from burnish.jobs.preference import preference_objective
from burnish.models.distill import DistillTarget
from burnish.models.load import choose_attention
from burnish.models.logprobs import Head
from burnish.models.scalar_model import ScalarModel
from burnish.steps.objectives import (
    policy_objective,
    process_objective,
    reward_model_objective,
    sft_objective,
    value_objective,
    with_expert_balance,
)
from burnish.tensors import upload
from burnish.train.base import Loss
from burnish.train.batching import arrange
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch, Stats, rows_to_batch

META = torch.device("meta")
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "window": lambda: MistralConfig(**SIZES, sliding_window=4),
    "softcap": lambda: Gemma2Config(**SIZES, head_dim=8, sliding_window=4),
    # batched_mm: transformers' other ways to compute experts read counts back to the host
    "experts": lambda: MixtralConfig(
        **SIZES, num_local_experts=4, experts_implementation="batched_mm"
    ),
}


class Copies(TorchDispatchMode):
    """Collects operations that move data between CPU and meta device, but for those of
    ``upload``."""

    def __init__(self) -> None:
        super().__init__()
        self.uploads = 0
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read, written = (
            {x.device.type for x in tree_leaves(leaves) if isinstance(x, Tensor) and x.dim()}
            for leaves in ((args, kwargs), out)
        )
        if len(read | written) > 1:
            if _inside(upload.__code__):
                self.uploads += 1
            else:
                self.found.append(f"{func} in {_burnish_line()}")
        return out


def _frames() -> Any:
    frame = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _inside(code: Any) -> bool:
    return any(frame.f_code is code for frame in _frames())


def _burnish_line() -> str:
    for frame in _frames():
        if "/burnish/" in frame.f_code.co_filename and "/tests/" not in frame.f_code.co_filename:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return "no file of burnish"


def engine_of(name: str, *, role: str = "policy", **train: Any) -> TorchTrainEngine:
    """An engine whose model is then moved to the meta device."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(MODELS[name]())
    choose_attention(model, name)
    if role != "policy":
        model = ScalarModel(model.get_decoder(), torch.nn.Linear(32, 1, bias=False))
    if name == "experts":
        train["moe_aux_loss_coef"] = 0.01
    settings = TrainConfig(logprob_chunk_tokens=7, train_batch_size=8, **train)
    spec = EngineSpec(TrainRole.alone(role, settings, ModelConfig(path=name)), micro_batch_size=4)  # type: ignore[arg-type]
    engine = TorchTrainEngine(model, spec)
    engine.model.to(META)
    engine.device = META
    return engine


def batch_of(**more: Any) -> Batch:
    """Two groups of four rows of unequal length, shared prompts of 5 and 7 tokens."""
    prompts = [[5, 6, 7, 8, 9]] * 4 + [[9, 8, 7, 6, 5, 4, 3]] * 4
    rows = [p + [10 + i] * (2 + i) for i, p in enumerate(prompts)]
    masks = [[False] * len(p) + [True] * (2 + i) for i, p in enumerate(prompts)]
    ids = [0] * 4 + [1] * 4
    batch = rows_to_batch(rows, masks, prompt_lens=[len(p) for p in prompts], group_ids=ids)
    return replace(batch, **{k: v(batch) if callable(v) else v for k, v in more.items()})


def flat(batch: Batch) -> Tensor:
    return torch.linspace(-2, -1, batch.tokens.numel())


RL = {name: flat for name in ("advantages", "old_logprobs", "sampler_logprobs", "ref_logprobs")}
AGES = {"ages": lambda batch: torch.arange(batch.tokens.numel()) % 3}
PAIRS = {"ref_logprobs": flat, "rows_per_unit": 2}


def rl(**options: Any) -> Loss:
    config = AlgorithmConfig.model_validate(options)
    return policy_objective(config, max_len=20, kl_coef=lambda: 0.1)


def preference(kind: str) -> Loss:
    return preference_objective(TypeAdapter(PreferenceLossConfig).validate_python({"kind": kind}))


PPO = {
    "loss_aggregation": "sequence_mean",
    "entropy_coef": 0.01,
    "kl": {"placement": "loss"},
    "correction": {"level": "geometric", "mode": {"kind": "mask", "low": 0.5}, "high": 2.0},
}
CASES: dict[str, tuple[str, Loss, dict[str, Any]]] = {
    "sft": ("policy", sft_objective(), {}),
    "ppo": ("policy", rl(**PPO), RL | AGES),
    "the sampler's ratio": ("policy", rl(old_policy="sampler"), RL),
    "gspo": ("policy", rl(policy_loss={"kind": "gspo"}), RL),
    "dpo": ("policy", preference("dpo"), PAIRS),
    "orpo": ("policy", preference("orpo"), {"rows_per_unit": 2}),
    "kto": (
        "policy",
        preference("kto"),
        {"ref_logprobs": flat, "labels": torch.arange(8) % 2 == 0, "kl_estimate": 0.3},
    ),
    "critic": ("critic", value_objective(value_clip=0.2), {"values": flat, "returns": flat}),
    "pairs": (
        "reward",
        reward_model_objective(center_coef=0.1),
        {"margins": torch.ones(8), "rows_per_unit": 2},
    ),
    "steps": ("reward", process_objective(), {"step_labels": flat}),
}


def passes_without_waiting(engine: TorchTrainEngine, batch: Batch, loss: Loss) -> Copies:
    with Copies() as copies:
        stats = engine.forward_backward(batch, loss)
    numbers = [x for pair in stats.means.values() for x in pair]
    numbers += [*stats.maxima.values(), *stats.sums.values()]
    assert any(isinstance(x, Tensor) and x.device == META for x in numbers)
    assert copies.found == []
    assert all(p.grad is not None for n, p in engine.model.named_parameters() if "proj" in n)
    return copies


@pytest.fixture
def rows_taken_as_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers looks into the positions of padded rows for packed ones, once per pass: that
    read is its own."""
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda *_: None)


@pytest.mark.parametrize("layout", ["shared_prefix", "packed", "padded"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("rows_taken_as_rows")
def test_no_objective_waits_for_the_device(case: str, layout: str) -> None:
    role, loss, arrays = CASES[case]
    engine = engine_of("llama", role=role, layout=layout)
    copies = passes_without_waiting(engine, batch_of(**arrays), loss)
    assert copies.uploads > 0


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_a_distillation_objective_does_not_wait_for_the_device(kind: str) -> None:
    options = {"beta": 0.5} if kind == "jsd" else {}
    teacher = Head(torch.randn(50, 24, device=META), chunk_tokens=7)
    divergence, slope = (partial(x[kind], **options) for x in (DIVERGENCES, SLOPES))
    engine = engine_of("llama")
    engine.forward.distill_target = DistillTarget(teacher, divergence, slope, forward_kl)
    batch = batch_of(teacher_states=lambda b: torch.randn(b.tokens.numel(), 24))
    passes_without_waiting(engine, batch, distill_objective(temperature=1.0, nll_weight=0.5))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["window", "softcap", "experts"])
def test_no_model_waits_for_the_device(name: str, checkpointing: bool) -> None:
    loss = with_expert_balance(rl(**PPO), 0.01 if name == "experts" else 0.0)
    engine = engine_of(name, gradient_checkpointing=checkpointing)
    passes_without_waiting(engine, batch_of(**RL), loss)


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_passes_without_gradient_are_read_once(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches of four rows, and one copy of all their results."""
    read: list[Sequence[tuple[Any, Tensor]]] = []
    monkeypatch.setattr(train_engine, "fill_rows", lambda _out, _batch, found: read.append(found))
    engine = engine_of("llama", role=role)
    (engine.logprobs if role == "policy" else engine.values)(batch_of())
    assert [[rows for rows, _ in found] for found in read] == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert {values.device for _, values in read[0]} == {META}


def test_statistics_stay_on_the_device_until_they_are_read() -> None:
    """1 and NaN have the maximum NaN; counts and sums are added there too."""
    one = Stats({"a": (torch.ones((), device=META), 3)}, {"m": torch.ones((), device=META)})
    both = one + one
    assert isinstance(both.maxima["m"], Tensor) and both.maxima["m"].device == META
    with pytest.raises(RuntimeError, match=r"meta|item"):  # the read itself
        both.floats()


@pytest.mark.parametrize("layout", ["shared_prefix", "packed", "padded"])
def test_a_moved_batch_is_arranged_as_the_one_on_the_host(layout: Any) -> None:
    """Of a moved batch only sizes can be compared; its indices come from the host's batch."""
    batch = batch_of(**RL)
    moved = batch.select([6, 1, 2]).to(META)
    here, there = arrange(batch.select([6, 1, 2]), layout), arrange(moved, layout)
    assert torch.equal(here.flat_index, there.flat_index)
    assert here.input_ids.shape == there.input_ids.shape and there.input_ids.device == META
    assert moved.select([1]).on_host.tokens.tolist() == batch.select([1]).tokens.tolist()
