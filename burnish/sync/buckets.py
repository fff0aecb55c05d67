"""Tensors to buckets and back.

A tensor that does not fit into what is left of a bucket begins the next one. A tensor that is
larger than a bucket is split over several (so that buffers need not be as large as an embedding),
and the receiver puts it together again; all others are given out as views of the bucket, without a
copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from burnish.models.buffers import wanted_dtype
from burnish.sync.base import (
    Abort,
    Bucket,
    BucketEntry,
    End,
    LinkError,
    Message,
    NameCheck,
    ReceiveLink,
    Shape,
    SyncError,
)
from burnish.sync.checksum import verify

ALIGN = 16
"""Tensors begin at multiples of this: the size of the widest element."""
MAX_ENTRIES = 4096
"""In one bucket, so that its header stays a small message."""
LOOK_AHEAD_BYTES = 4 << 20
"""After so many bytes given out, see whether the next bucket can come in: a look costs as much as
copying some hundred kB."""


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


class LinkReceiver:
    """Takes hand-overs from a link. Implements :class:`burnish.sync.base.Receiver`.

    ``expected``: name -> shape of every weight of the rollout model. None: what the first good
    hand-over brought is expected from then on (its engine checks the first).
    ``hold``: give every tensor memory of its own, for engines that keep them beyond the next one.
    """

    def __init__(
        self,
        link: ReceiveLink,
        *,
        expected: Mapping[str, Shape] | None = None,
        check: bool = True,
        hold: bool = False,
    ) -> None:
        self.link, self.check, self.hold = link, check, hold
        self.expected = None if expected is None else {n: tuple(s) for n, s in expected.items()}
        self._last_push = -1

    def open(self, version: int | None) -> BucketsIn:
        """Wait for the first bucket of a hand-over; what is left of an earlier one is passed
        over."""
        message, payload = self.link.receive()
        while message.push <= self._last_push:
            message, payload = self.link.receive()
        self._last_push = message.push
        incoming = BucketsIn(self, message, payload)
        if version is not None and message.version != version:
            problem = (
                f"version {version} of the weights was due, and version {message.version} came"
            )
            incoming.close(problem)
            raise SyncError(f"{problem}; push and receive the same version")
        return incoming

    def close(self) -> None:
        """Leave the connection."""
        self.link.close()


class BucketsIn:
    """One hand-over, bucket by bucket. Implements :class:`burnish.sync.base.Incoming`."""

    def __init__(self, receiver: LinkReceiver, message: Message, payload: Tensor | None) -> None:
        self.version, self.push = message.version, message.push
        self.num_bytes = self.num_buckets = 0
        self._receiver, self._link = receiver, receiver.link
        self._message, self._payload = message, payload
        self._names = NameCheck(receiver.expected)
        self._part: tuple[BucketEntry, Tensor] | None = None
        """The tensor being put together: its last piece, and [bytes of the whole] uint8."""
        self._over = isinstance(message, End | Abort)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor); a tensor is good until the next one is asked for."""
        while not isinstance(self._message, End):
            if isinstance(self._message, Abort):
                raise SyncError(
                    f"the sender gave up version {self.version}: {self._message.reason}"
                )
            assert self._payload is not None
            self._check(self._message, self._payload)
            yield from self._tensors(self._message, self._payload)
            self._next()
        self._check_end(self._message)
        self._receiver.expected = self._names.given

    def close(self, problem: str | None) -> None:
        """Answer the sender; after a failure first take what is still on its way."""
        try:
            while not self._over:
                self._drain()
        except LinkError:
            pass  # silent or gone: nothing more to take
        self._link.answer(self.push, problem)

    def _drain(self) -> None:
        try:
            self._next()
        except LinkError:
            raise
        except SyncError:
            pass  # a damaged header more or less

    def _next(self) -> None:
        try:
            self._message, self._payload = self._link.receive()
        except LinkError as error:
            self._over = True
            raise LinkError(f"after {self._done()} of version {self.version}: {error}") from error
        self._over = isinstance(self._message, End | Abort)

    def _done(self) -> str:
        return f"{self.num_buckets} bucket{'' if self.num_buckets == 1 else 's'}"

    def _check(self, bucket: Bucket, payload: Tensor) -> None:
        """That this bucket is the next one, whole, and as it was sent."""
        where = f"bucket {bucket.index} of version {self.version}"
        if bucket.push != self.push or bucket.version != self.version:
            raise SyncError(
                f"bucket {self.num_buckets} of version {self.version} (push {self.push}) was due, "
                f"and bucket {bucket.index} of version {bucket.version} (push {bucket.push}) came: "
                "two hand-overs are mixed"
            )
        if bucket.index != self.num_buckets:
            lost = bucket.index > self.num_buckets
            raise SyncError(
                f"{where} came where bucket {self.num_buckets} was due: "
                + ("one was lost, or came out of order" if lost else "it came twice")
            )
        if payload.numel() != bucket.num_bytes:
            raise SyncError(
                f"{where} should have {bucket.num_bytes} bytes, and {payload.numel()} came"
            )
        if self._receiver.check:
            verify(payload, bucket.checksum, where)
        for entry in bucket.entries:
            self._check_entry(entry, bucket.num_bytes, where)

    def _check_entry(self, entry: BucketEntry, bucket_bytes: int, where: str) -> None:
        size = _whole_bytes(entry, where)
        if (
            entry.offset % ALIGN
            or entry.offset < 0
            or entry.num_bytes < 0
            or entry.offset + entry.num_bytes > bucket_bytes
            or entry.begin + entry.num_bytes > size
        ):
            raise SyncError(
                f"{where}: weight {entry.name} {list(entry.shape)} {entry.dtype} ({size} bytes) "
                f"cannot have its bytes {entry.begin} to {entry.begin + entry.num_bytes} at "
                f"{entry.offset} of {bucket_bytes}"
            )
        if entry.begin == 0:
            self._names.add(entry.name, entry.shape, where)

    def _tensors(self, bucket: Bucket, payload: Tensor) -> Iterator[tuple[str, Tensor]]:
        looked = 0
        for entry in bucket.entries:
            self.num_bytes += entry.num_bytes
            if entry.offset >= looked:
                self._link.look_ahead()
                looked = entry.offset + LOOK_AHEAD_BYTES
            data = payload[entry.offset : entry.offset + entry.num_bytes]
            if self._part is None and entry.num_bytes == _whole_bytes(entry):
                yield entry.name, self._own(data, entry)
            elif (whole := self._put_together(entry, data, bucket.index)) is not None:
                yield entry.name, _as_tensor(whole, entry)
        self.num_buckets += 1

    def _own(self, data: Tensor, entry: BucketEntry) -> Tensor:
        tensor = _as_tensor(data, entry)
        return tensor.clone() if self._receiver.hold else tensor

    def _put_together(self, entry: BucketEntry, data: Tensor, index: int) -> Tensor | None:
        """Add a part; the whole if this was the last."""
        have = 0 if self._part is None else self._part[0].begin + self._part[0].num_bytes
        last = entry if self._part is None else self._part[0]
        same = (last.name, last.shape, last.dtype) == (entry.name, entry.shape, entry.dtype)
        if not same or entry.begin != have:
            raise SyncError(
                f"bucket {index} of version {self.version}: byte {have} of weight {last.name} "
                f"{list(last.shape)} {last.dtype} was due, and byte {entry.begin} of {entry.name} "
                f"{list(entry.shape)} {entry.dtype} came"
            )
        if self._part is None:
            whole = torch.empty(_whole_bytes(entry), dtype=torch.uint8, device=data.device)
        else:
            whole = self._part[1]
        whole[have : have + data.numel()].copy_(data)
        complete = have + data.numel() == whole.numel()
        self._part = None if complete else (entry, whole)
        return whole if complete else None

    def _check_end(self, end: End) -> None:
        found = (self.push, self.version, self.num_buckets, len(self._names.given), self.num_bytes)
        said = (end.push, end.version, end.num_buckets, end.num_tensors, end.num_bytes)
        if found != said:
            raise SyncError(
                f"the end of version {end.version} (push {end.push}) speaks of {end.num_buckets} "
                f"buckets with {end.num_tensors} tensors and {end.num_bytes} bytes, and of version "
                f"{self.version} (push {self.push}) {self._done()} with {len(self._names.given)} "
                f"tensors and {self.num_bytes} bytes came"
            )
        if self._part is not None:
            raise SyncError(f"the end came in the middle of weight {self._part[0].name}")
        self._names.complete(f"version {self.version}")


def _aligned(used: int) -> int:
    return -(-used // ALIGN) * ALIGN


def _whole_bytes(entry: BucketEntry, where: str = "") -> int:
    dtype = vars(torch).get(entry.dtype)
    if not isinstance(dtype, torch.dtype):
        raise SyncError(f"{where}: weight {entry.name} has the unknown format {entry.dtype!r}")
    return math.prod(entry.shape) * dtype.itemsize


def _as_tensor(data: Tensor, entry: BucketEntry) -> Tensor:
    return data.view(vars(torch)[entry.dtype]).view(entry.shape)
