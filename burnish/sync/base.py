"""Messages and interfaces of weight transfers between a trainer and rollout engines in other
processes.

A weight transfer (a *push*) has a version and consists of buckets and an end. A bucket is some
bytes with a header: the tensors in it, in order, and their checksum. The receiver compares
checksum, order, names and shapes before it gives a tensor to its engine, and checks at the end that
nothing is missing. Anything else is a :class:`SyncError` with what was expected and what came.

Reading order of this package: base, checksum, buckets (tensors to messages), source (messages to
tensors), engine (the two ends: :class:`~burnish.sync.engine.WeightSender` and
:class:`~burnish.sync.engine.SyncedEngine`), channel (small messages), links, then one file for each
transport: collective, ipc, disk, snapshot; connect, which chooses among them; and inproc, where
nothing is moved.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from torch import Tensor

from burnish.errors import BurnishError
from burnish.rollout.weights import Shape

Metrics = dict[str, float]


class SyncError(BurnishError, RuntimeError):
    """Weights did not get over whole. Says what was expected, what came, and what to do."""


class WeightMismatchError(SyncError, ValueError):
    """A complete transfer does not match the weights of the rollout model."""


class LinkError(SyncError):
    """The link timed out, or the connection is lost."""


class InvalidWeightsError(SyncError):
    """A rollout engine was asked to sample while it has no weights that it may use."""


@dataclass(frozen=True)
class BucketEntry:
    """A tensor, or a part of one that is larger than a bucket, inside a bucket."""

    name: str
    shape: Shape
    """Of the whole tensor; () for a single number."""
    dtype: str
    """``bfloat16``, ``float32`` ..., as torch calls it."""
    offset: int
    """Where it begins in the bucket, in bytes; a multiple of 16."""
    begin: int
    """Where it begins in its tensor, in bytes; 0 unless an earlier bucket holds the part before."""
    num_bytes: int
    """Bytes in this bucket; 0 for a tensor without elements."""


@dataclass(frozen=True)
class Bucket:
    """The header of one bucket."""

    push: int
    """Number of the transfer among those of its sender, from 0, so that what a broken one left on
    the way is not taken for the next."""
    version: int
    """Optimizer steps the weights have taken."""
    index: int
    """Buckets of this transfer before this one."""
    num_bytes: int
    checksum: str
    """``kind:digest`` of the bytes (``checksum.py``); empty where nobody verifies."""
    entries: tuple[BucketEntry, ...]


@dataclass(frozen=True)
class End:
    """All of one transfer was sent."""

    push: int
    version: int
    num_buckets: int
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True)
class Abort:
    """The sender gave up in the middle of a transfer."""

    push: int
    version: int
    reason: str


Message = Bucket | End | Abort
_KINDS: dict[str, type[Message]] = {"bucket": Bucket, "end": End, "abort": Abort}


def encode(message: Message) -> bytes:
    """A message as sealed JSON: any changed byte is found by :func:`decode`."""
    kind = next(k for k, cls in _KINDS.items() if isinstance(message, cls))
    body = json.dumps({"kind": kind, **asdict(message)}, separators=(",", ":")).encode()
    return b"%08x" % zlib.crc32(body) + body


def decode(data: bytes) -> Message:
    """The message. Raises SyncError if it is not what :func:`encode` wrote."""
    seal, body = data[:8], data[8:]
    if seal != b"%08x" % zlib.crc32(body):
        raise SyncError(
            f"the header of a bucket was damaged on the way: its seal is {seal!r}, and "
            f"{b'%08x' % zlib.crc32(body)!r} fits the {len(body)} bytes that came; push again"
        )
    fields: dict[str, Any] = json.loads(body)
    kind = _KINDS[fields.pop("kind")]
    if kind is Bucket:
        entries = fields.pop("entries")
        made = tuple(BucketEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in entries)
        return Bucket(**fields, entries=made)
    return kind(**fields)


class WeightTransfer(Protocol):
    """One weight transfer as a receiver sees it."""

    version: int
    num_bytes: int
    """Bytes of tensors given out so far."""
    num_buckets: int

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate once over (name, tensor), each verified before it is given out and valid until
        the next one. Raises SyncError unless everything came as it was sent."""
        ...


class WeightSource(Protocol):
    """The receiving end of weight transfers."""

    def open(self, version: int | None = None) -> AbstractContextManager[WeightTransfer]:
        """Wait for the next transfer, and load it in the block.

        The end of the block tells the sender how it went: an exception refuses the transfer.
        Raises SyncError if none begins in time, or if it is not of ``version``.
        """
        ...

    def close(self) -> None:
        """Leave the connection."""
        ...


@contextmanager
def mismatch_at(where: str) -> Iterator[None]:
    """Raise the ValueError of a :class:`~burnish.rollout.weights.WeightNameCheck` as a
    WeightMismatchError that begins with ``where``."""
    try:
        yield
    except ValueError as error:
        raise WeightMismatchError(f"{where}: {error}") from error


def sync_metrics(version: int, num_bytes: int, *, buckets: int, seconds: float) -> Metrics:
    """``sync/version``, ``sync/bytes``, ``sync/buckets``, ``sync/seconds``,
    ``sync/bytes_per_s``."""
    return {
        "sync/version": float(version),
        "sync/bytes": float(num_bytes),
        "sync/buckets": float(buckets),
        "sync/seconds": seconds,
        "sync/bytes_per_s": num_bytes / seconds if seconds > 0 else 0.0,
    }
