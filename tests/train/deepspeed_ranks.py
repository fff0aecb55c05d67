"""What test_deepspeed_engine.py runs: as a script on one rank of two, and in the test on one rank
alone.

``python deepspeed_ranks.py PART FOLDER RANK`` meets the other rank through FOLDER, runs the cases
of PART and writes ``PART-rank<RANK>.safetensors`` and ``.json`` there.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from burnish.config.model import LoraConfig, ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.train import TrainConfig
from burnish.models.load import check_support, load_causal_lm
from burnish.models.value_head import load_scalar_model
from burnish.train.base import Loss, NonFiniteError, Outputs, TrainEngine
from burnish.train.deepspeed import DeepSpeedTrainEngine
from burnish.train.engine import FrozenBase
from burnish.train.engines import loading
from burnish.train.process_group import SINGLE, RankGroup
from burnish.train.spec import EngineSpec
from burnish.train.torch import TorchTrainEngine
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
STEPS = 5
HALF = {
    "bf16": PrecisionConfig(dtype="bf16"),
    "fp16": PrecisionConfig(dtype="fp16", initial_scale_power=8),
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
        cases += [
            Case("sft", stage, model=UNTIED, train={"layout": "packed"}),
            Case("policy", stage, "policy, sequence_mean", micro=1),
            Case("budget", stage, train={"max_tokens_per_micro_batch": 24, "layout": "padded"}),
            Case("reward", stage, "reward model", micro=1, train={"layout": "packed"}),
            Case("critic", stage, "critic", train={"max_tokens_per_micro_batch": 70}),
            Case("one row", stage, "policy, sequence_mean", rows=1, micro=1),
            Case("lora", stage, model=ADAPTED, micro=2),
        ]
    schedule = {"lr_scheduler": "cosine", "lr_warmup_ratio": 0.3, "weight_decay": 0.5}
    recompute = {"gradient_checkpointing": True}
    offload, both = {"adam_offload": True}, {"adam_offload": True, "param_offload": True}
    for stage in (1, 2, 3):
        cases.append(Case("adam offload", stage, micro=2, engine=offload))
    cases += [
        Case("schedule and decay", 2, train={**schedule, "max_grad_norm": 0.1}),
        Case("schedule and decay", 3, train={**schedule, "max_grad_norm": 0.1}),
        Case("checkpointing", 2, micro=2, train=recompute),
        Case("checkpointing", 3, micro=2, train=recompute),
        Case("checkpointing and lora", 3, micro=2, model=ADAPTED, train=recompute),
        Case("parameter offload", 3, micro=2, engine=both),
        Case("hpz", 3, micro=2, engine={"zero_hpz_partition_size": 2}),
        Case("ema", 3, micro=2, train={"ema_decay": 0.5}),
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
        role, config, case.model, case.micro, total_steps=10, precision=case.precision
    )


def make(case: Case, ranks: RankGroup, kind: str = "deepspeed") -> Any:
    """An engine; the same start for both kinds (adapters and value heads too)."""
    spec = spec_of(case, kind)
    torch.manual_seed(0)
    scalar = spec.role in ("critic", "reward")
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
    """Five optimizer steps: weights and outputs, and what the steps said."""
    engine, (role, loss) = make(case, ranks, kind), accumulation.LOSSES[case.loss]
    batch = batch_for(case.loss).select(list(range(case.rows)))
    look = engine.logprobs if role == "policy" else engine.values
    out, said = {"outputs before": look(batch)}, []
    for _ in range(STEPS):
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
    """A finite loss whose gradient is not finite where ``bad``."""

    def loss(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
        if bad:
            assert outputs.logprobs is not None
            outputs.logprobs.register_hook(lambda grad: grad * torch.inf)
        return nll(outputs, batch)

    return loss


def not_finite(bad: bool) -> Loss:
    """A loss that is not a number where ``bad``, and whose gradient is finite."""

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


# ---- what is not finite --------------------------------------------------------------------

SCALERS = {
    "hysteresis 1": {"hysteresis": 1, "loss_scale_window": 3},
    "hysteresis 3": {"hysteresis": 3, "loss_scale_window": 4},
    "consecutive": {"hysteresis": 2, "loss_scale_window": 2, "consecutive_hysteresis": True},
}
PATTERN = [int(c) for c in "0001000011010000001110100000000111111000000"]
"""1: the gradient of rank 1 overflows in that step."""


def trace(ranks: RankGroup, stage: int, name: str) -> list[float]:
    """The loss scale of every step of the pattern."""
    precision = PrecisionConfig(dtype="fp16", initial_scale_power=10, **SCALERS[name])
    engine = make(Case("", stage, precision=precision), ranks)
    batch, scales = ragged().select([0, 3, 4]), []
    for bad in PATTERN:
        engine.forward_backward(batch, overflowing(bool(bad) and ranks.rank == ranks.size - 1))
        step = engine.optim_step()
        assert step.skipped == step.overflow == bool(bad) and not step.at_floor and step.scaled
        scales.append(step.loss_scale)
    assert engine.version == PATTERN.count(0) and step.skipped_total == PATTERN.count(1)
    return [*scales, engine.optimizer.scaler.scale]


def skips(ranks: RankGroup, case: Case, folder: Path) -> dict[str, Any]:
    """A clean step, two bad ones of different kinds on the last rank, and a clean one."""
    engine, batch = make(case, ranks), ragged()
    last = ranks.rank == ranks.size - 1
    states, steps = [], []
    for i, loss in enumerate((nll, overflowing(last), not_finite(last), nll)):
        engine.forward_backward(batch, nll)
        engine.forward_backward(batch, loss)
        steps.append(engine.optim_step())
        states.append(saved(engine, folder / f"{case.key}-{i}", ranks))
    return {
        "skipped": [s.skipped for s in steps],
        "overflow": [s.overflow for s in steps],
        "skipped_total": [s.skipped_total for s in steps],
        "scales": [s.loss_scale for s in steps],
        "version": engine.version,
        "unmoved": [same(a, b) for a, b in itertools.pairwise(states)],
    }


SKIP_CASES = [
    Case("fp32", 0),
    *[Case("fp32", stage) for stage in (1, 2, 3)],
    *[Case("bf16", stage, precision=HALF["bf16"]) for stage in (1, 2, 3)],
    *[Case("fp16", stage, precision=HALF["fp16"]) for stage in (1, 2, 3)],
    Case("fp16 constant", 2, precision=PrecisionConfig(dtype="fp16", loss_scale=64)),
    Case("fp32 offload", 2, engine={"adam_offload": True}),
    Case("fp16 offload", 3, engine={"adam_offload": True}, precision=HALF["fp16"]),
]


def stops(ranks: RankGroup, case: Case, loss: Callable[[bool], Loss], steps: int) -> dict[str, Any]:
    """Bad steps until the engine says why it stops; it can be used afterwards."""
    engine = make(case, ranks)
    message, at_floor = "went on", False
    for _ in range(steps):
        engine.forward_backward(ragged(), loss(ranks.rank == ranks.size - 1))
        try:
            engine.optim_step()
        except NonFiniteError as error:
            message, at_floor = str(error), error.stats.at_floor
            break
    engine.forward_backward(ragged(), nll)
    after = engine.optim_step()
    return {"message": message, "at_floor": at_floor, "after": after.skipped}


def bad_weight(ranks: RankGroup) -> dict[str, Any]:
    """A weight that makes one module's output infinite is found through the shards."""
    case = Case("", 3, micro=2, train={"max_consecutive_skips": 1})
    engine = make(case, ranks)
    name = "model.layers.1.mlp.down_proj.weight"
    import deepspeed

    parameter = dict(engine.model.named_parameters())[name]
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        parameter.data[0, 0] = torch.inf
    engine.forward_backward(ragged(), nll)
    try:
        engine.optim_step()
    except NonFiniteError as error:
        return {"message": str(error)}
    return {"message": "went on"}


def nan_parts(ranks: RankGroup, folder: Path) -> dict[str, Any]:
    floor = PrecisionConfig(dtype="fp16", initial_scale_power=1, hysteresis=2)
    short = {"max_consecutive_skips": 2}
    return {
        "traces": {f"{s} {n}": trace(ranks, s, n) for s in (1, 2, 3) for n in SCALERS},
        "skips": {case.key: skips(ranks, case, folder) for case in SKIP_CASES},
        "floor": {s: stops(ranks, Case("", s, precision=floor), overflowing, 9) for s in (1, 2, 3)},
        "limit": {s: stops(ranks, Case("", s, train=short), not_finite, 9) for s in (0, 2, 3)},
        "bad weight": bad_weight(ranks),
    }


# ---- state ---------------------------------------------------------------------------------

STATE_CASES = [
    Case("fp32", 0, micro=3),
    Case("bf16", 1, micro=3, precision=HALF["bf16"], train={"ema_decay": 0.9}),
    Case("fp16", 2, micro=3, precision=HALF["fp16"]),
    Case("fp16", 3, micro=3, precision=HALF["fp16"], train={"ema_decay": 0.9}),
    Case("fp32 offload", 3, micro=3, engine={"adam_offload": True}),
    Case("lora", 3, micro=3, model=ADAPTED),
]


def take_steps(engine: TrainEngine, count: int) -> list[float]:
    norms = []
    for _ in range(count):
        engine.forward_backward(ragged(), nll)
        norms.append(engine.optim_step().grad_norm)
    return norms


def resume(ranks: RankGroup, case: Case, folder: Path) -> dict[str, Any]:
    """Two steps, save, two more; and a second engine that loads and takes the same two."""
    first, place = make(case, ranks), folder / case.key
    before = first.state_bytes
    take_steps(first, 2)
    at_save = saved(first, place / "two", ranks)
    second = make(case, ranks)
    take_steps(second, 1)  # what it had before does not matter
    second.load(place / "two")
    reloaded = saved(second, place / "again", ranks)
    written = sum(f.stat().st_size for f in (place / "two").glob("*.safetensors"))
    ends = []
    for engine, name in ((first, "first"), (second, "second")):
        norms = take_steps(engine, 2)
        ends.append((norms, saved(engine, place / name, ranks), engine.version))
    return {
        "reloaded": same(at_save, reloaded),
        "same norms": ends[0][0] == ends[1][0],
        "same state": same(ends[0][1], ends[1][1]),
        "versions": [ends[0][2], ends[1][2]],
        "bytes": [before, first.state_bytes, written],
    }


def go_on(ranks: RankGroup, case: Case, folder: Path) -> dict[str, Any]:
    """Load what one rank saved, and take one more step."""
    engine = make(case, ranks)
    engine.load(folder / case.key / "alone")
    take_steps(engine, 1)
    engine.save(folder / case.key / "back")
    return {"version": engine.version}


# ---- loading in shards ---------------------------------------------------------------------


class Whole:
    """Counts the entries of weights that are whole at one time in this process."""

    def __init__(self) -> None:
        self.parameters: list[weakref.ref[nn.Parameter]] = []
        self.most = 0

    def look(self) -> None:
        alive = [p for p in (ref() for ref in self.parameters) if p is not None]
        self.most = max(self.most, sum(p.numel() for p in alive))

    def __enter__(self) -> Whole:
        import deepspeed

        self._register = nn.Module.register_parameter
        self._gather = deepspeed.zero.GatheredParameters.__enter__
        watch, register, gather = self, self._register, self._gather

        def registered(module: nn.Module, name: str, parameter: Any) -> None:
            register(module, name, parameter)
            if parameter is not None:
                watch.parameters.append(weakref.ref(parameter))
                watch.look()

        def gathered(context: Any) -> None:
            gather(context)
            watch.look()

        nn.Module.register_parameter = registered  # type: ignore[method-assign]
        deepspeed.zero.GatheredParameters.__enter__ = gathered
        return self

    def __exit__(self, *_: Any) -> None:
        import deepspeed

        nn.Module.register_parameter = self._register  # type: ignore[method-assign]
        deepspeed.zero.GatheredParameters.__enter__ = self._gather


def in_shards(
    ranks: RankGroup, folder: Path, dtype: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A model read from a folder with zero_init, looked at, trained, and saved."""
    model = ModelConfig(path=str(folder / "model"))
    precision = PrecisionConfig(dtype=dtype)  # type: ignore[arg-type]
    case = Case("", 3, model=model, engine={"zero_init": True}, precision=precision, micro=3)
    spec = spec_of(case)
    check_support(model)  # its small copy is whole, and not what is counted
    with Whole() as whole, loading(spec, "fp32", ranks):
        network: Any = load_causal_lm(model)
    held = sum(p.ds_tensor.numel() + p.numel() for p in network.parameters())
    engine = DeepSpeedTrainEngine(network, spec, ranks=ranks)
    start = saved(engine, folder / f"zero-init-{dtype}", ranks)
    out = {"logprobs": engine.logprobs(ragged())} | start
    norms = take_steps(engine, 2)
    out |= {f"weight {name}": t.detach().clone() for name, t in engine.weights()}
    total = sum(p.ds_numel for p in network.parameters())
    return out, {"most": whole.most, "held": held, "total": total, "norms": norms}


def frozen(ranks: RankGroup) -> dict[str, Tensor]:
    """Engines without an optimizer, in shards and whole."""
    out = {}
    for stage in (0, 3):
        case = Case("", stage, model=UNTIED)
        spec = EngineSpec("reference", spec_of(case).train, UNTIED, 2, trainable=False)
        engine = DeepSpeedTrainEngine(load_causal_lm(UNTIED), spec, ranks=ranks)
        out[f"frozen {stage}"] = engine.logprobs(ragged())
    return out


def main(part: str, folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / f"store-{part}"), 2)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=900)
    )
    ranks = RankGroup(torch.distributed.group.WORLD)
    tensors: dict[str, Tensor] = {}
    found: dict[str, Any] = {}
    if part == "train":
        for case in [*CASES, *HALF_CASES]:
            own, found[case.key] = run_case(case, ranks)
            tensors |= {f"{case.key}|{name}": tensor for name, tensor in own.items()}
        tensors |= frozen(ranks)
    elif part == "bad":
        found = nan_parts(ranks, folder)
    elif part == "state":
        found = {case.key: resume(ranks, case, folder) for case in STATE_CASES}
        for dtype in ("fp32", "bf16"):
            own, found[f"zero init {dtype}"] = in_shards(ranks, folder, dtype)
            tensors |= {f"zero init {dtype}|{name}": tensor for name, tensor in own.items()}
    else:
        found = {case.key: go_on(ranks, case, folder) for case in STATE_CASES}
    plain = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(plain, folder / f"{part}-rank{rank}.safetensors")
    (folder / f"{part}-rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
