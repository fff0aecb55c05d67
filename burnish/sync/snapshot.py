"""Snapshots of a policy's weights, bucket by bucket, in a store of objects.

The sender makes them (``buckets.messages``), the runtime keeps headers and bytes apart (on Ray: the
controller has the headers, the object store the bytes), and every receiver reads them when asked
to. So sender and receivers need not be there at the same time, and a receiver that starts later
reads what the others have. Buckets are checked as in every other transfer.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, Unpack

import numpy as np
import torch
from torch import Tensor

from burnish.sync.base import Bucket, End, LinkError, Message, SyncError, decode
from burnish.sync.source import BucketSource, Checks

P = TypeVar("P")


@dataclass(frozen=True)
class WeightSnapshot(Generic[P]):
    """One transfer, kept."""

    headers: tuple[bytes, ...]
    """Encoded messages: the buckets', in order, and the end's."""
    payloads: tuple[P, ...]
    """The bytes of each bucket, or where they are."""

    @property
    def end(self) -> End:
        """The last message. Raises SyncError if it is another."""
        message = decode(self.headers[-1])
        if not isinstance(message, End):
            raise SyncError(f"the transfer has no end: its last header is {message}")
        return message


class SnapshotSource(BucketSource):
    """Reads one snapshot, once. Arrays are read and never written, so they may be shared memory
    that is read-only; each is released when the next one is read."""

    def __init__(
        self,
        headers: Iterable[bytes] = (),
        payloads: Iterable[np.ndarray[Any, Any]] = (),
        **checks: Unpack[Checks],
    ) -> None:
        super().__init__(**checks)
        self._headers, self._payloads, self._given = deque(headers), deque(payloads), 0

    def next_message(self) -> tuple[Message, Tensor | None]:
        """Return the next message and its bytes. Raises LinkError if there is none."""
        if not self._headers:
            raise LinkError(
                f"the transfer stops after {self._given} messages, without an end; push again"
            )
        self._given += 1
        message = decode(self._headers.popleft())
        if not isinstance(message, Bucket):
            return message, None
        if not self._payloads:
            raise LinkError(f"the bytes of bucket {message.index} did not come; push again")
        return message, _as_tensor(self._payloads.popleft())

    def answer(self, push: int, problem: str | None) -> None:
        """Do nothing: the engine's ``receive`` raises the problem in its caller."""

    def close(self) -> None:
        """Release what is left."""
        self._headers.clear()
        self._payloads.clear()


def _as_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # read-only memory, which is only read
        return torch.from_numpy(array)
