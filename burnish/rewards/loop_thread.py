"""An event loop in a thread of its own, because the caller's thread may already run one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import TypeVar

from anyio.from_thread import start_blocking_portal

T = TypeVar("T")


class LoopThread:
    """Run coroutine functions for callers that are not coroutines, all on one loop, so that a
    client object that belongs to a loop can be kept from call to call."""

    def __init__(self, name: str) -> None:
        self._stack = ExitStack()
        self._portal = self._stack.enter_context(start_blocking_portal(name=name))

    def run(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Return or raise what ``function(*args)`` comes to. An interrupted wait cancels it."""
        future = self._portal.start_task_soon(function, *args)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel running calls and end the thread."""
        self._portal.call(self._portal.stop, True)
        self._stack.close()
