"""The memory table of the report: planned and measured memory by process and phase."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.small_files import read_small

MEMORY_JSON = "memory.json"
"""File of the run with the bytes of every process and phase."""


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
        rows = tuple(
            (_process(line), str(line["phase"]), tuple(_cell(line, c) for c in columns.values()))
            for line in lines
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    note = "Maximum over all ranks."
    if on_gpu:
        note += " Planned: tensors. Allocated and reserved: peaks of torch's allocator."
    return MemoryTable(tuple(columns), rows, note) if rows else None


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


def _process(line: Mapping[str, Any]) -> str:
    ranks = len(line["ranks"])
    name = "this process" if line["role"] == "all" else str(line["role"])
    return f"{name}, {ranks} ranks" if ranks > 1 else name


def _cell(line: Mapping[str, Any], column: str | tuple[str, str]) -> str:
    if isinstance(column, tuple):
        above, below = (line[name] for name in column)
        return f"{above / below:.2f}" if above and below else ""
    value = line[column]
    return "" if value is None else f"{value / 1e9:,.2f} GB"
