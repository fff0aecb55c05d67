"""This process's place among data-parallel ranks, and the few things that ranks say to each other.

Every method is called by all ranks in the same order (it would wait for ever otherwise) and gives
all of them the same answer. One rank alone has nothing to say: then every method returns at once,
and ``torch.distributed`` is not needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from burnish.errors import BurnishError
from burnish.types import Stats

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class CollectiveTimeoutError(BurnishError, RuntimeError):
    """A rank waited for the others in a collective until the limit. Says how long, and where."""


BUCKET_BYTES = 64 << 20
"""Tensors are summed over ranks this many bytes at a time: few calls, and little extra memory."""


class RankGroup:
    """The ranks of a ``torch.distributed`` process group; None: one rank, alone."""

    def __init__(
        self, group: ProcessGroup | None = None, *, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.group = group
        """What was given."""
        self._bucket_bytes = bucket_bytes
        self.rank = 0 if group is None else group.rank()
        """From 0."""
        self.size = 1 if group is None else group.size()
        """How many ranks there are."""
        self._subgroups: dict[int, tuple[RankGroup, RankGroup]] = {}

    def subgroups(self, size: int) -> tuple[RankGroup, RankGroup]:
        """(this rank's team, its peers) where every ``size`` consecutive ranks, which must divide
        all of them, are a team. Peers are the ranks with the same place in their teams.

        Called by all ranks. Asked twice, the same groups are given.
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
        """Some of these ranks, this one among them."""
        from torch.distributed import get_backend, get_process_group_ranks, new_group

        assert self.group is not None
        everywhere = get_process_group_ranks(self.group)
        group = new_group(
            [everywhere[rank] for rank in ranks],
            backend=get_backend(self.group),
            use_local_synchronization=True,
        )
        return RankGroup(group, bucket_bytes=self._bucket_bytes)

    def all_reduce_(self, tensors: Sequence[Tensor]) -> None:
        """Put the sum over ranks into every tensor, in place. Equal shapes and dtypes on all ranks.

        Small tensors are copied together into buckets of one dtype and device, so that few calls
        are made. All ranks end with the same bits.
        """
        if self.size == 1:
            return
        for bucket in _buckets(tensors, self._bucket_bytes):
            self._sum_bucket(bucket)

    def any(self, flag: bool | Tensor) -> bool:
        """Return whether ``flag`` is true on at least one rank."""
        return self.any_across([bool(flag)])[0]

    def any_across(self, flags: Sequence[bool]) -> list[bool]:
        """:meth:`any` for several flags at once; as many on every rank."""
        if self.size == 1 or not flags:
            return list(flags)
        from torch.distributed import ReduceOp, all_reduce

        values = torch.tensor(flags, dtype=torch.int32, device=self._device())
        all_reduce(values, op=ReduceOp.MAX, group=self.group)
        return [bool(v) for v in values.tolist()]

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value``, by rank. For small plain objects."""
        if self.size == 1:
            return [value]
        from torch.distributed import all_gather_object

        values: list[T] = [value] * self.size
        all_gather_object(values, value, group=self.group)
        return values

    @torch.no_grad()
    def gather_tensor(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's ``tensor``, by rank, on the device of the own one. Equal shapes and
        dtypes."""
        if self.size == 1 or not tensor.numel():
            return [tensor] * self.size
        from torch.distributed import all_gather

        own = tensor.detach().to(self._device()).contiguous()
        found = [torch.empty_like(own) for _ in range(self.size)]
        all_gather(found, own, group=self.group)
        return [t.to(tensor.device) for t in found]

    def sum_stats(self, stats: Stats) -> Stats:
        """Stats of all ranks together, as plain numbers: means and sums added, maxima compared.

        A rank that measured nothing (it had no rows) adds nothing. Raises ValueError if two
        ranks measured different things.
        """
        if self.size == 1:
            return stats
        gathered = self.gather(stats.plain())
        _check_same_names(gathered)
        return sum(gathered, Stats())

    @torch.no_grad()
    def _sum_bucket(self, bucket: Sequence[Tensor]) -> None:
        from torch.distributed import all_reduce

        device, first = self._device(), bucket[0]
        if len(bucket) == 1 and first.is_contiguous() and first.device.type == device.type:
            all_reduce(first, group=self.group)
            return
        flat = torch.cat([t.reshape(-1) for t in bucket]).to(device)
        all_reduce(flat, group=self.group)
        sums = flat.split([t.numel() for t in bucket])
        for tensor, total in zip(bucket, sums, strict=True):
            tensor.copy_(total.view(tensor.shape))

    def _device(self) -> torch.device:
        """Where the group wants its tensors: NCCL takes none on the CPU."""
        from torch.distributed import get_backend

        on_gpu = get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def timed_out_collective(error: BaseException) -> str | None:
    """The collective in which a rank waited until gloo's limit, and the module and function that
    called it. None: ``error`` is about something else."""
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
"""One process, which is all there is."""


def _buckets(tensors: Iterable[Tensor], most_bytes: int) -> Iterator[list[Tensor]]:
    """Tensors of one dtype and device, in order, up to ``most_bytes``; a larger one goes alone."""
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
    """Every rank that measured anything measured the same."""
    names = [
        {f"{kind} {name}" for kind, mapping in _kinds(stats) for name in mapping}
        for stats in by_rank
    ]
    measured = [rank for rank, own in enumerate(names) if own]
    for rank in measured[1:]:
        first = measured[0]
        if names[rank] != names[first]:
            only = [
                sorted(a - b) for a, b in ((names[first], names[rank]), (names[rank], names[first]))
            ]
            raise ValueError(
                f"ranks measured different things: only rank {first} has "
                f"{', '.join(only[0]) or 'nothing'}, only rank {rank} has "
                f"{', '.join(only[1]) or 'nothing'}. A loss has to return the same names for "
                "every micro-batch, whatever is in it"
            )


def _kinds(stats: Stats) -> list[tuple[str, Iterable[str]]]:
    return [("mean", stats.means), ("maximum", stats.maxima), ("sum", stats.sums)]
