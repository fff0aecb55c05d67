"""Runtime on the ranks of a launcher (torchrun, accelerate, srun), without a controller.

Every rank runs the job's loop with equal batches. A train engine computes the rank's share of each
batch and sums or gathers the results over ranks (``distributed/process_group.py``), so the loops of
all ranks see equal numbers and take equal decisions. An engine is that of a Ray worker
(``worker.TrainWorker``), called in this process: timeouts of collectives and random numbers of
passes are the same.

:class:`Ranks` connects the ranks and compares their inputs before anything is loaded. Rank 0 writes
the run folder."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from burnish.checkpoint.save import PendingSave
from burnish.config import JobConfig
from burnish.config.cluster import ClusterConfig
from burnish.config.launch import LaunchedRank, LaunchError, launched_rank
from burnish.config.model import ModelConfig, PrecisionConfig
from burnish.config.roles import free_name
from burnish.distributed.process_group import CollectiveTimeouts, RankGroup
from burnish.models.load import resolve_device
from burnish.observe.progress import silenced
from burnish.observe.timeline import Timeline
from burnish.runtime.inline import InlineRuntime
from burnish.runtime.spmd.inputs import Inputs, different_inputs, inputs_of
from burnish.runtime.spmd.monitor import RankMonitor, first_line
from burnish.runtime.worker import TrainWorker, WorkerInfo
from burnish.train.base import (
    CRITIC_SPANS,
    POLICY_SPANS,
    DistributedPasses,
    Loss,
    StepStats,
    TrainEngine,
)
from burnish.train.spec import EngineSpec
from burnish.types import Batch, Stats

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

T = TypeVar("T")


_CONNECTIONS = count()
"""Numbers the runs of this process: a launcher's store keeps the keys of earlier runs."""
_STORES: dict[tuple[str, int, int], TCPStore] = {}
"""(address, port, rank) -> store, for all runs of this process: rank 0 would close it between two
runs, while another rank connects to it."""
_POLL_S = 0.05
_GRACE_S = 5.0
"""Maximum seconds for which rank 0 waits until the others have received a problem."""


class Ranks:
    """The connected ranks of a launcher: their store, their monitor and their process group."""

    device: str
    """Device of this rank, once :meth:`join` has returned."""
    group: RankGroup

    def __init__(self, rank: LaunchedRank, config: ClusterConfig) -> None:
        """Connect to the store of the ranks, and wait until all ranks are connected.

        Raises LaunchError, on all connected ranks with the same message, if a rank does not connect
        within ``cluster.start_timeout_s``, or if two processes have the same rank.
        """
        self.launched, self.config = rank, config
        self.limits = CollectiveTimeouts(config.call_timeout_s, config.collective_timeout_s)
        torch.set_num_threads(max(1, int(config.cpus_per_worker)))
        os.environ.update(rank.environment())
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        number = next(_CONNECTIONS)
        try:
            store = self._open_store()
            self._store = PrefixStore(f"burnish {number}", store)
            problem = self._meet()
        except RuntimeError as error:
            raise LaunchError(
                f"rank {rank.rank} of {rank.size} (host {socket.gethostname()}) cannot connect to "
                f"the others through {rank.address}:{rank.port} within "
                f"{config.start_timeout_s:g} s (cluster.start_timeout_s): {first_line(error)}. "
                f"Check the output of rank 0, that all {rank.size} ranks were started, and that "
                "every node reaches this address and port"
            ) from error
        if problem:
            raise LaunchError(problem)
        self.monitor = RankMonitor(
            PrefixStore(f"burnish monitor {number}", store.clone()),  # type: ignore[attr-defined]
            rank=rank.rank,
            size=rank.size,
            timeout_s=config.heartbeat_timeout_s,
        )

    def _open_store(self) -> TCPStore:
        """Connect to torchrun's store, or to that of rank 0, which starts here."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        rank = self.launched
        key = (rank.address, rank.port, rank.rank)
        if key in _STORES:
            return _STORES[key]
        in_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = _STORES[key] = TCPStore(
            rank.address,
            rank.port,
            rank.size,
            is_master=rank.rank == 0 and not in_agent,
            timeout=timedelta(seconds=self.config.start_timeout_s),
            wait_for_workers=False,  # rank 0 names those that are missing
            multi_tenant=True,  # torch's own rendezvous in this process may use the same port
        )
        return store

    def _meet(self) -> str:
        """Wait for all ranks. Return the problem of this launch; an empty text if there is none."""
        rank = self.launched
        description = f"rank {rank.rank} (host {socket.gethostname()}, pid {os.getpid()})"
        if self._store.add(f"claimed/{rank.rank}", 1) > 1:
            first = bytes(self._store.get(f"here/{rank.rank}")).decode()
            problem = (
                f"two processes have RANK={rank.rank}: {first} and {description}. Give every "
                "process its own RANK (torchrun, accelerate launch and srun do)"
            )
            self._store.set("problem", problem)
            return problem
        self._store.set(f"here/{rank.rank}", description)
        if rank.rank == 0:
            self._store.set("size", str(rank.size))
            return self._announce("met", self._missing())
        wait = timedelta(seconds=self.config.start_timeout_s + _GRACE_S)
        self._store.wait(["met"], wait)
        size = int(self._store.get("size"))
        if size != rank.size:
            return (
                f"{description} has WORLD_SIZE={rank.size}, but rank 0 has {size}. Set the same on "
                "all"
            )
        return self._announced("met")

    def _missing(self) -> str:
        """Wait for all ranks on rank 0. Return an error message that names the missing ones."""
        rank, wait_s = self.launched, self.config.start_timeout_s
        left, ends = list(range(rank.size)), time.monotonic() + wait_s
        while True:
            left = [r for r in left if not self._store.check([f"here/{r}"])]
            if self._store.check(["problem"]):
                return bytes(self._store.get("problem")).decode()
            if not left:
                return ""
            if time.monotonic() > ends:
                break
            time.sleep(_POLL_S)
        missing = [r for r in range(rank.size) if r not in left]
        names = [bytes(self._store.get(f"here/{r}")).decode() for r in missing]
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        ended = "rank" if len(left) == 1 else "ranks"
        return (
            f"{ended} {', '.join(map(str, left))} of {rank.size} did not connect to "
            f"{rank.address}:{rank.port} within {wait_s:g} s (cluster.start_timeout_s); connected "
            f"are {', '.join(names[:8])}{more}. Check the output of the missing ranks for an "
            "error, that they were started, and that their nodes reach this address and port"
        )

    def _announce(self, key: str, problem: str) -> str:
        """Send a problem, or an empty text, from rank 0 to the other ranks. Wait until they have
        received a problem: the store may end with this process."""
        self._store.set(key, problem)
        ends = time.monotonic() + _GRACE_S
        others = sum(self._store.check([f"here/{r}"]) for r in range(1, self.launched.size))
        while problem and self._store.add(f"received/{key}", 0) < others:
            if time.monotonic() > ends:
                break
            time.sleep(_POLL_S)
        return problem

    def _announced(self, key: str) -> str:
        problem = bytes(self._store.get(key)).decode()
        if problem:
            self._store.add(f"received/{key}", 1)
        return problem

    def different_inputs(self, inputs: Inputs) -> str:
        """Return the differences between the inputs of the ranks, the same text on all of them; an
        empty text if there are none. Waits as long as a rank computes its inputs."""
        rank, name = self.launched, "the comparison of the inputs"
        sent = {"host": socket.gethostname(), "inputs": inputs}
        self._store.set(f"inputs/{rank.rank}", json.dumps(sent))
        if rank.rank != 0:
            with self.monitor.long_block_of_first(name):
                return self._announced("compared")
        with self.monitor.long_block_of_first(name):
            received = []
            for key in (f"inputs/{r}" for r in range(rank.size)):
                while not self._store.check([key]):  # the monitor ends this wait if a rank fails
                    time.sleep(_POLL_S)
                received.append(json.loads(bytes(self._store.get(key))))
            hosts = [inputs_of_rank["host"] for inputs_of_rank in received]
            problem = (
                different_inputs([inputs_of_rank["inputs"] for inputs_of_rank in received], hosts)
                or ""
            )
            self._store.set("compared", problem)
        return self._announce("compared", problem)

    def join(self, device: str) -> None:
        """Form the process group. ``device``: that of the recipe. Raises LaunchError if a rank does
        not join, or if this node has fewer GPUs than ranks."""
        from torch import distributed
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        rank, self.device = self.launched, rank_device(device, self.launched)
        gpu = self.device.startswith("cuda")
        if gpu:
            torch.cuda.set_device(self.device)
        try:
            distributed.init_process_group(
                "nccl" if gpu else "gloo",
                store=PrefixStore("group", self._store),
                rank=rank.rank,
                world_size=rank.size,
                timeout=timedelta(seconds=self.limits.call_s),
            )
            distributed.barrier()
        except RuntimeError as error:
            raise LaunchError(
                f"rank {rank.rank} of {rank.size} (host {socket.gethostname()}) cannot form the "
                f"process group: {first_line(error)}. Check that the nodes reach each other on "
                "all ports (GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME select the network)"
            ) from error
        self.group = RankGroup(distributed.group.WORLD)

    def from_first(self, name: str, make: Callable[[], T]) -> T:
        """Return the result of ``make`` on rank 0 as :meth:`RankGroup.from_first` does, for calls
        that may take longer than a collective may. ``name``: used once per run, for errors."""

        def made() -> T:
            with self.monitor.long_block_of_first(name):
                return make()

        if self.group.rank != 0:
            with self.monitor.long_block_of_first(name):
                pass
        return self.group.from_first(made)

    def close(self) -> None:
        """Leave the process group."""
        self.monitor.close()
        if torch.distributed.is_initialized():
            with suppress(RuntimeError):
                torch.distributed.destroy_process_group()


def rank_device(device: str, rank: LaunchedRank) -> str:
    """Return the device of a rank for ``device`` of the recipe: the CPU, or the GPU with the number
    of the rank on its node. Raises LaunchError for a fixed GPU, or if the node has too few."""
    if ":" in device:
        raise LaunchError(
            f"device={device}: {rank.launcher} started {rank.size} ranks, which would all use this "
            "GPU; use auto (a rank takes the GPU with the number LOCAL_RANK)"
        )
    resolved = resolve_device(device)
    if resolved.type != "cuda":
        return str(resolved)
    if torch.cuda.device_count() == 1 and rank.local_rank > 0:
        return "cuda:0"  # the launcher shows each rank only its own GPU
    if rank.local_rank >= torch.cuda.device_count():
        raise LaunchError(
            f"rank {rank.rank} has the local number {rank.local_rank}, but this node has "
            f"{torch.cuda.device_count()} GPUs; start one rank per GPU"
        )
    return f"cuda:{rank.local_rank}"


@contextmanager
def connected(config: JobConfig, *, resumed: bool) -> Iterator[Ranks | None]:
    """Connect the ranks of a launcher for the duration of a run; None with another runtime. Ranks
    other than 0 print only errors.

    Raises LaunchError, on all ranks with the same message, if their inputs differ.
    """
    cluster, device = config.cluster, config.resolve().device
    if cluster.runtime != "spmd":
        yield None
        return
    rank = launched_rank()
    if rank is None:
        raise LaunchError(
            "cluster.runtime=spmd is for ranks that a launcher started, but this is a single "
            "process; start with torchrun --nproc-per-node N -m burnish ..., or set "
            "cluster.runtime=inline cluster.policy_ranks=1, or cluster.runtime=ray"
        )
    if rank.size != cluster.policy_ranks:
        raise LaunchError(
            f"cluster.policy_ranks={cluster.policy_ranks}, but {rank.launcher} started {rank.size} "
            "ranks; load the recipe with burnish.load_config in the ranks"
        )
    with ExitStack() as stack:
        stack.enter_context(nullcontext() if rank.rank == 0 else silenced())
        ranks = Ranks(rank, cluster)
        stack.callback(ranks.close)
        with ranks.monitor.reported():
            kind, reads = resolve_device(device).type, 0 in (rank.rank, rank.local_rank)
            inputs = inputs_of(config, resumed=resumed, device=kind, reads_contents=reads)
            different = ranks.different_inputs(inputs)
            if not different:
                ranks.join(device)
        if different:  # not in the block: every rank reports it
            raise LaunchError(different)
        with ranks.monitor.reported():
            yield ranks
        ranks.monitor.wait_for_first()


@contextmanager
def records_folder(run_dir: Path, ranks: RankGroup) -> Iterator[Path]:
    """Yield the folder for metrics, samples and logs: the run folder on rank 0, and a temporary
    folder on the others, so that one rank writes."""
    if ranks.rank == 0:
        yield run_dir
        return
    with tempfile.TemporaryDirectory(prefix="burnish-rank-") as folder:
        yield Path(folder)


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Restore the CPU's random numbers at the end. A pass draws numbers of its rank; the loops of
    all ranks must keep equal ones."""
    with torch.random.fork_rng(devices=()):
        yield


class SpmdRuntime(InlineRuntime):
    """Engines over the ranks of a launcher. Implements ``runtime.base.Runtime``."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        ranks: Ranks,
        *,
        precision: PrecisionConfig,
        timeline: Timeline,
        model: ModelConfig,
    ) -> None:
        """Engines for trained models are over ``ranks``. ``model``: the model whose tokenizer is
        used."""
        super().__init__(tokenizer, precision=precision, device=ranks.device, timeline=timeline)
        self.launched, self.policy = ranks, model
        self.loop_ranks = ranks.group
        self._names: list[str] = []

    def language_model(  # type: ignore[override]
        self, spec: EngineSpec, spans: Mapping[str, str] = POLICY_SPANS
    ) -> TrainEngine:
        return self._on_ranks(spec, scalar=False, seed=spec.seed, spans=spans)

    def scalar_model(  # type: ignore[override]
        self, spec: EngineSpec, *, seed: int, spans: Mapping[str, str] = CRITIC_SPANS
    ) -> TrainEngine:
        return self._on_ranks(spec, scalar=True, seed=seed, spans=spans)

    def _on_ranks(
        self, spec: EngineSpec, *, scalar: bool, seed: int, spans: Mapping[str, str]
    ) -> TrainEngine:
        group = self.launched.group
        name = free_name(spec.role.engine_role, self._names)
        self._names.append(name)
        info = WorkerInfo(name, group.rank, group.size, str(self.device), torch.get_num_threads())
        worker = TrainWorker(info, self.policy, self.precision)
        worker.tokenizer, worker.timeline = self.tokenizer, self.timeline
        worker.ranks, worker.limits = group, self.launched.limits
        with _own_random_numbers():
            attention = worker.build(spec, scalar=scalar, seed=seed, spans=spans)
        self.attention[spec.role.name] = attention
        return SpmdTrainEngine(worker)


class SpmdTrainEngine(DistributedPasses):
    """One rank of a train engine, called by the loop of the same rank.

    Implements ``train.base.TrainEngine``. All ranks call each method with equal arguments and get
    equal results.
    """

    def __init__(self, worker: TrainWorker) -> None:
        self.worker, self.role = worker, worker.engine.role
        self.version = 0

    def _per_token(self, method: str, batch: Batch) -> Tensor:
        return self.worker.run_per_token(method, batch)

    def _stats(self, method: str, batch: Batch, loss: Loss) -> Stats:
        with _own_random_numbers():
            return self.worker.run_stats(method, batch, loss)

    def optim_step(self) -> StepStats:
        """Run one optimizer step of all ranks. Raises NonFiniteError on all of them."""
        self.worker.start_step()
        try:
            with self.worker.one_pass():
                return self.worker.engine.optim_step()
        finally:
            self.version = self.worker.engine.version

    def offload(self) -> None:
        self.worker.offload()

    def reload(self) -> None:
        self.worker.reload()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (HuggingFace name, full tensor). All ranks consume all tensors."""
        return self.worker.engine.weights()

    def mix(self, weights: Iterable[tuple[str, Tensor]], alpha: float) -> None:
        """Mix weights into those of a frozen model. All ranks consume all tensors."""
        self.worker.engine.mix(weights, alpha)

    @property
    def state_bytes(self) -> int:
        return self.worker.engine.state_bytes

    def save(self, folder: Path) -> None:
        """Write the state of all ranks. The folder must be on a file system shared by all nodes."""
        self.worker.engine.save(folder)

    def save_async(self, folder: Path) -> PendingSave:
        return self.worker.engine.save_async(folder)

    def load(self, folder: Path) -> None:
        self.version = self.worker.load(str(folder))
