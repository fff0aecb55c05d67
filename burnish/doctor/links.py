"""Links between GPUs and between machines, with their nominal rates.

Nothing is measured; ``burnish doctor --calibrate`` measures the link between the first two GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch

SYSTEM = Path("/sys/class")


@dataclass(frozen=True)
class Links:
    """Links available for weights, gradients and rollouts."""

    network: tuple[str, ...] = ()
    """Descriptions of the active network adapters, with their rates."""
    gpu_pairs: int = 0
    direct_pairs: int = 0
    """Number of GPU pairs that can read each other's memory (NVLink, or PCIe with peer access)."""

    @property
    def between_gpus(self) -> str:
        """Return a description of the links between GPUs; "" with fewer than two GPUs."""
        if not self.gpu_pairs:
            return ""
        return f"{self.direct_pairs} of {self.gpu_pairs} pairs of GPUs have peer access"


def find_links(system: Path = SYSTEM) -> Links:
    pairs = list(combinations(range(torch.cuda.device_count()), 2))
    direct = [torch.cuda.can_device_access_peer(first, second) for first, second in pairs]
    return Links((*_infiniband(system), *_ethernet(system)), len(pairs), sum(direct))


def _infiniband(system: Path) -> Iterator[str]:
    for port in sorted(system.glob("infiniband/*/ports/*")):
        if "ACTIVE" not in _read(port / "state"):
            continue
        rate = re.match(r"([\d.]+) Gb/sec", _read(port / "rate"))
        name = f"{port.parts[-3]} port {port.name} (RDMA, {_read(port / 'link_layer')})"
        yield f"{name}: {_gbs(float(rate[1]) * 1000) if rate else 'rate unknown'}"


def _ethernet(system: Path) -> Iterator[str]:
    """Yield active adapters with a physical or virtual device; bridges and loopback have none."""
    for adapter in sorted(system.glob("net/*")):
        if not (adapter / "device").exists() or _read(adapter / "operstate") != "up":
            continue
        speed = _read(adapter / "speed")
        known = speed.isdecimal() and int(speed) > 0
        yield f"{adapter.name}: {_gbs(float(speed)) if known else 'rate unknown'}"


def _read(path: Path) -> str:
    """Read a file of /sys; "" if it is not readable (a virtual adapter has no speed)."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8").strip()
    return ""


def _gbs(megabits: float) -> str:
    return f"{megabits / 1000:g} Gbit/s ({megabits / 8000:.3g} GB/s)"
