"""Messages and interfaces of weight transfers between a trainer and rollout engines in other
processes.

A weight transfer (a *push*) has a version and consists of buckets and an end. A bucket is a header
and a payload; the header contains the entries of its tensors, in order, and the checksum of the
payload. The receiver compares checksum, order, names and shapes before it yields a tensor to its
engine. At the end it checks that nothing is missing. Any mismatch raises :class:`SyncError` with
the expected and the received value.

Reading order of this package:

- base, checksum
- buckets (tensors to messages), source (messages to tensors)
- engine (the two ends: :class:`~burnish.sync.engine.WeightSender` and
  :class:`~burnish.sync.engine.SyncedEngine`)
- channel (small messages), links
- one file per transport: collective, ipc, disk, snapshot
- connect, which selects one of them
- inproc, for a rollout engine in the trainer's process
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
    """A weight transfer failed. The message contains the expected value, the received value, and a
    suggested fix."""


class WeightMismatchError(SyncError, ValueError):
    """A complete transfer does not match the weights of the rollout model."""


class LinkError(SyncError):
    """The link timed out, or the connection is lost."""


class InvalidWeightsError(SyncError):
    """A rollout engine was asked to sample while its weights are invalid."""


@dataclass(frozen=True)
class BucketEntry:
    """A tensor inside a bucket, or one part of a tensor that is larger than a bucket."""

    name: str
    shape: Shape
    """Shape of the full tensor; () for a scalar."""
    dtype: str
    """Name of the torch dtype, such as ``bfloat16`` or ``float32``."""
    offset: int
    """Offset in the bucket, in bytes; a multiple of 16."""
    begin: int
    """Offset in the tensor, in bytes; above 0 if an earlier bucket contains the part before."""
    num_bytes: int
    """Number of bytes in this bucket; 0 for a tensor without elements."""


@dataclass(frozen=True)
class Bucket:
    """The header of one bucket."""

    push: int
    """Number of the transfer within its sender, from 0. It distinguishes leftover messages of a
    failed transfer from those of the next."""
    version: int
    """Number of optimizer steps applied to the weights."""
    index: int
    """Number of buckets of this transfer before this one."""
    num_bytes: int
    checksum: str
    """``kind:digest`` of the bytes (``checksum.py``); empty if checksums are disabled."""
    entries: tuple[BucketEntry, ...]


@dataclass(frozen=True)
class End:
    """Last message of a transfer: everything was sent."""

    push: int
    version: int
    num_buckets: int
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True)
class Abort:
    """Last message of a transfer that the sender aborted."""

    push: int
    version: int
    reason: str


Message = Bucket | End | Abort
_KINDS: dict[str, type[Message]] = {"bucket": Bucket, "end": End, "abort": Abort}


def encode(message: Message) -> bytes:
    """Encode a message as JSON with a CRC-32; :func:`decode` detects any changed byte."""
    kind = next(k for k, cls in _KINDS.items() if isinstance(message, cls))
    body = json.dumps({"kind": kind, **asdict(message)}, separators=(",", ":")).encode()
    return b"%08x" % zlib.crc32(body) + body


def decode(data: bytes) -> Message:
    """Decode a message. Raises SyncError if it is not the output of :func:`encode`."""
    seal, body = data[:8], data[8:]
    if seal != b"%08x" % zlib.crc32(body):
        raise SyncError(
            f"the header of a bucket was corrupted: its CRC-32 is {seal!r}, but its {len(body)} "
            f"bytes have {b'%08x' % zlib.crc32(body)!r}; push again"
        )
    fields: dict[str, Any] = json.loads(body)
    kind = _KINDS[fields.pop("kind")]
    if kind is Bucket:
        entries = fields.pop("entries")
        decoded = tuple(
            BucketEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in entries
        )
        return Bucket(**fields, entries=decoded)
    return kind(**fields)


class WeightTransfer(Protocol):
    """One weight transfer on the receiver's side."""

    version: int
    num_bytes: int
    """Number of bytes of tensors yielded so far."""
    num_buckets: int

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) once. Each tensor is verified first and valid until the next one.
        Raises SyncError if anything is missing, damaged or out of order."""
        ...


class WeightSource(Protocol):
    """The receiving end of weight transfers."""

    def open(self, version: int | None = None) -> AbstractContextManager[WeightTransfer]:
        """Wait for the next transfer; load it within the block.

        When the block ends, the result is reported to the sender; an exception refuses the
        transfer. Raises SyncError if no transfer begins in time, or if it is not of ``version``.
        """
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


@contextmanager
def mismatch_at(where: str) -> Iterator[None]:
    """Convert the ValueError of a :class:`~burnish.rollout.weights.WeightNameCheck` to a
    WeightMismatchError that begins with ``where``."""
    try:
        yield
    except ValueError as error:
        raise WeightMismatchError(f"{where}: {error}") from error


def sync_metrics(version: int, num_bytes: int, *, buckets: int, seconds: float) -> Metrics:
    """Return ``sync/version``, ``sync/bytes``, ``sync/buckets``, ``sync/seconds`` and
    ``sync/bytes_per_s``."""
    return {
        "sync/version": float(version),
        "sync/bytes": float(num_bytes),
        "sync/buckets": float(buckets),
        "sync/seconds": seconds,
        "sync/bytes_per_s": num_bytes / seconds if seconds > 0 else 0.0,
    }
