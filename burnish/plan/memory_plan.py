"""Memory plan: bytes of every role in every phase, with explanations, and whether the job fits.

The classes are plain data. ``predict.py`` creates the plan, and this module formats it as text and
JSON. ``plan_vs_actual.py`` compares it with measured peaks by place, memory and phase.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

PHASES = ("load", "rollout", "log-probs", "forward/backward", "step", "sync", "checkpoint")
ITEMS = (
    "parameters",
    "gradients",
    "optimizer",
    "gathered layers",
    "activations",
    "logits/loss",
    "KV cache",
    "communication",
    "overhead",
)
"""Columns of the table. Every allocation is counted in one of them."""
_HEADS = ("param", "grad", "optim", "gather", "activ", "logits", "KV", "comm", "other")
GB = 1e9
TIGHT = 0.05
"""Share of free memory below which a plan that fits is called tight."""


@dataclass(frozen=True)
class PlanRow:
    """Bytes of one rank of a role, for one purpose in one phase."""

    role: str
    phase: str
    item: str
    bytes: float
    how: str
    where: str = "device"
    """``device`` (the GPU; on a machine without one, its memory), ``host`` or ``disk``."""
    ranks: str = "each"
    """``each`` rank, or ``first``: rank 0 (of a rollout engine over several GPUs: one process)."""
    on_node: int = 1
    """Ranks that have it, on the node with most ranks of the role."""


@dataclass(frozen=True)
class Peak:
    """Peak memory in one place and phase. A place is a GPU with its workers, or a node's host
    memory."""

    place: str
    where: str
    phase: str
    bytes: float
    limit: float
    how: str = ""

    @property
    def margin(self) -> float:
        """Free bytes; negative if bytes are missing."""
        return self.limit - self.bytes

    @property
    def fits(self) -> bool:
        """True if the peak is within the limit."""
        return self.bytes <= self.limit


@dataclass(frozen=True)
class Plan:
    """Result of ``burnish plan``."""

    job: str
    hardware: str
    models: tuple[str, ...]
    batch: tuple[tuple[str, str, str], ...]
    rows: tuple[PlanRow, ...]
    peaks: tuple[Peak, ...]
    """Peaks of every place in every phase."""
    disk_per_checkpoint: float
    assumptions: tuple[str, ...]
    savings: tuple[str, ...] = ()
    """Effect of ``cluster.offload_between_phases``, as text."""
    problems: tuple[str, ...] = ()
    """Reasons other than memory why the job cannot run."""
    guessed: float = 0.0
    """Bytes by which the worst peak may be too high: the margin of activations computed by formula,
    and the upper bound for unknown tensor-parallel parts."""

    @property
    def worst(self) -> Peak:
        """Peak with the least free memory, as a share of its limit."""
        return min(self.peaks, key=lambda p: p.margin / p.limit)

    @property
    def fits(self) -> bool:
        """True if every peak is within its limit and there is no other problem."""
        return not self.problems and all(peak.fits for peak in self.peaks)

    def peak(self, where: str) -> Peak | None:
        """Return the worst peak of one memory (``device`` or ``host``)."""
        peaks = [p for p in self.peaks if p.where == where]
        return min(peaks, key=lambda p: p.margin / p.limit) if peaks else None

    @property
    def cannot_run(self) -> bool:
        """True if the job does not fit even without the ``guessed`` bytes."""
        return bool(self.problems) or any(p.margin + self.guessed < 0 for p in self.peaks)

    def verdict(self) -> str:
        """Return as text whether the job fits, with the tightest peak; then the worst peaks of the
        other places."""
        worst: dict[tuple[str, str], Peak] = {}
        for peak in self.peaks:
            have = worst.get((peak.place, peak.where))
            if have is None or peak.bytes > have.bytes:
                worst[peak.place, peak.where] = peak
        if self.fits:
            tight = self.worst.margin / self.worst.limit < TIGHT
            head = "fits, with a small margin" if tight else "fits"
        else:
            head = "does not fit"
        first, *others = sorted(worst.values(), key=lambda peak: peak.margin / peak.limit)
        lines = [f"verdict: {head}; {_peak_text(first)}", *self.problems, *map(_peak_text, others)]
        return "\n  ".join(lines)

    def to_json(self) -> str:
        """Return the plan as JSON, with ``fits`` and the margin of the worst peak."""
        worst = self.worst
        extra = {
            "fits": self.fits,
            "margin_bytes": worst.margin,
            "margin_frac": worst.margin / worst.limit,
        }
        return json.dumps({**extra, **asdict(self)}, indent=1)

    def to_text(self, *, details: bool = False) -> str:
        """Return the plan as text. ``details``: add every row with its calculation."""
        parts = [
            self.verdict(),
            f"plan of {self.job} on {self.hardware}",
            "\n".join(self.models),
            "\n".join(f"{n:<30} {value:>8}  {origin}".rstrip() for n, value, origin in self.batch),
            _table(self.rows),
            _places_text(self.peaks),
            f"disk: {_gb(self.disk_per_checkpoint)} GB per checkpoint",
        ]
        if details:
            parts.append(_details(self.rows))
        if self.savings:
            parts.append(
                "saved by cluster.layout and cluster.offload_between_phases:\n"
                + "\n".join(f"  {s}" for s in self.savings)
            )
        parts.append("assumed:\n" + "\n".join(f"  - {a}" for a in self.assumptions))
        return "\n\n".join(p for p in parts if p)


def _peak_text(peak: Peak) -> str:
    return (
        f"{peak.place}, {peak.where} memory: {_gb(peak.bytes)} of {_gb(peak.limit)} GB in "
        f"{peak.phase}; {_gb(abs(peak.margin))} GB ({abs(100 * peak.margin / peak.limit):.0f}%) "
        + ("free" if peak.margin >= 0 else "over the limit")
    )


def _table(rows: Iterable[PlanRow]) -> str:
    """Return a table of GB by role and phase: device memory of a rank by purpose, then host memory
    of all ranks of the role on a node."""
    sums: dict[tuple[str, str], dict[str, float]] = {}
    hosts: dict[tuple[str, str], float] = {}
    for row in rows:
        key = (row.role, row.phase)
        if row.where == "device":
            held = sums.setdefault(key, {})
            held[row.item] = held.get(row.item, 0.0) + row.bytes
        elif row.where == "host":
            sums.setdefault(key, {})
            hosts[key] = hosts.get(key, 0.0) + row.bytes * row.on_node
    width = max((len(role) for role, _ in sums), default=4) + 1
    head = f"{'GB by rank':<{width}} {'phase':<17}" + "".join(f"{h:>7}" for h in _HEADS)
    lines = [head + f"{'total':>8}{'node host':>11}"]
    last = None
    for (role, phase), held in sums.items():
        name, last = ("" if role == last else role), role
        cells = "".join(f"{_cell(held.get(item, 0.0)):>7}" for item in ITEMS)
        host = _cell(hosts.get((role, phase), 0.0))
        lines.append(f"{name:<{width}} {phase:<17}{cells}{_gb(sum(held.values())):>8}{host:>11}")
    return "\n".join(lines)


def _places_text(peaks: Iterable[Peak]) -> str:
    """Return the peaks of every place, by phase."""
    places: dict[tuple[str, str], list[Peak]] = {}
    for peak in peaks:
        places.setdefault((peak.place, peak.where), []).append(peak)
    lines = ["peak memory of each GPU or node, GB:"]
    for (place, where), phases in places.items():
        by_phase = ", ".join(f"{p.phase} {_gb(p.bytes)}" for p in phases)
        limit = phases[0].limit
        room = f"{_gb(limit)} GB = {_gb(limit * GB / 2**30)} GiB"
        lines.append(f"  {place} ({where}, {room}): {by_phase}")
    return "\n".join(lines)


def _details(rows: Iterable[PlanRow]) -> str:
    """Return one line per item, with the phases in which it exists."""
    phases: dict[tuple[str, str, str, float, str], list[str]] = {}
    for row in rows:
        key = (row.role, row.where, row.item, row.bytes, row.how)
        phases.setdefault(key, []).append(row.phase)
    lines = ["calculation:"]
    for (role, where, item, size, formula), phases_of_item in phases.items():
        when = (
            ", ".join(dict.fromkeys(phases_of_item))
            if len(set(phases_of_item)) < 4
            else f"{len(set(phases_of_item))} phases"
        )
        lines.append(f"  {role}, {where}, {item}: {_gb(size, 3)} GB = {formula} ({when})")
    return "\n".join(lines)


def _cell(size: float) -> str:
    return "-" if size == 0 else _gb(size)


def _gb(size: float, digits: int = 1) -> str:
    """Format bytes as GB, with more digits for small sizes."""
    value = size / GB
    return f"{value:.{digits if abs(value) >= 1 else max(digits, 3) if abs(value) < 0.1 else 2}f}"
