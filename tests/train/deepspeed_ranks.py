"""The cases of test_deepspeed_engine.py: run as a script on one rank of two, and in the test on a
single rank.

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
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from burnish.config.model import Fp16Config, ModelConfig, PrecisionConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.distributed.process_group import SINGLE, RankGroup
from burnish.models.load import check_support, load_causal_lm
from burnish.train.base import Loss, NonFiniteError
from burnish.train.deepspeed.engine import DeepSpeedTrainEngine
from burnish.train.engines import loading, make_engine
from burnish.train.spec import EngineSpec

_SPEC = importlib.util.spec_from_file_location(
    "deepspeed_cases", Path(__file__).with_name("deepspeed_cases.py")
)
assert _SPEC is not None and _SPEC.loader is not None
cases: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["deepspeed_cases"] = cases  # its dataclasses look their module up
_SPEC.loader.exec_module(cases)
UNTIED, ADAPTED, HALF, Case, CASES, HALF_CASES = (
    cases.UNTIED,
    cases.ADAPTED,
    cases.HALF,
    cases.Case,
    cases.CASES,
    cases.HALF_CASES,
)
spec_of, make, ragged, run_case, nll, overflowing, not_finite, saved, same, take_steps = (
    cases.spec_of,
    cases.make,
    cases.ragged,
    cases.run_case,
    cases.nll,
    cases.overflowing,
    cases.not_finite,
    cases.saved,
    cases.same,
    cases.take_steps,
)

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
    precision = PrecisionConfig(
        dtype="fp16", fp16=Fp16Config(initial_scale_power=10, **SCALERS[name])
    )
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
    *[Case("fp32", stage) for stage in (0, 3)],
    *[Case("bf16", stage, precision=HALF["bf16"]) for stage in (1, 2)],
    *[Case("fp16", stage, precision=HALF["fp16"]) for stage in (1, 3)],
    Case(
        "fp16 constant", 2, precision=PrecisionConfig(dtype="fp16", fp16=Fp16Config(loss_scale=64))
    ),
    Case("fp32 offload", 2, engine={"adam_offload": True}),
    Case("fp16 offload", 3, engine={"adam_offload": True}, precision=HALF["fp16"]),
]


def stops(ranks: RankGroup, case: Case, loss: Callable[[bool], Loss], steps: int) -> dict[str, Any]:
    """Bad steps until the engine stops with a reason; it can be used afterwards."""
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
    floor = PrecisionConfig(dtype="fp16", fp16=Fp16Config(initial_scale_power=1, hysteresis=2))
    short = {"max_consecutive_skips": 2}
    return {
        "traces": {f"{s} {n}": trace(ranks, s, n) for s, n in enumerate(SCALERS, 1)},
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
    Case("muon", 2, micro=3, train={**cases.MUON, "ema_decay": 0.9}),
    Case("muon and lora", 3, micro=3, model=ADAPTED, train=cases.MUON),
]


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
    """Load a checkpoint of one rank, and take one more step."""
    engine = make(case, ranks)
    engine.load(folder / case.key / "alone")
    take_steps(engine, 1)
    engine.save(folder / case.key / "back")
    return {"version": engine.version}


FROM_TORCH = {
    "fsdp2": {"sharding": "full"},
    "tensor parallel": {"sharding": "none", "tensor_parallel_size": 2},
}
"""Engines whose ranks each write their own files."""
TO_ZERO = {
    "fsdp2": [
        Case("fp32", 1, micro=3, train={"ema_decay": 0.9}),
        Case("lora", 2, micro=3, model=ADAPTED),
        Case("fp32", 3, micro=3, train={"ema_decay": 0.9}),
    ],
    "tensor parallel": [
        Case("lora", 1, micro=3, model=ADAPTED),
        Case("bf16", 2, micro=3, precision=HALF["bf16"], train={"ema_decay": 0.9}),
        Case("lora", 3, micro=3, model=ADAPTED),
    ],
}
"""Every stage resumes from both."""


def from_torch(ranks: RankGroup, name: str, folder: Path) -> dict[str, Any]:
    """Two steps of torch on several ranks, saved there and again by one rank; then every ZeRO stage
    loads both and takes a step from each."""
    found = {}
    for case in TO_ZERO[name]:
        place = folder / name / case.key
        _save_torch(ranks, case, FROM_TORCH[name], place)
        found[case.key] = from_both(ranks, case, place)
    return found


def _save_torch(ranks: RankGroup, case: Case, options: dict[str, Any], place: Path) -> None:
    spec = spec_of(case, "torch")
    config = TrainConfig(**{"lr": 1e-3, "engine": {"kind": "torch", **options}, **case.train})
    torch.manual_seed(0)
    spec = replace(spec, role=replace(spec.role, train=config))
    engine = make_engine(load_causal_lm(case.model), spec, ranks=ranks)
    take_steps(engine, 2)
    engine.save(place / "ranks")
    alone = make(case, SINGLE, "torch")
    alone.load(place / "ranks")
    if ranks.rank == 0:
        alone.save(place / "alone")
    ranks.any(False)


def from_both(ranks: RankGroup, case: Case, place: Path) -> dict[str, Any]:
    """Load what several ranks of torch saved, and the same from one file; whether state, norm and
    state after a step are the same bits, and whether the state is that of the file."""
    states, norms, versions = [], [], []
    for name in ("ranks", "alone"):
        engine = make(case, ranks)
        engine.load(place / name)
        states.append(saved(engine, place / f"{ranks.size} from {name}", ranks))
        norms.append(take_steps(engine, 1))
        states.append(saved(engine, place / f"{ranks.size} from {name}, a step", ranks))
        versions.append(engine.version)
    files = sorted((place / "alone").glob("*.safetensors"))
    file = {f"{f.stem} {n}": t for f in files for n, t in load_file(f).items()}
    return {
        "same state": same(states[0], states[2]),
        "same as the file": same(states[0], file),
        "same norms": norms[0] == norms[1],
        "same step": same(states[1], states[3]),
        "moved": not same(states[0], states[1]),
        "versions": versions,
    }


# ---- loading in shards ---------------------------------------------------------------------


class Whole:
    """Counts the entries of weights that are unsharded at the same time in this process."""

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
    """Engines without an optimizer, sharded and replicated."""
    out = {}
    for stage in (0, 3):
        case = Case("", stage, model=UNTIED)
        spec = EngineSpec(
            TrainRole.alone("reference", spec_of(case).role.train, UNTIED, trainable=False),
            micro_batch_size=2,
        )
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
        found |= {f"from {name}": from_torch(ranks, name, folder) for name in FROM_TORCH}
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
