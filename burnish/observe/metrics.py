"""``metrics.jsonl``: one line of strictly valid JSON per log call, always on. TensorBoard beside it
on request.

Names are grouped by a slash: ``train/loss``, ``reward/mean``, ``rollout/tokens_per_s``,
``time/rollout_s``, ``eval/pass@1``, ``memory/peak_rss_bytes``. A line is on disk (flushed) before
the next step begins, so a killed run loses at most the step it was in; :meth:`MetricsLog.rewind`
takes the log back to a checkpoint on resume.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.observe.files import write_text

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIR = "tensorboard"

_log = logging.getLogger("burnish.metrics")


class MetricsLog:
    """Appends to ``run_dir/metrics.jsonl``. One writer per run folder."""

    def __init__(self, run_dir: Path, *, tensorboard: bool = False) -> None:
        """Open the log, making the folder; an existing log is continued.

        ``tensorboard`` also writes event files under ``run_dir/tensorboard``. Raises ImportError
        with the package to install where TensorBoard is missing.
        """
        self._run_dir = Path(run_dir)
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._path = self._run_dir / METRICS_FILE
        self._tensorboard = _summary_writer(self._run_dir, None) if tensorboard else None
        _cut_torn_line(self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append ``{"step": step, "time": <unix seconds>, **metrics}``; NaN and infinity are
        written as null.

        Raises ValueError for a metric called ``step`` or ``time``, which the line itself uses.
        """
        taken = {"step", "time"} & set(metrics)
        if taken:
            raise ValueError(
                f"metric name {sorted(taken)[0]!r} is used by the log line itself; put a group in "
                "front, such as 'train/step'"
            )
        numbers = {name: float(value) for name, value in metrics.items()}
        line: dict[str, Any] = {"step": int(step), "time": round(time.time(), 3)}
        line.update((name, x if math.isfinite(x) else None) for name, x in numbers.items())
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            for name, x in numbers.items():
                self._tensorboard.add_scalar(name, x, int(step))
            self._tensorboard.flush()

    def rewind(self, step: int) -> None:
        """Forget everything after ``step``, in one atomic replacement (for resuming from its
        checkpoint).

        Lines that cannot be read, such as one that a kill cut off, are dropped too.
        """
        self._file.close()
        kept = [line for line in _lines(self._path) if _step_of(line) <= step]
        write_text(self._path, "".join(line + "\n" for line in kept))
        self._file = self._path.open("a", encoding="utf-8")
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = _summary_writer(self._run_dir, step + 1)

    def close(self) -> None:
        """Close the files. May be called twice."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of ``run_dir/metrics.jsonl`` in order; null reads as NaN, a torn last line is left
    out.

    A folder without the file gives an empty list. Raises ValueError naming a broken line elsewhere.
    """
    path = Path(run_dir) / METRICS_FILE
    lines = list(_lines(path))
    read: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = _parse(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise ValueError(
                f"{path}, line {number} is not a metrics line ({error}); delete that line to go "
                "on without it"
            ) from None
        read.append({k: math.nan if v is None else v for k, v in entry.items()})
    return read


def _parse(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(entry, dict) or not _is_step(entry.get("step")):
        raise ValueError("no JSON object with a whole number 'step' and a number 'time'")
    clock = entry.get("time")
    if not isinstance(clock, int | float) or not 0 <= clock < _END_OF_TIME:
        raise ValueError("its 'time' is no number of seconds since 1970")
    return entry


_END_OF_TIME = 2.0**36
"""Seconds; datetime ends before."""


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53


def _step_of(line: str) -> float:
    """The step of a line; infinity (after every step) where the line cannot be read."""
    try:
        return int(_parse(line)["step"])
    except ValueError as error:
        _log.warning("metrics.jsonl: dropped an unreadable line (%s): %.80r", error, line)
        return math.inf


def _lines(path: Path) -> Iterator[str]:
    if not path.is_file():
        return
    # Not splitlines(): only "\n" ends a line. A killed write can leave half a UTF-8 character.
    for line in path.read_bytes().decode("utf-8", errors="replace").split("\n"):
        if line.strip():
            yield line


def _cut_torn_line(path: Path) -> None:
    """Remove a last line without a line end, so that the next one is not glued to it."""
    if not path.is_file():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        _log.warning("%s: dropped a last line that an earlier run did not finish", path)
        write_text(path, data[: data.rfind(b"\n") + 1].decode("utf-8", errors="replace"))


def _summary_writer(run_dir: Path, purge_step: int | None) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"observe.tensorboard=true needs the package tensorboard, and importing it failed "
            f"({error}); install it with 'pip install tensorboard', or leave observe.tensorboard "
            "off (metrics.jsonl is always written)"
        ) from None
    return SummaryWriter(str(run_dir / TENSORBOARD_DIR), purge_step=purge_step)
