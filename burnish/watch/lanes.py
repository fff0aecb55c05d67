"""Lanes of time: when each role of a run worked, from its ``timeline.json``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from burnish.observe.files import TIMELINE_FILE
from burnish.report.tables import DAMAGE
from burnish.runs.errors import RunFolderError
from burnish.small_files import UnreadableFileError, read_small

_MAX_SPANS = 50_000


def lanes_of(folder: Path) -> dict[str, Any] | None:
    """Return ``{"lanes": [{"name", "thread", "busy_s", "gap": [start, seconds], "spans": [[start,
    seconds], ...]}], "seconds", "note"}`` of a run; None if it has no timeline yet.

    A lane is a role (rollout, train, ...) in a thread: the spans of one name that are not inside of
    another span of the thread. ``gap``: the longest one. Times are in seconds since the first span
    that is kept. Raises RunFolderError if the
    file is damaged.
    """
    path = folder / TIMELINE_FILE
    if not path.is_file():
        return None
    try:
        tree = json.loads(read_small(path))
        events = [event for event in tree["traceEvents"] if event.get("ph") == "X"]
        spans = [
            (int(event["tid"]), float(event["ts"]), float(event["dur"]), str(event["name"]))
            for event in events[-_MAX_SPANS:]
        ]
        if not all(
            0 <= start < math.inf and 0 <= seconds < math.inf for _, start, seconds, _ in spans
        ):
            raise ValueError("its times are not finite")
        threads = {
            int(event["tid"]): str(event["args"]["name"])
            for event in tree["traceEvents"]
            if event.get("ph") == "M"
        }
        note = str(tree.get("otherData", {}).get("note", ""))
    except UnreadableFileError as error:
        raise RunFolderError(str(error)) from error
    except (*DAMAGE, RecursionError) as error:
        raise RunFolderError(f"{path} is not a timeline ({error}); remove it") from error
    first = min((start for _, start, _, _ in spans), default=0.0)
    lanes: dict[tuple[int, str], list[list[float]]] = {}
    ends: dict[int, float] = {}
    for thread, start, length, name in sorted(spans, key=lambda span: (span[1], -span[2])):
        if start + length > ends.get(thread, -math.inf):
            ends[thread] = start + length
            part = [round((start - first) / 1e6, 6), round(length / 1e6, 6)]
            lanes.setdefault((thread, name), []).append(part)
    seconds = (max(ends.values(), default=first) - first) / 1e6
    return {
        "lanes": [
            _lane(name, threads.get(thread, str(thread)), parts, seconds)
            for (thread, name), parts in lanes.items()
        ],
        "seconds": seconds,
        "note": note,
    }


def _lane(name: str, thread: str, spans: list[list[float]], seconds: float) -> dict[str, Any]:
    """Return a lane. Time in which several spans overlap is counted once."""
    busy = end = 0.0
    gap = [0.0, 0.0]
    for start, length in [*spans, [seconds, 0.0]]:
        if start - end > gap[1] + 1e-6:
            gap = [round(end, 6), round(start - end, 6)]
        busy += max(0.0, start + length - max(start, end))
        end = max(end, start + length)
    return {"name": name, "thread": thread, "busy_s": busy, "gap": gap, "spans": spans}
