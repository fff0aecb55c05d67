"""Text of responses while they are sampled: from the tokens of the engine to the deltas of a reply.

The engine reports tokens in its thread. Texts are made in the thread of the renderers, and sent in
the event loop, as often as that is free: a busy server sends more tokens at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

from burnish.agents.calls import Delta, Progress, ReplyStart


class TokenReader(Protocol):
    """Reader of the tokens of a response (``episodes/streaming.py``)."""

    def feed(self, tokens: Sequence[int]) -> tuple[str, str]:
        """Return the (reasoning, content) that more tokens make certain."""
        ...


class TokenQueue:
    """Tokens of one response, from the engine's thread to the event loop that made this."""

    def __init__(self, changed: asyncio.Event) -> None:
        """``changed``: set in the event loop when there are new tokens."""
        self._changed, self._loop = changed, asyncio.get_running_loop()
        self._new: deque[list[int]] = deque()
        self._num_reported = 0

    def report(self, tokens: Sequence[int]) -> None:
        """Accept all tokens so far. A callback of the engine (``Request.on_tokens``)."""
        new = list(tokens[self._num_reported :])
        self._num_reported += len(new)
        self._new.append(new)
        with suppress(RuntimeError):  # the loop is closed, so nobody waits for the response
            self._loop.call_soon_threadsafe(self._changed.set)

    def take(self) -> list[int]:
        """Return the tokens that were not returned before."""
        tokens: list[int] = []
        while self._new:
            tokens += self._new.popleft()
        return tokens


class ResponseStreams:
    """The responses of one call, while they are sampled."""

    def __init__(self, readers: Sequence[TokenReader]) -> None:
        """``readers``: one for each response."""
        self._changed = asyncio.Event()
        self._all = [(TokenQueue(self._changed), reader) for reader in readers]

    def listener(self, index: int) -> Callable[[Sequence[int]], None]:
        """Return the callback for the engine's request of a response."""
        return self._all[index][0].report

    @asynccontextmanager
    async def followed(
        self,
        progress: Progress,
        start: ReplyStart,
        in_thread: Callable[..., Awaitable[Any]],
    ) -> AsyncIterator[None]:
        """Send the responses to ``progress`` during the ``async with`` block. ``in_thread`` calls a
        function in the thread of the readers."""
        task = asyncio.create_task(self._follow(progress, start, in_thread))
        try:
            yield
        finally:
            task.cancel()
            (end,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(end, Exception):  # (CancelledError is none)
            raise end

    async def _follow(
        self,
        progress: Progress,
        start: ReplyStart,
        in_thread: Callable[..., Awaitable[Any]],
    ) -> None:
        has_begun = False
        while True:
            await self._changed.wait()
            self._changed.clear()
            for index, (tokens, reader) in enumerate(self._all):
                new = tokens.take()
                if not new:
                    continue
                delta = Delta(index, *await in_thread(reader.feed, new))
                if not delta.reasoning and not delta.content:
                    continue
                if not has_begun:
                    has_begun = True
                    progress.start(start)
                progress.add(delta)
