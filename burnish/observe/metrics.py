"""``metrics.jsonl``: one line of strictly valid JSON per log call. Always written; trackers receive
the same numbers.

Names have a group before the slash: ``train/loss``, ``reward/mean``, ``rollout/tokens_per_s``,
``time/rollout_s``, ``eval/pass@1``, ``memory/peak_rss_bytes``. Each line is flushed before the next
step starts, so a killed run loses at most the current step. :meth:`MetricsLog.rewind` truncates the
log to a checkpoint on resume.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from burnish.observe.errors import RemovedError
from burnish.observe.files import write_text
from burnish.observe.tracker import Trackers
from burnish.small_files import read_small

METRICS_FILE = "metrics.jsonl"
_LARGEST_LOG = 8 << 30
"""Bytes of a log of millions of steps."""

_log = logging.getLogger("burnish.metrics")


class MetricsLog:
    """Appends to ``run_dir/metrics.jsonl``. Only one writer per run folder is allowed."""

    def __init__(self, run_dir: Path, trackers: Trackers | None = None) -> None:
        """Open or create the log and its folder; an existing log is continued.

        ``trackers`` receive every step once :meth:`start_trackers` has been called.
        """
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        self._path = Path(run_dir) / METRICS_FILE
        self._trackers = trackers or Trackers()
        if self._path.is_file():
            # The next line must not be appended to an incomplete one, which a kill can leave.
            data = read_small(self._path, limit=_LARGEST_LOG)
            if data and not data.endswith(b"\n"):
                _log.warning("%s: dropped an incomplete last line of an earlier run", self._path)
                complete = data[: data.rfind(b"\n") + 1]
                write_text(self._path, complete.decode("utf-8", errors="replace"))
        self._file = self._path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append ``{"step": step, "time": <unix seconds>, **metrics}`` and queue the numbers for
        the trackers.

        NaN and infinity are written as null. Lone surrogates in names, which come from servers and
        recipes, are escaped: no file and no tracker takes them, and one such name would cost all
        numbers of its step. Raises ValueError if a metric is named ``step`` or ``time``. Raises
        RemovedError if the file was removed: another run may have the folder now.
        """
        if not self._is_in_place():
            raise RemovedError(
                f"{self._path} was removed or replaced while this run wrote to it, so the run "
                "ends here and does not write to a folder that another run may have now; start it "
                "again with another run_dir"
            )
        taken = {"step", "time"} & set(metrics)
        if taken:
            raise ValueError(
                f"metric name {sorted(taken)[0]!r} is reserved for the log line itself; add a "
                "group, such as 'train/step'"
            )
        numbers = {_encodable(name): float(value) for name, value in metrics.items()}
        numbers |= self._trackers.metrics()
        line: dict[str, Any] = {"step": int(step), "time": round(time.time(), 3)}
        line.update((name, x if math.isfinite(x) else None) for name, x in numbers.items())
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        self._trackers.log(int(step), numbers)

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False

    def rewind(self, step: int) -> None:
        """Remove all lines after ``step``, atomically, to resume from its checkpoint.

        Unreadable lines, such as a last line truncated by a kill, are dropped too.
        """
        self._file.close()
        lines = []
        for _, line in _lines(self._path):
            try:
                if parse_line(line)["step"] <= step:
                    lines.append(line.decode("utf-8-sig").rstrip("\n"))
            except ValueError as error:
                _log.warning("metrics.jsonl: dropped an unreadable line (%s): %.80r", error, line)
        write_text(self._path, "".join(line + "\n" for line in lines))
        self._file = self._path.open("a", encoding="utf-8")
        self._trackers.rewind(step, lambda: map(_numbers, lines))

    def start_trackers(self) -> None:
        """Start the trackers. Call this once the run is certain to start or resume."""
        self._trackers.start()

    def close(self, *, ended_by: type[BaseException] | None = None) -> None:
        """Close the file and the trackers (:meth:`Trackers.close`). May be called twice."""
        self._file.close()
        self._trackers.close(ended_by=ended_by)


def _encodable(name: str) -> str:
    """Return a name that UTF-8 can encode.

    >>> _encodable("reward/\\ud800")
    'reward/\\\\ud800'
    """
    return name.encode("utf-8", "backslashreplace").decode()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of ``run_dir/metrics.jsonl`` in order, with null and what is not a number as
    NaN.

    A truncated last line is skipped; without the file, the list is empty. Raises ValueError with
    the line number if another line is damaged.
    """
    path = Path(run_dir) / METRICS_FILE
    lines, damaged = _read(path)
    if damaged:
        number, error = next(iter(damaged.items()))
        raise ValueError(
            f"{path}, line {number} is not a metrics line ({error}); delete that line to "
            "continue without it"
        )
    return lines


def readable_metrics(run_dir: Path) -> tuple[list[dict[str, Any]], int]:
    """Return (:func:`read_metrics` without damaged lines, the number of these)."""
    lines, damaged = _read(Path(run_dir) / METRICS_FILE)
    return lines, len(damaged)


def damaged_lines(count: int) -> str:
    """Return a sentence with the number of damaged lines; empty if there is none.

    >>> damaged_lines(2)
    '2 lines of metrics.jsonl are damaged and left out'
    """
    lines = "1 line" if count == 1 else f"{count:,} lines"
    verb = "is" if count == 1 else "are"
    return f"{lines} of {METRICS_FILE} {verb} damaged and left out" if count else ""


def _read(path: Path) -> tuple[list[dict[str, Any]], dict[int, ValueError]]:
    """Return the lines that are metrics, and number of a line -> why it is not. A line without an
    end that is no metrics line was truncated, which is no damage."""
    read: list[dict[str, Any]] = []
    damaged: dict[int, ValueError] = {}
    for number, line in _lines(path):
        try:
            entry = parse_line(line)
        except ValueError as error:
            if line.endswith(b"\n"):
                damaged[number] = error
            continue
        read.append({k: _number(v) for k, v in entry.items()})
    return read, damaged


def _numbers(line: str) -> tuple[int, dict[str, float]]:
    """Return step and metrics of a line, with null as NaN."""
    entry = parse_line(line.encode())
    step = entry.pop("step")
    del entry["time"]
    return step, {_encodable(k): math.nan if v is None else v for k, v in entry.items()}


MAX_LINE = 8 << 20
"""Bytes of the longest line that is parsed."""


def parse_line(line: bytes) -> dict[str, Any]:
    """Return a line of the log as it was written, for all its readers. Raises ValueError if it is
    damaged: no UTF-8, no JSON object, or without an integer ``step`` and a number ``time``."""
    if len(line) > MAX_LINE:
        raise ValueError(f"it has more than {MAX_LINE >> 20} MiB")
    try:
        entry = json.loads(line.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    step = entry.get("step") if isinstance(entry, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or abs(step) >= 2**53:
        raise ValueError("not a JSON object with an integer 'step' and a number 'time'")
    clock = entry.get("time")
    is_number = isinstance(clock, int | float) and not isinstance(clock, bool)
    if not is_number or not 0 <= clock < END_OF_TIME:
        raise ValueError("its 'time' is not a number of seconds since 1970")
    return dict(entry)


END_OF_TIME = 2.0**36
"""Upper bound of ``time``, in seconds. datetime cannot represent times beyond it."""


def _number(value: Any) -> float:
    """Return a metric's value; NaN if it is not a number in the range of a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        float(value)
    except OverflowError:
        return math.nan
    return value


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line with its end) of the lines that are not empty."""
    if not path.is_file():
        return
    # Not splitlines(): only "\n" ends a line.
    data = read_small(path, limit=_LARGEST_LOG)
    for number, line in enumerate(io.BytesIO(data), 1):
        if line.strip():
            yield number, line
