"""What travels when a trainer hands its weights to rollout engines in other processes, and who says
what.

A hand-over (a *push*) has a version and is a row of buckets and an end. A bucket is some bytes and
a header that says which tensors they are, in which order, and what their checksum is. The receiver
computes the checksum over what came, checks order, names and shapes, and only then gives a tensor
to its engine; at the end it checks that nothing is missing. Whatever does not fit is a
:class:`SyncError` that says what was expected and what came.

Reading order of this package: base, checksum, buckets (tensors <-> buckets), engine (the two ends:
:class:`~burnish.sync.engine.WeightSender` and :class:`~burnish.sync.engine.SyncedEngine`), store
(small messages), links, then one file per way that bytes go: collective, ipc, disk; connect, which
chooses among them; and inproc, where none go.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from torch import Tensor

from burnish.errors import BurnishError

Metrics = dict[str, float]
Shape = tuple[int, ...]


class SyncError(BurnishError, RuntimeError):
    """Weights did not get over whole. Says what was expected, what came, and what to do."""


class WeightMismatchError(SyncError, ValueError):
    """What came whole is not the weights of the rollout model."""


class LinkError(SyncError):
    """Nothing more comes over this link for now: the other side is silent, or the connection is
    gone."""


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
    """Number of the hand-over among those of its sender, from 0, so that what a broken one left on
    the way is not taken for the next."""
    version: int
    """Optimizer steps the weights have taken."""
    index: int
    """Buckets of this hand-over before this one."""
    num_bytes: int
    checksum: str
    """``kind:digest`` of the bytes (``checksum.py``); empty where nobody verifies."""
    entries: tuple[BucketEntry, ...]


@dataclass(frozen=True)
class End:
    """All of one hand-over was sent."""

    push: int
    version: int
    num_buckets: int
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True)
class Abort:
    """The sender gave up in the middle of a hand-over."""

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
    """The message. Raises SyncError where it is not what :func:`encode` wrote."""
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


class SendLink(Protocol):
    """The sender's end of a connection to all receivers."""

    def buffer(self) -> Tensor:
        """uint8 [bucket_bytes] to be filled next; waits until nobody reads what was sent from it.
        Two take turns."""
        ...

    def send(self, bucket: Bucket, payload: Tensor) -> None:
        """Start to send the first bytes of the buffer given last. Raises LinkError."""
        ...

    def finish(self, message: End | Abort) -> None:
        """Say that this was all, and wait for the receivers' answers (not after an Abort).

        Raises SyncError with what each receiver that refused said, and LinkError with the names of
        those that said nothing in time.
        """
        ...

    def close(self) -> None:
        """Leave the connection. Nothing can be sent afterwards."""
        ...


class ReceiveLink(Protocol):
    """One receiver's end of a connection."""

    def receive(self) -> tuple[Message, Tensor | None]:
        """The next message, with uint8 [num_bytes] if it is a bucket; good until the next call.

        Raises LinkError where nothing comes in time, SyncError for a header that was damaged.
        """
        ...

    def look_ahead(self) -> None:
        """Let the next bucket come in meanwhile, if it has been announced. Does not wait."""
        ...

    def answer(self, push: int, problem: str | None) -> None:
        """Tell the sender how a hand-over went; None: accepted."""
        ...

    def close(self) -> None:
        """Leave the connection."""
        ...


class Incoming(Protocol):
    """One hand-over as a receiver sees it: iterate once, then close."""

    version: int
    num_bytes: int
    """Bytes of tensors given out so far."""
    num_buckets: int

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor), each verified before it is given out; a tensor is good until the next.
        Ends only where all was right; raises SyncError otherwise."""
        ...

    def close(self, problem: str | None) -> None:
        """Let the sender know how it went, and leave nothing of this hand-over on the way."""
        ...


class Receiver(Protocol):
    """Where a rollout engine's weights come from."""

    def open(self, version: int | None) -> Incoming:
        """Wait for a hand-over to begin. Raises SyncError where none comes in time, and where it is
        not of ``version``."""
        ...

    def close(self) -> None:
        """Leave the connection."""
        ...


class NameCheck:
    """Every weight of a model exactly once, each in its shape."""

    def __init__(self, expected: Mapping[str, Shape] | None) -> None:
        self._expected = expected
        self.given: dict[str, Shape] = {}
        """What came so far, in order."""

    def add(self, name: str, shape: Shape, where: str) -> None:
        """Raises WeightMismatchError, beginning with ``where``, for a name that is unknown or came
        before, and for another shape."""
        if name in self.given:
            raise WeightMismatchError(
                f"{where}: weight {name} was given before, and each is to come once; the sender's "
                "weights() repeats it, or a bucket was sent twice"
            )
        if self._expected is not None and name not in self._expected:
            raise WeightMismatchError(
                f"{where}: weight {name} is not one of the {len(self._expected)} weights of the "
                "rollout model; trainer and rollout engine must be of one model"
            )
        if self._expected is not None and self._expected[name] != shape:
            raise WeightMismatchError(
                f"{where}: weight {name} is {list(shape)}, the rollout model has "
                f"{list(self._expected[name])}; trainer and rollout engine must be of one model"
            )
        self.given[name] = shape

    def complete(self, where: str) -> None:
        """Raises WeightMismatchError where a weight has not come."""
        missing = [n for n in self._expected or () if n not in self.given]
        if missing:
            raise WeightMismatchError(
                f"{where}: {len(missing)} of {len(self._expected or ())} weights did not come, "
                f"e.g. {missing[0]}: they would be stale"
            )


def transfer_metrics(incoming: Incoming, seconds: float) -> Metrics:
    """What a hand-over cost, as metrics."""
    return sync_metrics(
        incoming.version, incoming.num_bytes, buckets=incoming.num_buckets, seconds=seconds
    )


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
