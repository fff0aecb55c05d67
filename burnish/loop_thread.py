"""An event loop in a dedicated thread, because the caller's thread may already run one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TypeVar

from anyio.from_thread import start_blocking_portal

T = TypeVar("T")


class LoopThread:
    """An event loop that runs coroutine functions for synchronous callers.

    All calls share one loop, so a client object bound to that loop can be reused across calls.
    """

    def __init__(self, name: str) -> None:
        self._stack = ExitStack()
        self._portal = self._stack.enter_context(start_blocking_portal(name=name))

    def run(self, function: Callable[..., Awaitable[T]], *args: object) -> T:
        """Return the result of ``function(*args)`` or raise its exception.

        Interrupting the wait cancels the call.
        """
        future = self._portal.start_task_soon(function, *args)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def spawn(self, function: Callable[..., Awaitable[T]], *args: object) -> Future[T]:
        """Start ``function(*args)`` without waiting; return its future, which cancels it. It must
        not raise."""
        return self._portal.start_task_soon(function, *args)

    def close(self) -> None:
        """Cancel running calls and end the thread."""
        self._portal.call(self._portal.stop, True)
        self._stack.close()
