"""Conversion of tensors to the messages of a weight transfer; ``source.py`` is the inverse.

A tensor that does not fit into the rest of a bucket begins the next one. A tensor larger than a
bucket is split over several, so that buffers can be smaller than an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from burnish.models.buffers import wanted_dtype
from burnish.sync.base import Bucket, BucketEntry, End
from burnish.sync.checksum import checksum

ALIGN = 16
"""Tensors begin at multiples of this many bytes, the size of the widest element."""
MAX_ENTRIES = 4096
"""Limit on the entries of one bucket, which keeps its header small."""


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
        """Copy as much of ``tensor``, from byte ``begin``, as fits; return the number of bytes
        copied."""
        total = tensor.numel() * dtype.itemsize
        count = min(total - begin, self.room // dtype.itemsize * dtype.itemsize)
        offset, first = _aligned(self.used), begin // dtype.itemsize
        target = self.buffer[offset : offset + count].view(dtype)
        target.copy_(tensor.reshape(-1)[first : first + target.numel()])  # casts to dtype
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
    """Yield (entries, uint8 payload) of each bucket. Floating-point weights are cast to ``dtype``
    (None: unchanged); buffers keep their dtype.

    ``take_buffer`` returns the next uint8 buffer to fill, of at least 16 bytes and a multiple of
    16. It is called once the first tensor of a bucket is available. Gathering that tensor therefore
    overlaps with the transfer of earlier buckets.
    """
    bucket: _Open | None = None
    for name, tensor in weights:
        target_dtype = wanted_dtype(tensor, dtype)
        tensor = tensor.detach().contiguous()
        total, begin = tensor.numel() * target_dtype.itemsize, 0
        if bucket is not None and total > bucket.room:
            yield bucket.filled
            bucket = None
        bucket = bucket or _Open(take_buffer())
        while (begin := begin + bucket.add(name, tensor, target_dtype, begin)) < total:
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
    """Yield all messages of a transfer: (header, uint8 payload) of every bucket, then the end with
    an empty payload.

    ``take_buffer`` and ``dtype``: see :func:`pack`.
    """
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
