"""The cases of test_two_ranks.py: run as a script on one rank of two, and in the test on a single
rank.

``python two_ranks.py FOLDER RANK`` meets the other rank through FOLDER, runs every case and writes
``rank<RANK>.safetensors`` and ``.json`` there.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from burnish.config.model import Fp16Config, ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.distributed.process_group import SINGLE, RankGroup
from burnish.models.load import load_causal_lm
from burnish.models.value_head import load_scalar_model
from burnish.optimizers.adamw.config import AdamW
from burnish.train.base import Loss, NonFiniteError, Outputs
from burnish.train.batching import split_over_ranks
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Batch, Stats

_SPEC = importlib.util.spec_from_file_location(
    "accumulation", Path(__file__).with_name("test_accumulation.py")
)
assert _SPEC is not None and _SPEC.loader is not None
accumulation: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(accumulation)

TINY = ModelConfig(scratch=ScratchConfig(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2))
NAMES = ("sft", "policy, sequence_mean", "reward model", "critic")
SPLITS: dict[str, dict[str, int]] = {
    "all at once": {},
    "micro 1": {"micro": 1},
    "micro 3": {"micro": 3},
    "budget 24": {"budget": 24},
    "budget 70": {"budget": 70},
}
GROUPS = [(5, [3, 7, 1]), (3, [11]), (9, [2, 2, 8, 5]), (2, [25, 1])]
"""Prompt tokens, and response tokens of each row: 10 rows of 3 to 27 tokens."""


@dataclass(frozen=True)
class Case:
    """One gradient."""

    loss: str
    layout: str
    split: str
    rows: int = 10
    """The first so many of the batch; 1 (or one pair) leaves rank 1 without any."""

    @property
    def key(self) -> str:
        return f"{self.loss}, {self.layout}, {self.split}, {self.rows} rows"


CASES = [
    *(Case(*parts) for parts in itertools.product(NAMES, accumulation.LAYOUTS, SPLITS)),
    *(Case(name, "packed", "micro 1", rows=2 if "reward" in name else 1) for name in NAMES),
]


def make_engine(  # house: ok what an engine can vary in
    ranks: RankGroup,
    *,
    role: Any = "policy",
    micro: int | None = None,
    budget: int | None = None,
    precision: PrecisionConfig = PrecisionConfig(),
    **train: Any,
) -> TorchTrainEngine:
    scalar = role in ("critic", "reward")
    model = load_scalar_model(TINY, new_head="random") if scalar else load_causal_lm(TINY)
    config = TrainConfig(**{"lr": 1e-3, "max_tokens_per_micro_batch": budget, **train})
    spec = EngineSpec(
        TrainRole.alone(role, config, TINY, precision=precision), micro_batch_size=micro
    )
    return TorchTrainEngine(model, spec, ranks=ranks)


def ragged() -> Batch:
    batch: Batch = accumulation.random_groups(GROUPS, torch.Generator().manual_seed(5))
    return batch


@cache
def batch_for(loss: str) -> Batch:
    """The ragged batch with the columns that the loss reads, made on one rank alone."""
    engine = make_engine(SINGLE, role=accumulation.LOSSES[loss][0])
    batch: Batch = accumulation.batch_for(loss, engine, ragged())
    return batch


def run_case(case: Case, ranks: RankGroup) -> tuple[dict[str, Tensor], dict[str, float]]:
    """One optimizer step. With beta1 = 0 Adam's first moment is the gradient it was given."""
    role, loss = accumulation.LOSSES[case.loss]
    batch = batch_for(case.loss).select(list(range(case.rows)))
    options = {"layout": case.layout, "optimizer": AdamW(betas=(0.0, 0.95)), "max_grad_norm": None}
    engine = make_engine(ranks, role=role, **SPLITS[case.split], **options)
    outputs = engine.logprobs(batch) if role == "policy" else engine.values(batch)
    stats = engine.forward_backward(batch, loss)
    step = engine.optim_step()
    assert engine.optimizer is not None and not step.skipped
    gradient = engine.optimizer.tensors()["exp_avg"]
    return {**gradient, "outputs": outputs}, {**stats.floats(), "grad_norm": step.grad_norm}


def nll(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
    assert outputs.logprobs is not None
    return -outputs.logprobs.sum() / batch.num_tokens, Stats(sums={"rows": batch.num_rows})


def state_hash(engine: TorchTrainEngine) -> str:
    """Of everything a step moves."""
    assert engine.optimizer is not None
    digest = hashlib.sha256(str(engine.version).encode())
    for name, parameter in engine.model.named_parameters():
        digest.update(name.encode() + parameter.detach().float().numpy().tobytes())
    for kind, tensors in engine.optimizer.tensors().items():
        for name, tensor in tensors.items():
            digest.update(f"{kind}/{name}".encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


PRECISIONS = {
    "fp32": PrecisionConfig(),
    "bf16": PrecisionConfig(dtype="bf16"),
    "fp16": PrecisionConfig(dtype="fp16", fp16=Fp16Config(hysteresis=1, initial_scale_power=10)),
    "fp16 sums": PrecisionConfig(
        dtype="fp16",
        grad_accum_dtype="fp16",
        fp16=Fp16Config(hysteresis=1, initial_scale_power=10),
    ),
}


def overflow(ranks: RankGroup, precision: PrecisionConfig) -> dict[str, Any]:
    """A clean step, one with an infinite entry in the last rank's gradient, and a clean one."""
    engine, batch = make_engine(ranks, precision=precision), ragged()
    assert engine.optimizer is not None
    hashes, steps = [state_hash(engine)], []
    for bad in (False, True, False):
        engine.forward_backward(batch, nll)
        if bad and ranks.rank == ranks.size - 1:
            optimizer = engine.optimizer
            own_sums = optimizer.half and not optimizer.sums_fp32
            grad = (optimizer.params if own_sums else optimizer.masters)[3].grad
            grad.view(-1)[0] = torch.inf
        steps.append(engine.optim_step())
        hashes.append(state_hash(engine))
    return {
        "hashes": hashes,
        "skipped": [s.skipped for s in steps],
        "skipped_total": [s.skipped_total for s in steps],
        "scales": [s.loss_scale for s in steps] + [engine.optimizer.scaler.scale],
        "version": engine.version,
    }


def not_finite_on(ranks: RankGroup, rank: int) -> Loss:
    """A loss that is not a number on one rank, and whose gradient is finite."""

    def loss(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
        scalar, stats = nll(outputs, batch)
        return (scalar + torch.nan if ranks.rank == rank else scalar), stats

    return loss


def bad_loss(ranks: RankGroup) -> dict[str, Any]:
    engine = make_engine(ranks)
    before = state_hash(engine)
    engine.forward_backward(ragged(), not_finite_on(ranks, 1))
    step = engine.optim_step()
    return {
        "skipped": step.skipped,
        "overflow": step.overflow,
        "unmoved": state_hash(engine) == before,
    }


def stop(ranks: RankGroup) -> dict[str, Any]:
    """The second bad step in a row ends the run, on both ranks, with one message."""
    engine = make_engine(ranks, max_consecutive_skips=2)
    for _ in range(2):
        engine.forward_backward(ragged(), not_finite_on(ranks, 1))
        try:
            engine.optim_step()
        except NonFiniteError as error:
            return {"message": str(error)}
    return {"message": "went on"}


def uneven(ranks: RankGroup) -> dict[str, Any]:
    """One long row and many short ones under a token budget, two steps."""
    batch: Batch = accumulation.random_groups(
        [(3, [60]), *[(1, [2])] * 20], torch.Generator().manual_seed(6)
    )
    engine = make_engine(ranks, budget=12, layout="packed")
    parts = split_over_ranks(batch, ranks=2, micro_batch_size=None, max_tokens=12, layout="packed")
    passes: list[int] = []
    engine.body.register_forward_pre_hook(lambda *_: passes.append(1))
    rows = []
    for _ in range(2):
        rows.append(engine.forward_backward(batch, nll).floats()["rows"])
        engine.optim_step()
    return {
        "planned": [len(part) for part in parts],
        "empty": [sum(not rows for rows in part) for part in parts],
        "computed": len(passes),
        "rows": rows,
        "hash": state_hash(engine),
    }


def exchange(ranks: RankGroup) -> dict[str, Any]:
    """Collectives of the ranks, on tensors that fill several buckets."""
    small = RankGroup(torch.distributed.group.WORLD, bucket_bytes=64)
    own = ranks.rank + 1.0
    tensors = [
        torch.full((3,), own),
        torch.full((2, 2), own, dtype=torch.float64),
        torch.full((40,), own),  # larger than a bucket
        torch.arange(6.0).view(2, 3).t() * own,  # not contiguous
        torch.full((), own),
        torch.full((10,), own),
        torch.full((0,), own),
    ]
    small.all_reduce_(tensors)
    stats = Stats(
        means={"frac": (3.0 * own, 10)}, maxima={"most": torch.tensor(own)}, sums={"n": own}
    )
    try:
        ranks.sum_stats(Stats(sums={"a": 1.0, f"only {ranks.rank}": 1.0}))
        message = "went on"
    except ValueError as error:
        message = str(error)
    summed = ranks.sum_stats(stats)
    return {
        "sums": [t.tolist() for t in tensors],
        "any": [ranks.any(f) for f in (False, ranks.rank == 1, torch.tensor(ranks.rank == 0))],
        "any_across": ranks.any_across([False, ranks.rank == 0, ranks.rank == 1]),
        "gathered": ranks.gather(f"rank {ranks.rank}"),
        "stats": {**summed.floats(), "frac_den": summed.means["frac"][1]},
        "empty": ranks.sum_stats(stats if ranks.rank == 0 else Stats()).floats(),
        "message": message,
    }


def save(ranks: RankGroup) -> dict[str, Any]:
    """All ranks save a checkpoint, one that cannot be written, and one with a bad weight."""
    engine = make_engine(ranks)
    engine.forward_backward(ragged(), nll)
    engine.optim_step()
    own = mkdtemp()
    folder = Path(ranks.gather(own)[0])
    engine.save(folder / "policy")
    there = (folder / "policy" / "engine.json").is_file()
    loaded = make_engine(ranks)
    loaded.load(folder / "policy")
    messages = []
    (folder / "file").touch()
    try:
        engine.save(folder / "file")
    except OSError as error:
        messages.append(type(error).__name__)
    assert engine.optimizer is not None
    if ranks.rank == ranks.size - 1:
        engine.optimizer.masters[0].data.view(-1)[0] = torch.nan
    try:
        engine.save(folder / "bad")
    except ValueError as error:
        messages.append(str(error))
    ranks.any(False)
    written = sorted(p.name for p in folder.iterdir())
    ranks.any(False)
    shutil.rmtree(own)
    return {"there": there, "version": loaded.version, "messages": messages, "written": written}


OTHERS: dict[str, Callable[[RankGroup], dict[str, Any]]] = {
    "save": save,
    "bad_loss": bad_loss,
    "stop": stop,
    "uneven": uneven,
    "exchange": exchange,
}


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), 2)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    ranks = RankGroup(torch.distributed.group.WORLD)
    tensors: dict[str, Tensor] = {}
    found: dict[str, Any] = {"cases": {}}
    for case in CASES:
        own, found["cases"][case.key] = run_case(case, ranks)
        tensors |= {f"{case.key}|{name}": tensor.clone() for name, tensor in own.items()}
    found["overflow"] = {name: overflow(ranks, p) for name, p in PRECISIONS.items()}
    found |= {name: run(ranks) for name, run in OTHERS.items()}
    save_file(tensors, folder / f"rank{rank}.safetensors")
    (folder / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
