"""Memory use of this process, in bytes. Linux and macOS."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import torch

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
