"""Peak memory of this process in each phase, measured without changes to the training loops.

Phases are the outermost spans of a :class:`~burnish.observe.timeline.Timeline` with a
:class:`PhasePeaks`. A phase lasts from its first span until a span of another name starts, so that
memory use between two spans is included. Between :meth:`PhasePeaks.collect` and the next span
nothing is measured.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from burnish.observe.memory import current_rss_bytes, reset_peaks, since_reset

UNWATCHED = frozenset({"data"})
"""Names of frequent, short spans without significant memory; they do not start a phase."""


@dataclass(frozen=True)
class MemoryPeak:
    """Peak memory in bytes."""

    host: float
    """Resident memory of the process."""
    allocated: float | None = None
    """Memory of tensors on its GPUs. None: it uses no GPU."""
    reserved: float | None = None
    """Memory reserved by torch's allocator on its GPUs. None: it uses no GPU."""

    def __or__(self, other: MemoryPeak) -> MemoryPeak:
        """Return the elementwise maximum."""
        return MemoryPeak(
            max(self.host, other.host),
            _larger(self.allocated, other.allocated),
            _larger(self.reserved, other.reserved),
        )

    @property
    def first(self) -> float:
        """Return the peak of GPU tensors, or of host memory if the process uses no GPU."""
        return self.host if self.allocated is None else self.allocated


@dataclass(frozen=True)
class ProcessPeaks:
    """Memory peaks of one process in each phase."""

    role: str
    """Role of the process; ``all`` if it runs all roles."""
    rank: int
    phases: Mapping[str, MemoryPeak]


class PhasePeaks:
    """Measures the peaks of one process. The thread that creates it sets the phase."""

    def __init__(self, first: str = "load") -> None:
        """Start in phase ``first``, which lasts until the first span."""
        self.phase: str | None = first
        """Current phase, or the last one if no phase is active."""
        self._open = True
        self._held: dict[str, MemoryPeak] = {}
        self._thread = threading.get_ident()
        self._begun_at = 0.0

    def begin(self, phase: str) -> None:
        """Start ``phase``. Calls from threads other than the creating one are ignored."""
        if phase in UNWATCHED or threading.get_ident() != self._thread:
            return
        if self._open and phase == self.phase:
            return
        self._close()
        self.phase, self._open = phase, True

    def collect(self) -> dict[str, MemoryPeak]:
        """Return the peaks by phase since the last call, and end the current phase."""
        self._close()
        self._open = False
        held, self._held = self._held, {}
        return held

    def _close(self) -> None:
        """Record the peak of the current phase, and reset it."""
        if self._open and self.phase is not None:
            host, device = since_reset()
            if host is None:  # not supported by the system: use start and end of the phase
                host = max(self._begun_at, float(current_rss_bytes()))
            peak = MemoryPeak(host, *(device or (None, None)))
            have = self._held.get(self.phase)
            self._held[self.phase] = peak if have is None else have | peak
        if not reset_peaks():
            self._begun_at = float(current_rss_bytes())


def peak_metrics(processes: Iterable[ProcessPeaks]) -> dict[str, float]:
    """Return ``memory/<phase>/host_peak_bytes`` and, with a GPU, ``peak_bytes`` and
    ``reserved_peak_bytes``: the maximum over all processes.

    If several processes were in a phase, ``peak_rank`` is the rank of the one with the largest
    peak.
    """
    phases: dict[str, list[tuple[int, MemoryPeak]]] = {}
    for process in processes:
        for phase, held in process.phases.items():
            phases.setdefault(phase, []).append((process.rank, held))
    metrics: dict[str, float] = {}
    for phase, peaks in phases.items():
        held = peaks[0][1]
        for _, more in peaks[1:]:
            held = held | more
        values = {
            "host_peak_bytes": held.host,
            "peak_bytes": held.allocated,
            "reserved_peak_bytes": held.reserved,
            "peak_rank": max(peaks, key=lambda f: f[1].first)[0] if len(peaks) > 1 else None,
        }
        metrics |= {f"memory/{phase}/{n}": float(v) for n, v in values.items() if v is not None}
    return metrics


def _larger(a: float | None, b: float | None) -> float | None:
    known = [x for x in (a, b) if x is not None]
    return max(known) if known else None
