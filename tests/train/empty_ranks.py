"""Script of test_empty_ranks.py: steps in which one of two ranks has no rows, with every engine.

``python empty_ranks.py FOLDER RANK`` meets the other rank through FOLDER, runs every case and
writes ``rank<RANK>.safetensors`` and ``rank<RANK>.json`` there.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from burnish.algorithms.distill import forward_kl, forward_kl_slope
from burnish.config.algorithm import AlgorithmConfig
from burnish.config.model import LoraConfig, ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.preference_losses import DpoLoss, KtoLoss
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.distributed.process_group import CollectiveTimeoutError, CollectiveTimeouts, RankGroup
from burnish.jobs.distill import distill_objective
from burnish.jobs.preference import preference_objective
from burnish.models.load import load_causal_lm
from burnish.models.teacher import DistillTargetSpec
from burnish.models.value_head import load_scalar_model
from burnish.optimizers.adamw.config import AdamW
from burnish.runtime.worker import TrainWorker, WorkerInfo, pack_share
from burnish.steps.objectives import policy_objective, process_objective
from burnish.train.base import Loss, Role
from burnish.train.deepspeed.engine import DeepSpeedTrainEngine
from burnish.train.engines import make_engine as engine_of
from burnish.train.spec import EngineSpec
from burnish.types import Batch

_SPEC = importlib.util.spec_from_file_location(
    "accumulation", Path(__file__).with_name("test_accumulation.py")
)
assert _SPEC is not None and _SPEC.loader is not None
accumulation: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(accumulation)

SCRATCH = ScratchConfig(hidden_size=32, num_layers=2)
MODELS = {
    "full": ModelConfig(scratch=SCRATCH),
    "lora": ModelConfig(scratch=SCRATCH, lora=LoraConfig(lora_rank=4)),
}
GROUPS = [(5, [3, 7]), (3, [11, 2]), (9, [2, 5]), (2, [25, 3])]
"""Prompt tokens, and response tokens of each row: 8 rows in four pairs."""
FEW_AND_ALL = (2, 8, 2, 8)
"""Rows of each step. One unit leaves rank 1 without rows; then all of them."""
_ZERO = {"kind": "deepspeed", "reduce_bucket_size": 50_000}
ENGINES: dict[str, dict[str, Any]] = {
    "replicas": {"kind": "torch"},
    "fsdp": {"kind": "torch", "sharding": "full"},
    "zero 1": {**_ZERO, "zero_stage": 1},
    "zero 2": {**_ZERO, "zero_stage": 2},
    "zero 3": {**_ZERO, "zero_stage": 3, "param_persistence_threshold": 40},
}


def _policy_loss(entropy_coef: float) -> Loss:
    config = AlgorithmConfig(entropy_coef=entropy_coef)
    return policy_objective(config, max_len=16, kl_coef=lambda: 0.0)


LOSSES: dict[str, tuple[Role, Loss]] = {
    "policy": ("policy", _policy_loss(0.0)),
    "policy with entropy bonus": ("policy", _policy_loss(0.01)),
    "sft": accumulation.LOSSES["sft"],
    "dpo": ("policy", preference_objective(DpoLoss())),
    "kto": ("policy", preference_objective(KtoLoss(kind="kto"))),
    "distill": ("policy", distill_objective(temperature=2.0, nll_weight=0.0)),
    "reward model": accumulation.LOSSES["reward model"],
    "process reward model": ("reward", process_objective()),
    "critic": accumulation.LOSSES["critic"],
}


@dataclass(frozen=True)
class Case:
    """Four optimizer steps of one loss with one engine."""

    engine: str
    loss: str
    model: str = "full"
    budget: int | None = None
    """Tokens per pass; None: two rows per pass."""

    @property
    def key(self) -> str:
        return f"{self.engine}, {self.loss}, {self.model}, {self.budget}"


ALL, SOME = ("replicas", "fsdp", "zero 3"), ("zero 1", "zero 2")
CASES = [
    *(Case(engine, loss) for engine, loss in itertools.product(ALL, LOSSES)),
    *(Case(SOME[i % 2], loss) for i, loss in enumerate(LOSSES)),
    *(Case(engine, "policy", "lora") for engine in ALL),
    *(Case(engine, "policy", budget=24) for engine in ALL),
]
"""ZeRO-1 and ZeRO-2, which differ little here, have half of the losses each."""


def make_engine(case: Case, ranks: RankGroup) -> Any:
    """The engine of the case; alone: the plain torch engine. Equal weights at the start."""
    role, model = LOSSES[case.loss][0], MODELS[case.model]
    config = ENGINES["replicas" if ranks.size == 1 else case.engine]
    train = TrainConfig(
        lr=1e-3, optimizer=AdamW(eps=1e-6), engine=config, max_tokens_per_micro_batch=case.budget
    )
    distill_target = None
    if case.loss == "distill":
        distill_target = DistillTargetSpec(
            model, "fp32", 40, forward_kl, forward_kl_slope, forward_kl, 2.0
        )
    units = None if case.budget else 2 if case.loss in ("kto", "critic") else 1
    spec = EngineSpec(
        TrainRole.alone(role, train, model),
        micro_batch_size=units,
        total_steps=10,
        distill_target=distill_target,
    )
    torch.manual_seed(0)
    scalar = role in ("critic", "reward")
    network: nn.Module = (
        load_scalar_model(model, new_head="random") if scalar else load_causal_lm(model)
    )
    if config["kind"] == "deepspeed":
        return DeepSpeedTrainEngine(network, spec, ranks=ranks)
    return engine_of(network, spec, ranks=ranks)


@cache
def batch_for(loss: str) -> Batch:
    """Eight rows with the columns that any loss reads."""
    generator = torch.Generator().manual_seed(5)
    batch: Batch = accumulation.random_groups(GROUPS, generator)
    shape = batch.tokens.shape

    def column(scale: float) -> Tensor:
        return torch.where(batch.action_mask, scale * torch.randn(shape, generator=generator), 0.0)

    return replace(
        batch,
        old_logprobs=column(0.3) - 4 * batch.action_mask,
        ref_logprobs=column(0.3) - 4 * batch.action_mask,
        advantages=column(1.0),
        values=column(0.3),
        returns=column(1.0),
        labels=torch.arange(batch.num_rows) % 3 == 0,
        kl_estimate=0.1,
        rows_per_unit=1 if loss in ("kto", "critic") else 2,
        step_labels=column(1.0).gt(0).float() if loss == "process reward model" else None,
        teacher_states=torch.randn(*shape, 32, generator=generator) if loss == "distill" else None,
    )


def run_case(case: Case, ranks: RankGroup) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Weights after the steps, outputs before each of them, and the step statistics."""
    engine, loss = make_engine(case, ranks), LOSSES[case.loss][1]
    look = engine.values if engine.scalar else engine.logprobs
    found: dict[str, Tensor] = {}
    reports = []
    for step, rows in enumerate(FEW_AND_ALL):
        batch = batch_for(case.loss).select(range(rows)).with_global_counts()
        found[f"outputs {step}"] = look(batch)
        measured = engine.measure(batch, loss).floats("measured ")
        stats = engine.forward_backward(batch, loss).floats()
        reports.append({**measured, **stats, "grad_norm": engine.optim_step().grad_norm})
    found |= {f"weight {name}": t.detach().clone() for name, t in engine.weights()}
    return found, reports


def wait_in_vain(ranks: RankGroup, store: Any) -> str:
    """Rank 0 makes a pass that rank 1 does not make; return its error, on both ranks. (The group
    cannot be used afterwards.)"""
    worker = TrainWorker(
        WorkerInfo("policy", ranks.rank, 2, "cpu", 1), MODELS["full"], PrecisionConfig()
    )
    worker.ranks, worker.limits = ranks, CollectiveTimeouts(call_s=60, pass_s=0.5)
    worker.build(
        EngineSpec(TrainRole.alone("policy", TrainConfig(), MODELS["full"])), scalar=False, seed=0
    )
    ranks.any(False)  # takes the longer limit
    if ranks.rank == 0:
        text = "went on"
        try:
            share = next(worker.engine.row_split.shares(batch_for("sft")))
            worker.stats("measure", pack_share(share), LOSSES["sft"][1])
        except CollectiveTimeoutError as error:
            text = str(error)
        store.set("text", text)
    return str(store.get("text").decode())


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), 2)
    limit = timedelta(seconds=60)  # a rank that waits in vain fails the test soon
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=limit
    )
    ranks = RankGroup(torch.distributed.group.WORLD)
    tensors: dict[str, Tensor] = {}
    reports: dict[str, Any] = {}
    for case in CASES:
        print(case.key, flush=True)
        found, reports[case.key] = run_case(case, ranks)
        tensors |= {f"{case.key}|{name}": t.contiguous().clone() for name, t in found.items()}
    save_file(tensors, folder / f"rank{rank}.safetensors")
    reports["in vain"] = wait_in_vain(ranks, store)
    (folder / f"rank{rank}.json").write_text(json.dumps(reports), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
