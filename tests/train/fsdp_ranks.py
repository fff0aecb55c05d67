"""The cases of test_fsdp_engine.py: run as a script on each of several ranks, and in the test on a
single rank with the plain engine.

``python fsdp_ranks.py FOLDER RANK SIZE`` meets the other ranks through FOLDER, runs every case and
writes ``rank<RANK>.safetensors`` and ``.json`` there. ``python fsdp_ranks.py FOLDER RANK SIZE
killed`` is killed in the middle of a save.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

import burnish.models.tensor_files as tensor_files
from burnish.config.model import Fp16Config, LoraConfig, ModelConfig, PrecisionConfig
from burnish.config.roles import TrainRole
from burnish.config.train import TrainConfig
from burnish.config.train_engines import TorchEngine
from burnish.distributed.process_group import SINGLE, RankGroup
from burnish.models.load import load_causal_lm, load_tokenizer
from burnish.models.tensor_files import TensorFiles
from burnish.models.value_head import load_scalar_model
from burnish.optimizers.rule import OptimizerError
from burnish.train.base import FrozenBase, NonFiniteError
from burnish.train.engines import make_engine as engine_of
from burnish.train.fsdp.engine import ShardedTrainEngine
from burnish.train.spec import EngineSpec
from burnish.types import Batch

_SPEC = importlib.util.spec_from_file_location(
    "fsdp_cases", Path(__file__).with_name("fsdp_cases.py")
)
assert _SPEC is not None and _SPEC.loader is not None
cases: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["fsdp_cases"] = cases  # its dataclasses look their module up
_SPEC.loader.exec_module(cases)
two_ranks, Case, MODELS, CASES, OPTIONS = (
    cases.two_ranks,
    cases.Case,
    cases.MODELS,
    cases.CASES,
    cases.OPTIONS,
)
make_engine, run_case, steps_of, train = (
    cases.make_engine,
    cases.run_case,
    cases.steps_of,
    cases.train,
)
state_hash, PRECISIONS, SPLITS = cases.state_hash, cases.PRECISIONS, cases.SPLITS


def overflow(ranks: RankGroup, precision: PrecisionConfig) -> dict[str, Any]:
    """A clean step, one with an infinite entry in the last rank's rows, and a clean one."""
    engine, batch = make_engine(ranks, Case(), precision=precision), two_ranks.ragged()
    assert engine.optimizer is not None
    hashes, steps = [state_hash(engine)], []
    for bad in (False, True, False):
        engine.forward_backward(batch, two_ranks.nll)
        if bad and ranks.rank == ranks.size - 1:
            grad: Any = engine.optimizer.params[3].grad
            grad.to_local().view(-1)[0] = torch.inf
        steps.append(engine.optim_step())
        hashes.append(state_hash(engine))
    return {
        "hashes": hashes,
        "norms": [s.grad_norm for s in steps if not s.skipped],
        "skipped": [s.skipped for s in steps],
        "skipped_total": [s.skipped_total for s in steps],
        "scales": [s.loss_scale for s in steps] + [engine.optimizer.scaler.scale],
        "version": engine.version,
    }


def precisions(ranks: RankGroup) -> dict[str, Any]:
    """Losses over 8 steps, formats, and log-probs, of every format."""
    found = {}
    for name, precision in PRECISIONS.items():
        engine, batch = make_engine(ranks, Case(), precision=precision), two_ranks.ragged()
        before = engine.logprobs(batch)
        train(engine, 8)
        after = engine.logprobs(batch)
        assert engine.optimizer is not None
        found[name] = {
            "before": before.tolist(),
            "after": after.tolist(),
            "formats": sorted({str(t.dtype) for _, t in engine.weights()}),
            "state": sorted(
                {str(t.dtype) for k in engine.optimizer.tensors().values() for t in k.values()}
            ),
        }
    return found


def real_overflow(ranks: RankGroup) -> dict[str, Any]:
    """fp16 with a scale that is too high at first: the trace of scales and skips."""
    precision = PrecisionConfig(
        dtype="fp16",
        fp16=Fp16Config(initial_scale_power=24, hysteresis=2, loss_scale_window=3),
    )
    engine = make_engine(ranks, Case(), precision=precision)
    steps = []
    for _ in range(14):
        engine.forward_backward(two_ranks.ragged(), two_ranks.nll)
        steps.append(engine.optim_step())
    return {"trace": [[s.loss_scale, s.skipped] for s in steps], "version": engine.version}


def stop(ranks: RankGroup) -> dict[str, Any]:
    """The second bad step in a row ends the run, on all ranks, with one message; a loss that is
    not finite on the last rank, and a weight that is not."""
    messages = {}
    last = ranks.size - 1
    for what in ("loss", "weight"):
        engine = make_engine(ranks, Case(train={"max_consecutive_skips": 2}))
        loss = two_ranks.not_finite_on(ranks, last) if what == "loss" else two_ranks.nll
        if what == "weight" and ranks.rank == last:
            name = "model.layers.1.mlp.up_proj.weight"
            assert engine.optimizer is not None
            engine.optimizer.masters[engine.optimizer.names.index(name)].view(-1)[5] = torch.nan
        for _ in range(2):
            engine.forward_backward(two_ranks.ragged(), loss)
            try:
                engine.optim_step()
            except NonFiniteError as error:
                messages[what] = str(error)
    return messages


def forward_order(ranks: RankGroup) -> dict[str, Any]:
    """Log-probs and a step, three times, as in this version of torch and as before 2.13, which has
    no method that forgets the modules run."""
    reports: dict[str, Any] = {}
    reset = FSDPModule.reset_iter_state
    for name in ("reset", "older"):
        engine, batch = make_engine(ranks, Case()), two_ranks.ragged()
        FSDPModule.reset_iter_state = reset if name == "reset" else None
        try:
            lengths = []
            for _ in range(3):
                engine.logprobs(batch)
                lengths.append(len(engine.root._get_fsdp_state()._comm_ctx.post_forward_order))
                engine.forward_backward(batch, two_ranks.nll)
                engine.optim_step()
        finally:
            FSDPModule.reset_iter_state = reset
        reports[name] = {"lengths": lengths, "state": state_hash(engine)}
    return reports


def gradient_overflow(ranks: RankGroup) -> dict[str, Any]:
    """fp16 at the floor of its scale, with a loss so large that gradients are not finite."""
    precision = PrecisionConfig(
        dtype="fp16",
        fp16=Fp16Config(initial_scale_power=20, min_loss_scale=2.0**20, hysteresis=1),
    )
    engine = make_engine(ranks, Case(), precision=precision)
    before = state_hash(engine)

    def loss(outputs: Any, batch: Batch) -> Any:
        scalar, stats = two_ranks.nll(outputs, batch)
        return scalar * 1e4, stats

    engine.forward_backward(two_ranks.ragged(), loss)
    try:
        engine.optim_step()
    except NonFiniteError as error:
        return {"message": str(error), "unmoved": state_hash(engine) == before}
    return {"message": "went on"}


def uneven(ranks: RankGroup) -> dict[str, Any]:
    """One long row and many short ones under a token budget: passes over no rows."""
    batch: Batch = two_ranks.accumulation.random_groups(
        [(3, [60]), *[(1, [2])] * 20], torch.Generator().manual_seed(6)
    )
    case = Case(train={"layout": "packed", "max_tokens_per_micro_batch": 12})
    engine = make_engine(ranks, case)
    passes: list[int] = []
    engine.body.register_forward_pre_hook(lambda *_: passes.append(1))
    rows = [engine.forward_backward(batch, two_ranks.nll).floats()["rows"] for _ in range(2)]
    norm = engine.optim_step().grad_norm
    made = len(passes)
    return {"passes": made, "rows": rows, "norm": norm, "logprobs": engine.logprobs(batch).tolist()}


def held(ranks: RankGroup) -> dict[str, Any]:
    """Elements that this rank holds between steps, and the most that were gathered in one."""
    engine = make_engine(ranks, Case(model="untied"))
    train(engine, 1)
    assert engine.optimizer is not None
    parameters = list(engine.model.parameters())
    own = [p.to_local() for p in parameters if isinstance(p, torch.distributed.tensor.DTensor)]
    state = engine.optimizer.tensors()
    return {
        "whole": sum(p.numel() for p in parameters),
        "own": sum(p.numel() for p in own),
        "memory": sum(p.untyped_storage().nbytes() for p in own),
        "sharded": len(own) == len(parameters),
        "moments": sum(t.numel() for t in state["exp_avg"].values()),
        "masters": sum(t.numel() for t in state["master"].values()),
        "frozen": _held_by_reference(ranks),
    }


def _held_by_reference(ranks: RankGroup) -> dict[str, Any]:
    """A reference model: each rank holds half of it, before and after a pass."""
    engine = make_engine(ranks, Case(), role="reference", trainable=False)
    first = engine.logprobs(two_ranks.ragged())
    again = engine.logprobs(two_ranks.ragged())
    policy = make_engine(ranks, Case())
    train(policy, 2)
    engine.mix(policy.weights(), 0.25)
    return {
        "mixed": cases.weights(engine)["model.embed_tokens.weight"].tolist(),
        "policy": cases.weights(policy)["model.embed_tokens.weight"].tolist(),
        "own": sum(_own_elements(p) for p in engine.model.parameters()),
        "whole": sum(p.numel() for p in engine.model.parameters()),
        "logprobs": first.tolist(),
        "same": torch.equal(first, again),
    }


def _own_elements(parameter: Any) -> int:
    return int(parameter.to_local().numel())


@contextmanager
def counting_reads() -> Any:
    """The elements of every read from safetensors files."""
    reads: list[int] = []
    read = TensorFiles.read

    def counted(self: TensorFiles, name: str, rows: Any = None) -> Tensor:
        tensor = read(self, name, rows)
        reads.append(tensor.numel())
        return tensor

    TensorFiles.read = counted  # type: ignore[method-assign]
    try:
        yield reads
    finally:
        TensorFiles.read = read  # type: ignore[method-assign]


def from_folder(folder: Path, ranks: RankGroup, *, lora: bool = False) -> dict[str, Any]:
    """A policy, a critic and a reward model of a folder's weights, each rank reading its own."""
    adapters = LoraConfig(lora_rank=3) if lora else None
    config = ModelConfig(path=str(folder / "model"), lora=adapters)
    found: dict[str, Any] = {}
    for role, precision in itertools.product(("policy", "critic"), ("fp32", "bf16")):
        torch.manual_seed(0)
        dtype: Any = "bf16" if lora and precision == "bf16" else "fp32"
        options: dict[str, Any] = {"dtype": dtype, "empty": ranks.group is not None}
        model: Any = (
            load_scalar_model(config, new_head="random", **options)
            if role == "critic"
            else load_causal_lm(config, **options)
        )
        empty = sum(p.numel() for p in model.parameters() if p.is_meta)
        train_config = TrainConfig(engine=TorchEngine(sharding="full"), lr=1e-3)
        spec = EngineSpec(
            TrainRole.alone(role, train_config, config, precision=PrecisionConfig(dtype=precision))
        )
        with counting_reads() as reads:
            engine = engine_of(model, spec, ranks=ranks)
        batch = two_ranks.ragged()
        outputs = engine.values(batch) if engine.scalar else engine.logprobs(batch)
        norms = []
        if role == "policy":
            norms = train(engine, 3)
        found[f"{role} {precision}"] = {
            "empty": empty,
            "whole": sum(p.numel() for p in engine.model.parameters()),
            "read": sum(reads),
            "outputs": outputs.tolist(),
            "norms": norms,
            "end_tokens": None if engine.scalar else model.generation_config.eos_token_id,
        }
    return found


def frozen_base(ranks: RankGroup) -> dict[str, Any]:
    """A LoRA policy that is asked as its own reference before anything else."""
    engine = make_engine(ranks, Case(model="lora"))
    base = FrozenBase(engine).logprobs(two_ranks.ragged())
    norms = train(engine, 3)
    return {
        "base": base.tolist(),
        "norms": norms,
        "again": FrozenBase(engine).logprobs(two_ranks.ragged()).tolist(),
        "tuned": engine.logprobs(two_ranks.ragged()).tolist(),
    }


def nf4_weights(ranks: RankGroup) -> dict[str, Any]:
    """Whether the gathered weights of a QLoRA policy have the bits of a replica's."""
    found = {}
    for dtype in ("fp32", "bf16"):
        precision = PrecisionConfig(dtype=dtype)
        sharded = cases.weights(make_engine(ranks, Case(model="nf4"), precision=precision))
        alone = cases.weights(make_engine(SINGLE, Case(model="nf4"), precision=precision))
        found[dtype] = all(torch.equal(sharded[name], alone[name]) for name in alone)
    return found


def eight_bit(folder: Path, ranks: RankGroup) -> dict[str, Any]:
    """Weights and states of 8-bit AdamW after equal gradients, as hashes, on these ranks and after
    the checkpoint of one rank alone. ``odd``: its rows are 36 x 72 = 10.125 blocks of 256."""
    train = {"optimizer": "adamw_8bit", "max_grad_norm": None, "weight_decay": 0.1}
    case = Case(model="wide", train=train)
    try:
        make_engine(ranks, Case(model="odd", train=train))
        refused = ""
    except OptimizerError as error:
        refused = str(error)
    engine, other = make_engine(ranks, case), make_engine(ranks, case)
    own = folder / f"8bit {ranks.size}"
    _steps_with_equal_gradients(engine, range(2))
    engine.save(own)
    bytes_ = engine.optimizer.num_bytes
    _steps_with_equal_gradients(engine, range(2, 4))
    other.load(folder / "8bit 1" if ranks.size > 1 else own)
    _steps_with_equal_gradients(other, range(2, 4))
    kinds = tensor_files.tensor_sets(own)
    saved = {f"{k} {n}": _hash(files.read(n)) for k, files in kinds.items() for n in files}
    runs = [{n: _hash(t) for n, t in cases.weights(e).items()} for e in (engine, other)]
    return {"refused": refused, "saved": saved, "runs": runs, "bytes": bytes_}


def _steps_with_equal_gradients(engine: Any, seeds: range) -> None:
    """Optimizer steps whose gradients do not depend on the order of sums over ranks."""
    for seed in seeds:
        engine.forward_backward(two_ranks.ragged(), two_ranks.nll)
        for i, parameter in enumerate(engine.optimizer.params):
            generator = torch.Generator().manual_seed(100 * seed + i)
            full = torch.randn(parameter.shape, generator=generator)
            own = parameter.grad
            if isinstance(own, torch.distributed.tensor.DTensor):
                begin, end = engine.optimizer.rows[engine.optimizer.names[i]]
                own, full = own.to_local(), full[begin:end]
            own.copy_(full)
        engine.optim_step()


def _hash(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).numpy().tobytes()).hexdigest()[:16]


SAVED: dict[str, Case] = {
    "tied": Case(train={"ema_decay": 0.9, "lr": 1e-2}),
    "untied": Case(model="untied"),
    "lora": Case(model="lora"),
    "nf4": Case(model="nf4"),
    "critic": Case("critic"),
    "muon": Case(train={"optimizer": cases.MUON}),
    "adafactor": Case(train={"optimizer": "adafactor"}),
}


def save_and_resume(folder: Path, ranks: RankGroup) -> dict[str, Any]:
    """Three steps, saved; then two more here, in a new engine from the checkpoint, and from the
    checkpoint of a rank alone."""
    found: dict[str, Any] = {}
    for name, case in SAVED.items():
        first = make_engine(ranks, case)
        steps_of(case, first, 3)
        first.save(folder / f"saved {name}")
        announced = first.state_bytes
        norms = steps_of(case, first, 2)
        second = make_engine(ranks, case)
        steps_of(case, second, 1)
        second.load(folder / f"saved {name}")
        version = second.version
        same = steps_of(case, second, 2) == norms and state_hash(first) == state_hash(second)
        third = make_engine(ranks, case)
        third.load(folder / f"alone {name}")
        from_alone = steps_of(case, third, 2)
        third.save(folder / f"again {name}")
        found[name] = {
            "norms": norms,
            "same": same,
            "version": version,
            "announced": announced,
            "from_alone": from_alone,
        }
    return found


def save_while_training(folder: Path, ranks: RankGroup) -> dict[str, Any]:
    """Two saves that are written during training, and one that is not."""
    engine = make_engine(ranks, Case(train={"lr": 1e-2}))
    train(engine, 2)
    engine.save(folder / "at once")
    assert isinstance(engine, ShardedTrainEngine)
    pending = engine.save_async(folder / "meanwhile")
    train(engine, 3)
    engine.save_async(folder / "later")  # waits for the first
    done = pending.done
    train(engine, 2)
    pending.wait()
    engine.save(folder / "last")
    resumed = make_engine(ranks, Case(train={"lr": 1e-2}))
    resumed.load(folder / "later")
    version = resumed.version
    train(resumed, 2)
    assert engine._save_group is not None
    gloo: Any = engine._save_group._get_backend(torch.device("cpu"))
    return {
        "done": done,
        "limit_s": gloo.options._timeout.total_seconds(),
        "version": version,
        "same": state_hash(resumed) == state_hash(engine),
        "failed": _failing_save(folder, ranks, engine),
    }


def _failing_save(folder: Path, ranks: RankGroup, engine: ShardedTrainEngine) -> str:
    """The last rank cannot write: all ranks raise."""
    write = tensor_files.write_shard_file

    def refuse(*arguments: Any) -> Path:
        raise OSError("no space left")

    if ranks.rank == ranks.size - 1:
        tensor_files.write_shard_file = refuse  # type: ignore[assignment]
    try:
        engine.save(folder / "failed")
    except OSError as error:
        return str(error)
    finally:
        tensor_files.write_shard_file = write
    return "went on"


def killed(folder: Path, ranks: RankGroup) -> None:
    """Every rank is killed after it has written some of its files, during training."""
    engine = make_engine(ranks, Case())
    train(engine, 2)
    engine.save(folder / "good")
    write = tensor_files.write_shard_file

    def write_one(*arguments: Any) -> Path:
        path = write(*arguments)
        (folder / f"killed{ranks.rank}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
        return path

    tensor_files.write_shard_file = write_one
    assert isinstance(engine, ShardedTrainEngine)
    engine.save_async(folder / "bad")
    while True:
        train(engine, 1)


def prepare(folder: Path) -> None:
    """Inputs of the ranks: a model folder with several weight files, and checkpoints of the plain
    engine."""
    model: Any = load_causal_lm(MODELS["untied"])
    model.save_pretrained(folder / "model", max_shard_size="30KB")
    load_tokenizer(MODELS["untied"]).save_pretrained(folder / "model")
    for name, case in SAVED.items():
        engine = make_engine(SINGLE, case)
        steps_of(case, engine, 3)
        engine.save(folder / f"alone {name}")
    eight_bit(folder, SINGLE)


OTHERS: dict[str, Callable[[RankGroup], dict[str, Any]]] = {
    "precisions": precisions,
    "real_overflow": real_overflow,
    "stop": stop,
    "forward_order": forward_order,
    "gradient_overflow": gradient_overflow,
    "uneven": uneven,
    "held": held,
    "frozen_base": frozen_base,
    "nf4_weights": nf4_weights,
}


def main(folder: Path, rank: int, size: int, *, kill: bool) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), size)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    ranks = RankGroup(torch.distributed.group.WORLD)
    if kill:
        killed(folder, ranks)
    tensors: dict[str, Tensor] = {}
    found: dict[str, Any] = {"cases": {}}
    for case in [*CASES, *OPTIONS] if size > 1 else [*CASES[::4], *OPTIONS[:4]]:
        own, found["cases"][case.key] = run_case(case, ranks)
        tensors |= {f"{case.key}|{name}": tensor.clone() for name, tensor in own.items()}
    found["overflow"] = {name: overflow(ranks, p) for name, p in PRECISIONS.items()}
    if size > 1:
        found |= {name: run(ranks) for name, run in OTHERS.items()}
        found["eight_bit"] = eight_bit(folder, ranks)
    found["from_folder"] = from_folder(folder, ranks)
    found["lora_from_folder"] = from_folder(folder, ranks, lora=True)
    found["resumed"] = save_and_resume(folder, ranks)
    found["async"] = save_while_training(folder, ranks)
    save_file(tensors, folder / f"rank{rank}.safetensors")
    (folder / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), kill="killed" in sys.argv)
