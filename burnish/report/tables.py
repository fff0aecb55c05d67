"""The memory table of a run, and the warnings of its log."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.observe.files import MEMORY_JSON
from burnish.observe.progress import LOG_FILE
from burnish.small_files import read_small

DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""Errors of a JSON file with other content than a run writes."""


@dataclass(frozen=True)
class MemoryTable:
    """The memory table of the page."""

    heads: tuple[str, ...]
    """Headings of the number columns."""
    rows: tuple[tuple[str, str, tuple[str, ...]], ...]
    """(process, phase, numbers)."""
    note: str


def memory_table(run_dir: Path) -> MemoryTable | None:
    """Return the table of a run; None if nothing was measured or the file cannot be read."""
    file = run_dir / MEMORY_JSON
    if not file.is_file():  # (a pipe would be waited for)
        return None
    try:
        tree = json.loads(read_small(file))
        lines = list(tree["lines"])
        on_gpu = any(line["allocated"] is not None for line in lines)
        columns = _GPU if on_gpu else _CPU
        rows = []
        for line in lines:
            process = "this process" if line["role"] == "all" else str(line["role"])
            if len(line["ranks"]) > 1:
                process += f", {len(line['ranks'])} ranks"
            cells = tuple(_cell(line, column) for column in columns.values())
            rows.append((process, str(line["phase"]), cells))
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ):
        return None
    note = "Maximum over all ranks."
    if on_gpu:
        note += " Planned: tensors. Allocated and reserved: peaks of torch's allocator."
    return MemoryTable(tuple(columns), tuple(rows), note) if rows else None


_GPU: Mapping[str, str | tuple[str, str]] = {
    "Planned": "planned",
    "Allocated": "allocated",
    "Planned / allocated": ("planned", "allocated"),
    "Reserved": "reserved",
    "Host, planned": "host_planned",
    "Host": "host",
}
_CPU: Mapping[str, str | tuple[str, str]] = {
    "Planned": "host_planned",
    "Measured": "host",
    "Planned / measured": ("host_planned", "host"),
}


def _cell(line: Mapping[str, Any], column: str | tuple[str, str]) -> str:
    if isinstance(column, tuple):
        above, below = (line[name] for name in column)
        return f"{above / below:.2f}" if above and below else ""
    value = line[column]
    return "" if value is None else f"{value / 1e9:,.2f} GB"


@dataclass(frozen=True)
class LoggedWarning:
    """A warning or error of a run."""

    text: str
    count: int
    """Number of times it was logged."""


MAX_WARNINGS = 50
"""Different warnings that a report shows."""
_MAX_CHARS = 2000
_LARGEST = 1 << 30
"""Bytes of a log of any run; one line of a larger one may exhaust the memory."""
_RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ([A-Z]+) +")
"""Beginning of a record in run.log. Lines without it continue the record above."""


def read_warnings(run_dir: Path) -> list[LoggedWarning]:
    """Return each different warning and error of a run, in the order of the first. Empty
    if the run has no log."""
    path = run_dir / LOG_FILE
    if not path.is_file():
        return []
    if (size := path.stat().st_size) > _LARGEST:
        return [LoggedWarning(f"{LOG_FILE} has {size} bytes, so its warnings are omitted", 1)]
    counts: Counter[str] = Counter()
    lines: list[str] = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if begin := _RECORD.match(line):
                _count("".join(lines), counts)
                important = begin[1] in ("WARNING", "ERROR", "CRITICAL")
                lines = [line[begin.end() :]] if important else []
            elif lines and len(lines) < MAX_WARNINGS:
                lines.append(line)
    _count("".join(lines), counts)
    return [LoggedWarning(*item) for item in counts.items()]


def _count(text: str, counts: Counter[str]) -> None:
    text = text.strip()[:_MAX_CHARS]
    if text and (text in counts or len(counts) < MAX_WARNINGS):
        counts[text] += 1
