"""Use of this machine by everyone: cores, GPUs, disk."""

from __future__ import annotations

import importlib
import shutil
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

_EVERY_S = 1.0
"""Seconds between two looks at the GPUs. Their counters cover less than that."""


class MachineMonitor:
    """Measures how busy a machine is between two calls of :meth:`metrics`.

    GPUs are those that NVIDIA's library (``nvidia-ml-py``, which vLLM and Ray install) lists, all
    of the machine. Without the library or without a GPU there are no numbers of GPUs.
    """

    def __init__(self, folder: Path) -> None:
        """``folder``: on the disk whose free space is measured."""
        self._folder = folder
        psutil.cpu_percent()  # the first call only starts the measurement
        self._gpus = _Gpus.open()

    def metrics(self) -> dict[str, float]:
        """Return, under metric names: the share of busy cores and of time in which GPUs were busy
        (mean over GPUs), used memory of the machine and of its GPUs, and free bytes on the disk."""
        metrics = {
            "time/cpu_busy_frac": psutil.cpu_percent() / 100,
            "memory/machine_used_bytes": float(psutil.virtual_memory().used),
        }
        with suppress(OSError):  # the folder was removed
            metrics["memory/disk_free_bytes"] = float(shutil.disk_usage(self._folder).free)
        return metrics | (self._gpus.metrics() if self._gpus is not None else {})

    def close(self) -> None:
        """End the thread that looks at the GPUs."""
        if self._gpus is not None:
            self._gpus.close()


class _Gpus:
    """A thread that looks at the GPUs every second."""

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        self._nvml, self._handles = nvml, handles
        self._lock, self._end = threading.Lock(), threading.Event()
        self._busy: list[float] = []
        self._used = 0.0
        self._thread = threading.Thread(target=self._watch, name="burnish-gpus", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls) -> _Gpus | None:
        """Return a thread that has started; None without NVIDIA's library or without a GPU."""
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        except Exception:  # house: ok the library has one class of errors per reason, and no driver
            return None
        return cls(nvml, handles) if handles else None

    def _watch(self) -> None:
        while not self._end.wait(_EVERY_S):
            try:
                busy = [self._nvml.nvmlDeviceGetUtilizationRates(h).gpu for h in self._handles]
                used = sum(self._nvml.nvmlDeviceGetMemoryInfo(h).used for h in self._handles)
            except self._nvml.NVMLError:  # (partitioned GPUs have no rates)
                return
            with self._lock:
                self._busy.append(sum(busy) / len(busy) / 100)
                self._used = max(self._used, float(used))

    def metrics(self) -> dict[str, float]:
        """Return means and maxima since the last call; empty if there was no look since."""
        with self._lock:
            busy, used, self._busy, self._used = self._busy, self._used, [], 0.0
        if not busy:
            return {}
        return {"time/gpu_busy_frac": sum(busy) / len(busy), "memory/gpu_used_bytes": used}

    def close(self) -> None:
        self._end.set()
        self._thread.join()
