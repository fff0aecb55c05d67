"""The split of a run's time by phase: of the trainer, and of threads that work at the same
time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from burnish.observe.progress import format_duration, time_lanes, time_phases
from burnish.report.catalog import words
from burnish.report.charts import ChartData, Line

MAX_BARS = 80


@dataclass(frozen=True)
class Phase:
    """A row of the time table."""

    name: str
    total: str
    per_step: str
    percent: float


@dataclass(frozen=True)
class TimeSplit:
    """Seconds per step of one lane."""

    chart: ChartData
    """Stacked bars: a line per phase, in the order of ``phases``. ``x``: first step of each
    bar."""
    phases: tuple[Phase, ...]
    """The longest first."""
    total_s: float


def time_splits(metrics: Sequence[Mapping[str, Any]]) -> list[TimeSplit]:
    """Return the time split of the trainer and, in asynchronous runs, of the threads that work at
    the same time; empty if there are no ``time/*_s`` metrics."""
    lanes = dict.fromkeys(lane for line in metrics for lane in time_lanes(line))
    splits = [_time_split(metrics, lane) for lane in lanes]
    return [split for split in splits if split is not None]


def _time_split(metrics: Sequence[Mapping[str, Any]], lane: str) -> TimeSplit | None:
    lines = [(int(line["step"]), _phases(line, lane)) for line in metrics]
    lines = [(step, phases) for step, phases in lines if phases]
    if not lines:
        return None
    totals: dict[str, float] = {}
    for _, phases in lines:
        for name, seconds in phases.items():
            totals[name] = totals.get(name, 0.0) + seconds
    names = sorted(totals, key=lambda name: -totals[name])
    everything = sum(totals.values())
    num_steps = len({step for step, _ in lines})
    table = [
        Phase(
            name=words(name),
            total=format_duration(totals[name]),
            per_step=f"{totals[name] / num_steps:,.3g} s",
            percent=100 * totals[name] / everything if everything else 0.0,
        )
        for name in names
    ]
    title = "Time per step" + (f", {lane}" if lane else "")
    return TimeSplit(_stacked_bars(title, lines, names), tuple(table), everything)


def _phases(line: Mapping[str, Any], lane: str) -> dict[str, float]:
    """Return the seconds of each phase of a lane, and the rest of the step's time as ``other``."""
    phases = {n: s for n, s in time_phases(line, lane).items() if s > 0}  # NaN is not above 0
    if lane and not phases:
        return {}
    whole = line.get("time/step_s", 0.0)
    rest = whole - sum(phases.values())
    return {**phases, "other": rest} if rest > 0.005 * whole > 0 else phases


def _stacked_bars(
    title: str, lines: Sequence[tuple[int, Mapping[str, float]]], names: Sequence[str]
) -> ChartData:
    """Return at most :data:`MAX_BARS` bars: the mean seconds of each phase in equally many
    steps."""
    steps = sorted({step for step, _ in lines})
    size = -(-len(steps) // MAX_BARS)
    bar_of = {step: i // size for i, step in enumerate(steps)}
    starts = steps[::size]
    counts = [len(steps[i : i + size]) for i in range(0, len(steps), size)]
    bars = []
    for name in names:
        heights = [0.0] * len(starts)
        for step, phases in lines:
            heights[bar_of[step]] += phases.get(name, 0.0) / counts[bar_of[step]]
        bars.append(Line(words(name), f"time/{name}_s", tuple(heights)))
    note = f"each bar is the mean of {size} steps" if size > 1 else ""
    return ChartData(title, "seconds", tuple(starts), tuple(bars), note=note, bars=True)
