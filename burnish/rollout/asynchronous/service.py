"""A rollout engine for many threads: one thread owns the engine, and callers get futures.

The engine thread is the only one that touches the engine. It waits for commands while no request is
open, and otherwise polls the engine and carries out commands between two polls. An error of the
engine answers all requests and calls, and ends the thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from burnish.rollout.base import Completion, Request, RolloutEngine, Sampling

T = TypeVar("T")

_CLOSE_S = 60.0


Lane = Literal["training", "evaluation"]
"""Use of a request. Those for training can be held back (:meth:`RolloutService.hold`)."""


@dataclass
class _Submitted:
    """A request that is open in the engine."""

    request: Request
    future: Future[Any]
    all_samples: bool
    """True if the result of the future is a list of all completions, False if it is the only
    one."""
    lane: Lane
    completions: list[Completion] = field(default_factory=list)


class RolloutService:
    """A rollout engine shared by threads. Close the service to get the engine back."""

    def __init__(
        self, engine: RolloutEngine, *, after_poll: Callable[[], None] = lambda: None
    ) -> None:
        """Start the engine thread. Nothing else may use ``engine`` until :meth:`close`.

        ``after_poll`` is called in the engine thread, after its commands and its poll."""
        self._engine, self.after_poll = engine, after_poll
        self._changed = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._open: dict[str, Future[Any]] = {}
        self._submitted: dict[str, _Submitted] = {}
        """Requests that are open in the engine. Only the engine thread changes it: an id may be
        canceled and submitted again before the engine cancels it."""
        self._held: list[Callable[[], None]] | None = None
        """Submissions for training that are held back. None: they are not."""
        self._idle_calls: deque[Callable[[], None]] = deque()
        """Calls that wait until no request is open; new requests wait for them. Only the engine
        thread uses this and the next."""
        self._deferred: list[tuple[_Submitted, Sampling]] = []
        self._paused = False
        self._stopped_s = 0.0
        self._stopped_since: float | None = None
        """Time at which the service was paused or began to hold requests. None: it did neither."""
        self._idle_s = self._idle_before = 0.0
        self._idle_since: float | None = None
        """Time at which the engine ran out of work. None: it has some."""
        self._looked_at = time.monotonic()
        self._calls: set[Future[Any]] = set()
        self._error: BaseException | None = None
        self._closed = False
        self._num_threads = torch.get_num_threads()
        self._thread = self._start()

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="burnish-rollout", daemon=True)
        thread.start()
        return thread

    def restart(self) -> None:
        """Serve again if an error of the engine has ended the service, once its cause is removed.
        Requests and calls from before have been answered with the error. Does nothing if there was
        none."""
        if self._error is None:
            return
        self._thread.join()  # the end of the failed engine thread drops its requests
        self._commands.clear()
        self._idle_calls.clear()
        self._submitted, self._deferred, self._held = {}, [], None
        self._error, self._closed, self._paused = None, False, False
        self._count_stopped()
        self._thread = self._start()

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def error(self) -> BaseException | None:
        """Return the engine's error that ended the service; None: it has not failed."""
        return self._error

    @property
    def max_len(self) -> int | None:
        return self._engine.max_len

    def idle_frac(self) -> float:
        """Return the share of time since the last call (the first time: since the start) in which
        the engine had no work, because no request was open or the service was paused."""
        now = time.monotonic()
        with self._changed:
            waited = 0.0 if self._idle_since is None else now - self._idle_since
            idle, since = self._idle_s + waited, now - self._looked_at
            before, self._idle_before, self._looked_at = self._idle_before, idle, now
        return (idle - before) / since if since > 0 else 0.0

    def submit(
        self, request: Request, sampling: Sampling, *, lane: Lane = "training"
    ) -> Future[Completion]:
        """Submit a request with ``n`` = 1 and return its completion as a future. Canceling the
        future drops the request.

        The future raises ValueError if the engine refuses the request, and the engine's error if
        that fails. Raises ValueError if the id is already open, RuntimeError if the service is
        closed, and the engine's error if it has failed.
        """
        if request.n != 1:
            raise ValueError(
                f"request {request.request_id} has n={request.n}; use submit_all for several "
                "samples"
            )
        future: Future[Completion] = Future()
        self._open_request(request, sampling, future, all_samples=False, lane=lane)
        return future

    def submit_all(
        self, request: Request, sampling: Sampling, *, lane: Lane = "training"
    ) -> Future[list[Completion]]:
        """Submit a request and return its ``n`` completions, in the order of finishing, as a
        future. Otherwise as :meth:`submit`."""
        future: Future[list[Completion]] = Future()
        self._open_request(request, sampling, future, all_samples=True, lane=lane)
        return future

    def _open_request(
        self,
        request: Request,
        sampling: Sampling,
        future: Future[Any],
        *,
        all_samples: bool,
        lane: Lane,
    ) -> None:
        name = request.request_id
        new = _Submitted(request, future, all_samples, lane)
        future.add_done_callback(partial(self._answered, name))
        with self._changed:
            self._check()
            before = self._open.get(name)
            if before is not None and not before.done():
                raise ValueError(f"request {name} is already open; give each request its own id")
            if before is not None:  # its callbacks have not run yet
                self._add(partial(self._drop, name, before))
            self._open[name] = future
            command = partial(self._submit, new, sampling)
            if self._held is not None and lane == "training":
                self._held.append(command)
            else:
                self._add(command)

    def hold(self) -> None:
        """Hold back new requests for training until :meth:`release_held`. Those in the engine go
        on."""
        with self._changed:
            self._held = [] if self._held is None else self._held
            self._count_stopped()

    def release_held(self) -> None:
        """Submit the requests that were held back."""
        with self._changed:
            held, self._held = self._held or [], None
            self._count_stopped()
            for command in held:
                self._add(command)

    def wait_for_training(self) -> None:
        """Wait until the engine has no request for training. Call :meth:`hold` before. Raises the
        engine's error if it failed."""
        self.call(lambda engine: None).result()  # submissions from before are in the engine then
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closed
                    or not any(
                        request.lane == "training" for request in list(self._submitted.values())
                    )
                )
            )
            self._check()

    def pause(self) -> None:
        """Stop polling the engine; requests stay open. Returns once no poll runs. The weights of
        the engine may then be changed by the caller."""
        self.call(lambda engine: self._set_paused(True)).result()

    def resume(self) -> None:
        """Poll the engine again."""
        self._set_paused(False)

    def _set_paused(self, paused: bool) -> None:
        with self._changed:
            self._paused = paused
            self._count_stopped()
            self._changed.notify_all()

    def _count_stopped(self) -> None:
        """Start or end a span of :meth:`stopped_s`."""
        now, stopped = time.monotonic(), self._paused or self._held is not None
        if self._stopped_since is not None:
            self._stopped_s += now - self._stopped_since
        self._stopped_since = now if stopped else None

    def stopped_s(self) -> float:
        """Return the seconds so far in which the service was paused or held requests back."""
        with self._changed:
            since = self._stopped_since
            return self._stopped_s + (0.0 if since is None else time.monotonic() - since)

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

    def call(self, function: Callable[[RolloutEngine], T], *, when_idle: bool = False) -> Future[T]:
        """Call ``function`` with the engine in the engine thread, between two polls, e.g. to load
        weights. Its result or error is that of the future; open requests are not affected by its
        error.

        With ``when_idle``, the call waits until no request is open, and new requests wait for the
        call."""
        future: Future[T] = Future()

        def command() -> None:
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(function(self._engine))
            except Exception as error:  # the caller's failure becomes its result
                future.set_exception(error)
            with self._changed:
                self._calls.discard(future)
                self._changed.notify_all()

        with self._changed:
            self._check()
            self._calls.add(future)
            if when_idle:
                self._add(partial(self._idle_calls.append, command))
            else:
                self._add(command)
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

    def _answered(self, request_id: str, future: Future[Any]) -> None:
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
        """Serve until closed or failed. Then answer all open requests and calls, as canceled or
        with the error, and drop the requests from the engine."""
        torch.set_num_threads(self._num_threads)  # each thread has its own number
        error: BaseException | None = None
        try:
            while self._advance():
                pass
        except BaseException as failure:  # it becomes the result of all open requests
            error = failure
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

    def _advance(self) -> bool:
        """Carry out the commands, then poll once. Return False once closed."""
        with self._changed:
            if not self._has_work and self._idle_since is None:
                self._idle_since = time.monotonic()
            self._changed.wait_for(
                lambda: (
                    self._commands
                    or self._closed
                    or self._has_work
                    or (self._idle_calls and not self._submitted)
                )
            )
            self._count_idle()
            if self._closed:
                return False
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        if self._idle_calls and not self._submitted:
            while self._idle_calls:
                self._idle_calls.popleft()()
            deferred, self._deferred = self._deferred, []
            for new, sampling in deferred:
                self._submit(new, sampling)
        with self._changed:
            self._count_idle()
        for completion in self._engine.poll() if self._has_work else ():
            submitted = self._submitted[completion.request_id]
            submitted.completions.append(completion)
            if len(submitted.completions) < submitted.request.n:
                continue
            del self._submitted[completion.request_id]
            result = submitted.completions if submitted.all_samples else completion
            with suppress(InvalidStateError):  # canceled during the poll
                submitted.future.set_result(result)
            with self._changed:
                self._changed.notify_all()  # also if it was canceled
        self.after_poll()
        return True

    def _count_idle(self) -> None:
        """Add the time without work, once there is some."""
        if self._has_work and self._idle_since is not None:
            self._idle_s += time.monotonic() - self._idle_since
            self._idle_since = None

    @property
    def _has_work(self) -> bool:
        return self._engine.busy and not self._paused

    def _submit(self, new: _Submitted, sampling: Sampling) -> None:
        if new.future.cancelled():
            return
        if self._idle_calls:
            self._deferred.append((new, sampling))
            return
        try:
            self._engine.submit([new.request], sampling)
            self._submitted[new.request.request_id] = new
        except ValueError as error:
            with suppress(InvalidStateError):  # canceled meanwhile
                new.future.set_exception(error)

    def _drop(self, request_id: str, future: Future[Any]) -> None:
        submitted = self._submitted.get(request_id)
        if submitted is not None and submitted.future is future:
            del self._submitted[request_id]
            self._engine.cancel([request_id])
            with self._changed:
                self._changed.notify_all()
