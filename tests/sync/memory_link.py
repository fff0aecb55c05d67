"""A link inside one process, for tests: a list of messages and copies of their bytes."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from burnish.sync.base import Abort, Bucket, End, LinkError, Message, decode, encode


class MemoryLink:
    """Both ends of a link. Buffers are overwritten when their turn comes, as in a real one."""

    def __init__(self, bucket_bytes: int) -> None:
        self._buffers = [torch.zeros(bucket_bytes, dtype=torch.uint8) for _ in "ab"]
        self._turn = 0
        self.sent: deque[tuple[bytes, Tensor | None]] = deque()
        self.answers: list[tuple[int, str | None]] = []
        self.closed = False
        self._given: Tensor | None = None

    def buffer(self) -> Tensor:
        self._turn = 1 - self._turn
        return self._buffers[self._turn]

    def send(self, bucket: Bucket, payload: Tensor) -> None:
        self.sent.append((encode(bucket), payload.clone()))

    def finish(self, message: End | Abort) -> None:
        self.sent.append((encode(message), None))

    def receive(self) -> tuple[Message, Tensor | None]:
        if self._given is not None:
            self._given.fill_(255)  # what was given out before is good no more
        if not self.sent:
            raise LinkError("nothing more came")
        header, self._given = self.sent.popleft()
        return decode(header), self._given

    def look_ahead(self) -> None:
        pass

    def answer(self, push: int, problem: str | None) -> None:
        self.answers.append((push, problem))

    def close(self) -> None:
        self.closed = True


class Weights:
    """All that a sender needs of a train engine."""

    def __init__(self, weights: dict[str, Tensor], version: int = 3) -> None:
        self.own, self.version = weights, version

    def weights(self):
        yield from self.own.items()
