"""Hand-overs that somebody else keeps and carries, bucket by bucket, in a store of objects.

The sender makes them (``engine.messages``), the carrier keeps headers and bytes apart (on Ray: the
controller has the headers, the object store the bytes), and every receiver gets them when it is
told to. So nobody has to be there at the same time, and a receiver that starts anew is given what
the others have. What is in a bucket is checked as on every other way.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from burnish.sync.base import Bucket, End, LinkError, Message, SyncError, decode

P = TypeVar("P")


@dataclass(frozen=True)
class WeightSnapshot(Generic[P]):
    """One hand-over, kept."""

    headers: tuple[bytes, ...]
    """Encoded messages: the buckets', in order, and the end's."""
    payloads: tuple[P, ...]
    """The bytes of each bucket, or where they are."""

    @property
    def end(self) -> End:
        """The last message. Raises SyncError where it is another."""
        message = decode(self.headers[-1])
        if not isinstance(message, End):
            raise SyncError(f"the hand-over has no end: its last header is {message}")
        return message


class SnapshotLink:
    """Gives out what it was filled with. Implements :class:`burnish.sync.base.ReceiveLink`."""

    def __init__(self) -> None:
        self._headers: deque[bytes] = deque()
        self._payloads: deque[Any] = deque()
        self._given = 0
        self.answers: list[tuple[int, str | None]] = []
        """(push, problem) of every hand-over that was closed."""

    def fill(self, headers: Sequence[bytes], payloads: Sequence[np.ndarray[Any, Any]]) -> None:
        """The next hand-over; what is left of an earlier one is forgotten. Arrays are read and
        never written, so they may be shared memory that is read-only."""
        self._headers, self._payloads, self._given = deque(headers), deque(payloads), 0

    def receive(self) -> tuple[Message, Tensor | None]:
        """The next message and its bytes. Raises LinkError where there is none."""
        if not self._headers:
            raise LinkError(
                f"the hand-over stops after {self._given} messages, without an end; push again"
            )
        self._given += 1
        message = decode(self._headers.popleft())
        if not isinstance(message, Bucket):
            return message, None
        if not self._payloads:
            raise LinkError(f"the bytes of bucket {message.index} did not come; push again")
        return message, _as_tensor(self._payloads.popleft())

    def look_ahead(self) -> None:
        """Nothing: all is here."""

    def answer(self, push: int, problem: str | None) -> None:
        """Keep how it went; who filled the link is told by what ``receive`` of the engine does."""
        self.answers = [(push, problem)]

    def close(self) -> None:
        """Forget what is left."""
        self.fill((), ())


def _as_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # read-only memory, which is only read
        return torch.from_numpy(array)
