"""Retries of clients: one record per call, however often a client sends it.

SDKs repeat a request after an error, a timeout or a lost connection. A repetition must not sample a
second response. Equal requests that are sent side by side, with both clients connected, are no
repetitions: an agent may sample several responses to one prompt.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from burnish.agents.calls import ModelReply


@dataclass(eq=False)
class _Work:
    """A call that is being answered, and the number of clients that wait for it."""

    task: asyncio.Task[ModelReply]
    clients: int = 0
    is_answered: bool = False
    """True once a client has the reply."""


class Retries:
    """Running calls and finished replies of one episode, by the digest of the request's body."""

    def __init__(self) -> None:
        self._running: dict[bytes, _Work] = {}
        self._open: set[_Work] = set()
        self._replies: dict[bytes, ModelReply] = {}
        self._undelivered: dict[bytes, ModelReply] = {}
        self._left: Counter[bytes] = Counter()
        """Calls that were canceled because their clients left, and that were not sent again."""

    def finished(self, digest: bytes, *, is_retry: bool) -> ModelReply | None:
        """Return the reply that a request must get again; None if it is a call of its own.

        That is the reply of an equal request whose client was gone, and for a retry the last reply
        to an equal request. The retry of a canceled call is a call of its own.
        """
        if (lost := self._undelivered.pop(digest, None)) is not None:
            return lost
        return self._replies.get(digest) if is_retry and not self._left[digest] else None

    def undelivered(self, digest: bytes, reply: ModelReply) -> None:
        """Keep a reply whose client was gone before it could be sent."""
        self._undelivered[digest] = reply

    async def run(
        self,
        digest: bytes,
        work: Callable[[], Coroutine[Any, Any, ModelReply]],
        *,
        is_retry: bool,
        attached: Callable[[], None] = lambda: None,
    ) -> ModelReply:
        """Return the result of ``work``. A retry waits for the running call that it repeats, if
        there is one; ``attached`` is called then. The call is canceled when nobody waits for it
        anymore."""
        running = None
        if is_retry and self._left[digest]:
            self._left[digest] -= 1
        elif is_retry:
            running = self._running.get(digest)
        if running is None:
            running = _Work(asyncio.create_task(work()))
            self._running[digest] = running
            self._open.add(running)
        else:
            attached()
        running.clients += 1
        try:
            reply = await asyncio.shield(running.task)
            running.is_answered = True
            self._replies[digest] = reply
            return reply
        finally:
            running.clients -= 1
            if not running.clients:  # nobody waits anymore
                self._open.discard(running)
                if self._running.get(digest) is running:
                    del self._running[digest]
                task = running.task
                if task.cancel():
                    self._left[digest] += 1
                elif not (running.is_answered or task.cancelled() or task.exception()):
                    self.undelivered(digest, task.result())  # it ended just when its client left

    async def cancel(self) -> None:
        """Cancel all running calls and wait for their end."""
        tasks = [work.task for work in self._open]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
