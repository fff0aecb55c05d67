"""Worker process of one rank of a train engine, and the parts it shares with rollout workers
(``ray/rollout_worker.py``).

The classes do not depend on Ray; ``ray/worker_group.py`` starts them in processes and calls their
methods. Arguments and results are small or NumPy arrays, which Ray shares read-only without
copies."""

from __future__ import annotations

import os
import socket
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from operator import methodcaller
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from burnish.checkpoint.save import PendingSave
from burnish.config.model import Dtype, ModelConfig, PrecisionConfig
from burnish.config.sync import DiskSync, LinkSync
from burnish.distributed.process_group import (
    CollectiveTimeouts,
    RankGroup,
    groups_here,
    limit_collectives,
    limited,
)
from burnish.host_copies import HostBuffers
from burnish.models.load import DTYPES, load_tokenizer
from burnish.observe.memory import MemoryPeak, PhasePeaks
from burnish.observe.timeline import Drained, Timeline
from burnish.runtime.heartbeat import start_heartbeat
from burnish.runtime.inline import InlineRuntime
from burnish.sync.base import Metrics, encode
from burnish.sync.buckets import messages
from burnish.sync.channel import serve_store
from burnish.sync.connect import Rendezvous, open_sender
from burnish.sync.disk import DiskSender
from burnish.sync.engine import WeightSender, drain
from burnish.train.base import Loss, NonFiniteError, StepStats
from burnish.train.batching import RowSplit, Share
from burnish.train.engine import BaseTrainEngine
from burnish.train.spec import EngineSpec
from burnish.types import Batch, Stats

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

Packed = dict[str, Any]
_MAX_SPANS = 1000
"""Newest spans that a worker keeps until they are collected, once per step."""
NO_SPANS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Bf16:
    """Numbers in bf16, a format that NumPy lacks."""

    bits: Any
    """int16 array with the same bits."""


def to_array(tensor: Tensor) -> Any:
    """Return a NumPy array over the memory of a CPU tensor, wrapped in :class:`Bf16` if NumPy lacks
    the format."""
    if tensor.dtype == torch.bfloat16:
        return Bf16(tensor.view(torch.int16).numpy())
    return tensor.numpy()


def to_tensor(array: Any) -> Tensor:
    """Return the tensor of an array from :func:`to_array`, without a copy. Arrays from Ray's object
    store are shared and must not be written; torch does not enforce it."""
    if isinstance(array, Bf16):
        return to_tensor(array.bits).view(torch.bfloat16)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.from_numpy(array)


def pack_share(share: Share) -> Packed:
    """Return a share as NumPy arrays over the memory of its batch, and numbers."""
    values = vars(share.batch).items()
    batch = {n: to_array(v) if isinstance(v, Tensor) else v for n, v in values}
    return {"batch": batch, "passes": share.passes, "row_numbers": share.row_numbers}


def unpack_share(packed: Packed) -> Share:
    """Return the share packed by :func:`pack_share`, over the same memory. Engines copy the rows of
    each micro-batch, so a loss may write to them."""
    values: dict[str, Any] = {
        name: to_tensor(value) if isinstance(value, (np.ndarray, Bf16)) else value
        for name, value in packed["batch"].items()
    }
    return Share(Batch(**values), packed["passes"], packed["row_numbers"])


BUCKET_BYTES = 64 << 20
"""Bucket size of transfers that no recipe configures: ``weights()`` and ``load_weights()``."""


@dataclass(frozen=True)
class TransferOptions:
    """Options for packing weights into buckets."""

    bucket_bytes: int
    dtype: Dtype | None
    """Format of floating-point weights in the buckets. None: unchanged."""
    verify: bool
    """True if buckets have checksums that receivers verify."""


def own_address() -> str:
    """Return an address at which the other ranks can reach this one. The machine's host name may
    resolve to the loopback."""
    if os.environ.get("GLOO_SOCKET_IFNAME") == "lo":  # all ranks are on this machine
        return "127.0.0.1"
    with suppress(OSError):
        host = socket.gethostbyname(socket.gethostname())
        if not host.startswith("127."):
            return host
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: the system picks the interface
        address: str = probe.getsockname()[0]
        return address
    return "127.0.0.1"


@dataclass(frozen=True)
class WorkerInfo:
    """Identity of a worker and the resources it may use."""

    group: str
    """Name of its group of workers (``config.roles``)."""
    rank: int
    size: int
    device: str
    threads: int
    shared: bool = False
    """True if other workers are on the same GPU."""


class Worker:
    """Common base of train workers and rollout workers."""

    def __init__(self, info: WorkerInfo, policy: ModelConfig, precision: PrecisionConfig) -> None:
        """Store the arguments. ``policy``: the model whose tokenizer is used. Nothing is loaded
        here, because an exception in a constructor looks like a worker's death."""
        self.info, self.policy, self.precision = info, policy, precision
        self.timeline = Timeline(max_events=_MAX_SPANS, peaks=PhasePeaks())
        torch.set_num_threads(info.threads)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer of the policy."""
        return load_tokenizer(self.policy)

    def ping(self) -> int:
        """Return the process id, which shows that the worker responds."""
        return os.getpid()

    def heartbeat(self, heartbeat: Callable[[], None], every_s: float) -> tuple[str, int]:
        """Call ``heartbeat`` periodically from a thread, during any computation. Return node and
        process id."""
        return start_heartbeat(heartbeat, every_s)

    @contextmanager
    def release_memory_after(self) -> Iterator[None]:
        """Run a call after which other workers on this GPU may need its memory. The allocator's
        unused memory is released at the end."""
        try:
            yield
        finally:
            if self.info.shared and torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    def runtime(self, ranks: RankGroup | None = None) -> InlineRuntime:
        return InlineRuntime(
            self.tokenizer,
            precision=self.precision,
            device=self.info.device,
            timeline=self.timeline,
            ranks=ranks or RankGroup(),
        )

    def usage(self) -> tuple[dict[str, MemoryPeak], Drained]:
        """Return the peak memory of this process in each phase, and its spans, since the last
        call."""
        assert self.timeline.peaks is not None
        return self.timeline.peaks.collect(), self.timeline.drain()


class TrainWorker(Worker):
    """One data-parallel rank of a train engine."""

    engine: BaseTrainEngine
    store: TCPStore
    limits: CollectiveTimeouts | None = None
    _groups: Sequence[Any] = ()
    """Process groups that exist once the engine is built. A group for background saves is created
    later, and keeps its timeout while that of passes changes."""
    _passes = 0
    """Number of calls that drew random numbers since the last optimizer step."""
    _store: Any = None
    _sender: WeightSender | DiskSender | None = None
    _saving: PendingSave | None = None

    def open_rendezvous(self, timeout_s: float) -> tuple[str, int]:
        """Open the rendezvous store of the ranks, on a port that stays bound so that nothing else
        can take it. Return (host, port)."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host = own_address()
        listener = socket.create_server((host, 0))  # the store itself would listen on every address
        port = int(listener.getsockname()[1])
        self.store = TCPStore(
            host,
            port,
            self.info.size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return host, port

    def join(self, host: str, port: int, *, timeout_s: float, limits: CollectiveTimeouts) -> None:
        """Connect to the other ranks. Raises after ``timeout_s`` if rank 0 is not reachable. The
        controller ends workers that wait for other ranks. ``limits`` apply after the connection."""
        self.ranks = RankGroup()
        if self.info.size == 1:
            return
        from torch import distributed
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        if self.info.rank != 0:
            wait = timedelta(seconds=timeout_s)
            self.store = TCPStore(host, port, self.info.size, is_master=False, timeout=wait)
        distributed.init_process_group(
            "nccl" if self.info.device.startswith("cuda") else "gloo",
            store=self.store,
            rank=self.info.rank,
            world_size=self.info.size,
            timeout=timedelta(seconds=limits.call_s),
        )
        self.ranks, self.limits = RankGroup(distributed.group.WORLD), limits

    def build(
        self, spec: EngineSpec, *, scalar: bool, seed: int, spans: Mapping[str, str] = NO_SPANS
    ) -> str:
        """Load the model and make the engine. ``spans``: engine method -> memory phase. Return the
        engine's attention as a sentence."""
        torch.manual_seed(seed)
        self._passes = 0
        runtime = self.runtime(self.ranks)
        with self.release_memory_after():
            if scalar:
                self.engine = runtime.scalar_model(spec, seed=seed, spans=spans)
            else:
                self.engine = runtime.language_model(spec, spans)
        if self.limits is not None:
            self._groups = groups_here()
            limit_collectives(self.limits.call_s, self._groups)
        return self.engine.attention.sentence

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """Run a call in which ranks wait only for each other's passes."""
        with self.release_memory_after(), limited(self.limits, self._groups):
            yield

    def seed_pass(self) -> None:
        """Seed the random numbers of the next pass (dropout) from the run's seed, the group, the
        rank and the steps so far. Ranks then draw independently, except that ranks of a
        tensor-parallel group, which compute one layer together, draw equally. A restarted or
        resumed group draws the same numbers."""
        engine, spec = self.engine, self.engine.spec
        alike = spec.role.train.engine.tensor_parallel_size
        steps = engine.version + engine.skipped_total
        group = zlib.crc32(self.info.group.encode())
        key = (group, self.info.rank // alike, steps, self._passes)
        self._passes += 1
        source = np.random.SeedSequence(spec.seed % (1 << 64), spawn_key=key)
        torch.manual_seed(int(source.generate_state(1, np.uint64)[0]))

    def start_step(self) -> None:
        """Count the passes of :meth:`seed_pass` from 0, before an optimizer step."""
        self._passes = 0

    def row_split(self) -> tuple[RowSplit, int]:
        """Return the split of batches over data-parallel ranks, and the number of this rank's
        share. Ranks of a model-parallel group have the same share."""
        return self.engine.row_split, self.engine.data_parallel.rank

    def run_per_token(self, method: str, batch: Batch | Share) -> Tensor:
        """Call a method of the engine that returns a tensor with an entry per token."""
        with self.one_pass():
            result: Tensor = methodcaller(method, batch)(self.engine)
            return result

    def run_stats(self, method: str, batch: Batch | Share, loss: Loss) -> Stats:
        """Call a method of the engine that returns statistics over all ranks. Return plain
        numbers."""
        if method == "forward_backward":
            self.seed_pass()
        with self.one_pass():
            stats: Stats = methodcaller(method, batch, loss)(self.engine)
            return stats.plain()

    def per_token(self, method: str, packed: Packed) -> Any:
        """Return :meth:`run_per_token` of a share as an array [m, ...], on one rank of each
        model-parallel group. The other ranks take part and return None."""
        result = self.run_per_token(method, unpack_share(packed))
        return to_array(result) if self.engine.model_parallel.rank == 0 else None

    def stats(self, method: str, packed: Packed, loss: Loss) -> Stats:
        """Return :meth:`run_stats` of a share."""
        return self.run_stats(method, unpack_share(packed), loss)

    def optim_step(self) -> tuple[StepStats, str | None, int]:
        """Return the statistics of the step, the message of NonFiniteError if it was raised, and
        the version."""
        self.start_step()
        try:
            with self.one_pass():
                return self.engine.optim_step(), None, self.engine.version
        except NonFiniteError as error:
            return error.stats, str(error), self.engine.version

    def offload(self) -> None:
        """Move the engine's tensors to host memory."""
        with self.release_memory_after(), self.timeline.span("offload"):
            self.engine.offload()

    def reload(self) -> None:
        """Move the engine's tensors back to the device."""
        with self.timeline.span("reload"):
            self.engine.reload()

    # ---- weights ---------------------------------------------------------------------------

    def mix(self, packed: Sequence[tuple[str, Any]], alpha: float) -> None:
        """Mix full weights, as arrays by name, into those of a frozen model."""
        with self.one_pass(), self.timeline.span("reference"):
            self.engine.mix(((name, to_tensor(array)) for name, array in packed), alpha)

    def transfer_weights(self, push: int, options: TransferOptions) -> Iterator[Any]:
        """Yield one transfer from rank 0, as pairs: a bucket's bytes, then its header. The other
        ranks take part in gathering and yield nothing."""
        with self.timeline.span("sync"):
            yield from self._give(push, options)

    def _give(self, push: int, options: TransferOptions) -> Iterator[Any]:
        weights = self.engine.weights()
        if self.info.rank != 0:
            drain(weights)
            return
        buffers = HostBuffers(options.bucket_bytes, self.info.device)
        dtype = None if options.dtype is None else DTYPES[options.dtype]
        version = self.engine.version
        try:
            for message, payload in messages(
                weights,
                buffers.take,
                push=push,
                version=version,
                dtype=dtype,
                check=options.verify,
                ahead=buffers.pinned,
            ):
                # Ray copies each yielded value before it requests the next.
                yield payload.numpy()
                yield encode(message)
        finally:
            with self.release_memory_after():
                drain(weights)  # after an early exit, the other ranks still wait in these gathers

    def serve_store(self, timeout_s: float) -> tuple[str, int]:
        """Start a store on rank 0 through which receivers find this process. Return its host and
        port."""
        host = own_address()
        self._store = serve_store(host, timeout_s=timeout_s)
        return host, self._store.port

    def open_sender(
        self, sync: LinkSync | DiskSync, options: TransferOptions, connection: str, n: int
    ) -> None:
        """Open the trainer's end of a new connection to ``n`` receivers, after closing the previous
        one."""
        self.close_sender()
        rendezvous = None
        if self.info.rank == 0:
            rendezvous = Rendezvous(self._store, connection, n, rank=0, device=self.info.device)
        self._sender = open_sender(sync, self.engine, rendezvous, dtype=options.dtype)

    def push(self) -> Metrics:
        """Send the weights through the connection. Rank 0 returns the metrics."""
        assert self._sender is not None
        with self.timeline.span("sync"):
            return self._sender.push()

    def close_sender(self) -> None:
        """Close the connection, if there is one."""
        if self._sender is not None:
            self._sender.close()
        self._sender = None

    # ---- state -----------------------------------------------------------------------------

    def state_bytes(self) -> int:
        """Return the size of the files that :meth:`save` writes."""
        return self.engine.state_bytes

    def save(self, folder: str) -> None:
        """Save the engine's state. All ranks take part, and return once everything is written."""
        with self.release_memory_after(), self.timeline.span("checkpoint"):
            self.engine.save(Path(folder))

    def save_async(self, folder: str) -> None:
        """Start a :meth:`save` of the current state, in the background if the engine supports
        it."""
        with self.release_memory_after(), self.timeline.span("checkpoint"):
            self._saving = self.engine.save_async(Path(folder))

    def is_saved(self) -> bool:
        """Return whether :meth:`finish_save` returns without waiting."""
        return self._saving is None or self._saving.done

    def finish_save(self) -> None:
        """Wait until the save started by :meth:`save_async` is complete. Raises OSError if a rank
        could not write."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def load(self, folder: str) -> int:
        """Load the state written by :meth:`save`. Return the version."""
        self.engine.load(Path(folder))
        self._passes = 0
        return self.engine.version
