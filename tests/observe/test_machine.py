"""Use of the machine: cores, memory, disk, and GPUs behind a stand-in for NVIDIA's library."""

import sys
import time
from types import SimpleNamespace

import pytest

from burnish.observe import machine
from burnish.observe.machine import MachineMonitor


class Nvml:
    """A library with two GPUs, busy 100% and 50%."""

    class NVMLError(Exception):
        pass

    looks = 0

    def nvmlInit(self):
        pass

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUtilizationRates(self, handle):
        self.looks += 1
        return SimpleNamespace(gpu=(100, 50)[handle])

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=10 << handle)


def test_cores_memory_and_disk_are_measured_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # the import fails
    monitor = MachineMonitor(tmp_path)
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    metrics = monitor.metrics()
    assert 0 < metrics["time/cpu_busy_frac"] <= 1
    assert metrics["memory/disk_free_bytes"] > 0 and metrics["memory/machine_used_bytes"] > 0
    assert not any("gpu" in name for name in metrics)
    monitor.close()


def test_gpus_are_means_over_gpus_and_looks(tmp_path, monkeypatch):
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(machine, "_EVERY_S", 0.01)
    monitor = MachineMonitor(tmp_path)
    deadline = time.monotonic() + 10
    while nvml.looks < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    metrics = monitor.metrics()
    monitor.close()
    assert metrics["time/gpu_busy_frac"] == pytest.approx(0.75)
    assert metrics["memory/gpu_used_bytes"] == 30


def test_a_gpu_without_rates_gives_no_numbers(tmp_path, monkeypatch):
    nvml = Nvml()

    def refused(handle):
        raise Nvml.NVMLError("Not Supported")

    monkeypatch.setattr(nvml, "nvmlDeviceGetUtilizationRates", refused)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(machine, "_EVERY_S", 0.01)
    monitor = MachineMonitor(tmp_path)
    time.sleep(0.05)
    assert "time/gpu_busy_frac" not in monitor.metrics()
    monitor.close()
