"""A thread for calls of functions whose end may not be waited for."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any


class CallThread:
    """A thread that runs functions one after the other."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True, name="tool").start()

    def start(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """Queue a call and return the future of its result."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            result, error = None, None
            try:
                result = function()
            except Exception as raised:
                error = raised
            except BaseException as raised:  # exit() in a tool must not end the worker
                error = RuntimeError(f"{type(raised).__name__}: {raised}")
            if not loop.is_closed():
                loop.call_soon_threadsafe(_finish, future, result, error)

        self._calls.put(run)
        return future

    def end(self) -> None:
        """End the thread after its current call."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _finish(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration):  # a future refuses it
        future.set_exception(RuntimeError(f"StopIteration: {error}"))
    else:
        future.set_exception(error)
