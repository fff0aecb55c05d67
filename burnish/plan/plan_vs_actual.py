"""Compare planned and measured memory, by role and phase."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from burnish.plan.memory_plan import Plan

MEMORY_FILE = "memory.txt"

PLANNED_AS: Mapping[str, tuple[str, str]] = {
    "load": ("", "load"),
    "rollout": ("rollout", "rollout"),
    "wait": ("rollout", "rollout"),
    "eval": ("rollout", "rollout"),
    "rollout_sync": ("rollout", "sync"),
    "reward": ("reward", "log-probs"),
    "logprobs": ("policy", "log-probs"),
    "reference": ("reference", "log-probs"),
    "teacher": ("teacher", "log-probs"),
    "values": ("critic", "log-probs"),
    "train": ("policy", "forward/backward"),
    "critic": ("critic", "forward/backward"),
    "optim": ("policy", "step"),
    "sync": ("policy", "sync"),
    "checkpoint": ("policy", "checkpoint"),
}
"""Timeline span -> (role, phase of the plan)."""


@dataclass(frozen=True)
class MeasuredPeak:
    """Peak memory of one process in one phase, in bytes."""

    role: str
    """Name of the role, or ``all`` for a process that runs all roles."""
    rank: int
    phase: str
    """Name of a timeline span."""
    host: float
    allocated: float | None = None
    reserved: float | None = None


@dataclass(frozen=True)
class PlanVsActual:
    """One line of the comparison, in bytes. Measured values are the maximum over all ranks."""

    role: str
    phase: str
    planned: float | None
    """Planned tensors on the GPU. None: nothing is planned there."""
    allocated: float | None
    reserved: float | None
    host_planned: float | None
    """Planned host memory of one process. On a machine without GPUs, it includes everything."""
    host: float
    ranks: tuple[float, ...]
    """Measured bytes of each rank: GPU memory, or host memory without a GPU."""


def plan_vs_actual(plan: Plan | None, measured: Iterable[MeasuredPeak]) -> list[PlanVsActual]:
    """Return one line per role and phase, in the order in which they were measured."""
    peaks: dict[tuple[str, str], list[MeasuredPeak]] = {}
    for peak in measured:
        peaks.setdefault((peak.role, peak.phase), []).append(peak)
    lines = []
    for (role, phase), ranks in peaks.items():
        device, host = _planned(plan, role, phase) if plan is not None else (None, None)
        allocated = [m.allocated for m in ranks if m.allocated is not None]
        reserved = [m.reserved for m in ranks if m.reserved is not None]
        line = PlanVsActual(
            role=role,
            phase=phase,
            planned=device,
            allocated=max(allocated, default=None),
            reserved=max(reserved, default=None),
            host_planned=host,
            host=max(m.host for m in ranks),
            ranks=tuple(m.host if m.allocated is None else m.allocated for m in ranks),
        )
        lines.append(line)
    return lines


def _planned(plan: Plan, role: str, span: str) -> tuple[float | None, float | None]:
    """Return the planned (tensors on the device, host memory) of one process."""
    if span not in PLANNED_AS:
        return None, None
    phase = PLANNED_AS[span][1]
    on_gpu = any(p.where == "device" for p in plan.peaks)
    if role == "all":
        peaks = {p.where: p.bytes for p in plan.peaks if p.phase == phase}
        extra = _total(plan, None, phase, "device", overhead=True)
        device = peaks["device"] - extra if "device" in peaks else None
        return device, peaks.get("host")
    device = _total(plan, role, phase, "device", overhead=None if not on_gpu else False)
    host = _total(plan, role, phase, "host", overhead=None)
    if not on_gpu:
        return None, (device + host) or None
    return device or None, host or None


def _total(plan: Plan, role: str | None, phase: str, where: str, *, overhead: bool | None) -> float:
    """Return the bytes of the plan's rows. ``overhead``: True counts only overhead, False excludes
    it, None counts all rows."""
    return sum(
        row.bytes
        for row in plan.rows
        if (role is None or row.role.split(" x")[0] == role)
        and row.phase == phase
        and row.where == where
        and overhead in (None, row.item == "overhead")
    )


def plan_vs_actual_text(lines: Sequence[PlanVsActual]) -> str:
    """Return the comparison as a table in GB."""
    if not lines:
        return "no phase has been measured"
    on_gpu = any(line.allocated is not None for line in lines)
    heads = ["process", "phase"]
    heads += ["planned", "allocated", "plan/meas.", "reserved"] if on_gpu else []
    heads += ["host planned", "host measured"]
    heads += [] if on_gpu else ["plan/meas."]
    table = [heads]
    for line in lines:
        cells = [line.role, line.phase]
        if on_gpu:
            ratio = _ratio(line.planned, line.allocated)
            cells += [_gb(line.planned), _gb(line.allocated), ratio, _gb(line.reserved)]
        cells += [_gb(line.host_planned), _gb(line.host)]
        cells += [] if on_gpu else [_ratio(line.host_planned, line.host)]
        table.append(cells)
    widths = [max(len(row[i]) for row in table) for i in range(len(heads))]
    rows = [
        "  ".join(cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(cells))
        for cells in (list(zip(row, widths, strict=True)) for row in table)
    ]
    note = (
        "GB, maximum over ranks. planned: tensors; allocated, reserved: torch's allocator"
        if on_gpu
        else "GB of resident memory, maximum over ranks"
    )
    return "\n".join([note, *(row.rstrip() for row in rows)])


def to_json(lines: Sequence[PlanVsActual]) -> str:
    """Return the JSON that the report reads."""
    return json.dumps({"lines": [asdict(line) for line in lines]}, indent=1)


def _gb(size: float | None) -> str:
    return "-" if size is None else f"{size / 1e9:.2f}"


def _ratio(a: float | None, b: float | None) -> str:
    return f"{a / b:.2f}" if a and b else "-"
