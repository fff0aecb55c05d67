"""``burnish doctor --calibrate``: measure the throughput of this machine for ``burnish plan``.

Times a few matmuls, memory reads, copies and optimizer steps. The results are written to the user's
own table, which ``burnish/plan/hardware.py`` reads, so that later plans predict the times of this
machine. Of the links, only the one between the first two GPUs is measured; the network between
nodes is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml

from burnish.plan.hardware import Gpu, Tables

REPEATS = 5
ADAM_BYTES = 28
"""Bytes per parameter that a fused AdamW transfers: reads weight, gradient and two moments, writes
all but the gradient."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements. :data:`ON_GPU` and :data:`ON_CPU` take a few seconds."""

    tokens: int
    width: int
    read_bytes: int
    """Bytes read; must exceed the last-level cache."""
    adam_parameters: int = 20_000_000


ON_GPU = Sizes(tokens=8192, width=4096, read_bytes=2 << 30, adam_parameters=100_000_000)
ON_CPU = Sizes(tokens=512, width=1024, read_bytes=256 << 20)


def calibrate(tables: Tables, sizes: Sizes | None = None) -> dict[str, dict[str, float]]:
    """Measure this machine. Returns the sections ``efficiency`` and ``machines`` of the user's
    table."""
    if torch.cuda.is_available():
        return _on_gpu(tables, sizes or ON_GPU)
    sizes = sizes or ON_CPU
    device, share = torch.device("cpu"), tables.efficiency
    return {
        "machines": {
            "cpu_tflops": matmul_flops(sizes, device, torch.float32) / 1e12 / share["matmul"],
            "cpu_gbs": read_rate(sizes, device, torch.float32) / 1e9 / share["memory"],
        },
        "efficiency": {"host_adam_gbs": adam_rate(sizes) / 1e9},
    }


def _on_gpu(tables: Tables, sizes: Sizes) -> dict[str, dict[str, float]]:
    device = torch.device("cuda")
    gpu = gpu_of(tables, torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1])
    efficiency = {"host_adam_gbs": adam_rate(sizes) / 1e9}
    if gpu is not None:
        flops, read = (f(sizes, device, torch.bfloat16) for f in (matmul_flops, read_rate))
        efficiency |= {
            "matmul": flops / 1e12 / gpu.bf16_tflops,
            "memory": read / 1e9 / gpu.memory_gbs,
            "pcie": copy_rate(sizes, device) / 1e9 / gpu.pcie_gbs,
        }
        if torch.cuda.device_count() > 1:
            efficiency["link"] = link_rate(sizes) / 1e9 / gpu.link_gbs
    return {"efficiency": efficiency}


def gpu_of(tables: Tables, name: str, memory_bytes: int) -> Gpu | None:
    """Return the table's entry for a device; None if there is none.

    The entry's model name must be part of the device name; of several, the one with the closest
    memory size is used.
    """
    fits = [g for g in tables.gpus.values() if g.name.split("-")[0] in name.replace(" ", "")]
    return min(fits, key=lambda g: abs(g.bytes - memory_bytes), default=None)


def matmul_flops(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> float:
    """Return FLOP/s of forward and backward through the two projections of an MLP."""
    width, inner = sizes.width, 4 * sizes.width
    first, second = (
        torch.randn(a, b, device=device, dtype=dtype, requires_grad=True)
        for a, b in ((width, inner), (inner, width))
    )
    x = torch.randn(sizes.tokens, width, device=device, dtype=dtype, requires_grad=True)

    def step() -> None:
        ((x @ first) @ second).sum().backward()

    return 6.0 * sizes.tokens * 2 * width * inner / _seconds(step, device)


def read_rate(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> float:
    """Return bytes per second of a matmul that reads its weights once for a few tokens."""
    rows = sizes.read_bytes // (sizes.width * dtype.itemsize)
    weight = torch.randn(rows, sizes.width, device=device, dtype=dtype)
    tokens = torch.randn(sizes.width, 4, device=device, dtype=dtype)
    seconds = _seconds(lambda: weight @ tokens, device)
    return weight.nbytes / seconds


def copy_rate(sizes: Sizes, device: torch.device) -> float:
    """Return bytes per second of a copy from pinned host memory to the GPU."""
    host = torch.empty(sizes.read_bytes // 8, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device=device)
    return host.nbytes / _seconds(lambda: target.copy_(host, non_blocking=True), device)


def link_rate(sizes: Sizes) -> float:
    """Return bytes per second of a copy from the first GPU to the second."""
    source = torch.empty(sizes.read_bytes // 8, dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source, device="cuda:1")
    return source.nbytes / _seconds(lambda: target.copy_(source), target.device)


def adam_rate(sizes: Sizes) -> float:
    """Return bytes per second of an AdamW step on the host."""
    parameter = torch.nn.Parameter(torch.zeros(sizes.adam_parameters))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    seconds = _seconds(optimizer.step, torch.device("cpu"))
    return ADAM_BYTES * sizes.adam_parameters / seconds


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Return the median seconds of several calls, after one warm-up call."""
    taken = []
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - started)
    return median(taken[1:])


def remember(measurements: dict[str, dict[str, float]], path: Path) -> str:
    """Merge the measurements into the user's table at ``path``, and return the table's text."""
    tree = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
    tree = tree if isinstance(tree, dict) else {}
    for part, values in measurements.items():
        rounded = {name: float(f"{value:.3g}") for name, value in values.items()}
        tree[part] = {**(tree.get(part) or {}), **rounded}
    text: str = yaml.safe_dump(tree, sort_keys=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return text
