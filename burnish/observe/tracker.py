"""The tracker protocol, and a queue that isolates training from slow or failing trackers.

A :class:`Tracker` sends the metrics of a run to an external tool, such as TensorBoard or Weights &
Biases. Training never calls it directly. Each tracker has a :class:`TrackerQueue`: a bounded queue
and one thread.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from burnish.observe.progress import tell
from burnish.observe.samples import DROPPED, read_sample_file, samples_of_step
from burnish.secret import without_secrets

MAX_QUEUED_STEPS = 1024
_QUIET_S = 2.0
"""Seconds of waiting at the end of a run after which a message is printed."""

_log = logging.getLogger("burnish.tracker")

Samples = Mapping[str, Sequence[Mapping[str, Any]]]
"""Split (``train``, ``eval``, ``generate``) -> rows with the columns of
:data:`burnish.observe.samples.SCHEMA`."""


Logged = Callable[[], Iterable[tuple[int, Mapping[str, float]]]]
"""Steps and metrics of the log up to a rewind, oldest first."""


class Tracker(Protocol):
    """An external tool that records the metrics of a run.

    A queue calls all methods from one thread, in the order of the run. Each call may block or
    raise.
    """

    @property
    def name(self) -> str:
        """Return the key of the tracker in ``observe``."""
        ...

    def start(self) -> None:
        """Open or resume the tracker's run. Called once, before any other method."""
        ...

    def log(self, step: int, metrics: Mapping[str, float], samples: Samples) -> None:
        """Record a step. ``metrics`` may contain NaN and infinity."""
        ...

    def rewind(self, step: int) -> int:
        """Handle a run that resumes from the checkpoint of ``step``: later steps will be logged
        again.

        Returns the last recorded step; if it is before ``step``, the steps between are logged
        next.
        """
        ...

    def close(self, *, failed: bool) -> None:
        """Deliver pending data and end the tracker's run. ``failed``: the training run ended with
        an error."""
        ...


@dataclass(frozen=True)
class SampleRate:
    """How many samples a tracker receives, and how often."""

    rows: int
    """Rows per split and table. 0: none."""
    every_n_steps: int
    """Minimum number of steps between two tables of a split."""


@dataclass(frozen=True)
class TrackerLimits:
    """Limits on the resources of a tracker."""

    close_timeout_s: float
    samples: SampleRate = SampleRate(0, 1)
    max_queued_steps: int = MAX_QUEUED_STEPS


@dataclass(frozen=True)
class _Step:
    number: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class _Rewind:
    step: int
    logged: Logged


class TrackerQueue:
    """A tracker behind a bounded queue and a daemon thread.

    Contract: :meth:`start`, :meth:`log` and :meth:`rewind` never block on the tracker. A step is
    dropped and counted if the queue is full or its delivery raises. The first problem is logged
    when it occurs. :meth:`join` waits for at most ``limits.close_timeout_s`` after :meth:`finish`
    and logs the number of dropped steps. Samples are read from the run folder, in the thread.
    """

    def __init__(self, tracker: Tracker, run_dir: Path, limits: TrackerLimits) -> None:
        self.name = tracker.name
        self._tracker, self._run_dir, self._limits = tracker, Path(run_dir), limits
        self._items: deque[_Step | _Rewind] = deque()
        self._changed = threading.Condition()
        """Guards the queue and the fields below, except for ``_thread`` and ``_shown``."""
        self._dropped = 0
        self._delivering = 0
        """Number of steps taken from the queue and not yet delivered or dropped: 0 or 1."""
        self._problem_reported = False
        self._closing = self._abandoned = self._failed = False
        self._deadline = 0.0
        """End of the wait for the thread, by ``time.monotonic``."""
        self._thread: threading.Thread | None = None
        self._shown: dict[str, int] = {}
        """Split -> step of its last table. Only used by the thread."""

    @property
    def dropped(self) -> int:
        """Return the number of dropped steps so far."""
        with self._changed:
            return self._dropped

    def start(self) -> None:
        """Start the thread, which starts the tracker and then delivers the queued steps."""
        self._thread = threading.Thread(
            target=self._work, name=f"burnish-tracker-{self.name}", daemon=True
        )
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue a step, or drop it if the queue is full."""
        with self._changed:
            waiting = len(self._items)
            if waiting < self._limits.max_queued_steps:
                self._items.append(_Step(step, dict(metrics)))
                self._changed.notify()
                return
            self._dropped += 1
        self._report_problem(f"{waiting} steps are waiting for it, so new ones are dropped")

    def rewind(self, step: int, logged: Logged) -> None:
        """Queue a rewind to ``step``.

        Queued steps after ``step`` are removed; they will be logged again. From ``logged``, the
        thread delivers the steps up to ``step`` that the tracker has not recorded, because they
        were dropped or an earlier process was killed.
        """
        with self._changed:
            items = [x for x in self._items if not isinstance(x, _Step) or x.number <= step]
            self._items = deque([*items, _Rewind(step, logged)])
            self._changed.notify()

    def finish(self, *, failed: bool, wait: bool) -> None:
        """Request that the thread closes the tracker after the queued steps. Does not wait."""
        with self._changed:
            self._closing, self._failed = True, failed
            self._deadline = time.monotonic() + (self._limits.close_timeout_s if wait else 0.0)
            self._changed.notify()

    def join(self) -> None:
        """Wait for the thread until the deadline of :meth:`finish`, then log the number of dropped
        steps, if any."""
        if self._thread is not None:
            left_s = max(0.0, self._deadline - time.monotonic())
            self._thread.join(min(left_s, _QUIET_S))
            if self._thread.is_alive() and left_s > _QUIET_S:
                tell(f"observe.{self.name}: waiting up to {left_s:.0f} s for the last steps")
                self._thread.join(left_s - _QUIET_S)
        with self._changed:
            hangs = self._thread is not None and self._thread.is_alive()
            self._abandoned = True
            left = self._delivering + sum(isinstance(x, _Step) for x in self._items)
            self._dropped += left if self._thread is not None else 0
            self._delivering = 0
            self._items.clear()
            dropped = self._dropped
            self._changed.notify()
        if dropped:
            _log.warning(
                "observe.%s: number of steps that did not reach it: %d (metrics.jsonl has them)",
                self.name,
                dropped,
            )
        elif hangs:
            self._report_problem(f"it did not close within {self._limits.close_timeout_s:g} s")

    # ---- the thread --------------------------------------------------------------------------

    def _work(self) -> None:
        started = self._tries(self._tracker.start, "could not start")
        while (item := self._next()) is not None:
            if isinstance(item, _Rewind):
                if started:
                    self._tries(lambda to=item: self._rewind(to), "going back failed")
                continue
            self._deliver(item, started=started)
        if started and not self._abandoned:
            self._tries(lambda: self._tracker.close(failed=self._failed), "closing failed")

    def _next(self) -> _Step | _Rewind | None:
        """Wait for the next item; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._closing or self._abandoned)
            if self._abandoned or not self._items:
                return None
            item = self._items.popleft()
            self._delivering = int(isinstance(item, _Step))
            return item

    def _rewind(self, item: _Rewind) -> None:
        self._shown = {k: at for k, at in self._shown.items() if at <= item.step}
        recorded = self._tracker.rewind(item.step)
        for step, metrics in item.logged() if recorded < item.step else ():
            if recorded < step <= item.step and not self._abandoned:
                self._deliver(_Step(step, metrics), started=True)

    def _deliver(self, item: _Step, *, started: bool) -> None:
        """Send a step to the tracker, or count it as dropped."""

        def log() -> None:
            self._tracker.log(item.number, item.metrics, self._samples(item.number))

        done = started and self._tries(log, "a step failed")
        with self._changed:
            if not self._abandoned:
                self._dropped += not done
                self._delivering = 0

    def _samples(self, step: int) -> Samples:
        rate, samples = self._limits.samples, {}
        for split, path in samples_of_step(self._run_dir, step).items() if rate.rows else ():
            due = step - self._shown.get(split, -math.inf) >= rate.every_n_steps
            if due and split != DROPPED:
                samples[split] = read_sample_file(path, limit=rate.rows)
                self._shown[split] = step
        return samples

    def _tries(self, action: Any, failure: str) -> bool:
        try:
            action()
        except BaseException as error:  # house: ok no failure of a tracker reaches training
            if not self._abandoned:
                self._report_problem(f"{failure}: {type(error).__name__}: {error}")
            return False
        return True

    def _report_problem(self, problem: str) -> None:
        """Log the first problem only. Later ones are included in the count at the end."""
        with self._changed:
            was_reported, self._problem_reported = self._problem_reported, True
        if not was_reported:
            _log.warning(
                "observe.%s: %s. Training continues; metrics.jsonl has every step, and the metric "
                "observe/%s_dropped counts the steps lost by the tracker",
                self.name,
                without_secrets(problem),
                self.name,
            )


class Trackers:
    """The trackers of a run; none by default."""

    def __init__(self, queues: Sequence[TrackerQueue] = ()) -> None:
        self._queues = list(queues)

    def start(self) -> None:
        """Start every tracker. Steps logged earlier are delivered first."""
        for queue in self._queues:
            queue.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for queue in self._queues:
            queue.log(step, metrics)

    def rewind(self, step: int, logged: Logged) -> None:
        """Queue a rewind to ``step`` for every tracker. ``logged`` provides the steps up to it."""
        for queue in self._queues:
            queue.rewind(step, logged)

    def metrics(self) -> dict[str, float]:
        """Return ``observe/<name>_dropped``: the number of steps that each tracker lost so far."""
        return {f"observe/{queue.name}_dropped": float(queue.dropped) for queue in self._queues}

    def close(self, *, ended_by: type[BaseException] | None = None) -> None:
        """Close all trackers in parallel, each within its time limit. Idempotent.

        ``ended_by`` is the class of the exception that ended the run. If it is not an Exception,
        such as the KeyboardInterrupt of a second Ctrl-C, undelivered steps are dropped.
        """
        queues, self._queues = self._queues, []
        wait = ended_by is None or issubclass(ended_by, Exception)
        for queue in queues:
            queue.finish(failed=ended_by is not None, wait=wait)
        for queue in queues:
            queue.join()
