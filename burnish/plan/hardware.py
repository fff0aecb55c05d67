"""GPUs and machines of a plan: a small table that users can extend.

``4x8xA800-80GB`` is four nodes of eight GPUs. Without a cluster, the limit is this machine's own
memory. The numbers and their sources are in ``hardware.yaml``.
"""

from __future__ import annotations

import functools
import importlib.resources
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from burnish.config.explain import nearest
from burnish.models.sdpa import Kernels, installed_torch
from burnish.plan.shapes import PlanError

GB = 1e9
GIB = float(1 << 30)
USER_FILE = Path("~/.config/burnish/gpus.yaml")
_FIELDS = ("memory_gib", "bf16_tflops", "fp32_tflops", "memory_gbs", "link_gbs", "pcie_gbs")
_OLDER_SHARES = {"decode": "memory"}
"""Names of ``efficiency`` in files written by an earlier version."""
_CGROUP = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclass(frozen=True)
class Gpu:
    """Data-sheet values of one kind of GPU."""

    name: str
    memory_gib: float
    bf16_tflops: float
    fp32_tflops: float
    memory_gbs: float
    link_gbs: float
    pcie_gbs: float
    capability: float = 8.0
    """Compute capability. Only "at least 8.0" matters here, for the attention kernels."""

    @property
    def bytes(self) -> float:
        """Memory available to a program."""
        return self.memory_gib * GIB


@dataclass(frozen=True)
class Tables:
    """Contents of ``hardware.yaml``, with the user's additions."""

    gpus: Mapping[str, Gpu]
    machines: Mapping[str, float]
    overhead: Mapping[str, float]
    efficiency: Mapping[str, float]


@dataclass(frozen=True)
class Hardware:
    """A cluster of equal nodes with equal GPUs. Without a GPU: one machine that computes on its
    CPUs."""

    nodes: int
    gpus_per_node: int
    gpu: Gpu | None
    host_bytes: float
    """Memory of one node."""
    network_gbs: float
    tables: Tables = field(repr=False)
    notes: tuple[str, ...] = ()
    """Descriptions of the assumptions made."""

    @property
    def num_gpus(self) -> int:
        """Number of GPUs in the cluster."""
        return self.nodes * self.gpus_per_node

    @property
    def device(self) -> str:
        """``cuda`` or ``cpu``."""
        return "cpu" if self.gpu is None else "cuda"

    @property
    def kernels(self) -> Kernels | None:
        """Attention kernels of the GPU in the installed version of torch; None without a GPU."""
        if self.gpu is None:
            return None
        major, minor = divmod(round(self.gpu.capability * 10), 10)
        return Kernels(installed_torch(), (major, minor))

    @property
    def limit(self) -> float:
        """Bytes of the memory that a rank computes in: GPU memory, or host memory without a GPU."""
        return self.host_bytes if self.gpu is None else self.gpu.bytes

    def __str__(self) -> str:
        """Return the name for tables and messages."""
        if self.gpu is None:
            return f"this machine, {self.host_bytes / GB:.1f} GB"
        return f"{self.nodes}x{self.gpus_per_node}x{self.gpu.name}"


@functools.lru_cache(maxsize=8)
def load_tables(extra: Path | None = None) -> Tables:
    """Load the package's table, then merge the user's file and ``extra``. Raises PlanError if a
    file has the wrong format."""
    text = (importlib.resources.files("burnish.plan") / "hardware.yaml").read_text("utf-8")
    tree = yaml.safe_load(text)
    if extra is not None and not extra.is_file():
        why = "is a folder, not a file" if extra.is_dir() else "does not exist"
        raise PlanError(f"--gpus {extra} {why}; give a YAML file with GPUs")
    for path in (USER_FILE.expanduser(), extra):
        if path is not None and path.is_file():
            _merge(tree, path)
    gpus = {name: Gpu(name, **fields) for name, fields in tree["gpus"].items()}
    return Tables(gpus, tree["machines"], tree["overhead"], tree["efficiency"])


def _merge(tree: dict[str, Any], path: Path) -> None:
    try:
        more = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PlanError(f"{path} cannot be read as YAML: {error}") from None
    if isinstance(more, dict) and isinstance(shares := more.get("efficiency"), dict):
        for older, name in _OLDER_SHARES.items():
            if older in shares:
                shares.setdefault(name, shares.pop(older))
    for part, entries in more.items() if isinstance(more, dict) else [("?", None)]:
        if part not in tree or not isinstance(entries, dict):
            raise PlanError(
                f"{path}: {part!r} is not a known section with entries; use {', '.join(tree)}"
            )
        for name, value in entries.items():
            if part == "gpus":
                _check_gpu(path, name, value)
            elif name not in tree[part] or not isinstance(value, (int, float)):
                raise PlanError(
                    f"{path}: {part}.{name}={value!r} is not a known key with a number; keys of "
                    f"{part}: {', '.join(tree[part])}"
                )
            tree[part][name] = value


def _check_gpu(path: Path, name: str, value: Any) -> None:
    wrong = (
        not isinstance(value, dict)
        or set(value) - {"capability"} != set(_FIELDS)
        or any(
            isinstance(v, bool) or not isinstance(v, (int, float)) or v <= 0 for v in value.values()
        )
    )
    if wrong:
        raise PlanError(
            f"{path}: the GPU {name} needs positive numbers for {', '.join(_FIELDS)}; only "
            "capability may be added"
        )


def parse_cluster(
    text: str,
    *,
    tables: Tables | None = None,
    host_gb: float | None = None,
    network_gbs: float | None = None,
    source: str = "--cluster ",
) -> Hardware:
    """Parse ``4x8xA800-80GB``: nodes x GPUs per node x name. ``8xH100-80GB`` is one node,
    ``H100-80GB`` one GPU. ``source``: origin of ``text``, for messages. Raises PlanError if the
    format or the GPU is unknown."""
    tables = tables or load_tables()
    match = re.fullmatch(r"(?:(\d+)x)?(?:(\d+)x)?([A-Za-z].*)", text.strip())
    counts = [int(n) for n in match.groups()[:2] if n is not None] if match else []
    if match is None or 0 in counts:
        raise PlanError(
            f"{source}{text!r} is not of the form NODESxGPUSxNAME, e.g. 4x8xA800-80GB (8xNAME: "
            f"one node; NAME: one GPU). Known GPUs: {', '.join(tables.gpus)}"
        )
    nodes, each = [1, 1, *counts][-2:]
    gpu = _find_gpu(match.group(3), tables)
    notes = []
    if host_gb is None:
        host = tables.machines["host_gib_per_gpu"] * GIB * each
        notes.append(f"a node has {host / GB:.0f} GB of host memory (default; set --host-gb)")
    else:
        host = host_gb * GB
    network = tables.machines["network_gbs"] if network_gbs is None else network_gbs
    if nodes > 1 and network_gbs is None:
        notes.append(f"a GPU sends {network:g} GB/s to other nodes (default; set --network-gbs)")
    return Hardware(nodes, each, gpu, host, network, tables, tuple(notes))


def _find_gpu(name: str, tables: Tables) -> Gpu:
    known = {n.lower(): gpu for n, gpu in tables.gpus.items()}
    key = name.lower().replace("_", "-")
    if key in known:
        return known[key]
    short = [gpu for n, gpu in known.items() if n.partition("-")[0] == key]
    if len(short) == 1:
        return short[0]
    hint = nearest(key, known) if not short else f"; choose from {', '.join(g.name for g in short)}"
    raise PlanError(
        f"the GPU {name!r} is not known{hint}. Known: {', '.join(tables.gpus)}. Add it to "
        f"{USER_FILE} (or a file given by --gpus), as 'gpus: {{NAME: {{...}}}}' with "
        f"{', '.join(_FIELDS)}"
    )


def this_machine(tables: Tables | None = None) -> Hardware:
    """Return this machine's CPUs and memory, limited by its container."""
    tables = tables or load_tables()
    return Hardware(1, 0, None, float(host_memory()), tables.machines["network_gbs"], tables)


def host_memory() -> int:
    """Return the bytes of memory of this machine, or the limit of its container if that is
    lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CGROUP:
        try:
            limit = int(path.read_text())
        except (OSError, ValueError):  # no such file on this system, or "max"
            continue
        return min(total, limit)
    return total


def visible_gpus(tables: Tables | None = None, *, nodes: int = 1) -> Hardware | None:
    """Return the GPUs of this machine that torch detects, on ``nodes`` equal machines; None if
    there are none."""
    import torch

    if not torch.cuda.is_available():
        return None
    tables = tables or load_tables()
    properties = torch.cuda.get_device_properties(0)
    name = properties.name.lower().replace(" ", "")
    near = [
        g
        for g in tables.gpus.values()
        if g.name.partition("-")[0].lower() in name
        and abs(g.bytes / properties.total_memory - 1) < 0.1
    ]
    base = near[0] if near else tables.gpus["A100-80GB"]
    gpu = replace(
        base,
        name=properties.name.replace(" ", "-"),
        memory_gib=properties.total_memory / GIB,
        capability=properties.major + properties.minor / 10,
    )
    note = f"{properties.name} is not in the table of GPUs: the speeds of {base.name} are used"
    notes = () if near else (note,)
    count = torch.cuda.device_count()
    network = tables.machines["network_gbs"]
    return Hardware(nodes, count, gpu, float(host_memory()), network, tables, notes)
