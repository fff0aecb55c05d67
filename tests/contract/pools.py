"""Ranks that an engine of the contract suite is made of: one in this process, processes that a pipe
leads to, ranks as a launcher starts them, or Ray workers. In each of them
``runtime/worker.py::TrainWorker`` does the work, so what is tested is what jobs run.

As a script (``python pools.py SOCKET RANK SIZE``) this file is one of the processes.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import GeneratorType
from typing import Any

import fork_server
import numpy as np
import torch
from torch import Tensor

from burnish.config import launch
from burnish.config.cluster import ClusterConfig
from burnish.config.model import ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.placement import placement_groups_for
from burnish.config.roles import TrainRole
from burnish.config.train import Checkpointing, TrainConfig
from burnish.distributed.process_group import CollectiveTimeouts, RankGroup
from burnish.models.load import load_tokenizer
from burnish.observe.timeline import Timeline
from burnish.optimizers.adamw.config import AdamW
from burnish.runtime.ray.runtime import RayRuntime
from burnish.runtime.ray.train_engine import RemoteTrainEngine
from burnish.runtime.ray.worker_group import WorkerGroup
from burnish.runtime.spmd.runtime import Ranks, SpmdRuntime, SpmdTrainEngine
from burnish.runtime.worker import TrainWorker, TransferOptions, WorkerInfo, pack_share
from burnish.sync.snapshot import SnapshotSource
from burnish.train.base import DistributedPasses, Loss, Outputs, Role, StepStats, TrainEngine
from burnish.train.batching import Share, fill_rows
from burnish.train.host_memory import storages_of
from burnish.train.spec import EngineSpec
from burnish.types import Batch, Stats

NAME = "tests.contract.pools"
MODEL = ModelConfig(scratch=ScratchConfig(hidden_size=32))
PATIENCE_S = 240.0


@dataclass(frozen=True)
class Wanted:
    """What an engine is asked for."""

    role: Role = "policy"
    micro: int | None = None
    temperature: float = 1.0
    lr: float = 1e-2
    precision: PrecisionConfig = PrecisionConfig()
    offload: bool = False


@dataclass(frozen=True)
class Kind:
    """A train engine and where it runs."""

    place: str = "here"
    """``here``, ``processes``, ``launched`` or ``ray``."""
    ranks: int = 1
    engine: dict[str, Any] = field(default_factory=dict)
    """``train.engine``."""
    attention: str = "sdpa"
    """``train.attention``."""
    gradient_checkpointing: Checkpointing = False
    """``train.gradient_checkpointing``."""

    def spec(self, wanted: Wanted) -> EngineSpec:
        return EngineSpec(
            TrainRole.alone(
                wanted.role,
                # (eps: gradients differ by 1e-9, which is then no step of its own)
                TrainConfig(
                    lr=wanted.lr,
                    engine=self.engine,
                    optimizer=AdamW(eps=1e-6),
                    attention=self.attention,
                    gradient_checkpointing=self.gradient_checkpointing,
                ),
                MODEL,
                precision=wanted.precision,
                offload=wanted.offload,
            ),
            micro_batch_size=wanted.micro,
            total_steps=100,
            temperature=wanted.temperature,
        )


def zero(stage: int) -> dict[str, Any]:
    # the norms (32) stay whole at stage 3, matrices do not
    sizes = {"reduce_bucket_size": 50_000, "param_persistence_threshold": 40}
    return {"kind": "deepspeed", "zero_stage": stage, **sizes}


FULL = {"sharding": "full"}
KINDS: dict[str, Kind] = {
    "torch": Kind(),
    "torch, flash": Kind(attention="flash"),
    "torch, selective": Kind(attention="flash", gradient_checkpointing="selective"),
    "FSDP2, 1 rank": Kind(engine=FULL),
    "FSDP2, 1 rank, flash": Kind(engine=FULL, attention="flash"),
    **{f"ZeRO-{n}, 1 rank": Kind(engine=zero(n)) for n in range(4)},
    "torch, 2 ranks": Kind("processes", 2),
    "FSDP2, 2 ranks": Kind("processes", 2, FULL),
    **{f"ZeRO-{n}, 2 ranks": Kind("processes", 2, zero(n)) for n in (1, 2, 3)},
    "torch, 2 launched ranks": Kind("launched", 2),
    "FSDP2, 2 launched ranks": Kind("launched", 2, FULL),
    "FSDP2, 4 launched ranks": Kind("launched", 4, FULL),
    "torch, 2 ranks on Ray": Kind("ray", 2),
    "FSDP2, 2 ranks on Ray": Kind("ray", 2, FULL),
    "ZeRO-3, 2 ranks on Ray": Kind("ray", 2, zero(3)),
}


# ---- losses, which ranks find here ---------------------------------------------------------------


def nll(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
    """Minus the mean log-prob of the step's action tokens."""
    assert outputs.logprobs is not None
    stats = Stats(sums={"tokens": int(batch.action_mask.sum())})
    return -outputs.logprobs.sum() / batch.num_tokens, stats


def rising(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
    """Minus the sum of the values, per row."""
    assert outputs.values is not None
    return -outputs.values.sum() / batch.num_rows, Stats(sums={"rows": batch.num_rows})


def bad(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
    scalar, stats = nll(outputs, batch)
    return scalar * float("nan"), stats


def on_last_rank() -> bool:
    group = torch.distributed
    return not group.is_initialized() or group.get_rank() == group.get_world_size() - 1


def overflowing(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
    """A finite loss whose gradient is not finite on the last rank."""
    if on_last_rank():
        assert outputs.logprobs is not None
        outputs.logprobs.register_hook(lambda grad: grad * torch.inf)
    return nll(outputs, batch)


def watching(
    expected: Tensor, begins: list[Any], outputs: Outputs, batch: Batch
) -> tuple[Tensor, Stats]:
    """:func:`nll`, and the largest gap between the rows' log-probs and ``expected``."""
    assert outputs.logprobs is not None and outputs.logprobs.requires_grad
    scalar, stats = nll(outputs, batch)
    own = outputs.logprobs.detach().cpu().split(batch.lengths.tolist())
    rows = batch.tokens.cpu().split(batch.lengths.tolist())
    gap = 0.0
    for row, tokens in zip(own, rows, strict=True):
        same = [expected[b : b + len(row)] for b, t in begins if t == tokens.tolist()]
        gap = max(gap, min(float((row - e).abs().max()) for e in same))
    return scalar, stats + Stats(maxima={"gap": gap})


# ---- ranks ---------------------------------------------------------------------------------------


def build(worker: TrainWorker, spec: EngineSpec, *, scalar: bool) -> None:
    """Make an engine in the place of the last one."""
    worker.build(spec, scalar=scalar, seed=0)


def held_bytes(engine: Any) -> int:
    """Bytes of weights, gradients and optimizer state on the device."""
    return sum(s.nbytes() for s in storages_of(engine._held_tensors(), engine.device))


def is_scalar(wanted: Wanted) -> bool:
    return wanted.role in ("critic", "reward")


class Here:
    """One rank in this process."""

    def make(self, kind: Kind, wanted: Wanted) -> TrainEngine:
        worker = TrainWorker(WorkerInfo("policy", 0, 1, "cpu", 1), MODEL, wanted.precision)
        group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
        worker.ranks = RankGroup(group) if kind.engine == FULL else RankGroup()
        build(worker, kind.spec(wanted), scalar=is_scalar(wanted))
        return worker.engine

    def close(self) -> None:
        pass


class OnRay:
    """Two Ray workers, in which one engine after another is made."""

    def __init__(self) -> None:
        import ray

        ray.cloudpickle.register_pickle_by_value(sys.modules[NAME])
        config = ClusterConfig(runtime="ray", policy_ranks=2)
        self.runtime = RayRuntime(
            load_tokenizer(MODEL),
            MODEL,
            config,
            placements=placement_groups_for(config, ["policy"]),
            precision=PrecisionConfig(),
            timeline=Timeline(),
        )
        cluster = self.runtime.cluster
        self._group = WorkerGroup(cluster, Kind("ray", 2).spec(Wanted()), scalar=False, seed=0)
        self.runtime.groups.append(self._group)

    def make(self, kind: Kind, wanted: Wanted) -> RemoteTrainEngine:
        spec, scalar = kind.spec(wanted), is_scalar(wanted)
        self._group.all(lambda w: w.__ray_call__.remote(build, spec, scalar=scalar))
        self._group.role = wanted.role
        return RemoteTrainEngine(self._group)

    def close(self) -> None:
        self.runtime.close()


class Pipes:
    """Processes that a pipe leads to, in which one engine after another is made."""

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="burnish-contract-")
        address = f"{self._folder.name}/socket"
        env = os.environ | {
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
            "PYTHONWARNINGS": "ignore",
        }
        self.pipes: list[Connection] = []
        self._processes = []
        with Listener(address, "AF_UNIX") as listener:
            for rank in range(size):
                command = [*fork_server.command(), __file__, address, str(rank), str(size)]
                self._processes.append(subprocess.Popen(command, env=env))
                self.pipes.append(listener.accept())

    def all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Each rank's answer to one call of its worker. Raises what one raised."""
        return self.each(method, *([arg] * len(self.pipes) for arg in args), **kwargs)

    def each(self, method: str, *args: Sequence[Any], **kwargs: Any) -> list[Any]:
        """The same, with an own argument for each rank in each of ``args``."""
        for pipe, *own in zip(self.pipes, *args, strict=True):
            pipe.send_bytes(pickle.dumps((method, own, kwargs)))  # (send would share tensors)
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(PATIENCE_S):
                self.close()
                raise TimeoutError(f"rank {rank} did not answer {method} in {PATIENCE_S:g} s")
            answers.append(pickle.loads(pipe.recv_bytes()))
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._folder.cleanup()


class Processes(Pipes):
    """Processes in which a controller, here, calls the worker of each rank."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        host, port = self.all("open_rendezvous", PATIENCE_S)[0]
        self.all(
            "join",
            host,
            port,
            timeout_s=PATIENCE_S,
            limits=CollectiveTimeouts(PATIENCE_S, PATIENCE_S),
        )

    def make(self, kind: Kind, wanted: Wanted) -> PipedEngine:
        spec, scalar = kind.spec(wanted), is_scalar(wanted)
        self.all("build here", spec, scalar=scalar)
        return PipedEngine(self, wanted.role)


class Launched(Pipes):
    """Ranks that are connected as a launcher's are. Each runs what its loop would call."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        self.all("launch", port)

    def make(self, kind: Kind, wanted: Wanted) -> LaunchedEngine:
        spec, scalar = kind.spec(wanted), is_scalar(wanted)
        self.all("engine: build", spec, scalar=scalar)
        return LaunchedEngine(self, wanted.role)


class PipedEngine(DistributedPasses):
    """The ranks of :class:`Processes` as one train engine."""

    def __init__(self, pool: Processes, role: Role) -> None:
        self.pool, self.role, self.version = pool, role, 0

    def _per_token(self, method: str, batch: Batch) -> Tensor:
        shares = self.shares(batch)
        found = self.pool.each(
            "per_token", [method] * len(shares), [pack_share(share) for share in shares]
        )
        out = torch.zeros(batch.tokens.numel(), *found[0].shape[1:])
        for share, values in zip(shares, found, strict=True):
            fill_rows(out, batch, [(share.row_numbers, torch.from_numpy(values))])
        return out

    def _stats(self, method: str, batch: Batch, loss: Loss) -> Stats:
        packed = [pack_share(share) for share in self.shares(batch)]
        losses, methods = [loss] * len(packed), [method] * len(packed)
        stats: Stats = self.pool.each("stats", methods, packed, losses)[0]
        return stats

    def shares(self, batch: Batch) -> list[Share]:
        """Those of the ranks, in their order."""
        return list(self.pool.all("row_split")[0][0].shares(batch))

    def optim_step(self) -> StepStats:
        found = self.pool.all("optim_step")
        assert repr(found[0]) == repr(found[1]), "all ranks say the same (a norm may be nan)"
        stats, failure, self.version = found[0]
        assert failure is None, failure
        result: StepStats = stats
        return result

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        items, _ = self.pool.all("transfer_weights", 0, TransferOptions(1 << 20, None, verify=True))
        source = SnapshotSource(items[1::2], [p for p in items[::2] if p.size], hold=True)
        with source.open(self.version) as transfer:
            yield from transfer

    @property
    def state_bytes(self) -> int:
        first, second = self.pool.all("state_bytes")
        assert first == second
        return int(first)

    def offload(self) -> None:
        held = self.pool.all("offload here")
        assert held == [0, 0], "every rank has freed its memory"

    def save(self, folder: Path) -> None:
        self.pool.all("save", str(folder))

    def load(self, folder: Path) -> None:
        self.version = self.pool.all("load", str(folder))[0]


class LaunchedEngine(DistributedPasses):
    """The engines of :class:`Launched` as one: each gets the same calls, and all have the same
    results, bit for bit."""

    def __init__(self, pool: Launched, role: Role) -> None:
        self.pool, self.role, self.version = pool, role, 0

    def _call(self, method: str, *args: Any) -> Any:
        results = self.pool.all(f"engine: {method}", *args)
        assert all(equal(result, results[0]) for result in results[1:]), f"{method} differs"
        return results[0]

    def _per_token(self, method: str, batch: Batch) -> Any:
        return self._call(method, batch)

    def _stats(self, method: str, batch: Batch, loss: Loss) -> Any:
        return self._call(method, batch, loss)

    def optim_step(self) -> Any:
        stats, self.version = self._call("optim_step")
        return stats

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._call("weights")

    @property
    def state_bytes(self) -> Any:
        return self._call("state_bytes")

    def offload(self) -> None:
        assert self._call("offload") == 0, "every rank has freed its memory"

    def save(self, folder: Path) -> None:
        self._call("save", folder)

    def load(self, folder: Path) -> None:
        self.version = self._call("load", folder)


def equal(first: Any, second: Any) -> bool:
    """Return True if two results are bit-equal."""
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(equal, first, second))
    return repr(first) == repr(second)  # a norm may be nan


# ---- inside a process --------------------------------------------------------------------------


class LaunchedRank:
    """The rank that this process is, once ``launch`` was called, and its engine."""

    runtime: SpmdRuntime
    engine: SpmdTrainEngine

    def launch(self, rank: int, size: int, port: int) -> None:
        launched = launch.LaunchedRank(rank, size, rank, size, "127.0.0.1", port, "pools.py")
        ranks = Ranks(launched, ClusterConfig(runtime="spmd", policy_ranks=size))
        ranks.join("cpu")
        self.runtime = SpmdRuntime(
            load_tokenizer(MODEL),
            ranks,
            precision=PrecisionConfig(),
            timeline=Timeline(),
            model=MODEL,
        )

    def build(self, spec: EngineSpec, *, scalar: bool) -> None:
        runtime = self.runtime
        made = runtime.scalar_model(spec, seed=0) if scalar else runtime.language_model(spec)
        assert isinstance(made, SpmdTrainEngine)
        self.engine = made

    def call(self, method: str, args: Any, kwargs: Any) -> Any:
        if method == "build":
            return self.build(*args, **kwargs)
        if method == "state_bytes":
            return self.engine.state_bytes
        result = getattr(self.engine, method)(*args, **kwargs)
        if method == "weights":
            return [(name, tensor.detach().clone()) for name, tensor in result]
        if method == "optim_step":
            return result, self.engine.version
        if method == "offload":
            return held_bytes(self.engine.worker.engine)
        return self.engine.version if method == "load" else result


def _call(worker: TrainWorker, launched: LaunchedRank, method: str, args: Any, kwargs: Any) -> Any:
    if method == "launch":
        return launched.launch(worker.info.rank, worker.info.size, *args)
    if method.startswith("engine: "):
        return launched.call(method.removeprefix("engine: "), args, kwargs)
    if method == "build here":
        return build(worker, *args, **kwargs)
    if method == "offload here":
        worker.offload()
        return held_bytes(worker.engine)
    result = getattr(worker, method)(*args, **kwargs)
    if isinstance(result, GeneratorType):  # what was yielded is good until the next
        return [np.copy(item) if isinstance(item, np.ndarray) else item for item in result]
    return result


def serve(address: str, rank: int, size: int) -> None:
    """Do what comes through the pipe until it is closed."""
    torch.set_num_threads(1)
    worker = TrainWorker(WorkerInfo("policy", rank, size, "cpu", 1), MODEL, PrecisionConfig())
    launched = LaunchedRank()
    with Client(address, "AF_UNIX") as pipe:
        while True:
            try:
                method, args, kwargs = pickle.loads(pipe.recv_bytes())
            except EOFError:
                return
            try:
                answer = _call(worker, launched, method, args, kwargs)
            except Exception as error:
                answer = error
            pipe.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    sys.modules[NAME] = sys.modules["__main__"]
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
