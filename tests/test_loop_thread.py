"""An event loop in a separate thread: results, exceptions and cleanup."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from burnish.loop_thread import LoopThread


async def fails() -> None:
    raise ZeroDivisionError


def test_results_and_exceptions_are_returned() -> None:
    loop = LoopThread("x")
    assert loop.run(asyncio.sleep, 0, 3) == 3
    with pytest.raises(ZeroDivisionError):
        loop.run(fails)
    loop.close()
    assert not any(thread.name == "x" for thread in threading.enumerate())


def test_close_cancels_running_calls() -> None:
    loop, running = LoopThread("x"), threading.Event()

    async def waits() -> None:
        running.set()
        await asyncio.sleep(1000)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(loop.run, waits)
        assert running.wait(30)
        loop.close()
        assert isinstance(future.exception(30), CancelledError)
