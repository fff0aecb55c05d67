"""The worker process of one rank of a train engine, and the parts it shares with rollout workers
(``rollout_worker.py``).

Plain classes that know nothing of Ray; ``ray.py`` starts them in processes and calls their methods.
Arguments and results are small or NumPy arrays (Ray shares those without copies, read-only).
"""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from burnish.config.model import Dtype, ModelConfig, PrecisionConfig
from burnish.config.sync import DiskSync, LinkSync
from burnish.models.load import DTYPES, load_tokenizer
from burnish.observe.peaks import MemoryPeak, PhasePeaks
from burnish.observe.timeline import Timeline
from burnish.runtime.heartbeat import start_heartbeat
from burnish.runtime.inline import InlineRuntime
from burnish.runtime.limits import Limits, groups_here, limit_collectives, limited
from burnish.sync.base import Metrics, encode
from burnish.sync.buckets import messages
from burnish.sync.channel import serve_store
from burnish.sync.connect import Rendezvous, open_sender
from burnish.sync.disk import DiskSender
from burnish.sync.engine import WeightSender, exhaust
from burnish.train.base import Loss, NonFiniteError, StepStats
from burnish.train.engine import BaseTrainEngine, FrozenBase
from burnish.train.process_group import RankGroup
from burnish.train.spec import EngineSpec
from burnish.types import Batch, PendingSave, Stats

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

Packed = dict[str, Any]
NO_SPANS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Bf16:
    """Numbers in bf16, which NumPy has not."""

    bits: Any
    """int16 array"""


def to_array(tensor: Tensor) -> Any:
    """Return a NumPy array of the memory of a CPU tensor, marked if NumPy lacks the format."""
    if tensor.dtype == torch.bfloat16:
        return Bf16(tensor.view(torch.int16).numpy())
    return tensor.numpy()


def to_tensor(array: Any) -> Tensor:
    """The inverse of :func:`to_array`. Copies: shared arrays are read-only."""
    if isinstance(array, Bf16):
        return torch.from_numpy(array.bits.copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def pack_batch(batch: Batch) -> Packed:
    """A batch as NumPy arrays and numbers."""
    values = {f.name: vars(batch)[f.name] for f in fields(batch)}
    return {n: to_array(v) if isinstance(v, Tensor) else v for n, v in values.items()}


def unpack_batch(packed: Packed) -> Batch:
    """The inverse of :func:`pack_batch`. Copies: shared arrays are read-only."""
    values: dict[str, Any] = {
        name: to_tensor(value) if isinstance(value, (np.ndarray, Bf16)) else value
        for name, value in packed.items()
    }
    return Batch(**values)


BUCKET_BYTES = 64 << 20
"""Bucket size of transfers that no recipe configures: ``weights()`` and ``load_weights()``."""


@dataclass(frozen=True)
class TransferOptions:
    """How weights are put into buckets."""

    bucket_bytes: int
    dtype: Dtype | None
    """What floating-point weights become on the way. None: as they are."""
    verify: bool
    """Buckets carry checksums, and receivers compare them."""


def own_address() -> str:
    """An address at which the other ranks reach this one. (The machine's host name may mean the
    loopback.)"""
    if os.environ.get("GLOO_SOCKET_IFNAME") == "lo":  # all of them are on this machine
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
    """Which worker this is, and what it may use."""

    group: str
    """Of which group of workers, by its role (``config.roles``)."""
    rank: int
    size: int
    device: str
    threads: int
    shared: bool = False
    """Other workers are on the same GPU."""


class Worker:
    """The common base of train workers and rollout workers."""

    def __init__(self, info: WorkerInfo, policy: ModelConfig, precision: PrecisionConfig) -> None:
        """``policy``: whose tokenizer it is. Nothing is read here: what a constructor raises would
        look like a death."""
        self.info, self.policy, self.precision = info, policy, precision
        self.timeline = Timeline(max_events=1, peaks=PhasePeaks())
        torch.set_num_threads(info.threads)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's."""
        return load_tokenizer(self.policy)

    def ping(self) -> int:
        """The process id: the worker is there and answers."""
        return os.getpid()

    def heartbeat(self, heartbeat: Callable[[], None], every_s: float) -> tuple[str, int]:
        """Report by ``heartbeat`` from now on, whatever else is computed. Returns node and
        process."""
        return start_heartbeat(heartbeat, every_s)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A call after which other workers on this GPU may need its memory: what the allocator
        keeps and does not use is given back."""
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

    def peaks(self) -> dict[str, MemoryPeak]:
        """The most memory that this process held in each phase since the last call."""
        assert self.timeline.peaks is not None
        return self.timeline.peaks.collect()


class TrainWorker(Worker):
    """One data-parallel rank of a train engine."""

    engine: BaseTrainEngine
    store: TCPStore
    limits: Limits | None = None
    _groups: Sequence[Any] = ()
    """Those that exist once the engine is built. (A group for saves in the background is made
    later, and keeps its limit while a pass has another.)"""
    _passes = 0
    """Calls that drew random numbers since the last optimizer step."""
    _store: Any = None
    _sender: WeightSender | DiskSender | None = None
    _saving: PendingSave | None = None

    def open_rendezvous(self, timeout_s: float) -> tuple[str, int]:
        """Open the place where the ranks meet, on a port that nothing else can take meanwhile:
        (host, port)."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host = own_address()
        listener = socket.create_server((host, 0))  # the store would listen on every address
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

    def join(self, host: str, port: int, *, timeout_s: float, limits: Limits) -> None:
        """Meet the other ranks. Raises after ``timeout_s`` if rank 0 is not to be found; who
        waits for the others is ended from outside. Later ``limits`` hold."""
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
    ) -> None:
        """Load the model and make the engine. ``spans``: the phases of memory that its methods
        are."""
        torch.manual_seed(seed)
        self._passes = 0
        runtime = self.runtime(self.ranks)
        with self.turn():
            if scalar:
                self.engine = runtime.scalar_model(spec, seed=seed, spans=spans)
            else:
                self.engine = runtime.language_model(spec, spans)
        if self.limits is not None:
            self._groups = groups_here()
            limit_collectives(self.limits.call_s, self._groups)

    @contextmanager
    def _pass(self) -> Iterator[None]:
        """A call in which ranks wait for each other's passes alone."""
        with self.turn(), limited(self.limits, self._groups):
            yield

    def _seed_pass(self) -> None:
        """Seed the random numbers of the next pass (dropout) from the run's seed, the group, the
        rank and the steps so far. So ranks draw independently (equally in a tensor-parallel group,
        which computes one layer together), and a restarted or resumed group draws the same numbers
        as this one would."""
        engine, spec = self.engine, self.engine.spec
        alike = spec.train.engine.tensor_parallel_size
        steps = engine.version + engine.skipped_total
        group = zlib.crc32(self.info.group.encode())
        key = (group, self.info.rank // alike, steps, self._passes)
        self._passes += 1
        source = np.random.SeedSequence(spec.seed % (1 << 64), spawn_key=key)
        torch.manual_seed(int(source.generate_state(1, np.uint64)[0]))

    def logprobs(self, packed: Packed) -> Any:
        """[M] log-probs as an array, from rank 0; None from the others, which took part."""
        with self._pass():
            return self._first(self.engine.logprobs(unpack_batch(packed)))

    def base_logprobs(self, packed: Packed) -> Any:
        """As :meth:`logprobs`, with the adapters off."""
        with self._pass(), self.timeline.span("reference"):
            return self._first(FrozenBase(self.engine).logprobs(unpack_batch(packed)))

    def states(self, packed: Packed) -> Any:
        """[M, H] hidden states as an array, from rank 0."""
        with self._pass():
            return self._first(self.engine.states(unpack_batch(packed)))

    def values(self, packed: Packed) -> Any:
        """[M] values as an array, from rank 0."""
        with self._pass():
            return self._first(self.engine.values(unpack_batch(packed)))

    def _first(self, result: Tensor) -> Any:
        return to_array(result) if self.info.rank == 0 else None

    def forward_backward(self, packed: Packed, loss: Loss) -> Stats:
        """Stats over all ranks, as plain numbers."""
        self._seed_pass()
        with self._pass():
            return self.engine.forward_backward(unpack_batch(packed), loss).plain()

    def measure(self, packed: Packed, loss: Loss) -> Stats:
        """As :meth:`forward_backward`, without gradient."""
        with self._pass():
            return self.engine.measure(unpack_batch(packed), loss).plain()

    def optim_step(self) -> tuple[StepStats, str | None, int]:
        """Return the statistics of the step, the message of NonFiniteError if it was raised, and
        the version."""
        self._passes = 0
        try:
            with self._pass():
                return self.engine.optim_step(), None, self.engine.version
        except NonFiniteError as error:
            return error.stats, str(error), self.engine.version

    # ---- weights ---------------------------------------------------------------------------

    def transfer_weights(self, push: int, options: TransferOptions) -> Iterator[Any]:
        """One transfer from rank 0, as pairs: a bucket's bytes, then its header. The others take
        part in gathering and give none."""
        with self.timeline.span("sync"):
            yield from self._give(push, options)

    def _give(self, push: int, options: TransferOptions) -> Iterator[Any]:
        weights = self.engine.weights()
        if self.info.rank != 0:
            exhaust(weights)
            return
        buffer = torch.empty(options.bucket_bytes, dtype=torch.uint8)
        dtype = None if options.dtype is None else DTYPES[options.dtype]
        version = self.engine.version
        try:
            for message, payload in messages(
                weights,
                lambda: buffer,
                push=push,
                version=version,
                dtype=dtype,
                check=options.verify,
            ):
                # (Ray has copied what was yielded before it asks for the next)
                yield payload.numpy()
                yield encode(message)
        finally:
            with self.turn():
                exhaust(
                    weights
                )  # where it was broken off, the other ranks wait in the same gathers

    def serve_store(self, timeout_s: float) -> tuple[str, int]:
        """Rank 0: start a store at which receivers find this process; its host and port."""
        host = own_address()
        self._store = serve_store(host, timeout_s=timeout_s)
        return host, self._store.port

    def open_sender(
        self, sync: LinkSync | DiskSync, options: TransferOptions, connection: str, n: int
    ) -> None:
        """The trainer's end of a new connection to ``n`` receivers; the one before is closed."""
        self.close_sender()
        rendezvous = None
        if self.info.rank == 0:
            rendezvous = Rendezvous(self._store, connection, n, rank=0, device=self.info.device)
        self._sender = open_sender(sync, self.engine, rendezvous, dtype=options.dtype)

    def push(self) -> Metrics:
        """Hand the weights over through the connection; with metrics on rank 0."""
        assert self._sender is not None
        with self.timeline.span("sync"):
            return self._sender.push()

    def close_sender(self) -> None:
        """Leave the connection, if there is one."""
        if self._sender is not None:
            self._sender.close()
        self._sender = None

    # ---- state -----------------------------------------------------------------------------

    def state_bytes(self) -> int:
        """Size of what :meth:`save` writes."""
        return self.engine.state_bytes

    def save(self, folder: str) -> None:
        """All ranks take part, and return when everything is written."""
        with self.turn(), self.timeline.span("checkpoint"):
            self.engine.save(Path(folder))

    def save_async(self, folder: str) -> None:
        """:meth:`save` as of now, written while training goes on where the engine can."""
        with self.turn(), self.timeline.span("checkpoint"):
            self._saving = self.engine.save_async(Path(folder))

    def is_saved(self) -> bool:
        """Return whether :meth:`finish_save` need not wait."""
        return self._saving is None or self._saving.done

    def finish_save(self) -> None:
        """Until what :meth:`save_async` began is whole. Raises OSError if a rank could not
        write."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def load(self, folder: str) -> int:
        """Take back what :meth:`save` wrote; returns the version."""
        self.engine.load(Path(folder))
        self._passes = 0
        return self.engine.version
