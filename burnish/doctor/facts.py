"""Facts about a machine that are available without large imports: versions, devices, memory, and
links with their nominal rates. ``burnish doctor --calibrate`` measures the link between the first
two GPUs."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from itertools import combinations
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.version import Version

from burnish.config.sandbox import BubblewrapSandbox
from burnish.sandbox.base import SandboxError
from burnish.sandbox.make import check_sandbox
from burnish.secret import is_secret

EXTRAS = {
    "ray": "groups of workers, on this machine or a cluster (cluster.runtime=ray)",
    "deepspeed": "the DeepSpeed train engine (train.engine.kind=deepspeed)",
    "vllm": "the vLLM rollout engine (rollout.engine.kind=vllm; without a GPU by: make vllm-cpu)",
    "demo": "burnish demo, and environments of reasoning-gym",
    "serve": "burnish serve, serve-reward and watch",
    "notebook": "plots of runs (burnish.load_run(...).plot())",
    "mcp": "tools of MCP servers (rollout.episodes.mcp)",
    "tensorboard": "event files for TensorBoard (observe.tensorboard)",
    "wandb": "metrics and samples in Weights & Biases (observe.wandb)",
    "mlflow": "metrics in MLflow (observe.mlflow)",
    "trackio": "metrics in Trackio (observe.trackio)",
    "quant": "4-bit base weights for adapters (model.quantization), and 8-bit AdamW",
}
"""Extra of the package -> description of its features."""
DRIVER_FILE = Path("/proc/driver/nvidia/version")
"""File provided by NVIDIA's kernel module."""
OTHER_NAMES = {"vllm": ("vllm-cpu",)}
"""Distribution -> other distributions that provide the same module."""
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


@dataclass(frozen=True)
class CudaDevice:
    """A CUDA device."""

    name: str
    memory_bytes: int
    capability: str
    """Compute capability, e.g. ``9.0``."""


@dataclass(frozen=True)
class Facts:
    """Properties of a machine that matter to Burnish."""

    versions: Mapping[str, str]
    """Normalized name -> version of the installed distributions."""
    python: str
    system: str
    cpus: int
    cpu: str
    memory_bytes: int
    shm_bytes: int | None
    """Free bytes in /dev/shm. None: it does not exist."""
    disk_bytes: int
    """Free bytes on the disk of the working directory."""
    open_files: int
    """Limit on open files of this process."""
    gpus: tuple[CudaDevice, ...] = ()
    cuda_build: str | None = None
    """CUDA version that torch was built for. None: a CPU build."""
    nccl: str | None = None
    driver_present: bool = False
    """True if NVIDIA's kernel module or the tool nvidia-smi is installed."""
    driver: str | None = None
    """Version of the NVIDIA driver. None: unknown."""
    links: Links = field(default_factory=Links)
    sandbox_problem: str | None = None
    """Reason why bubblewrap does not run code in isolation. None: it does."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that influence Burnish or its libraries, without secrets."""

    def version(self, name: str) -> Version | None:
        """Return the installed version of a distribution, or of one that provides the same
        module."""
        for each in (name, *OTHER_NAMES.get(name, ())):
            if each in self.versions:
                return Version(self.versions[each])
        return None


def gather_facts() -> Facts:
    """Return the facts of this machine and this environment."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shm = Path("/dev/shm")
    watched = ("CUDA_", "DS_", "NCCL_", "OMP_", "PYTORCH_", "RAY_", "VLLM_")
    has_nccl = torch.version.cuda is not None and torch.distributed.is_nccl_available()
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    properties = [torch.cuda.get_device_properties(i) for i in range(num_gpus)]
    return Facts(
        versions=_versions(),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} ({platform.machine()})",
        cpus=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        cpu=_cpu_name(),
        memory_bytes=memory,
        shm_bytes=shutil.disk_usage(shm).free if shm.is_dir() else None,
        disk_bytes=shutil.disk_usage(Path.cwd()).free,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        gpus=tuple(CudaDevice(p.name, p.total_memory, f"{p.major}.{p.minor}") for p in properties),
        cuda_build=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        driver_present=shutil.which("nvidia-smi") is not None or DRIVER_FILE.is_file(),
        driver=driver_version(DRIVER_FILE),
        links=find_links(),
        sandbox_problem=_sandbox_problem(),
        environment={
            k: v for k, v in os.environ.items() if k.startswith(watched) and not is_secret(k)
        },
    )


def _sandbox_problem() -> str | None:
    try:
        check_sandbox(BubblewrapSandbox())
    except SandboxError as error:
        return str(error)
    return None


def _versions() -> dict[str, str]:
    """Return the version of each installed distribution.

    If there are several copies, the first one on ``sys.path`` counts, since it is the one imported.
    """
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            versions.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution.version)
    return versions


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    if path.is_file():
        named = re.search(r"^model name\s*: (.*)$", path.read_text(errors="replace"), re.MULTILINE)
        if named:
            return named[1]
    return platform.processor() or platform.machine()


def driver_version(path: Path) -> str | None:
    """Return the version of the driver's kernel module from ``path``; None if unknown."""
    if not path.is_file():
        return None
    text = path.read_text(errors="replace")
    match = re.search(r"Kernel Module(?: for \w+)?\s+(\d+(?:\.\d+)+)", text)
    return match[1] if match else None


def requirements() -> dict[str, list[Requirement]]:
    """Return the requirements of Burnish by extra; those without an extra are under ""."""
    try:
        lines = metadata.requires("burnish") or []
    except metadata.PackageNotFoundError:
        return {}
    by_extra: dict[str, list[Requirement]] = {"": []}
    for line in lines:
        requirement = Requirement(line)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", str(requirement.marker or ""))
        by_extra.setdefault(extra[1] if extra else "", []).append(requirement)
    return by_extra


def find_links(system: Path = SYSTEM) -> Links:
    """Return the links of this machine: its active network adapters, and its pairs of GPUs."""
    adapters = []
    for port in sorted(system.glob("infiniband/*/ports/*")):
        if "ACTIVE" in _read(port / "state"):
            rate = re.match(r"([\d.]+) Gb/sec", _read(port / "rate"))
            name = f"{port.parts[-3]} port {port.name} (RDMA, {_read(port / 'link_layer')})"
            adapters.append(f"{name}: {_gbs(float(rate[1]) * 1000) if rate else 'rate unknown'}")
    for adapter in sorted(system.glob("net/*")):  # (bridges and loopback have no device)
        if (adapter / "device").exists() and _read(adapter / "operstate") == "up":
            speed = _read(adapter / "speed")
            known = speed.isdecimal() and int(speed) > 0
            adapters.append(f"{adapter.name}: {_gbs(float(speed)) if known else 'rate unknown'}")
    pairs = list(combinations(range(torch.cuda.device_count()), 2))
    direct = [torch.cuda.can_device_access_peer(first, second) for first, second in pairs]
    return Links(tuple(adapters), len(pairs), sum(direct))


def _read(path: Path) -> str:
    """Read a file of /sys; "" if it is not readable (a virtual adapter has no speed)."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8").strip()
    return ""


def _gbs(megabits: float) -> str:
    return f"{megabits / 1000:g} Gbit/s ({megabits / 8000:.3g} GB/s)"
