"""Snapshots of a policy's weights, bucket by bucket, in an object store.

The sender creates them (``buckets.messages``). The runtime stores headers and bytes separately (on
Ray: headers in the controller, bytes in the object store). Every receiver reads them on request.
Sender and receivers therefore need not run at the same time, and a receiver that starts later reads
the same data. Buckets are verified as in every other transfer.
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
    """One stored transfer."""

    headers: tuple[bytes, ...]
    """Encoded messages: those of the buckets, in order, then the end."""
    payloads: tuple[P, ...]
    """The bytes of each bucket, or references to them."""

    @property
    def end(self) -> End:
        """Return the last message. Raises SyncError if it is not an end."""
        message = decode(self.headers[-1])
        if not isinstance(message, End):
            raise SyncError(f"the transfer is incomplete: its last header is {message}")
        return message


class SnapshotSource(BucketSource):
    """Source that reads one snapshot, once. Arrays are never written, so they may be read-only
    shared memory. An iterator of them is advanced for each bucket."""

    def __init__(
        self,
        headers: Iterable[bytes] = (),
        payloads: Iterable[np.ndarray[Any, Any]] = (),
        **checks: Unpack[Checks],
    ) -> None:
        super().__init__(**checks)
        self._headers, self._payloads, self._given = deque(headers), iter(payloads), 0

    def next_message(self) -> tuple[Message, Tensor | None]:
        """Return the next message and its bytes. Raises LinkError if there is none."""
        if not self._headers:
            raise LinkError(f"the transfer has no end after {self._given} messages; push again")
        self._given += 1
        message = decode(self._headers.popleft())
        if not isinstance(message, Bucket):
            return message, None
        payload = next(self._payloads, None)
        if payload is None:
            raise LinkError(f"the bytes of bucket {message.index} are missing; push again")
        return message, _as_tensor(payload)

    def answer(self, push: int, problem: str | None) -> None:
        """Do nothing: the engine's ``receive`` raises the problem in its caller."""

    def close(self) -> None:
        """Release the remaining messages."""
        self._headers.clear()
        self._payloads = iter(())


def _as_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the memory is read-only and never written
        return torch.from_numpy(array)
