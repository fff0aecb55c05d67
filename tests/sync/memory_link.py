"""A link inside one process, for tests: a list of messages and copies of their bytes."""

from __future__ import annotations

from collections import deque
from typing import Unpack

import torch
from torch import Tensor

from burnish.sync.base import Abort, Bucket, End, LinkError, Message, decode, encode
from burnish.sync.source import BucketSource, Checks


class MemoryLink:
    """The sender's end. Buffers are overwritten when their turn comes, as in a real one."""

    def __init__(self, bucket_bytes: int) -> None:
        self._buffers = [torch.zeros(bucket_bytes, dtype=torch.uint8) for _ in "ab"]
        self._turn = 0
        self.sent: deque[tuple[bytes, Tensor | None]] = deque()
        self.answers: list[tuple[int, str | None]] = []
        self.closed = False

    def buffer(self) -> Tensor:
        self._turn = 1 - self._turn
        return self._buffers[self._turn]

    def send(self, bucket: Bucket, payload: Tensor) -> None:
        self.sent.append((encode(bucket), payload.clone()))

    def finish(self, message: End | Abort) -> None:
        self.sent.append((encode(message), None))

    def close(self) -> None:
        self.closed = True

    def source(self, **checks: Unpack[Checks]) -> MemorySource:
        """A receiver's end."""
        return MemorySource(self, **checks)


class MemorySource(BucketSource):
    """Reads what was sent over a link."""

    def __init__(self, link: MemoryLink, **checks: Unpack[Checks]) -> None:
        super().__init__(**checks)
        self._link = link
        self._given: Tensor | None = None

    def next_message(self) -> tuple[Message, Tensor | None]:
        if self._given is not None:
            self._given.fill_(255)  # what was given out before is good no more
        if not self._link.sent:
            raise LinkError("nothing more came")
        header, self._given = self._link.sent.popleft()
        return decode(header), self._given

    def answer(self, push: int, problem: str | None) -> None:
        self._link.answers.append((push, problem))

    def close(self) -> None:
        pass


class Weights:
    """All that a sender needs of a train engine."""

    def __init__(self, weights: dict[str, Tensor], version: int = 3) -> None:
        self.own, self.version = weights, version

    def weights(self):
        yield from self.own.items()
