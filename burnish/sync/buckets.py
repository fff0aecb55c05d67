"""Tensors to the messages of a weight transfer; ``source.py`` has the way back.

A tensor that does not fit into the rest of a bucket begins the next one. A tensor that is larger
than a bucket is split over several, so that buffers need not be as large as an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from burnish.models.buffers import wanted_dtype
from burnish.sync.base import Bucket, BucketEntry, End
from burnish.sync.checksum import checksum

ALIGN = 16
"""Tensors begin at multiples of this: the size of the widest element."""
MAX_ENTRIES = 4096
"""In one bucket, so that its header stays a small message."""


class _Open:
    """The bucket being filled."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer, self.entries, self.used = buffer, list[BucketEntry](), 0

    @property
    def room(self) -> int:
        if len(self.entries) >= MAX_ENTRIES:
            return -1
        return self.buffer.numel() - _aligned(self.used)

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype, begin: int) -> int:
        """As much of ``tensor`` from byte ``begin`` on as there is room for; returns how much."""
        total = tensor.numel() * dtype.itemsize
        count = min(total - begin, self.room // dtype.itemsize * dtype.itemsize)
        offset, first = _aligned(self.used), begin // dtype.itemsize
        target = self.buffer[offset : offset + count].view(dtype)
        target.copy_(tensor.reshape(-1)[first : first + target.numel()])  # casts on the way
        shape = tuple(tensor.shape)
        name_of = str(dtype).removeprefix("torch.")
        self.entries.append(BucketEntry(name, shape, name_of, offset, begin=begin, num_bytes=count))
        self.used = offset + count
        return count

    @property
    def filled(self) -> tuple[tuple[BucketEntry, ...], Tensor]:
        return tuple(self.entries), self.buffer[: self.used]


@torch.no_grad()
def pack(
    weights: Iterable[tuple[str, Tensor]],
    take_buffer: Callable[[], Tensor],
    *,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[tuple[BucketEntry, ...], Tensor]]:
    """(what is in it, uint8 payload) bucket by bucket; floating-point weights become ``dtype`` on
    the way in (None: as they are); buffers keep their format.

    ``take_buffer`` gives the next uint8 buffer to fill, at least 16 bytes and a multiple of 16. It
    is called when the first tensor of a bucket is there, so that making (gathering) it goes on
    while earlier buckets are on their way.
    """
    bucket: _Open | None = None
    for name, tensor in weights:
        wanted = wanted_dtype(tensor, dtype)
        tensor = tensor.detach().contiguous()
        total, begin = tensor.numel() * wanted.itemsize, 0
        if bucket is not None and total > bucket.room:
            yield bucket.filled
            bucket = None
        bucket = bucket or _Open(take_buffer())
        while (begin := begin + bucket.add(name, tensor, wanted, begin)) < total:
            yield bucket.filled
            bucket = _Open(take_buffer())
    if bucket is not None:
        yield bucket.filled


def messages(
    weights: Iterable[tuple[str, Tensor]],
    take_buffer: Callable[[], Tensor],
    *,
    push: int,
    version: int,
    dtype: torch.dtype | None = None,
    check: bool = True,
) -> Iterator[tuple[Bucket, Tensor] | tuple[End, Tensor]]:  # house: ok all that a transfer is
    """All of a transfer: (header, uint8 payload) of every bucket, then the end (with no bytes).
    ``take_buffer`` and ``dtype`` as in :func:`pack`."""
    index = num_tensors = num_bytes = 0
    for entries, payload in pack(weights, take_buffer, dtype=dtype):
        digest = checksum(payload) if check else ""
        yield Bucket(push, version, index, payload.numel(), digest, entries=entries), payload
        index += 1
        num_tensors += sum(entry.begin == 0 for entry in entries)
        num_bytes += sum(entry.num_bytes for entry in entries)
    yield End(push, version, index, num_tensors, num_bytes), torch.empty(0, dtype=torch.uint8)


def _aligned(used: int) -> int:
    return -(-used // ALIGN) * ALIGN
