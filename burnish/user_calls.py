"""Calls of the user's code in this process, with a time limit and a sign of life.

A call runs in a thread of its own, which cannot be stopped: after the limit the caller gets an
error, and the thread is abandoned. ``call_guard.py`` is a process that acts if the code also holds
Python's lock. User code in worker processes (environments, agents, tools) has limits of its own.
"""

from __future__ import annotations

import contextvars
import itertools
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from burnish.errors import BurnishError

log = logging.getLogger("burnish")

NOTICE_S = 30.0
"""Seconds after which a call is named on the console."""
_BEAT_S = 5.0
_GUARD = Path(__file__).with_name("call_guard.py")

T = TypeVar("T")


class CallTimeoutError(BurnishError, TimeoutError):
    """A call of the user's code that did not return in time."""


class CallRaisedError(BurnishError, RuntimeError):
    """The user's code raised an error that is no Exception, such as CancelledError or SystemExit.
    As itself it would end the run, a thread or an event loop without a message."""


class UserCalls:
    """Calls of one object of the user, one after the other.

    ``name``: for messages. ``limit_s``: maximum seconds of one call.
    """

    def __init__(self, name: str, *, limit_s: float) -> None:
        self._name, self._limit_s = name, limit_s
        self._calls: queue.SimpleQueue[_Call | None] | None = None
        self._is_guarded = False

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return ``function(*arguments)`` or raise its error.

        Raises CallTimeoutError after the limit, and CallRaisedError for an error that is no
        Exception. Names the call on the console after :data:`NOTICE_S` seconds.
        """
        call = _Call(function, arguments)
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(
                target=_serve, args=(self._calls,), daemon=True, name="user-code"
            ).start()
        if not self._is_guarded:
            self._is_guarded = True
            GUARD.enter()
        number = GUARD.begin(self._name, self._limit_s)
        try:
            self._calls.put(call)  # (after begin: the call may hold Python's lock at once)
            self._wait(call)
        finally:
            GUARD.end(number)
        if isinstance(call.error, Exception):
            raise call.error
        if call.error is not None:
            reason = f"{type(call.error).__name__}: {call.error}".removesuffix(": ")
            raise CallRaisedError(reason) from call.error
        return call.result  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the thread after its current call, and the guard with the last user."""
        self._leave_thread()
        if self._is_guarded:
            self._is_guarded = False
            GUARD.leave()

    def _leave_thread(self) -> None:
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None

    def _wait(self, call: _Call) -> None:
        begin, is_named = time.monotonic(), False
        while not call.done.wait(max(min(_BEAT_S, begin + self._limit_s - time.monotonic()), 0)):
            GUARD.beat()
            passed_s = time.monotonic() - begin
            if passed_s >= self._limit_s:
                self._leave_thread()
                ABANDONED[:] = [*(c for c in ABANDONED if not c.done.is_set()), call]
                raise CallTimeoutError(f"did not return within {self._limit_s:g} s (timeout_s)")
            if passed_s >= NOTICE_S and not is_named:
                is_named = True
                log.warning(
                    "%s has been running for %.0f s; the run waits at most %g s (timeout_s)",
                    *(self._name, passed_s, self._limit_s),
                )


class _Call:
    """One call, and its result."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._function, self._arguments = function, arguments
        self._context = contextvars.copy_context()
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Call the function."""
        try:
            self.result = self._context.run(self._function, *self._arguments)
        except BaseException as error:  # raised in the caller
            self.error = error
        self.done.set()


def _serve(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        call.run()


class Guard:
    """The process of ``call_guard.py``, which runs while somebody needs it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._num_users = 0
        self._numbers = itertools.count()

    def enter(self) -> None:
        """Start the process, unless it runs."""
        with self._lock:
            self._num_users += 1
            if self._process is None:
                command = [sys.executable, "-I", "-S", str(_GUARD), str(os.getpid())]
                self._process = subprocess.Popen(command, stdin=subprocess.PIPE)

    def leave(self) -> None:
        """End the process if nobody else needs it."""
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0 and self._process is not None:
                assert self._process.stdin is not None
                with suppress(OSError):
                    self._process.stdin.close()
                self._process.wait()
                self._process = None

    def begin(self, name: str, limit_s: float) -> int:
        """Announce a call. Return its number."""
        number = next(self._numbers)
        self._tell({"begin": number, "name": name, "limit_s": limit_s})
        return number

    def beat(self) -> None:
        """Tell that Python's lock is free."""
        self._tell({})

    def end(self, number: int) -> None:
        """Announce the end of a call."""
        self._tell({"end": number})

    def _tell(self, line: Mapping[str, object]) -> None:
        with self._lock:
            if self._process is not None and self._process.stdin is not None:
                with suppress(OSError, ValueError):  # somebody killed it
                    self._process.stdin.write(json.dumps(line).encode() + b"\n")
                    self._process.stdin.flush()


GUARD = Guard()
ABANDONED: list[_Call] = []
"""Calls that did not return in time. Until they do, their threads may keep the process from
exiting."""


def exit_despite_abandoned_calls(code: int) -> None:
    """Exit at once if an abandoned call still runs: Python would wait for the threads of its
    libraries."""
    if not all(call.done.is_set() for call in ABANDONED):
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
