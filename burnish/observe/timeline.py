"""Time measurement: named spans, their sums, and a Chrome trace.

Instrumentation is outside of the training loops: :func:`timed` wraps an engine where it is built,
and the loop uses the wrapped engine like the original. Only the outermost spans of a thread are
summed, so the sums of one thread never exceed wall-clock time. Nested spans are in the trace.

Threads that work at the same time as the trainer's name their spans ``<lane>/<name>``, such as
``sampler/rollout``. Spans without a lane are the trainer's, and only those add up to its step.

A worker process has a timeline of its own, which the controller empties (:meth:`Timeline.drain`)
and adds to the trace of the run (:meth:`Timeline.add`).
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from burnish.observe.files import write_text
from burnish.observe.memory import PhasePeaks

T = TypeVar("T")

_JOIN_GAP_S = 1e-3
"""Gaps up to this length are not in the trace: between items of an iterator, and between calls of a
method in :data:`_JOINED`."""
_JOINED = frozenset({"poll"})
"""Methods that are called thousands of times per second."""


_SAVE_EVERY_S = 30.0

SAMPLER = "sampler"
"""Lane of the thread that samples while the trainer trains."""
SCORING = "scoring"
"""Lane of the thread that scores meanwhile."""


@dataclass(frozen=True, slots=True)
class Span:
    """A finished span of another process."""

    name: str
    start: float
    """Unix time in seconds, by the clock of the process's machine."""
    seconds: float


@dataclass(slots=True)
class _Event:
    name: str
    start: float
    """Start time by ``time.perf_counter``"""
    seconds: float
    thread: int


@dataclass(frozen=True, slots=True)
class Drained:
    """The spans that a process finished since its timeline was last emptied."""

    spans: Sequence[Span]
    """The newest of them, oldest first."""
    num_omitted: int = 0
    """Older spans, which are omitted to bound memory."""


class _ThreadState(threading.local):
    depth = 0


class Timeline:
    """Collects spans from any thread. Sums cover all spans of this process; the trace keeps the
    newest ``max_events`` of this process, and as many of all others together."""

    def __init__(self, *, max_events: int = 50_000, peaks: PhasePeaks | None = None) -> None:
        """Create an empty timeline. ``peaks`` measures memory in the outermost spans."""
        self.peaks = peaks
        self._events: deque[_Event] = deque(maxlen=max_events)
        self._newest: dict[int, _Event] = {}
        """Thread -> its newest event, which a joined span extends."""
        self._num_events = 0
        """Spans since the trace was last emptied, those that it no longer has included."""
        self._others: deque[tuple[str, Span]] = deque(maxlen=max_events)
        """Spans of other processes, each with the name of its process."""
        self._num_others = 0
        self._since_collect: dict[str, float] = {}
        self._totals: dict[str, float] = {}
        self._thread = _ThreadState()
        self._lock = threading.Lock()
        self._thread_names: dict[int, str] = {}
        self._origin = time.perf_counter()
        self._origin_unix = time.time()
        self._next_save = time.monotonic() + _SAVE_EVERY_S

    @contextmanager
    def span(self, name: str, *, join_s: float = 0.0) -> Iterator[None]:
        """Time the ``with`` block under ``name``, even if it raises. Spans may be nested. With
        ``join_s``, the trace extends the previous span of this name in this thread if that ended
        at most so many seconds ago."""
        start = self._enter(name)
        try:
            yield
        finally:
            end = self._leave(name, start)
            self._add_event(name, start, end, join_s=join_s)

    def collect(self) -> dict[str, float]:
        """Return seconds by name of outermost, finished spans of all threads since the last
        call."""
        with self._lock:
            collected, self._since_collect = self._since_collect, {}
        return collected

    def drain(self) -> Drained:
        """Remove all spans from the trace. Return the newest, and the number of the others."""
        with self._lock:
            events, recorded = list(self._events), self._num_events
            self._events.clear()
            self._newest.clear()
            self._num_events = 0
        behind = self._origin_unix - self._origin
        spans = [Span(event.name, event.start + behind, event.seconds) for event in events]
        return Drained(spans, recorded - len(spans))

    def add(self, process: str, drained: Drained) -> None:
        """Add spans of another process to the trace. The sums do not contain them."""
        with self._lock:
            self._others.extend((process, span) for span in drained.spans)
            self._num_others += len(drained.spans) + drained.num_omitted

    @property
    def totals(self) -> dict[str, float]:
        """Return seconds by name of outermost spans since the timeline was created."""
        with self._lock:
            return dict(self._totals)

    def save(self, path: Path) -> None:
        """Write the trace as Chrome trace JSON, atomically.

        chrome://tracing and ui.perfetto.dev can open it. ``otherData`` contains the number of
        recorded spans and of omitted old ones.
        """
        with self._lock:
            events, recorded = [replace(e) for e in self._events], self._num_events
            others, recorded_others = list(self._others), self._num_others
            threads = dict(self._thread_names)
        pid = os.getpid()
        # (Numbers that are no process ids of this machine: the others may be on another one.)
        pids = {name: -1 - i for i, name in enumerate(dict.fromkeys(name for name, _ in others))}
        labels = [
            *(_label("thread_name", pid, tid, name) for tid, name in threads.items()),
            *(_label("process_name", other, 0, name) for name, other in pids.items()),
        ]
        spans = [
            *(_trace_event(s, s.start - self._origin_unix, pids[name], 0) for name, s in others),
            *(_trace_event(e, e.start - self._origin, pid, e.thread) for e in events),
        ]
        omitted = recorded - len(events) + recorded_others - len(others)
        note = (
            f"{omitted} old spans are omitted to bound memory"
            if omitted
            else "all spans are included"
        )
        other = {
            "recorded_spans": recorded + recorded_others,
            "left_out_spans": omitted,
            "note": note,
            "start_unix_s": round(self._origin_unix, 3),
            "totals_s": self.totals,
        }
        trace = {"traceEvents": labels + spans, "displayTimeUnit": "ms", "otherData": other}
        write_text(Path(path), json.dumps(trace, allow_nan=False))

    def save_at_times(self, path: Path) -> bool:
        """Write the trace if the last time is half a minute ago, and 500 times as long as it took.
        Return whether it did."""
        now = time.monotonic()
        if now < self._next_save:
            return False
        self.save(path)
        took = time.monotonic() - now
        self._next_save = now + took + max(_SAVE_EVERY_S, 500 * took)
        return True

    def _enter(self, name: str) -> float:
        if self.peaks is not None and self._thread.depth == 0:
            self.peaks.begin(name)
        self._thread.depth += 1
        return time.perf_counter()

    def _leave(self, name: str, start: float) -> float:
        """End the span, add it to the sums if it is outermost, and return its end time."""
        end = time.perf_counter()
        self._thread.depth -= 1
        if self._thread.depth == 0:
            with self._lock:
                for sums in (self._since_collect, self._totals):
                    sums[name] = sums.get(name, 0.0) + end - start
        return end

    def _add_event(self, name: str, start: float, end: float, *, join_s: float = 0.0) -> None:
        thread = threading.get_ident()
        with self._lock:
            last = self._newest.get(thread) if join_s else None
            same = last is not None and last.name == name
            if last is not None and same and start - last.start - last.seconds <= join_s:
                last.seconds = end - last.start
                return
            event = self._newest[thread] = _Event(name, start, end - start, thread)
            self._events.append(event)
            self._num_events += 1
            if thread not in self._thread_names:
                self._thread_names[thread] = threading.current_thread().name

    def _consume(  # house: ok one generator that must time each next and clean up after itself
        self, name: str, items: Iterator[T]
    ) -> Generator[T, None, None]:
        """Yield ``items`` and time each ``next``, without the consumer's time.

        The sums include every item. The trace merges items less than a millisecond apart.
        """
        first = last = None
        try:
            while True:
                start = self._enter(name)
                try:
                    item = next(items)
                except StopIteration:
                    return
                finally:
                    end = self._leave(name, start)
                    if first is None or last is None or start - last > _JOIN_GAP_S:
                        if first is not None and last is not None:
                            self._add_event(name, first, last)
                        first = start
                    last = end
                yield item
        finally:
            if first is not None and last is not None:
                self._add_event(name, first, last)
            if isinstance(items, Generator):
                items.close()


def _label(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _trace_event(span: Span | _Event, start: float, pid: int, tid: int) -> dict[str, Any]:
    return {
        "name": span.name,
        "cat": "burnish",
        "ph": "X",
        "ts": round(start * 1e6, 1),
        "dur": round(span.seconds * 1e6, 1),
        "pid": pid,
        "tid": tid,
    }


def timed(obj: T, timeline: Timeline, names: Mapping[str, str]) -> T:
    """Return a proxy of ``obj`` that times some of its methods. ``names`` maps method name -> span
    name.

    Example: ``timed(engine, timeline, {"generate": "rollout", "load_weights": "sync"})``. An engine
    behind a service needs ``submit`` and ``poll`` in place of ``generate``.
    Everything else (reading and setting attributes, isinstance) is forwarded to ``obj``. If a
    method returns an iterator, the time inside each ``next`` counts, and the time between them does
    not.

    Python looks up special methods (``len()``, ``with``, calls) on the type, so those are not
    forwarded. Raises ValueError if ``obj`` lacks a method in ``names``.
    """
    methods_of_obj = {m: getattr(obj, m, None) for m in names}  # house: ok proxy of any object
    missing = [m for m, method in methods_of_obj.items() if not callable(method)]
    if missing:
        raise ValueError(
            f"cannot time {type(obj).__name__}.{missing[0]}: there is no such method; names maps "
            f"method names to span names, and is {dict(names)}"
        )
    methods = {m: _timed_method(obj, m, timeline, span) for m, span in names.items()}
    return Proxy(obj, methods)  # type: ignore[return-value]


class Proxy:
    """Proxy of an object in which some methods are replaced. Its two slots have mangled names, so
    they hide no attribute of the object."""

    __slots__ = ("__methods", "__obj")

    def __init__(self, obj: Any, methods: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_Proxy__obj", obj)
        object.__setattr__(self, "_Proxy__methods", methods)

    def __getattr__(self, name: str) -> Any:
        method = self.__methods.get(name)
        if method is not None:
            return method
        return getattr(self.__obj, name)  # house: ok proxy of any object

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__obj, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__obj, name)

    def __repr__(self) -> str:
        return f"Proxy({self.__obj!r})"

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.__obj)


def _timed_method(obj: Any, method: str, timeline: Timeline, span: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        with timeline.span(span, join_s=_JOIN_GAP_S if method in _JOINED else 0.0):
            # Looked up on each call, so that a method replaced on the object later is used.
            result = getattr(obj, method)(*args, **kwargs)  # house: ok proxy of any object
        return timeline._consume(span, result) if isinstance(result, Iterator) else result

    call.__name__ = method
    return call
