"""The metrics of a run as columns, which grow with their file."""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from burnish.observe.headline import HEADLINES, Headline, headlines
from burnish.observe.metrics import END_OF_TIME, METRICS_FILE

_MAX_METRICS = 1000
_MAX_LINE = 8 << 20
"""Characters of the longest line that is parsed."""
_BLOCK = 4 << 20
_REMEMBERED = 4096
_HEADLINE_VALUES = re.compile(
    b'"(%b)": (-?[0-9][0-9.eE+-]{0,30})[,}]' % b"|".join(re.escape(n).encode() for n in HEADLINES)
)
_STEP = re.compile(rb'"step": (\d{1,15})[,}]')


@dataclass
class Column:
    """A metric: its finite values and the lines in which they are."""

    lines: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))


class MetricLog:
    """The metrics of a run folder. :meth:`refresh` reads what was added since."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / METRICS_FILE
        self._clear()

    def _clear(self) -> None:
        self.steps: array[int] = array("q")
        self.times: array[float] = array("d")
        self.columns: dict[str, Column] = {}
        self.num_bad_lines = 0
        """Complete lines that are not metrics."""
        self.num_omitted = 0
        """Values of metrics beyond the first 1,000 names."""
        self._offset = 0
        self._last = b""
        """The bytes before the offset, at most as many as of a usual line."""
        self._skips = False
        """Whether the offset is inside of a line that is too long."""

    def refresh(self) -> bool:
        """Read complete lines that were added; everything, if the file was replaced or rewritten.
        Return whether something changed. Raises OSError except for a missing file, which has no
        lines."""
        had_lines, before = bool(self.steps), self._offset
        try:
            with open(self._path, "rb") as file:
                self._read(file)
        except FileNotFoundError:
            self._clear()
            return had_lines
        return self._offset != before or (had_lines and not self.steps)

    def _read(self, file: BinaryIO) -> None:
        # (The inode does not tell: file systems give that of a removed file to the next one.)
        file.seek(self._offset - len(self._last))
        if file.read(len(self._last)) != self._last:
            self._clear()
            file.seek(0)
        rest = b""
        while block := file.read(_BLOCK):
            *complete, rest = (rest + block).split(b"\n")
            for line in complete:
                self._advance(line + b"\n")
                if self._skips:
                    self.num_bad_lines += 1
                else:
                    self._add(line)
                self._skips = False
            if len(rest) > _MAX_LINE:
                self._advance(rest)
                self._skips, rest = True, b""

    def _advance(self, text: bytes) -> None:
        self._offset += len(text)
        self._last = text[-_REMEMBERED:]

    def _add(self, line: bytes) -> None:
        entry = _entry(line)
        if entry is None:
            self.num_bad_lines += bool(line.strip())
            return
        number = len(self.steps)
        self.steps.append(entry.pop("step"))
        self.times.append(float(entry.pop("time")))
        for name, value in entry.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            try:
                is_finite = math.isfinite(value)
            except OverflowError:
                continue
            column = self.columns.get(name)
            if column is None:
                if len(self.columns) >= _MAX_METRICS:
                    self.num_omitted += 1
                    continue
                column = self.columns[name] = Column()
            if is_finite:
                column.lines.append(number)
                column.values.append(float(value))

    def names(self) -> list[str]:
        """Return the metrics with a finite value."""
        return [name for name, column in self.columns.items() if column.values]


@dataclass(frozen=True)
class Overview:
    """Summary of a log for the table of runs."""

    step: int | None
    """Step of the last line."""
    headline: Headline | None
    values: Sequence[float]
    """Finite values of the headline."""


def overview_of(folder: Path) -> Overview:
    """Return the overview of a run without parsing its log: keys of headline metrics are found in
    the text, because values of metrics are numbers. Raises OSError except for a missing file."""
    found: dict[str, array[float]] = {}
    step = None
    try:
        with open(folder / METRICS_FILE, "rb") as file:
            rest = b""
            while block := file.read(_BLOCK):
                text = rest + block
                end = text.rfind(b"\n") + 1
                complete, rest = text[:end], text[end:][-_MAX_LINE:]
                for name, number in _HEADLINE_VALUES.findall(complete):
                    found.setdefault(name.decode(), array("d")).append(float(number))
                steps = _STEP.findall(complete[complete.rfind(b"\n", 0, -1) + 1 :])
                step = int(steps[0]) if steps else step
    except FileNotFoundError:
        pass
    finite = {name: values for name, values in found.items() if all(map(math.isfinite, values))}
    headline = next(iter(headlines(finite)), None)
    return Overview(step, headline, [] if headline is None else finite[headline.metric])


def _entry(line: bytes) -> dict[str, Any] | None:
    """Return a line of metrics; None for anything else."""
    if len(line) > _MAX_LINE:
        return None
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    step, clock = entry.get("step"), entry.get("time")
    if isinstance(step, bool) or not isinstance(step, int) or abs(step) >= 2**53:
        return None
    if isinstance(clock, bool) or not isinstance(clock, int | float):
        return None
    return entry if 0 <= clock < END_OF_TIME else None
