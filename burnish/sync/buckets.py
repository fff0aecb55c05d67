"""Conversion of tensors to the messages of a weight transfer; ``source.py`` is the inverse.

A tensor that does not fit into the rest of a bucket begins the next one. A tensor larger than a
bucket is split over several, so that buffers can be smaller than an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Self

import torch
from torch import Tensor

from burnish.host_copies import HostStream
from burnish.models.buffers import wanted_dtype
from burnish.rollout.weights import Shape
from burnish.sync.base import Bucket, BucketEntry, End
from burnish.sync.checksum import checksum

ALIGN = 16
"""Tensors begin at multiples of this many bytes, the size of the widest element."""
MAX_ENTRIES = 4096
"""Limit on the entries of one bucket, which keeps its header small."""


class _Open:
    """The bucket being filled."""

    def __init__(self, buffer: Tensor, stream: HostStream) -> None:
        self.buffer, self.entries, self.used = buffer, list[BucketEntry](), 0
        self.stream = stream
        self.complete: Callable[[], None] | None = None
        """Waits for the copies from a GPU. None: still being filled."""

    @property
    def room(self) -> int:
        if len(self.entries) >= MAX_ENTRIES:
            return -1
        return self.buffer.numel() - _aligned(self.used)

    def add(self, name: str, shape: Shape, flat: Tensor, dtype: torch.dtype, begin: int) -> int:
        """Copy as much of a flattened tensor, from byte ``begin``, as fits; return the number of
        bytes copied."""
        total = flat.numel() * dtype.itemsize
        count = min(total - begin, self.room // dtype.itemsize * dtype.itemsize)
        offset, first = _aligned(self.used), begin // dtype.itemsize
        target = self.buffer[offset : offset + count].view(dtype)
        self.stream.fill(target, flat.narrow(0, first, target.numel()))
        name_of = str(dtype).removeprefix("torch.")
        self.entries.append(BucketEntry(name, shape, name_of, offset, begin=begin, num_bytes=count))
        self.used = offset + count
        return count

    def submitted(self) -> Self:
        """Return the bucket, with nothing to be added."""
        self.complete = self.stream.submit()
        return self

    @property
    def filled(self) -> tuple[tuple[BucketEntry, ...], Tensor]:
        assert self.complete is not None
        self.complete()
        return tuple(self.entries), self.buffer[: self.used]


@torch.no_grad()
def pack(
    weights: Iterable[tuple[str, Tensor]],
    take_buffer: Callable[[], Tensor],
    *,
    dtype: torch.dtype | None = None,
    ahead: bool = False,
) -> Iterator[tuple[tuple[BucketEntry, ...], Tensor]]:
    """Yield (entries, uint8 payload) of each bucket. Floating-point weights are cast to ``dtype``
    (None: unchanged); buffers keep their dtype.

    ``take_buffer`` returns the next uint8 buffer to fill, of at least 16 bytes and a multiple of
    16. It is called once the first tensor of a bucket is available. Gathering that tensor therefore
    overlaps with the transfer of earlier buckets.

    ``ahead``: a bucket is yielded once the next one is being copied from a GPU, so ``take_buffer``
    must have two buffers in turn. It reuses one after the bucket in it was consumed.
    """
    if not ahead:
        yield from (bucket.filled for bucket in _fill(weights, take_buffer, dtype))
        return
    last: _Open | None = None
    for bucket in _fill(weights, take_buffer, dtype):
        if last is not None:
            yield last.filled
        last = bucket
    if last is not None:
        yield last.filled


def _fill(
    weights: Iterable[tuple[str, Tensor]],
    take_buffer: Callable[[], Tensor],
    dtype: torch.dtype | None,
) -> Iterator[_Open]:
    """Yield each bucket, whose copies from a GPU may not be complete."""
    bucket: _Open | None = None
    with HostStream() as stream:
        for name, tensor in weights:
            target_dtype = wanted_dtype(tensor, dtype)
            flat, shape = tensor.detach().reshape(-1), tuple(tensor.shape)
            total, begin = flat.numel() * target_dtype.itemsize, 0
            if bucket is not None and total > bucket.room:
                yield bucket.submitted()
                bucket = None
            bucket = bucket or _Open(take_buffer(), stream)
            while (begin := begin + bucket.add(name, shape, flat, target_dtype, begin)) < total:
                yield bucket.submitted()
                bucket = _Open(take_buffer(), stream)
        if bucket is not None:
            yield bucket.submitted()


def messages(
    weights: Iterable[tuple[str, Tensor]],
    take_buffer: Callable[[], Tensor],
    *,
    push: int,
    version: int,
    dtype: torch.dtype | None = None,
    check: bool = True,
    ahead: bool = False,
) -> Iterator[tuple[Bucket, Tensor] | tuple[End, Tensor]]:  # house: ok all that a transfer is
    """Yield all messages of a transfer: (header, uint8 payload) of every bucket, then the end with
    an empty payload.

    ``take_buffer``, ``dtype`` and ``ahead``: see :func:`pack`.
    """
    index = num_tensors = num_bytes = 0
    for entries, payload in pack(weights, take_buffer, dtype=dtype, ahead=ahead):
        digest = checksum(payload) if check else ""
        yield Bucket(push, version, index, payload.numel(), digest, entries=entries), payload
        index += 1
        num_tensors += sum(entry.begin == 0 for entry in entries)
        num_bytes += sum(entry.num_bytes for entry in entries)
    yield End(push, version, index, num_tensors, num_bytes), torch.empty(0, dtype=torch.uint8)


def _aligned(used: int) -> int:
    return -(-used // ALIGN) * ALIGN
