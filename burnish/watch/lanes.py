"""Lanes of time: when each role and each worker of a run worked, from its ``timeline.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.observe.files import TIMELINE_FILE
from burnish.report.tables import DAMAGE
from burnish.runs.errors import RunFolderError
from burnish.small_files import UnreadableFileError, read_small

_MAX_SPANS = 100_000


@dataclass(frozen=True)
class _Span:
    name: str
    start: float
    """Microseconds"""
    length: float
    """Microseconds"""
    process: int
    thread: int


@dataclass(frozen=True)
class _Trace:
    spans: list[_Span]
    threads: Mapping[tuple[int, int], str]
    """(process, thread) -> name"""
    workers: Mapping[int, str]
    """Process -> group and rank of the worker. The controller is not in it."""
    note: str


def lanes_of(folder: Path) -> dict[str, Any] | None:
    """Return the lanes of a run; None if it has no timeline yet.

    ``{"lanes": [{"name", "thread", "busy_s", "gap": [start, seconds], "spans": [[start, seconds,
    phase], ...]}], "phases": [name], "seconds", "note"}``. A lane is a role (rollout, train, ...)
    in a thread of the controller, or a worker process. Its spans are those that are not inside of
    another span of the thread; their phase is an index into ``phases``. ``gap``: the longest one.
    Times are in seconds since the first span that is kept. Raises RunFolderError if the file is
    damaged.
    """
    path = folder / TIMELINE_FILE
    if not path.is_file():
        return None
    try:
        trace = _read(json.loads(read_small(path)))
    except UnreadableFileError as error:
        raise RunFolderError(str(error)) from error
    except (*DAMAGE, RecursionError) as error:
        raise RunFolderError(f"{path} is not a timeline ({error}); remove it") from error
    first = min((span.start for span in trace.spans), default=0.0)
    lanes: dict[tuple[int, int, str], list[list[float]]] = {}
    ends: dict[tuple[int, int], float] = {}
    phases: dict[str, int] = {}
    for span in sorted(trace.spans, key=lambda span: (span.start, -span.length)):
        thread = span.process, span.thread
        if span.start + span.length > ends.get(thread, -math.inf):
            ends[thread] = span.start + span.length
            phase = phases.setdefault(span.name, len(phases))
            part = [round((span.start - first) / 1e6, 6), round(span.length / 1e6, 6), phase]
            name = trace.workers.get(span.process, span.name)
            lanes.setdefault((*thread, name), []).append(part)
    seconds = (max(ends.values(), default=first) - first) / 1e6
    return {
        "lanes": [
            _lane(name, trace.threads.get((process, thread), ""), parts, seconds)
            for (process, thread, name), parts in sorted(
                lanes.items(), key=lambda lane: _place(trace, lane[0][0])
            )
        ],
        "phases": list(phases),
        "seconds": seconds,
        "note": trace.note,
    }


def _read(tree: Any) -> _Trace:
    """Return the trace of a parsed timeline. Raises one of DAMAGE."""
    events = [event for event in tree["traceEvents"] if event.get("ph") == "X"]
    spans = [
        _Span(
            str(event["name"]),
            float(event["ts"]),
            float(event["dur"]),
            int(event["pid"]),
            int(event["tid"]),
        )
        for event in events[-_MAX_SPANS:]
    ]
    if not all(math.isfinite(span.start) and 0 <= span.length < math.inf for span in spans):
        raise ValueError("its times are not finite")
    threads: dict[tuple[int, int], str] = {}
    workers: dict[int, str] = {}
    for event in tree["traceEvents"]:
        if event.get("ph") == "M" and event["name"] == "thread_name":
            threads[int(event["pid"]), int(event["tid"])] = str(event["args"]["name"])
        elif event.get("ph") == "M" and event["name"] == "process_name":
            workers[int(event["pid"])] = str(event["args"]["name"])
    return _Trace(spans, threads, workers, str(tree.get("otherData", {}).get("note", "")))


def _place(trace: _Trace, process: int) -> tuple[int, str, int]:
    """Return a key that sorts the controller first, then workers by group and rank."""
    if process not in trace.workers:
        return 0, "", 0
    group, _, rank = trace.workers[process].rpartition(" ")
    return 1, group, int(rank) if rank.isdecimal() else 0


def _lane(name: str, thread: str, spans: list[list[float]], seconds: float) -> dict[str, Any]:
    """Return a lane. Time in which several spans overlap is counted once."""
    busy = end = 0.0
    gap = [0.0, 0.0]
    for start, length, _ in [*spans, [seconds, 0.0, 0]]:
        if start - end > gap[1] + 1e-6:
            gap = [round(end, 6), round(start - end, 6)]
        busy += max(0.0, start + length - max(start, end))
        end = max(end, start + length)
    return {"name": name, "thread": thread, "busy_s": busy, "gap": gap, "spans": spans}
