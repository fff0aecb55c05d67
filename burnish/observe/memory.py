"""How much memory this process holds. All numbers are bytes. Linux and macOS."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import torch

_PROC = Path("/proc/self")


def peak_rss_bytes() -> int:
    """Most resident memory this process ever held, in bytes; child processes are not counted.

    Linux: ``VmHWM`` of /proc/self/status, because ``ru_maxrss`` there also counts the program that
    started this one (it survives exec). Elsewhere ``ru_maxrss``: kibibytes on Linux, bytes on macOS
    (getrusage(2)).
    """
    high_water = _status_bytes("VmHWM")
    if high_water is not None:
        return high_water
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
    ``peak``: since the start of the process (or ``torch.cuda.reset_peak_memory_stats``).
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {}
    devices = range(torch.cuda.device_count())
    return {
        "memory/cuda_allocated_bytes": float(sum(map(torch.cuda.memory_allocated, devices))),
        "memory/cuda_reserved_bytes": float(sum(map(torch.cuda.memory_reserved, devices))),
        "memory/cuda_peak_bytes": float(sum(map(torch.cuda.max_memory_allocated, devices))),
        "memory/cuda_peak_reserved_bytes": float(sum(map(torch.cuda.max_memory_reserved, devices))),
    }


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
