"""Weight transfer by broadcast, in a torch.distributed group of the trainer's rank 0 and all
rollout workers.

The group is independent of any default group, so processes of different worlds can join. It uses
gloo for CPU buffers and NCCL for CUDA buffers (not run: no GPU was available). Headers, marks and
answers go through a store (``channel.py``). Only bytes of weights are broadcast.

Two buckets are in flight at a time. While one is sent, the next one is gathered, converted and
packed. A receiver receives the next bucket while it verifies and loads the previous one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from burnish.sync.base import LinkError
from burnish.sync.channel import Channel
from burnish.sync.links import ChannelSender, ChannelSource, split_frame
from burnish.sync.source import Checks


class CollectiveSender(ChannelSender):
    """Sender: rank 0 of the group. Must be created at the same time as the receivers: waits until
    all have joined."""

    def __init__(
        self, channel: Channel, *, bucket_bytes: int, device: torch.device | str = "cpu"
    ) -> None:
        """Raises LinkError with the names of the receivers that did not join in time."""
        self._group = _Group(channel, torch.device(device))
        super().__init__(
            channel, [torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in "ab"]
        )
        self._works: list[list[tuple[int, Any]]] = [[], []]

    def close(self) -> None:
        """Shut down the group; receivers then lose the connection."""
        super().close()
        self._group.close()

    def _before(self, payload: Tensor) -> None:
        """Do nothing: a broadcast waits for the work that fills its buffer."""

    def _after(self, slot: int, payload: Tensor, number: int) -> None:
        if payload.numel():
            self._works[slot].append((number, self._group.broadcast(payload)))

    def _wait_free(self, slot: int) -> None:
        while self._works[slot]:
            number, work = self._works[slot][0]
            try:
                self._group.wait(work)
            except RuntimeError as error:
                self._dead = f"a broadcast failed: {error}"
                late = [
                    r for r in self.channel.receivers if not self.channel.has(f"done/{number}/{r}")
                ]
                names = ", ".join(self.channel.who(r) for r in late) or "all receivers"
                raise LinkError(
                    f"a bucket did not reach {names} within {self.channel.timeout_s:g} s "
                    f"({error}); check whether that process is running, then make a new "
                    "connection"
                ) from error
            self._works[slot].pop(0)


class CollectiveSource(ChannelSource):
    """Source: one of the other ranks of the group."""

    def __init__(
        self, channel: Channel, *, device: torch.device | str = "cpu", **checks: Unpack[Checks]
    ) -> None:
        """Raises LinkError with the names of the processes that did not join in time."""
        super().__init__(**checks)
        self.channel, self._device = channel, torch.device(device)
        self._group = _Group(channel, self._device)
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in "ab"]
        self._turn = 0
        self._ahead: Callable[[], tuple[bytes, Tensor]] | None = None
        self._dead: str | None = None

    def close(self) -> None:
        """Leave the group."""
        self._dead = self._dead or "it was closed in this process"
        self._group.close()

    def prefetch(self) -> None:
        """Start to receive the next bucket if its header has arrived. It is received into the
        buffer whose contents are no longer in use."""
        if self._ahead is None and self._dead is None and self.channel.peek():
            self._ahead = self._start()

    def _receive(self) -> tuple[bytes, Tensor]:
        if self._dead is not None:
            raise LinkError(
                f"connection {self.channel.name!r} is no longer usable: {self._dead}; make a new "
                "one on both sides"
            )
        finish = self._ahead or self._start()
        self._ahead = None
        taken = finish()
        self.prefetch()
        return taken

    def _start(self) -> Callable[[], tuple[bytes, Tensor]]:
        """Read a header and start to receive its bytes; return a function that waits for them."""
        number, data = self.channel.next()
        num_bytes, _, header = split_frame(data)
        self._turn = 1 - self._turn
        if self._buffers[self._turn].numel() < num_bytes:
            self._buffers[self._turn] = torch.empty(
                num_bytes, dtype=torch.uint8, device=self._device
            )
        payload = self._buffers[self._turn][:num_bytes]
        work = self._group.broadcast(payload) if num_bytes else None

        def finish() -> tuple[bytes, Tensor]:
            try:
                if work is not None:
                    self._group.wait(work)
            except RuntimeError as error:
                self._dead = f"a broadcast failed: {error}"
                raise LinkError(
                    f"{num_bytes} announced bytes did not arrive within "
                    f"{self.channel.timeout_s:g} s ({error}); check whether the sender is "
                    "running, then make a new connection"
                ) from error
            self.channel.mark(number)
            return header, payload

        return finish


class _Group:
    """A dedicated process group and its only operation, broadcast."""

    def __init__(self, channel: Channel, device: torch.device) -> None:
        channel.rendezvous()
        self._channel, self._on_cpu = channel, device.type != "cuda"
        size, limit = len(channel.receivers) + 1, timedelta(seconds=channel.timeout_s)
        store = dist.PrefixStore("group", channel.store)  # type: ignore[attr-defined]
        self._group: Any
        if self._on_cpu:
            self._group = dist.ProcessGroupGloo(store, channel.rank, size, limit)
        else:  # not run
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = dist.ProcessGroupNCCL(store, channel.rank, size, options)
        self._options = dist.BroadcastOptions()
        self._options.rootRank = self._options.rootTensor = 0

    def broadcast(self, payload: Tensor) -> Any:
        """Start to send (rank 0) or receive (other ranks) a tensor; return a handle for
        :meth:`wait`."""
        try:
            return self._group.broadcast([payload], self._options)
        except RuntimeError as error:
            raise LinkError(f"a broadcast could not be started: {error}") from error

    def wait(self, work: Any) -> None:
        """Wait until a broadcast is complete. Raises RuntimeError if it fails or times out.

        On CUDA, the current stream waits for the broadcast; the host does not.
        """
        if self._on_cpu:
            work.wait(timedelta(seconds=self._channel.timeout_s))
        else:
            work.wait()

    def close(self) -> None:
        """Close the connections. May be called twice."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError):
                group.shutdown()
