"""What runs inside a worker process: one rank of a train engine, or one rollout engine.

Plain classes that know nothing of Ray; ``ray.py`` starts them in processes and calls their methods.
Arguments and results are small or NumPy arrays (Ray shares those without copies, read-only).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from burnish.config.model import ModelConfig, PrecisionConfig
from burnish.config.rollout import RolloutEngineConfig
from burnish.models.load import load_tokenizer
from burnish.observe.timeline import Timeline
from burnish.rollout.base import Completion, Request, RolloutEngine, Sampling
from burnish.runtime.heartbeat import start_beating
from burnish.runtime.inline import InlineRuntime
from burnish.train.base import Loss, NonFiniteError, StepStats
from burnish.train.ranks import Ranks
from burnish.train.torch import EngineSpec, FrozenBase, TorchTrainEngine
from burnish.types import Batch, Stats

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

Packed = dict[str, Any]
Bucket = list[tuple[str, Any, str]]
"""(name, array, dtype) of consecutive weights; half formats travel as integers of their size."""

PARCELS_PER_S = 64
"""Completions travel to the controller in parcels, so many a second from all workers together: one
by one they would cost it more than they are worth. What a worker that dies has not sent is sampled
again."""

_AS_INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16}


def pack_batch(batch: Batch) -> Packed:
    """A batch as NumPy arrays and numbers."""
    values = {f.name: vars(batch)[f.name] for f in fields(batch)}
    return {n: v.numpy() if isinstance(v, Tensor) else v for n, v in values.items()}


def unpack_batch(packed: Packed) -> Batch:
    """The inverse of :func:`pack_batch`. Copies: shared arrays are read-only."""
    values: dict[str, Any] = {
        name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
        for name, value in packed.items()
    }
    return Batch(**values)


def pack_weight(name: str, tensor: Tensor) -> tuple[str, Any, str]:
    """A weight as an array on the CPU."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    plain = tensor.detach().cpu().contiguous()
    as_integers = _AS_INTEGERS.get(tensor.dtype)
    return name, (plain.view(as_integers) if as_integers else plain).numpy(), dtype


def unpack_weight(packed: tuple[str, Any, str]) -> tuple[str, Tensor]:
    """The inverse of :func:`pack_weight`."""
    name, array, dtype_name = packed
    dtype: torch.dtype = vars(torch)[dtype_name]
    tensor = torch.from_numpy(array.copy())
    return name, tensor.view(dtype) if dtype in _AS_INTEGERS else tensor


def own_address() -> str:
    """An address at which other machines reach this one; its host name may mean the loopback."""
    with suppress(OSError):
        host = socket.gethostbyname(socket.gethostname())
        if not host.startswith("127."):
            return host
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: the system picks the interface
        address: str = probe.getsockname()[0]
        return address
    return "127.0.0.1"


def parcel_seconds(workers: int) -> float:
    """How long one of ``workers`` rollout workers gathers completions before it sends them."""
    return max(0.5, workers / PARCELS_PER_S)


@dataclass(frozen=True)
class Place:
    """Which worker this is, and what it may use."""

    role: str
    rank: int
    size: int
    device: str
    threads: int


class _Worker:
    """Common to all workers."""

    def __init__(self, place: Place, tokenizer: ModelConfig, precision: PrecisionConfig) -> None:
        self.place, self.precision = place, precision
        torch.set_num_threads(place.threads)
        self.tokenizer = load_tokenizer(tokenizer)

    def ping(self) -> int:
        """The process id: the worker is there and answers."""
        return os.getpid()

    def beat(self, beat: Callable[[], None], every_s: float) -> tuple[str, int]:
        """Report by ``beat`` from now on, whatever else is computed. Returns node and process."""
        return start_beating(beat, every_s)

    def _runtime(self, ranks: Ranks | None = None) -> InlineRuntime:
        return InlineRuntime(
            self.tokenizer,
            precision=self.precision,
            device=self.place.device,
            timeline=Timeline(),
            ranks=ranks or Ranks(),
        )


class TrainWorker(_Worker):
    """One data-parallel rank of a train engine."""

    engine: TorchTrainEngine
    store: TCPStore

    def meeting_place(self, timeout_s: float) -> tuple[str, int]:
        """Open the place where the ranks meet, on a port that nothing else can take meanwhile:
        (host, port)."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host = own_address()
        self.store = TCPStore(
            host,
            0,
            self.place.size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
        return host, int(self.store.port)

    def join(self, host: str, port: int, timeout_s: float) -> None:
        """Meet the other ranks. Raises after ``timeout_s`` where some do not come."""
        self.ranks = Ranks()
        if self.place.size == 1:
            return
        from torch import distributed
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        wait = timedelta(seconds=timeout_s)
        if self.place.rank != 0:
            self.store = TCPStore(host, port, self.place.size, is_master=False, timeout=wait)
        distributed.init_process_group(
            "nccl" if self.place.device.startswith("cuda") else "gloo",
            store=self.store,
            rank=self.place.rank,
            world_size=self.place.size,
            timeout=wait,
        )
        self.ranks = Ranks(distributed.group.WORLD)

    def build(self, spec: EngineSpec, *, scalar: bool, seed: int) -> None:
        """Load the model and make the engine."""
        torch.manual_seed(seed)
        runtime = self._runtime(self.ranks)
        if scalar:
            self.engine = runtime.scalar_model(spec, seed=seed, spans={})
        else:
            self.engine = runtime.language_model(spec, {})

    def logprobs(self, packed: Packed) -> Any:
        """[M] log-probs as an array, from rank 0; None from the others, which took part."""
        return self._first(self.engine.logprobs(unpack_batch(packed)))

    def base_logprobs(self, packed: Packed) -> Any:
        """As :meth:`logprobs`, with the adapters off."""
        return self._first(FrozenBase(self.engine).logprobs(unpack_batch(packed)))

    def values(self, packed: Packed) -> Any:
        """[M] values as an array, from rank 0."""
        return self._first(self.engine.values(unpack_batch(packed)))

    def _first(self, result: Tensor) -> Any:
        return result.numpy() if self.place.rank == 0 else None

    def forward_backward(self, packed: Packed, loss: Loss) -> Stats:
        """Stats over all ranks, as plain numbers."""
        stats = self.engine.forward_backward(unpack_batch(packed), loss)
        return Stats(
            {n: (float(a), float(b)) for n, (a, b) in stats.means.items()},
            {n: float(v) for n, v in stats.maxima.items()},
            {n: float(v) for n, v in stats.sums.items()},
        )

    def optim_step(self) -> tuple[StepStats, str | None, int]:
        """What the step did, what NonFiniteError said if it was raised, and the version."""
        try:
            return self.engine.optim_step(), None, self.engine.version
        except NonFiniteError as error:
            return error.stats, str(error), self.engine.version

    def weights(self, bucket_bytes: int) -> Iterator[Bucket]:
        """Buckets of weights from rank 0; the others take part in gathering and give none."""
        bucket: Bucket = []
        size = 0
        for name, tensor in self.engine.weights():
            if self.place.rank != 0:
                continue
            if bucket and size + tensor.nbytes > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(pack_weight(name, tensor))
            size += tensor.nbytes
        if bucket:
            yield bucket

    def state_bytes(self) -> int:
        """Size of what :meth:`save` writes."""
        return self.engine.state_bytes

    def save(self, folder: str) -> None:
        """Replicas are equal: rank 0 writes."""
        if self.place.rank == 0:
            self.engine.save(Path(folder))

    def load(self, folder: str) -> int:
        """Take back what :meth:`save` wrote; returns the version."""
        self.engine.load(Path(folder))
        return self.engine.version

    def random_state(self) -> bytes:
        """State of the generator that dropout draws from."""
        return torch.get_rng_state().numpy().tobytes()


class RolloutWorker(_Worker):
    """One rollout engine."""

    engine: RolloutEngine

    def build(self, model: ModelConfig, config: RolloutEngineConfig, max_len: int | None) -> None:
        """Load the model and make the engine."""
        self.engine = self._runtime().standalone_rollout(model, config, max_len=max_len)

    def generate(
        self, requests: Sequence[Request], sampling: Sampling
    ) -> Iterator[list[Completion]]:
        """Completions as they finish, those of :func:`parcel_seconds` together."""
        every = parcel_seconds(self.place.size)
        finished: list[Completion] = []
        begun = time.monotonic()
        for completion in self.engine.generate(requests, sampling):
            finished.append(completion)
            if time.monotonic() - begun >= every:
                yield finished
                finished, begun = [], time.monotonic()
        if finished:
            yield finished

    def load_weights(self, version: int, *buckets: Bucket) -> int:
        """Take new weights; returns the version."""
        tensors = (unpack_weight(packed) for bucket in buckets for packed in bucket)
        self.engine.load_weights(version, tensors)
        return self.engine.version
