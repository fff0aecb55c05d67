"""Notices about rows that are changed by encoding or look wrong. Each kind is logged once, with the
row's position, and counted.

``chat`` and ``rows`` call :func:`note`; ``encoded`` collects the notes of each row. Without a
collector a note is dropped."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from burnish.chat_message import end_of
from burnish.transcript import FinishReason

_log = logging.getLogger("burnish")

_notes: ContextVar[dict[str, str] | None] = ContextVar("notes", default=None)


def note(kind: str, text: str) -> None:
    """Record a note on the row that is being encoded. ``kind`` is the note's name in counts."""
    notes = _notes.get()
    if notes is not None:
        notes.setdefault(kind, text)


def known_end(reason: Any) -> FinishReason:
    """Return the end of a response by its finish reason. If it is unknown: ``stop``, with a
    note."""
    end = end_of(reason)
    if end is None:
        note(
            "unknown_finish_reason",
            f"the finish reason {reason!r:.60} is not known, so the response counts as ended by "
            "the model; if a limit cut it, write length",
        )
    return end or "stop"


@contextmanager
def collecting() -> Iterator[dict[str, str]]:
    """Collect the notes of one row: kind -> text."""
    notes: dict[str, str] = {}
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


class Notices:
    """Number of rows by kind of note. The first row of each kind is logged."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def add(self, notes: Mapping[str, str], where: str) -> None:
        """Count the notes of the row at ``where``, and log each kind that is new."""
        for kind, text in notes.items():
            if not self.counts[kind]:
                _log.warning("%s: %s (logged once; such rows are counted)", where, text)
            self.counts[kind] += 1

    def join(self, others: PostponedNotices) -> None:
        """Count notices that were postponed."""
        for notes, where in others.rows:
            self.add(notes, where)

    def log_totals(self, unit: str) -> None:
        """Log the number of rows of each kind that has more than one."""
        for kind, count in self.counts.items():
            if count > 1:
                _log.warning("%d %ss in all: %s", count, unit, kind.replace("_", " "))


class PostponedNotices(Notices):
    """Notices that are neither counted nor logged before they are joined to others."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[Mapping[str, str], str]] = []
        """Notes and position of each row."""

    def add(self, notes: Mapping[str, str], where: str) -> None:
        self.rows.append((notes, where))
