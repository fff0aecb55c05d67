"""Read the warnings of a run from its ``run.log``."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from burnish.observe.progress import LOG_FILE

MAX_WARNINGS = 50
"""Different warnings that a report shows."""
_MAX_CHARS = 2000
_LARGEST = 1 << 30
"""Bytes of a log of any run; one line of a larger one may exhaust the memory."""
_RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ([A-Z]+) +")
"""Beginning of a record in run.log. Lines without it continue the record above."""


def read_warnings(run_dir: Path) -> list[tuple[str, int]]:
    """Return (text, number of times) of each different warning and error of a run, in the order of
    the first. Empty if the run has no log."""
    path = run_dir / LOG_FILE
    if not path.is_file():
        return []
    if (size := path.stat().st_size) > _LARGEST:
        return [(f"{LOG_FILE} has {size} bytes, so its warnings are omitted", 1)]
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
    return list(counts.items())


def _count(text: str, counts: Counter[str]) -> None:
    text = text.strip()[:_MAX_CHARS]
    if text and (text in counts or len(counts) < MAX_WARNINGS):
        counts[text] += 1
