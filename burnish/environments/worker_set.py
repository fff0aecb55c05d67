"""A fixed number of workers: started, replaced if lost, and selected by load.

A worker executes calls of user code in a process of its own. The process is on this machine
(``process.py``) or behind an actor of a cluster (``runtime/ray/environment_workers.py``);
:class:`WorkerSet` treats both alike. A session is a use of one worker over several calls, such as
an episode. The set is used from one event loop::

    session = await workers.acquire()
    try:
        await session.call(timeout_s, op="step", ...)
    finally:
        await workers.release(session)

A call that exceeds its time limit or is cancelled leaves user code running in the worker. The
worker is then retired: it gets no new sessions, is replaced, and is ended after its last session.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from burnish.errors import BurnishError

log = logging.getLogger("burnish")

MAX_START_FAILURES = 3
"""Consecutive failures to start workers after which a set gives up."""
PING_TIMEOUT_S = 5.0
"""Time in which a worker must report the state of its event loop."""


class ReplyError(BurnishError, RuntimeError):
    """User code in a worker raised. ``trace``: its traceback, on lines of its own, or empty."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(kind, message, trace)  # (an exception is pickled by these arguments)
        self.trace = f"\n{trace.rstrip()}" if trace else ""

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.args[1]}"


class WorkerEndedError(BurnishError, RuntimeError):
    """A worker ended, cannot be reached any more, or is blocked by another session."""


class NoWorkerError(BurnishError, RuntimeError):
    """No worker is left and none can be started now. Another attempt may succeed."""


class EnvironmentWorker(Protocol):
    """A process that executes calls of user code, several at once."""

    @property
    def alive(self) -> bool:
        """False if every further call would fail."""
        ...

    async def call(self, timeout_s: float, **request: Any) -> Any:
        """Return the content of the reply to ``request`` (``worker.py`` lists the requests).

        Raises ReplyError if user code raised, TimeoutError, WorkerEndedError, and TypeError or
        ValueError if the request is not JSON.
        """
        ...

    async def end(self) -> None:
        """End the process and everything that it started. Never raises."""
        ...


@dataclass(eq=False)
class Slot:
    """A worker of a set, with its load."""

    worker: EnvironmentWorker
    sessions: int = 0
    retired: bool = False
    """True if user code may be running in the worker although nothing waits for it."""

    @property
    def usable(self) -> bool:
        """True if the worker takes new sessions."""
        return self.worker.alive and not self.retired


class Session:
    """A use of a worker, which its requests name ``episode``."""

    def __init__(self, slot: Slot, name: str) -> None:
        self.slot, self.name = slot, name

    @property
    def retired(self) -> bool:
        """True if user code may be running in the worker although nothing waits for it."""
        return self.slot.retired

    async def call(self, timeout_s: float, **request: Any) -> Any:
        """Return the content of the reply to ``request``. Raises as :meth:`EnvironmentWorker.call`.

        If the limit is exceeded because another session blocks the worker, raises WorkerEndedError
        instead of TimeoutError.
        """
        try:
            return await self.slot.worker.call(timeout_s, episode=self.name, **request)
        except TimeoutError as error:
            self.slot.retired = True
            raise await self._exceeded(timeout_s) from error
        except asyncio.CancelledError:
            self.slot.retired = True
            raise

    async def _exceeded(self, timeout_s: float) -> TimeoutError | WorkerEndedError:
        """Return the error of a call that exceeded its limit.

        A worker that cannot answer anything any more is ended, so that its other sessions need not
        wait for their limits.
        """
        alone, worker = self.slot.sessions == 1, self.slot.worker
        try:
            state = await worker.call(PING_TIMEOUT_S, op="ping")
        except WorkerEndedError as error:
            return error
        except TimeoutError:  # the process is stopped, or user code holds the interpreter's lock
            state = {"blocked": True, "episode": None, "stack": ""}
        exceeded = f"took more than {timeout_s:g} s"
        if not state["blocked"]:
            return TimeoutError(exceeded)
        culprit = self.name if alone else state["episode"]
        if culprit in (None, self.name):
            await worker.end()
        if culprit != self.name:
            return WorkerEndedError(
                f"another episode blocks its worker process (no answer for {timeout_s:g} s)"
            )
        if not state["stack"]:
            return TimeoutError(exceeded)
        return TimeoutError(
            f"{exceeded} and blocks all episodes of its worker process. A coroutine function must "
            "await whatever waits or computes long; as a plain function it runs in a thread. It "
            f"is at:\n{state['stack'].rstrip()}"
        )


class WorkerSet:
    """``size`` workers that ``start`` creates. ``start`` raises a BurnishError if it cannot."""

    def __init__(self, start: Callable[[], Awaitable[EnvironmentWorker]], size: int) -> None:
        self._start, self.size = start, size
        self._slots: list[Slot] = []
        self._lock = asyncio.Lock()
        self._names = count()
        self._failures = 0

    async def start(self) -> None:
        """Start the workers. Raises the error of the first one that cannot be started."""
        async with self._lock:
            await self._fill()

    async def acquire(self) -> Session:
        """Begin a session in the worker with the fewest, after replacing lost workers.

        Raises NoWorkerError if no worker is left. Raises the error of ``start`` after
        ``MAX_START_FAILURES`` consecutive calls in which it failed.
        """
        async with self._lock:
            lost = [slot for slot in self._slots if not slot.worker.alive]
            self._slots = [slot for slot in self._slots if slot.worker.alive]
            await asyncio.gather(*(slot.worker.end() for slot in lost))
            try:
                await self._fill()
                self._failures = 0
            except BurnishError as error:
                self._failures += 1
                if self._failures >= MAX_START_FAILURES:
                    raise
                if not any(slot.usable for slot in self._slots):
                    raise NoWorkerError(str(error)) from error
                log.warning("%s", error)
            usable = [slot for slot in self._slots if slot.usable]
            if not usable:
                raise NoWorkerError("all workers ended directly after their start")
            slot = min(usable, key=lambda slot: slot.sessions)
            slot.sessions += 1
            return Session(slot, f"{next(self._names)}")

    async def release(self, session: Session) -> None:
        """End a session. Call it once for each :meth:`acquire`."""
        slot = session.slot
        slot.sessions -= 1
        if slot.retired and not slot.sessions:
            with suppress(ValueError):
                self._slots.remove(slot)
            await slot.worker.end()

    async def close(self) -> None:
        slots, self._slots = self._slots, []
        await asyncio.gather(*(slot.worker.end() for slot in slots))

    async def _fill(self) -> None:
        missing = self.size - sum(slot.usable for slot in self._slots)
        results = await asyncio.gather(
            *(self._start() for _ in range(missing)), return_exceptions=True
        )
        errors = [result for result in results if isinstance(result, BaseException)]
        self._slots += [Slot(result) for result in results if not isinstance(result, BaseException)]
        if errors:
            raise errors[0]
