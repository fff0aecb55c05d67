"""The most memory that this process held in each phase. No loop needs to know.

Phases are the outermost spans of a :class:`~burnish.observe.timeline.Timeline` that was given a
:class:`PhasePeaks`. A phase lasts from its first span until a span of another name begins, so that
nothing between two spans is missed; between :meth:`PhasePeaks.collect` and the next span nothing is
counted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from burnish.observe.memory import current_rss_bytes, reset_peaks, since_reset

UNWATCHED = frozenset({"data"})
"""Spans that are short and many, and hold nothing of their own."""


@dataclass(frozen=True)
class MemoryPeak:
    """Most bytes held at once."""

    host: float
    """Resident memory of the process."""
    allocated: float | None = None
    """On its GPU, by tensors. None: it uses none."""
    reserved: float | None = None
    """On its GPU, taken by torch's allocator."""

    def __or__(self, other: MemoryPeak) -> MemoryPeak:
        """The larger of each."""
        return MemoryPeak(
            max(self.host, other.host),
            _larger(self.allocated, other.allocated),
            _larger(self.reserved, other.reserved),
        )

    @property
    def first(self) -> float:
        """On the GPU, where there is one."""
        return self.host if self.allocated is None else self.allocated


@dataclass(frozen=True)
class ProcessPeaks:
    """Memory peaks of one process in each phase."""

    role: str
    """Whose process; ``all``: of all roles."""
    rank: int
    phases: Mapping[str, MemoryPeak]


class PhasePeaks:
    """Measures one process, of which one thread says what phase it is in."""

    def __init__(self, first: str = "load") -> None:
        """Everything until the first span is ``first``."""
        self.phase: str | None = first
        """Where the process is; the last phase, once that is over."""
        self._open = True
        self._held: dict[str, MemoryPeak] = {}
        self._thread = threading.get_ident()
        self._begun_at = 0.0

    def begin(self, phase: str) -> None:
        """From here on it is ``phase``. Calls of other threads than the maker's are ignored."""
        if phase in UNWATCHED or threading.get_ident() != self._thread:
            return
        if self._open and phase == self.phase:
            return
        self._close()
        self.phase, self._open = phase, True

    def collect(self) -> dict[str, MemoryPeak]:
        """Peaks by phase since the last call, in bytes."""
        self._close()
        self._open = False
        held, self._held = self._held, {}
        return held

    def _close(self) -> None:
        """Record the peak of the current phase, and reset it."""
        if self._open and self.phase is not None:
            host, device = since_reset()
            if host is None:  # no system call for it: what is held at its two ends
                host = max(self._begun_at, float(current_rss_bytes()))
            found = MemoryPeak(host, *(device or (None, None)))
            have = self._held.get(self.phase)
            self._held[self.phase] = found if have is None else have | found
        if not reset_peaks():
            self._begun_at = float(current_rss_bytes())


def peak_metrics(processes: Iterable[ProcessPeaks]) -> dict[str, float]:
    """``memory/<phase>/host_peak_bytes``, and with a GPU ``peak_bytes`` and
    ``reserved_peak_bytes``: the most of all processes. Where several were in a phase,
    ``peak_rank`` is the rank of the one that held most."""
    phases: dict[str, list[tuple[int, MemoryPeak]]] = {}
    for process in processes:
        for phase, held in process.phases.items():
            phases.setdefault(phase, []).append((process.rank, held))
    metrics: dict[str, float] = {}
    for phase, found in phases.items():
        held = found[0][1]
        for _, more in found[1:]:
            held = held | more
        values = {
            "host_peak_bytes": held.host,
            "peak_bytes": held.allocated,
            "reserved_peak_bytes": held.reserved,
            "peak_rank": max(found, key=lambda f: f[1].first)[0] if len(found) > 1 else None,
        }
        metrics |= {f"memory/{phase}/{n}": float(v) for n, v in values.items() if v is not None}
    return metrics


def _larger(a: float | None, b: float | None) -> float | None:
    known = [x for x in (a, b) if x is not None]
    return max(known) if known else None
