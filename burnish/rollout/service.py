"""A rollout engine for many threads: one thread owns the engine, and callers get futures.

The engine thread is the only one that touches the engine. It waits for commands while no request is
open, and otherwise polls the engine and carries out commands between two polls.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch

from burnish.rollout.base import Completion, Request, RolloutEngine, Sampling

T = TypeVar("T")

_CLOSE_S = 60.0


class RolloutService:
    """A rollout engine shared by threads. Close the service to get the engine back."""

    def __init__(self, engine: RolloutEngine) -> None:
        """Start the engine thread. Nothing else may use ``engine`` until :meth:`close`."""
        self._engine = engine
        self._changed = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._open: dict[str, Future[Completion]] = {}
        self._submitted: dict[str, Future[Completion]] = {}
        """Futures of the requests that are open in the engine. Only the engine thread uses it: an
        id may be canceled and submitted again before the engine is told."""
        self._calls: set[Future[Any]] = set()
        self._error: BaseException | None = None
        self._closed = False
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="burnish-rollout", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """Version of the engine's weights."""
        return self._engine.version

    @property
    def error(self) -> BaseException | None:
        """Return the engine's error that ended the service; None: it has not failed."""
        return self._error

    def submit(self, request: Request, sampling: Sampling) -> Future[Completion]:
        """Submit a request with ``n`` = 1 and return its completion as a future. Canceling the
        future drops the request.

        The future raises ValueError if the engine refuses the request, and the engine's error if
        that fails. Raises ValueError if the id is already open, RuntimeError if the service is
        closed, and the engine's error if it has failed.
        """
        name = request.request_id
        if request.n != 1:
            raise ValueError(f"request {name} has n={request.n}; a service takes n=1")
        future: Future[Completion] = Future()
        future.add_done_callback(partial(self._answered, name))
        with self._changed:
            self._check()
            before = self._open.get(name)
            if before is not None and not before.done():
                raise ValueError(f"request {name} is already open; give each request its own id")
            if before is not None:  # its callbacks have not run yet
                self._add(partial(self._drop, name, before))
            self._open[name] = future
            self._add(partial(self._submit, request, sampling, future))
        return future

    def cancel(self, request_id: str) -> None:
        """Drop an open request; its future is canceled. Unknown ids are ignored."""
        with self._changed:
            future = self._open.get(request_id)
        if future is not None:
            future.cancel()

    def release(self, conversation: str) -> None:
        """Free the kept cache of a conversation. Ignored once the service is closed."""
        with self._changed:
            if not self._closed:
                self._add(lambda: self._engine.release([conversation]))

    def call(self, function: Callable[[RolloutEngine], T]) -> Future[T]:
        """Call ``function`` with the engine in the engine thread, between two polls, e.g. to load
        weights. Its result or error is that of the future; open requests are not affected by its
        error."""
        future: Future[T] = Future()
        with self._changed:
            self._check()
            self._calls.add(future)
            self._add(partial(self._call, function, future))
        return future

    def drain(self, timeout_s: float) -> None:
        """Wait until no request is open and all calls and releases are done. Raises TimeoutError
        after ``timeout_s`` seconds, or the engine's error if it failed."""
        self.call(lambda engine: None)  # commands are carried out in order, this one last
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._error is not None or not (self._open or self._calls), timeout_s
            )
            if self._error is not None:
                raise self._error
            if not done:
                raise TimeoutError(
                    f"{len(self._open)} requests and {len(self._calls)} calls are still open after "
                    f"{timeout_s:g} s; raise the time limit, or cancel them"
                )

    def close(self) -> None:
        """Cancel open requests and end the engine thread. The engine is not closed. May be called
        twice. Raises TimeoutError if the engine does not return from a poll."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            for future in list(self._open.values()):
                future.cancel()
            raise TimeoutError(
                f"the rollout engine did not return from a poll within {_CLOSE_S:g} s, so its "
                "thread cannot be ended and the engine cannot be used"
            )

    # ---- any thread ------------------------------------------------------------------------

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise RuntimeError("the rollout service is closed; make another one")

    def _add(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._changed.notify_all()

    def _answered(self, request_id: str, future: Future[Completion]) -> None:
        """Forget a future that is done; drop the request if it was canceled."""
        if future.cancelled():
            future.set_running_or_notify_cancel()  # concurrent.futures.wait waits for this
        with self._changed:
            if self._open.get(request_id) is future:
                del self._open[request_id]
            if future.cancelled() and not self._closed:
                self._add(partial(self._drop, request_id, future))
            self._changed.notify_all()

    # ---- the engine thread -----------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)  # each thread has its own number
        error: BaseException | None = None
        try:
            while self._advance():
                pass
        except BaseException as failure:  # it becomes the result of all open requests
            error = failure
        self._end(error)

    def _advance(self) -> bool:
        """Carry out the commands, then poll once. Return False once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._commands or self._closed or self._engine.busy)
            if self._closed:
                return False
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        for completion in self._engine.poll() if self._engine.busy else ():
            with suppress(InvalidStateError):  # canceled during the poll
                self._submitted.pop(completion.request_id).set_result(completion)
        return True

    def _submit(self, request: Request, sampling: Sampling, future: Future[Completion]) -> None:
        if future.cancelled():
            return
        try:
            self._engine.submit([request], sampling)
            self._submitted[request.request_id] = future
        except ValueError as error:
            with suppress(InvalidStateError):  # canceled meanwhile
                future.set_exception(error)

    def _drop(self, request_id: str, future: Future[Completion]) -> None:
        if self._submitted.get(request_id) is future:
            del self._submitted[request_id]
            self._engine.cancel([request_id])

    def _call(self, function: Callable[[RolloutEngine], T], future: Future[T]) -> None:
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(function(self._engine))
        except Exception as error:  # the caller's failure becomes its result
            future.set_exception(error)
        with self._changed:
            self._calls.discard(future)
            self._changed.notify_all()

    def _end(self, error: BaseException | None) -> None:
        """Answer all open requests and calls, with ``error`` or as canceled, and drop the requests
        from the engine."""
        with self._changed:
            self._error, self._closed = error, True
            requests, calls = list(self._open.values()), list(self._calls)
            self._commands.clear()
            self._calls.clear()
            self._changed.notify_all()
        for future in requests:
            if error is None:
                future.cancel()
            else:
                with suppress(InvalidStateError):  # canceled or finished meanwhile
                    future.set_exception(error)
        for call in calls:
            if error is None:
                call.cancel()
            if call.running() or call.set_running_or_notify_cancel():
                call.set_exception(error)
        self._engine.cancel(list(self._submitted))
