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
from concurrent.futures import Future, wait
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from burnish.sync.base import LinkError
from burnish.sync.channel import LOOK_S, Channel
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
            except LinkError as error:
                raise self._lost(str(error)) from error
            except RuntimeError as error:
                late = [
                    r for r in self.channel.receivers if not self.channel.has(f"done/{number}/{r}")
                ]
                names = ", ".join(self.channel.who(r) for r in late) or "all receivers"
                raise self._lost(f"a bucket did not reach {names} ({error})") from error
            self._works[slot].pop(0)

    def _lost(self, reason: str) -> LinkError:
        """Return the error of a failed broadcast, after ending the connection of all processes."""
        self.channel.end(reason)
        self._dead, self._works = f"a broadcast failed: {reason}", [[], []]
        self._group.close()
        return LinkError(f"{reason}; check that process and its log, then make a new connection")


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
                self._group.close()
                if isinstance(error, LinkError):
                    raise
                reason = f"{num_bytes} announced bytes did not arrive ({error})"
                self.channel.end(f"{self.channel.who(self.channel.rank)}: {reason}")
                raise LinkError(
                    f"{reason}; check whether the sender is running, then make a new connection"
                ) from error
            self.channel.mark(number)
            return header, payload

        return finish


def _connected(channel: Channel, *, on_cpu: bool) -> Any:
    """Return a new process group. Raises LinkError if the connection is ended meanwhile.

    A gloo group connects in a thread, with its own connection to the store, because it may wait for
    a process that was lost after the rendezvous. A NCCL group connects in its first broadcast.
    """
    size, limit = len(channel.receivers) + 1, timedelta(seconds=channel.timeout_s)
    store = dist.PrefixStore("group", channel.store.clone())  # type: ignore[attr-defined]
    if not on_cpu:  # not run
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, channel.rank, size, options)
    group: Future[Any] = Future()

    def connect() -> None:
        try:
            group.set_result(dist.ProcessGroupGloo(store, channel.rank, size, limit))
        except Exception as error:
            group.set_exception(error)

    Thread(target=connect, name="burnish-connect", daemon=True).start()
    while not wait([group], timeout=LOOK_S).done:
        channel.check_not_ended()
    try:
        return group.result()
    except RuntimeError as error:
        raise LinkError(f"connection {channel.name!r} was not made: {error}") from error


class _Group:
    """A dedicated process group and its only operation, broadcast."""

    def __init__(self, channel: Channel, device: torch.device) -> None:
        channel.rendezvous()
        self._channel, self._on_cpu = channel, device.type != "cuda"
        self._group: Any = _connected(channel, on_cpu=self._on_cpu)
        self._open: list[Any] = []
        """Broadcasts that may be in progress (on the CPU)."""
        self._options = dist.BroadcastOptions()
        self._options.rootRank = self._options.rootTensor = 0

    def broadcast(self, payload: Tensor) -> Any:
        """Start to send (rank 0) or receive (other ranks) a tensor; return a handle for
        :meth:`wait`."""
        try:
            work = self._group.broadcast([payload], self._options)
        except RuntimeError as error:
            raise LinkError(f"a broadcast could not be started: {error}") from error
        if self._on_cpu:
            self._open = [work, *(other for other in self._open if not other.is_completed())]
        return work

    def wait(self, work: Any) -> None:
        """Wait until a broadcast is complete. Raises RuntimeError if it fails or times out, or if
        the connection is ended.

        On CUDA, the current stream waits for the broadcast; the host does not.
        """
        if not self._on_cpu:
            work.wait()
            return
        for part_s in self._channel.parts_s():
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=part_s))
            if work.is_completed():
                work.wait()  # raises its error
                return
            self._channel.check_not_ended()
        raise RuntimeError(f"not within {self._channel.timeout_s:g} s")

    def close(self) -> None:
        """Close the connections. May be called twice.

        A gloo group cannot be destroyed while a broadcast is in progress: that would block the
        interpreter until the group's timeout. Such a group is kept until a later call.
        """
        _UNFINISHED[:] = [group for group in _UNFINISHED if group.is_busy]
        if self.is_busy:
            _UNFINISHED[:] = {*_UNFINISHED, self}
            return
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError):
                group.shutdown()

    @property
    def is_busy(self) -> bool:
        """Return whether a broadcast is in progress."""
        return any(not work.is_completed() for work in self._open)


_UNFINISHED: list[_Group] = []
"""Closed groups whose last broadcasts were in progress."""
