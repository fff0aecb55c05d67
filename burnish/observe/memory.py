"""Memory use of this process, in bytes, and its peaks in each phase of a run. Linux and macOS.

The peaks need no changes to the training loops. Phases are the outermost spans of a
:class:`~burnish.observe.timeline.Timeline` with a :class:`PhasePeaks`. A phase lasts from its first
span until a span of another name starts, so that memory use between two spans is included. Between
:meth:`PhasePeaks.collect` and the next span nothing is measured.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

UNWATCHED = frozenset({"data"})
"""Names of frequent, short spans without significant memory; they do not start a phase."""
_PROC = Path("/proc/self")
_RESET_HOST = b"5"
"""Value that resets ``VmHWM`` when written to clear_refs (proc(5), Linux 4.0). A process needs no
privileges to do this for itself."""


class _Before:
    """Peaks from the start of the process to the last :func:`reset_peaks`."""

    host = 0
    can_reset = True
    allocated = reserved = 0.0


def peak_rss_bytes() -> int:
    """Return the peak resident memory of this process in bytes, without child processes.

    On Linux this is ``VmHWM`` of /proc/self/status. ``ru_maxrss`` survives exec, so it would
    include the program that started this process. It is the fallback: in kibibytes on Linux, in
    bytes on macOS (getrusage(2)).
    """
    high_water = _status_bytes("VmHWM")
    if high_water is not None:
        return max(high_water, _Before.host)
    maxrss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return maxrss if sys.platform == "darwin" else maxrss * 1024


def current_rss_bytes() -> int:
    """Return the current resident memory of this process in bytes."""
    now = _status_bytes("VmRSS")
    if now is not None:
        return now
    shown = subprocess.run(
        ["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True, check=True
    )
    return int(shown.stdout) * 1024  # ps(1) reports kibibytes


def cuda_memory() -> dict[str, float]:
    """Return bytes of torch's allocator, summed over this process's GPUs, as metrics.

    ``allocated`` is the memory of tensors, ``reserved`` that taken from the device including free
    blocks, ``peak`` the maximum since the start of the process. Empty without CUDA.
    """
    if not _on_gpu():
        return {}
    devices = range(torch.cuda.device_count())
    return {
        "memory/cuda_allocated_bytes": float(sum(map(torch.cuda.memory_allocated, devices))),
        "memory/cuda_reserved_bytes": float(sum(map(torch.cuda.memory_reserved, devices))),
        "memory/cuda_peak_bytes": max(_Before.allocated, _device_peaks()[0]),
        "memory/cuda_peak_reserved_bytes": max(_Before.reserved, _device_peaks()[1]),
    }


def reset_peaks() -> bool:
    """Reset the peaks of :func:`since_reset`; the peaks since the start of the process are kept.

    Returns False if the system does not support this for host memory.
    """
    host, device = since_reset()
    if device is not None:
        _Before.allocated = max(_Before.allocated, device[0])
        _Before.reserved = max(_Before.reserved, device[1])
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)
    if host is None:
        return False
    _Before.host = max(_Before.host, int(host))
    try:
        (_PROC / "clear_refs").write_bytes(_RESET_HOST)
    except OSError:
        _Before.can_reset = False
    return _Before.can_reset


def since_reset() -> tuple[float | None, tuple[float, float] | None]:
    """Return the peaks since the last :func:`reset_peaks`, in bytes: (resident, (tensors, reserved)
    on this process's GPUs).

    The first is None if the system does not report it, the second without a GPU.
    """
    high_water = _status_bytes("VmHWM")
    known = high_water is not None and _Before.can_reset
    return float(high_water or 0) if known else None, _device_peaks() if _on_gpu() else None


def _on_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _device_peaks() -> tuple[float, float]:
    devices = range(torch.cuda.device_count())
    allocated = sum(map(torch.cuda.max_memory_allocated, devices))
    return float(allocated), float(sum(map(torch.cuda.max_memory_reserved, devices)))


def memory_metrics() -> dict[str, float]:
    """Return current and peak memory of this process under metric names, for the log."""
    return {
        "memory/rss_bytes": float(current_rss_bytes()),
        "memory/peak_rss_bytes": float(peak_rss_bytes()),
        **cuda_memory(),
    }


def _status_bytes(field: str) -> int | None:
    """Return a ``kB`` field (kibibytes, proc(5)) of /proc/self/status in bytes; None if absent."""
    try:
        lines = (_PROC / "status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return None


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
