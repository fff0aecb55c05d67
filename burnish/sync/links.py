"""Shared base of connections over a channel: two alternating buffers, a header per bucket, and
answers at the end.

``collective.py`` and ``ipc.py`` implement the transport of the bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from burnish.sync.base import (
    Abort,
    Bucket,
    End,
    LinkError,
    Message,
    SyncError,
    decode,
    encode,
)
from burnish.sync.channel import Channel
from burnish.sync.source import BucketSource


class ChannelSender(ABC):
    """The sender's end of a connection to all receivers. It sends buckets from two buffers in
    turn."""

    def __init__(self, channel: Channel, buffers: Sequence[Tensor]) -> None:
        self.channel, self._buffers, self._turn = channel, buffers, 0
        self._dead: str | None = None

    def buffer(self) -> Tensor:
        """Return the next uint8 [bucket_bytes] to fill, once all receivers have finished with its
        previous contents."""
        self._check_alive()
        self._turn = 1 - self._turn
        self._wait_free(self._turn)
        return self._buffers[self._turn]

    def send(self, bucket: Bucket, payload: Tensor) -> None:
        """Start to send ``payload``, a prefix of the buffer returned last. Raises LinkError if the
        connection is closed or lost."""
        self._check_alive()
        places = [buffer.data_ptr() for buffer in self._buffers]
        place = payload.data_ptr()  # 0 if only tensors without elements are in the bucket
        slot = places.index(place) if place in places else self._turn
        self._before(payload)
        data = b"%d %d " % (payload.numel(), slot) + encode(bucket)
        self._after(slot, payload, self.channel.post(data))

    def finish(self, message: End | Abort) -> None:
        """Send the last message and wait for the receivers' answers (not after an Abort).

        Raises SyncError with the answer of each receiver that refused. Raises LinkError with the
        names of those that did not answer in time.
        """
        self._check_alive()
        self.channel.post(b"0 0 " + encode(message))
        if isinstance(message, Abort):
            return
        for slot in range(len(self._buffers)):
            self._wait_free(slot)
        refused = self.channel.answers(message.push)
        self.channel.forget_messages()
        if refused:
            reasons = "; ".join(f"{self.channel.who(r)}: {text}" for r, text in refused.items())
            raise SyncError(
                f"{len(refused)} of {len(self.channel.receivers)} receivers rejected version "
                f"{message.version} and will not sample until a transfer succeeds: {reasons}"
            )

    def close(self) -> None:
        """Close the connection."""
        self._dead = self._dead or "it was closed in this process"

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise LinkError(
                f"connection {self.channel.name!r} is no longer usable: {self._dead}; make a new "
                "one on both sides"
            )

    @abstractmethod
    def _before(self, payload: Tensor) -> None:
        """Prepare a payload before its header is posted."""

    @abstractmethod
    def _after(self, slot: int, payload: Tensor, number: int) -> None:
        """Start to send the bytes, after message ``number`` with their header was posted."""

    @abstractmethod
    def _wait_free(self, slot: int) -> None:
        """Wait until all receivers have finished with a buffer. Raises LinkError after a
        timeout."""


class ChannelSource(BucketSource):
    """Source that receives the messages of a :class:`ChannelSender`."""

    channel: Channel

    def next_message(self) -> tuple[Message, Tensor | None]:
        """Wait for the next message and its bytes."""
        header, payload = self._receive()
        message = decode(header)  # after receiving the bytes, so that the next message is aligned
        return message, payload if isinstance(message, Bucket) else None

    def answer(self, push: int, problem: str | None) -> None:
        """Report the result of the transfer to the sender."""
        self.channel.answer(push, problem)

    @abstractmethod
    def _receive(self) -> tuple[bytes, Tensor]:
        """Wait for the next header and its bytes."""


def split_frame(data: bytes) -> tuple[int, int, bytes]:
    """Return (bytes of the payload, index of its buffer, header) of a posted message."""
    num_bytes, slot, header = data.split(b" ", 2)
    return int(num_bytes), int(slot), header
