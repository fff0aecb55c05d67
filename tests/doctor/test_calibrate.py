"""What a machine reaches, measured with sizes that take a moment, and remembered for later
plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from burnish.doctor import calibrate as calibration
from burnish.doctor.calibrate import Sizes, calibrate, gpu_of, remember
from burnish.plan.hardware import Gpu, load_tables

TINY = Sizes(tokens=16, width=64, read_bytes=1 << 20, adam_parameters=10_000)


def test_calibration_on_a_cpu_measures_speed_memory_and_host_adam() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    measurements = calibrate(load_tables(), TINY)
    assert set(measurements) == {"machines", "efficiency"}
    assert set(measurements["machines"]) == {"cpu_tflops", "cpu_gbs"}
    assert all(v > 0 for part in measurements.values() for v in part.values())


def test_rates_are_work_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With calls that take 2 s: 6 x 16 x 2 x 64 x 256 / 2 = 1,572,864 FLOPs a second; a MB in 2 s;
    28 x 10,000 / 2 = 140,000 B a second."""
    monkeypatch.setattr(calibration, "_seconds", lambda call, device: 2.0)
    cpu = torch.device("cpu")
    assert calibration.matmul_flops(TINY, cpu, torch.float32) == 1_572_864
    assert calibration.read_rate(TINY, cpu, torch.float32) == (1 << 20) / 2
    assert calibration.adam_rate(TINY) == 140_000


def test_plans_read_the_saved_calibration(tmp_path: Path) -> None:
    path = tmp_path / "gpus.yaml"
    mine = {"memory_gib": 10, "bf16_tflops": 1, "fp32_tflops": 1, "memory_gbs": 1, "link_gbs": 1}
    path.write_text(yaml.safe_dump({"gpus": {"MINE-10GB": {**mine, "pcie_gbs": 1}}}))
    remember({"machines": {"cpu_gbs": 12.3456}, "efficiency": {"host_adam_gbs": 7.0}}, path)
    remember({"efficiency": {"host_adam_gbs": 8.0}}, path)
    tables = load_tables(path)
    assert tables.machines["cpu_gbs"] == 12.3
    assert tables.efficiency["host_adam_gbs"] == 8.0
    assert "MINE-10GB" in tables.gpus, "what else stood there stays"


def test_a_device_is_matched_in_the_table_by_name_and_memory() -> None:
    tables = load_tables()
    gpu = gpu_of(tables, "NVIDIA H100 80GB HBM3", 85 << 30)
    assert gpu is not None and gpu.name.startswith("H100")
    assert gpu_of(tables, "Radeon", 8 << 30) is None
    two = replace(gpu, name="H100-40GB", memory_gib=40.0)
    more = replace(tables, gpus={gpu.name: gpu, two.name: two})
    near = gpu_of(more, "NVIDIA H100 40GB", 40 << 30)
    assert isinstance(near, Gpu) and near.name == "H100-40GB"
