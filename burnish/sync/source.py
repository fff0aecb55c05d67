"""Reconstruction of tensors from buckets, with the checks that every receiver makes for any
transport.

Tensors that fit into one bucket are returned as views of it, without a copy. A tensor that is split
over several buckets is assembled first.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from burnish.rollout.weights import Shape, WeightNameCheck
from burnish.sync.base import (
    Abort,
    Bucket,
    BucketEntry,
    End,
    LinkError,
    Message,
    SyncError,
    mismatch_at,
)
from burnish.sync.buckets import ALIGN
from burnish.sync.checksum import verify

PREFETCH_BYTES = 4 << 20
"""Number of bytes yielded between two polls for the next bucket. A poll costs as much as copying a
few hundred kB."""
_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
"""Names of formats in buckets."""


class Checks(TypedDict, total=False):
    """Options of a source: its checks, and the memory of its tensors."""

    expected: Mapping[str, Shape] | None
    """Shape of every weight of the rollout model. None (the default): later transfers must match
    the first successful one, which the engine itself checks."""
    check: bool
    """Verify checksums. Default: True."""
    hold: bool
    """Allocate separate memory for every tensor, for engines that keep tensors. Default: False."""


class BucketSource(ABC):
    """Source whose transfers arrive as messages. Implements
    :class:`burnish.sync.base.WeightSource`; subclasses implement message transport."""

    def __init__(self, **checks: Unpack[Checks]) -> None:
        expected = checks.get("expected")
        self.expected = None if expected is None else {n: tuple(s) for n, s in expected.items()}
        self.check, self.hold = checks.get("check", True), checks.get("hold", False)
        self._last_push = -1

    @contextmanager
    def open(self, version: int | None = None) -> Iterator[BucketTransfer]:
        """Wait for the first message of a transfer. Remaining messages of an earlier transfer are
        skipped."""
        message, payload = self.next_message()
        while message.push <= self._last_push:
            message, payload = self.next_message()
        self._last_push = message.push
        transfer = BucketTransfer(self, message, payload)
        try:
            if version is not None and message.version != version:
                raise SyncError(
                    f"expected version {version} of the weights, but received version "
                    f"{message.version}; push and receive the same version"
                )
            yield transfer
        except Exception as error:
            with suppress(SyncError):  # the first error is the one to report
                transfer.skip_rest()
                self.answer(message.push, str(error) or type(error).__name__)
            raise
        transfer.skip_rest()
        self.answer(message.push, None)

    @abstractmethod
    def next_message(self) -> tuple[Message, Tensor | None]:
        """Wait for the next message, with its uint8 [num_bytes] if it is a bucket. The bytes are
        valid until the next call.

        Raises LinkError after a timeout, and SyncError if the header was corrupted.
        """

    def prefetch(self) -> None:  # noqa: B027 (most sources have nothing to do)
        """Start to receive the next bucket if it has been announced. Does not block."""

    @abstractmethod
    def answer(self, push: int, problem: str | None) -> None:
        """Report the result of a transfer to the sender; None: accepted."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection. May be called twice."""


class BucketTransfer:
    """One transfer, received bucket by bucket. Implements
    :class:`burnish.sync.base.WeightTransfer`."""

    def __init__(self, source: BucketSource, message: Message, payload: Tensor | None) -> None:
        self.version, self.push = message.version, message.push
        self.num_bytes = self.num_buckets = 0
        self._source, self._message, self._payload = source, message, payload
        self._names = WeightNameCheck(source.expected)
        self._part: tuple[BucketEntry, Tensor] | None = None
        """Tensor being assembled: its last entry, and a uint8 buffer of its full size in bytes."""
        self._over = isinstance(message, End | Abort)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor). A tensor is valid until the next one is requested."""
        while not isinstance(self._message, End):
            if isinstance(self._message, Abort):
                raise SyncError(
                    f"the sender aborted version {self.version}: {self._message.reason}"
                )
            assert self._payload is not None
            self._check(self._message, self._payload)
            yield from self._tensors(self._message, self._payload)
            self._next()
        self._check_end(self._message)
        self._source.expected = self._names.given

    def skip_rest(self) -> None:
        """Receive and discard the remaining messages, unless the transfer has ended."""
        while not self._over:
            with suppress(SyncError):  # LinkError ends the loop; another corrupt header is harmless
                self._next()

    def _next(self) -> None:
        try:
            self._message, self._payload = self._source.next_message()
        except LinkError as error:
            self._over = True
            raise LinkError(f"after {self._done()} of version {self.version}: {error}") from error
        self._over = isinstance(self._message, End | Abort)

    def _done(self) -> str:
        return f"{self.num_buckets} bucket{'' if self.num_buckets == 1 else 's'}"

    def _check(self, bucket: Bucket, payload: Tensor) -> None:
        """Raise SyncError unless this bucket is the next one, complete, and undamaged."""
        where = f"bucket {bucket.index} of version {self.version}"
        if bucket.push != self.push or bucket.version != self.version:
            raise SyncError(
                f"expected bucket {self.num_buckets} of version {self.version} (push "
                f"{self.push}), but received bucket {bucket.index} of version {bucket.version} "
                f"(push {bucket.push}): two transfers are mixed; push again"
            )
        if bucket.index != self.num_buckets:
            lost = bucket.index > self.num_buckets
            raise SyncError(
                f"{where} was received instead of bucket {self.num_buckets}: "
                + ("one was lost or is out of order" if lost else "it was received twice")
                + "; push again"
            )
        if payload.numel() != bucket.num_bytes:
            raise SyncError(
                f"{where} should have {bucket.num_bytes} bytes, but {payload.numel()} were "
                "received; push again"
            )
        if self._source.check:
            verify(payload, bucket.checksum, where)
        for entry in bucket.entries:
            self._check_entry(entry, bucket.num_bytes, where)

    def _check_entry(self, entry: BucketEntry, bucket_bytes: int, where: str) -> None:
        size = _tensor_bytes(entry, where)
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
                f"offset {entry.offset} of {bucket_bytes}; push again"
            )
        if entry.begin == 0:
            with mismatch_at(where):
                self._names.add(entry.name, entry.shape)

    def _tensors(self, bucket: Bucket, payload: Tensor) -> Iterator[tuple[str, Tensor]]:
        prefetch_from = 0
        for entry in bucket.entries:
            self.num_bytes += entry.num_bytes
            if entry.offset >= prefetch_from:
                self._source.prefetch()
                prefetch_from = entry.offset + PREFETCH_BYTES
            data = payload[entry.offset : entry.offset + entry.num_bytes]
            if self._part is None and entry.num_bytes == _tensor_bytes(entry):
                yield entry.name, self._own(data, entry)
            elif (full := self._assemble(entry, data, bucket.index)) is not None:
                yield entry.name, _as_tensor(full, entry)
        self.num_buckets += 1

    def _own(self, data: Tensor, entry: BucketEntry) -> Tensor:
        tensor = _as_tensor(data, entry)
        return tensor.clone() if self._source.hold else tensor

    def _assemble(self, entry: BucketEntry, data: Tensor, index: int) -> Tensor | None:
        """Add one part; return the complete tensor if this was the last part."""
        have = 0 if self._part is None else self._part[0].begin + self._part[0].num_bytes
        last = entry if self._part is None else self._part[0]
        same = (last.name, last.shape, last.dtype) == (entry.name, entry.shape, entry.dtype)
        if not same or entry.begin != have:
            raise SyncError(
                f"bucket {index} of version {self.version}: expected byte {have} of weight "
                f"{last.name} {list(last.shape)} {last.dtype}, but received byte {entry.begin} "
                f"of {entry.name} {list(entry.shape)} {entry.dtype}; push again"
            )
        if self._part is None:
            full = torch.empty(_tensor_bytes(entry), dtype=torch.uint8, device=data.device)
        else:
            full = self._part[1]
        full[have : have + data.numel()].copy_(data)
        complete = have + data.numel() == full.numel()
        self._part = None if complete else (entry, full)
        return full if complete else None

    def _check_end(self, end: End) -> None:
        received = (
            self.push,
            self.version,
            self.num_buckets,
            len(self._names.given),
            self.num_bytes,
        )
        announced = (end.push, end.version, end.num_buckets, end.num_tensors, end.num_bytes)
        if received != announced:
            raise SyncError(
                f"the end of version {end.version} (push {end.push}) announces {end.num_buckets} "
                f"buckets with {end.num_tensors} tensors and {end.num_bytes} bytes, but of "
                f"version {self.version} (push {self.push}) {self._done()} with "
                f"{len(self._names.given)} tensors and {self.num_bytes} bytes were received; "
                "push again"
            )
        if self._part is not None:
            raise SyncError(
                f"the transfer ended in the middle of weight {self._part[0].name}; push again"
            )
        with mismatch_at(f"version {self.version}"):
            self._names.complete()


def _tensor_bytes(entry: BucketEntry, where: str = "") -> int:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise SyncError(f"{where}: weight {entry.name} has the unknown dtype {entry.dtype!r}")
    return math.prod(entry.shape) * dtype.itemsize


def _as_tensor(data: Tensor, entry: BucketEntry) -> Tensor:
    dtype = _DTYPES[entry.dtype]
    if not data.numel():  # an array of no bytes has no strides that could be viewed
        return data.new_empty(entry.shape, dtype=dtype)
    return data.view(dtype).view(entry.shape)
