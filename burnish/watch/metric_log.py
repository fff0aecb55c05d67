"""The metrics of a run as columns, which grow with their file."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from burnish.observe.headline import Headline, headlines
from burnish.observe.metrics import MAX_LINE, METRICS_FILE, parse_line

_MAX_METRICS = 1000
_BLOCK = 4 << 20
_REMEMBERED = 4096


@dataclass
class Column:
    """A metric: its finite values and the lines in which they are."""

    lines: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))


class MetricLog:
    """The metrics of a run folder. :meth:`refresh` reads what was added since."""

    def __init__(self, folder: Path, *, only: Collection[str] | None = None) -> None:
        """``only``: names of the metrics that are kept. None: all."""
        self._path, self._only = folder / METRICS_FILE, only
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
            if len(rest) > MAX_LINE:
                self._advance(rest)
                self._skips, rest = True, b""
        if rest and not self._skips and self._add(rest, is_complete=False):
            self._advance(rest)  # the last line of a file that was written without its end

    def _advance(self, text: bytes) -> None:
        self._offset += len(text)
        self._last = text[-_REMEMBERED:]

    def _add(self, line: bytes, *, is_complete: bool = True) -> bool:
        """Add a line. Return whether it is one of metrics; ``is_complete``: others are counted."""
        try:
            entry = parse_line(line)
        except ValueError:
            self.num_bad_lines += is_complete and bool(line.strip())
            return False
        number = len(self.steps)
        self.steps.append(entry.pop("step"))
        self.times.append(float(entry.pop("time")))
        for name, value in entry.items():
            if self._only is not None and name not in self._only:
                continue
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
        return True

    def names(self) -> list[str]:
        """Return the metrics with a finite value."""
        return [name for name, column in self.columns.items() if column.values]

    def points(self, name: str) -> list[tuple[int, float]]:
        """Return (number of a line, finite value) of a metric, by step. If a step has several
        values, the last one counts."""
        column = self.columns.get(name, Column())
        last = dict(zip((self.steps[i] for i in column.lines), column.lines, strict=True))
        value_of = dict(zip(column.lines, column.values, strict=True))
        return [(line, value_of[line]) for _, line in sorted(last.items())]

    @property
    def headline(self) -> Headline | None:
        """The metric by which the run is judged, as of :class:`burnish.runs.folder.Run`."""
        return next(iter(headlines(self.names())), None)
