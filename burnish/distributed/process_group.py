"""Rank group of a train engine: this process's rank, the collectives that engines use, and their
timeouts.

All ranks must call the methods in the same order; otherwise a call blocks until the timeout. Every
method except :meth:`RankGroup.subgroups` returns equal results on all ranks. With one rank every
method returns immediately and ``torch.distributed`` is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from burnish.errors import BurnishError
from burnish.types import Stats

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class CollectiveTimeoutError(BurnishError, RuntimeError):
    """A rank waited for the others in a collective until the timeout. The message contains the
    timeout and the collective."""


class OtherRankError(BurnishError, RuntimeError):
    """An error that another rank raised and reports. The command line does not print it again."""

    def __init__(self, text: str, exit_code: int = 2) -> None:
        super().__init__(text)
        self.exit_code = exit_code

    def text_for(self, job: str) -> str:
        return ""


BUCKET_BYTES = 64 << 20
"""Tensors are summed over ranks in buckets of this many bytes: few calls, and little extra
memory."""


class RankGroup:
    """The ranks of a ``torch.distributed`` process group; None: a single rank."""

    def __init__(
        self, group: ProcessGroup | None = None, *, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.group = group
        """The ``torch.distributed`` process group, or None."""
        self._bucket_bytes = bucket_bytes
        self.rank = 0 if group is None else group.rank()
        """This process's rank in the group, from 0."""
        self.size = 1 if group is None else group.size()
        """Number of ranks."""
        self._subgroups: dict[int, tuple[RankGroup, RankGroup]] = {}

    def subgroups(self, size: int) -> tuple[RankGroup, RankGroup]:
        """Return (model-parallel group, data-parallel group) of this rank.

        Every ``size`` consecutive ranks form a model-parallel group; ``size`` must divide the
        number of ranks. A data-parallel group contains the ranks with the same position in their
        model-parallel groups. All ranks call this. Repeated calls return the same groups.
        """
        if size == 1:
            return SINGLE, self
        if size not in self._subgroups:
            assert self.size % size == 0 and self.group is not None
            first = self.rank - self.rank % size
            model_parallel = self._part(range(first, first + size))
            data_parallel = self._part(range(self.rank % size, self.size, size))
            self._subgroups[size] = (model_parallel, data_parallel)
        return self._subgroups[size]

    def _part(self, ranks: Iterable[int]) -> RankGroup:
        """Return the group of some of these ranks, which include this one."""
        from torch.distributed import get_backend, get_process_group_ranks, new_group

        assert self.group is not None
        everywhere = get_process_group_ranks(self.group)
        group = new_group(
            [everywhere[rank] for rank in ranks],
            backend=get_backend(self.group),
            use_local_synchronization=True,
        )
        return RankGroup(group, bucket_bytes=self._bucket_bytes)

    @torch.no_grad()
    def all_reduce_(self, tensors: Sequence[Tensor]) -> None:
        """Replace every tensor by its sum over ranks, in place. Shapes and dtypes are equal on all
        ranks.

        Small tensors of one dtype and device are copied into buckets to reduce the number of calls.
        The results are bitwise equal on all ranks.
        """
        if self.size == 1:
            return
        from torch.distributed import all_reduce

        device = self._device()
        for bucket in _buckets(tensors, self._bucket_bytes):
            first = bucket[0]
            if len(bucket) == 1 and first.is_contiguous() and first.device.type == device.type:
                all_reduce(first, group=self.group)
                continue
            flat = torch.cat([t.reshape(-1) for t in bucket]).to(device)
            all_reduce(flat, group=self.group)
            sums = flat.split([t.numel() for t in bucket])
            for tensor, total in zip(bucket, sums, strict=True):
                tensor.copy_(total.view(tensor.shape))

    def any(self, flag: bool | Tensor) -> bool:
        """Return whether ``flag`` is true on at least one rank."""
        return self.any_across([bool(flag)])[0]

    def any_across(self, flags: Sequence[bool]) -> list[bool]:
        """Return the result of :meth:`any` for each of several flags; their number is the same on
        every rank."""
        if self.size == 1 or not flags:
            return list(flags)
        from torch.distributed import ReduceOp, all_reduce

        values = torch.tensor(flags, dtype=torch.int32, device=self._device())
        all_reduce(values, op=ReduceOp.MAX, group=self.group)
        return [bool(v) for v in values.tolist()]

    def gather(self, value: T) -> list[T]:
        """Return every rank's ``value``, in rank order. For small plain objects."""
        if self.size == 1:
            return [value]
        from torch.distributed import all_gather_object

        values: list[T] = [value] * self.size
        all_gather_object(values, value, group=self.group)
        return values

    def from_first(self, make: Callable[[], T]) -> T:
        """Return the result of ``make`` on rank 0, the only rank that calls it. For small plain
        objects. If it raises, rank 0 raises the error and the others raise OtherRankError."""
        if self.size == 1:
            return make()
        from torch.distributed import broadcast_object_list, get_global_rank

        assert self.group is not None
        sent: list[tuple[T | None, str, int]] = [(None, "", 0)]
        failure: BaseException | None = None
        if self.rank == 0:
            try:
                sent = [(make(), "", 0)]
            except Exception as error:
                failure, code = error, error.exit_code if isinstance(error, BurnishError) else 1
                sent = [(None, f"{type(error).__name__}: {error}", code)]
        source = get_global_rank(self.group, 0)
        broadcast_object_list(sent, source, group=self.group, device=self._device())
        if failure is not None:
            raise failure
        value, problem, code = sent[0]
        if problem:
            raise OtherRankError(problem, code)
        return value  # type: ignore[return-value]

    @torch.no_grad()
    def gather_tensor(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's ``tensor``, in rank order, on the device of this rank's tensor.
        Shapes and dtypes are equal on all ranks."""
        if self.size == 1 or not tensor.numel():
            return [tensor] * self.size
        from torch.distributed import all_gather

        local = tensor.detach().to(self._device()).contiguous()
        gathered = [torch.empty_like(local) for _ in range(self.size)]
        all_gather(gathered, local, group=self.group)
        return [t.to(tensor.device) for t in gathered]

    def sum_stats(self, stats: Stats) -> Stats:
        """Return the statistics of all ranks as plain numbers: means and sums are added, maxima
        compared.

        A rank without measurements (it had no rows) adds nothing. Raises ValueError if two ranks
        have different names.
        """
        if self.size == 1:
            return stats
        gathered = self.gather(stats.plain())
        _check_same_names(gathered)
        return sum(gathered, Stats())

    def _device(self) -> torch.device:
        """Return the device that the group needs for its tensors. NCCL accepts no CPU tensors."""
        from torch.distributed import get_backend

        on_gpu = get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def timed_out_collective(error: BaseException) -> str | None:
    """Return the collective in which a rank waited until gloo's timeout.

    If the call did not go through ``torch.distributed``, return the calling function and its file.
    Return None if ``error`` has another cause.
    """
    if "Timed out waiting" not in str(error):  # gloo raises RuntimeError, without a type of its own
        return None
    frames = [frame for frame in extract_tb(error.__traceback__) if frame.name != "wrapper"]
    inside = [f for f in frames if "/torch/distributed/distributed_c10d.py" in f.filename]
    if inside:
        return f"torch.distributed.{inside[0].name}"
    if not frames:
        return "a collective"
    return f"{frames[-1].name} ({'/'.join(Path(frames[-1].filename).parts[-3:])})"


SINGLE = RankGroup()
"""The group of a single process."""


def _buckets(tensors: Iterable[Tensor], most_bytes: int) -> Iterator[list[Tensor]]:
    """Yield tensors of one dtype and device, in order, in buckets of up to ``most_bytes``. A larger
    tensor is a bucket of its own."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in kinds.values():
        bucket: list[Tensor] = []
        size = 0
        for tensor in same:
            if bucket and size + tensor.nbytes > most_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket


def _check_same_names(by_rank: Sequence[Stats]) -> None:
    """Raise ValueError if ranks with measurements have different names."""
    names = [
        {f"mean {name}" for name in stats.means}
        | {f"maximum {name}" for name in stats.maxima}
        | {f"sum {name}" for name in stats.sums}
        for stats in by_rank
    ]
    measured = [rank for rank, names_of_rank in enumerate(names) if names_of_rank]
    for rank in measured[1:]:
        first = measured[0]
        if names[rank] != names[first]:
            only = [
                sorted(a - b) for a, b in ((names[first], names[rank]), (names[rank], names[first]))
            ]
            raise ValueError(
                f"ranks returned different statistics: only rank {first} has "
                f"{', '.join(only[0]) or 'none'}, only rank {rank} has "
                f"{', '.join(only[1]) or 'none'}. A loss must return the same names for every "
                "micro-batch, regardless of its content"
            )


# ---- timeouts of collectives ---------------------------------------------------------------


@dataclass(frozen=True)
class CollectiveTimeouts:
    """Timeouts of one rank in one collective, in seconds: a shorter one for passes."""

    call_s: float
    """Timeout of calls in which a rank may wait for a disk or a transfer."""
    pass_s: float
    """Timeout of passes and optimizer steps."""


def groups_here() -> list[Any]:
    """Return the process groups of this process, including those made by libraries."""
    from torch.distributed import distributed_c10d

    return list(distributed_c10d._world.pg_map)


def limit_collectives(seconds: float, groups: Iterable[Any]) -> None:
    """Set the timeout of collectives of ``groups``. Libraries make groups with their own
    timeouts."""
    from torch.distributed import distributed_c10d

    for group in groups:
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


@contextmanager
def limited(limits: CollectiveTimeouts | None, groups: Sequence[Any]) -> Iterator[None]:
    """Set the timeout of ``groups`` to ``pass_s`` inside the context, and to ``call_s`` afterward.
    None: no change.

    Raises CollectiveTimeoutError when this rank reached the timeout."""
    if limits is None:
        yield
        return
    limit_collectives(limits.pass_s, groups)
    try:
        yield
    except RuntimeError as error:
        collective = timed_out_collective(error)
        if collective is None:
            raise
        raise CollectiveTimeoutError(
            f"timed out after {limits.pass_s:g} s waiting for the other ranks in {collective}"
        ) from error
    finally:
        limit_collectives(limits.call_s, groups)
