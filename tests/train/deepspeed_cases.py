"""The cases of test_deepspeed_engine.py: models, losses and options, and how to run them with the
DeepSpeed engine and with the torch engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from burnish.config.model import Fp16Config, LoraConfig, ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.distributed.process_group import SINGLE, RankGroup
from burnish.models.load import load_causal_lm
from burnish.models.value_head import load_scalar_model
from burnish.train.base import FrozenBase, Loss, Outputs, TrainEngine
from burnish.train.deepspeed.engine import DeepSpeedTrainEngine
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch, Stats

_SPEC = importlib.util.spec_from_file_location(
    "accumulation", Path(__file__).with_name("test_accumulation.py")
)
assert _SPEC is not None and _SPEC.loader is not None
accumulation: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(accumulation)

TIED = ModelConfig(scratch=ScratchConfig(hidden_size=32))
UNTIED = ModelConfig(scratch=ScratchConfig(hidden_size=32, tie_word_embeddings=False))
ADAPTED = ModelConfig(
    scratch=ScratchConfig(hidden_size=32), lora=LoraConfig(lora_rank=4, lora_alpha=8)
)
GROUPS = [(5, [3, 7, 1]), (3, [11]), (9, [2, 2, 8, 5]), (2, [25, 1])]
"""Prompt tokens, and response tokens of each row: 10 rows of 3 to 27 tokens."""
MUON: dict[str, Any] = {
    "optimizer": {"kind": "muon", "ns_dtype": "fp32", "matrix_lr": 2e-3},
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
}
STEPS, SCHEDULED_STEPS = 2, 5
"""Optimizer steps of a case: the second depends on the weights and the moments of the first. More
if the learning rate has a warmup of three."""
HALF = {
    "bf16": PrecisionConfig(dtype="bf16"),
    "fp16": PrecisionConfig(dtype="fp16", fp16=Fp16Config(initial_scale_power=8)),
}


@dataclass(frozen=True)
class Case:
    """One short training run."""

    name: str
    stage: int
    loss: str = "sft"
    model: ModelConfig = TIED
    micro: int | None = None
    rows: int = 10
    """The first so many of the batch; 1 (or one pair) leaves rank 1 without any."""
    engine: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    precision: PrecisionConfig = PrecisionConfig()

    @property
    def key(self) -> str:
        return f"stage {self.stage}, {self.name}"


def _cases() -> list[Case]:
    cases: list[Case] = []
    for stage in range(4):
        some = [
            Case("sft", stage, model=UNTIED, train={"layout": "packed"}),
            Case("policy", stage, "policy, sequence_mean", micro=1),
            Case("budget", stage, train={"max_tokens_per_micro_batch": 24, "layout": "padded"}),
            Case("reward", stage, "reward model", micro=1, train={"layout": "packed"}),
            Case("lora", stage, model=ADAPTED, micro=2),
            Case("critic", stage, "critic", train={"max_tokens_per_micro_batch": 70}),
        ]
        # Stage 3 has all of them; the others, which differ less, have them in turn.
        cases += some if stage == 3 else some[stage % 2 :: 2]
        cases.append(Case("one row", stage, "policy, sequence_mean", rows=1, micro=1))
    schedule = {"lr_scheduler": "cosine", "lr_warmup_ratio": 0.3, "weight_decay": 0.5}
    recompute = {"gradient_checkpointing": True}
    selective = {"gradient_checkpointing": "selective"}
    offload, both = {"adam_offload": True}, {"adam_offload": True, "param_offload": True}
    for stage in (1, 2, 3):
        cases.append(Case("adam offload", stage, micro=2, engine=offload))
    cases += [
        Case("schedule and decay", 2, train={**schedule, "max_grad_norm": 0.1}),
        Case("schedule and decay", 3, train={**schedule, "max_grad_norm": 0.1}),
        Case("checkpointing", 2, micro=2, train=recompute),
        Case("checkpointing", 3, micro=2, train=recompute),
        Case("checkpointing and lora", 3, micro=2, model=ADAPTED, train=recompute),
        Case("selective", 2, micro=2, train=selective),
        Case("selective and lora", 2, micro=2, model=ADAPTED, train=selective),
        Case("parameter offload", 3, micro=2, engine=both),
        Case("hpz", 3, micro=2, engine={"zero_hpz_partition_size": 2}),
        Case("ema", 3, micro=2, train={"ema_decay": 0.5}),
        *(Case("muon", stage, micro=2, train=MUON) for stage in (0, 1, 3)),
        Case("muon and lora", 3, micro=2, model=ADAPTED, train=MUON),
        Case("muon offload", 2, micro=2, engine=offload, train=MUON),
        Case("default persistence", 3, micro=2, engine={"param_persistence_threshold": 100_000}),
    ]
    return cases


CASES = _cases()
HALF_CASES = [
    Case(dtype, stage, micro=3, precision=precision)
    for dtype, precision in HALF.items()
    for stage in (1, 2, 3)
] + [
    Case("bf16", 0, micro=3, precision=PrecisionConfig(dtype="bf16", grad_accum_dtype="bf16")),
    Case("bf16 lora", 3, model=ADAPTED, precision=HALF["bf16"]),
    Case("bf16 offload", 1, engine={"adam_offload": True}, precision=HALF["bf16"]),
    Case("fp16 offload", 2, engine={"adam_offload": True}, micro=3, precision=HALF["fp16"]),
]


def spec_of(case: Case, kind: str = "deepspeed") -> EngineSpec:
    sizes = {"reduce_bucket_size": 50_000}
    if case.stage == 3:
        sizes["param_persistence_threshold"] = 40  # the norms (32) stay whole, matrices do not
    engine = {"kind": kind}
    if kind == "deepspeed":
        engine = {"kind": kind, "zero_stage": case.stage, **sizes, **case.engine}
    role = accumulation.LOSSES[case.loss][0]
    config = TrainConfig(**{"lr": 1e-3, "engine": engine, **case.train})
    return EngineSpec(
        TrainRole.alone(role, config, case.model, precision=case.precision),
        micro_batch_size=case.micro,
        total_steps=10,
    )


def make(case: Case, ranks: RankGroup, kind: str = "deepspeed") -> Any:
    """An engine; the same start for both kinds (adapters and value heads too)."""
    spec = spec_of(case, kind)
    torch.manual_seed(0)
    scalar = spec.role.engine_role in ("critic", "reward")
    load: Callable[..., nn.Module] = load_scalar_model if scalar else load_causal_lm
    model = load(case.model, **({"new_head": "random"} if scalar else {}))
    make_engine = TorchTrainEngine if kind == "torch" else DeepSpeedTrainEngine
    return make_engine(model, spec, ranks=ranks)


@cache
def ragged() -> Batch:
    batch: Batch = accumulation.random_groups(GROUPS, torch.Generator().manual_seed(5))
    return batch


@cache
def batch_for(case_loss: str) -> Batch:
    """The ragged batch with the columns that the loss reads, made on one rank alone."""
    engine = make(Case("", 0, case_loss), SINGLE, "torch")
    batch: Batch = accumulation.batch_for(case_loss, engine, ragged())
    return batch


def run_case(
    case: Case, ranks: RankGroup, kind: str = "deepspeed"
) -> tuple[dict[str, Tensor], Any]:
    """Two or five optimizer steps: weights, outputs and step statistics."""
    engine, (role, loss) = make(case, ranks, kind), accumulation.LOSSES[case.loss]
    batch = batch_for(case.loss).select(list(range(case.rows)))
    look = engine.logprobs if role == "policy" else engine.values
    out, said = {"outputs before": look(batch)}, []
    for _ in range(SCHEDULED_STEPS if "lr_scheduler" in case.train else STEPS):
        stats = engine.forward_backward(batch, loss)
        step = engine.optim_step()
        assert not step.skipped
        said.append({**stats.floats(), "grad_norm": step.grad_norm, "lr": step.lr})
    out["outputs after"] = look(batch)
    if case.model.lora is not None:
        out["outputs of the base"] = FrozenBase(engine).logprobs(batch)
    out |= {f"weight {name}": t.detach().clone() for name, t in engine.weights()}
    return out, said


def nll(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
    assert outputs.logprobs is not None
    return -outputs.logprobs.sum() / batch.num_tokens, Stats(sums={"rows": batch.num_rows})


def overflowing(bad: bool) -> Loss:
    """A finite loss whose gradient is not finite if ``bad``."""

    def loss(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
        if bad:
            assert outputs.logprobs is not None
            outputs.logprobs.register_hook(lambda grad: grad * torch.inf)
        return nll(outputs, batch)

    return loss


def not_finite(bad: bool) -> Loss:
    """A loss that is NaN if ``bad``, with a finite gradient."""

    def loss(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
        scalar, stats = nll(outputs, batch)
        return (scalar + torch.nan if bad else scalar), stats

    return loss


def saved(engine: Any, folder: Path, ranks: RankGroup) -> dict[str, Tensor]:
    """Everything a step moves, as a checkpoint has it."""
    engine.save(folder)
    ranks.any(False)
    files = sorted(folder.glob("*.safetensors"))
    return {f"{f.stem} {n}": t for f in files for n, t in load_file(f).items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def take_steps(engine: TrainEngine, count: int) -> list[float]:
    norms = []
    for _ in range(count):
        engine.forward_backward(ragged(), nll)
        norms.append(engine.optim_step().grad_norm)
    return norms
