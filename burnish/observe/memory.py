"""How much memory this process holds. All numbers are bytes. Linux and macOS."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import torch

_PROC = Path("/proc/self")
_RESET_HOST = b"5"
"""Written to clear_refs it resets ``VmHWM`` (proc(5), Linux 4.0); a process may do that
to itself without any right."""


class _Before:
    """Peaks that were there before the last :func:`reset_peaks`."""

    host = 0
    can_reset = True
    allocated = reserved = 0.0


def peak_rss_bytes() -> int:
    """Most resident memory this process ever held, in bytes; child processes are not counted.

    Linux: ``VmHWM`` of /proc/self/status, because ``ru_maxrss`` there also counts the program that
    started this one (it survives exec). Elsewhere ``ru_maxrss``: kibibytes on Linux, bytes on macOS
    (getrusage(2)).
    """
    high_water = _status_bytes("VmHWM")
    if high_water is not None:
        return max(high_water, _Before.host)
    maxrss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return maxrss if sys.platform == "darwin" else maxrss * 1024


def current_rss_bytes() -> int:
    """Resident memory this process holds now, in bytes."""
    now = _status_bytes("VmRSS")
    if now is not None:
        return now
    shown = subprocess.run(
        ["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True, check=True
    )
    return int(shown.stdout) * 1024  # ps(1) counts kibibytes


def cuda_memory() -> dict[str, float]:
    """Bytes of torch's allocator summed over this process's GPUs, as metrics; empty without CUDA.

    ``allocated``: held by tensors; ``reserved``: taken from the device, free blocks included;
    ``peak``: since the start of the process.
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
    """Reset the peaks of :func:`since_reset`; those since the start of the process are
    kept. False where the system cannot do that for host memory."""
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
    """(most resident bytes, (most bytes of tensors, most bytes reserved) on this process's GPUs)
    since the last :func:`reset_peaks`; None where it cannot be known, or there is no GPU."""
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
    """Everything above under metric names, ready for the log."""
    return {
        "memory/rss_bytes": float(current_rss_bytes()),
        "memory/peak_rss_bytes": float(peak_rss_bytes()),
        **cuda_memory(),
    }


def _status_bytes(field: str) -> int | None:
    """A ``kB`` field (kibibytes, proc(5)) of /proc/self/status in bytes; None where there is
    none.
    """
    try:
        lines = (_PROC / "status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return None
