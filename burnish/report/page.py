"""The data of the page of one run: :func:`page_of` reads a run folder, ``as_json`` of its result is
the same as JSON values. ``report.html`` contains it, and a live page can send it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby, islice
from typing import Any

from burnish.observe.ending import RunState
from burnish.observe.headline import Headline, headlines
from burnish.observe.metrics import METRICS_FILE
from burnish.observe.progress import format_duration
from burnish.observe.resumes import Resume, read_resumes
from burnish.report.catalog import MORE, OMITTED_IF_ZERO, arrange
from burnish.report.charts import (
    ChartData,
    Constant,
    chart_data,
    constant_of,
    smooth,
    thin,
)
from burnish.report.number_text import format_number
from burnish.report.tables import LoggedWarning, MemoryTable, memory_table, read_warnings
from burnish.report.times import TimeSplit, time_splits
from burnish.runs.curves import Curve, curves_of
from burnish.runs.folder import Run

MAX_METRICS = 1000
"""Different metrics that a page shows."""

_JOBS = {
    "rl": "Reinforcement learning",
    "sft": "Supervised fine-tuning",
    "rm": "Reward model",
    "distill": "Distillation",
    "evaluate": "Evaluation",
    "generate": "Generation",
}


@dataclass(frozen=True)
class Tile:
    """A headline number of the page."""

    label: str
    value: str
    note: str = ""
    spark: str = ""
    """Points of a sparkline, "x,y x,y ..." in a box of 100 x 28; "" for none."""


@dataclass(frozen=True)
class Section:
    """A heading of the page and the charts below it. Charts whose lines never change are in
    ``constants`` instead."""

    title: str
    anchor: str
    charts: tuple[ChartData, ...]
    constants: tuple[Constant, ...]
    folded: bool


@dataclass(frozen=True)
class RunPage:
    """Everything that the page of a run shows, except for its samples."""

    title: str
    """Name of the model."""
    job: str
    run: str
    """Name of the run folder."""
    state: RunState
    facts: tuple[tuple[str, str], ...]
    """(name, value)."""
    tiles: tuple[Tile, ...]
    sections: tuple[Section, ...]
    times: tuple[TimeSplit, ...]
    memory: MemoryTable | None
    warnings: tuple[LoggedWarning, ...]
    recipe: str
    """The resolved recipe as YAML without its secrets; "" if the folder has none."""
    resumes: tuple[Resume, ...]
    """The oldest first."""
    num_steps: int
    """Steps with metrics."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values. Numbers are finite."""
        return dataclasses.asdict(self)


def page_of(run: Run) -> RunPage:
    """Return the data of the page of a run from the present content of its folder; missing
    measurements are omitted. Raises RunFolderError if the recipe or the metrics cannot be read."""
    recipe = run.recipe
    lines, omitted = _with_fewer_names(run.lines)
    curves = curves_of(lines)
    times = time_splits(lines)
    damage = [LoggedWarning(run.damage, 1)] if run.damage else []
    return RunPage(
        title=run.model,
        job=_JOBS.get(run.job, run.job.capitalize()),
        run=run.name,
        state=run.state,
        facts=tuple(_facts(recipe, run.name, lines)),
        tiles=tuple(_tiles(recipe, lines, curves, total_s=times[0].total_s if times else None)),
        sections=tuple(_sections(curves)),
        times=tuple(times),
        memory=memory_table(run.folder),
        warnings=(*damage, *omitted, *read_warnings(run.folder)),
        recipe=run.recipe_text,
        resumes=tuple(read_resumes(run.folder)),
        num_steps=len({line["step"] for line in lines}),
    )


def _sections(curves: Mapping[str, Curve]) -> list[Section]:
    drawn = [n for n, c in curves.items() if n not in OMITTED_IF_ZERO or any(c.values)]
    sections = []
    for title, group in groupby(arrange(drawn), key=lambda chart: chart.section):
        charts = [(chart, constant_of(chart)) for chart in (chart_data(c, curves) for c in group)]
        sections.append(
            Section(
                title=title,
                anchor=title.lower().replace(" ", "-"),
                charts=tuple(chart for chart, constant in charts if constant is None),
                constants=tuple(constant for _, constant in charts if constant is not None),
                folded=title == MORE,
            )
        )
    return sections


def _with_fewer_names(
    lines: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[LoggedWarning]]:
    """Return the lines with the first :data:`MAX_METRICS` metrics, and a warning with its count if
    some were left out."""
    names = dict.fromkeys(name for line in lines for name in line if name not in ("step", "time"))
    drawn = {"step", "time", *islice(names, MAX_METRICS)}
    reduced = [{name: value for name, value in line.items() if name in drawn} for line in lines]
    omitted = len(names) - MAX_METRICS
    if omitted <= 0:
        return reduced, []
    text = (
        f"this page shows the first {MAX_METRICS:,} of {len(names):,} metrics; {METRICS_FILE} "
        "has all of them"
    )
    return reduced, [LoggedWarning(text, 1)]


def _facts(
    config: Mapping[str, Any], name: str, metrics: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """Return the (name, value) pairs below the title."""
    facts = [("Run", name)]
    if metrics:
        facts.append(("Started", date_text(float(metrics[0]["time"]))))
    known = (
        ("Advantage", _below(config, "algorithm", "advantage", "kind")),
        ("LoRA rank", _below(config, "model", "lora", "lora_rank")),
        ("Precision", _below(config, "precision", "dtype")),
        ("Learning rate", _below(config, "train", "lr")),
        ("Seed", config.get("seed")),
    )
    return facts + [
        (name, format_number(value) if isinstance(value, float) else str(value))
        for name, value in known
        if value is not None
    ]


def date_text(seconds: float) -> str:
    """Return a time in Unix seconds as a date of this time zone."""
    return f"{datetime.fromtimestamp(seconds).astimezone():%d %B %Y, %H:%M %Z}".lstrip("0")


def _below(config: Mapping[str, Any], *keys: str) -> Any:
    node: Any = config
    for key in keys:
        if not isinstance(node, Mapping):
            return None
        node = node.get(key)
    return node


def _tiles(
    config: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]],
    curves: Mapping[str, Curve],
    *,
    total_s: float | None,
) -> list[Tile]:
    tiles = [_change(headline, curves[headline.metric]) for headline in headlines(curves)[:2]]
    tiles += _skipped_tile(curves)
    steps = [int(line["step"]) for line in metrics]
    if steps:
        planned = config.get("max_steps")
        tiles.append(
            Tile(
                "Steps",
                f"{max(steps):,}",
                f"of {planned:,} planned" if isinstance(planned, int) else "",
            )
        )
    clock = float(metrics[-1]["time"]) - float(metrics[0]["time"]) if metrics else 0.0
    seconds = total_s if total_s is not None else clock
    if seconds > 0:
        per_step = format_duration(seconds / max(1, len(set(steps))))
        tiles.append(Tile("Total time", format_duration(seconds), f"{per_step} per step"))
    peak = curves.get("memory/peak_rss_bytes")
    if peak:
        top = max(peak.values)
        tiles.append(Tile("Peak memory", format_number(top, "bytes"), "resident, main process"))
    speed = next((n for n in ("rollout/tokens_per_s", "train/tokens_per_s") if n in curves), None)
    if speed:
        mean = sum(curves[speed].values) / len(curves[speed].values)
        tiles.append(
            Tile(
                f"{speed.partition('/')[0].title()} speed",
                f"{mean:,.0f}",
                "tokens per second, mean",
            )
        )
    return tiles


def _skipped_tile(curves: Mapping[str, Curve]) -> list[Tile]:
    """Return a tile with the run's number of skipped optimizer steps, by role; none if it is 0."""
    totals = {
        n.partition("/")[0]: c.last for n, c in curves.items() if n.endswith("/skipped_total")
    }
    for name, curve in curves.items():
        role, _, last = name.partition("/")
        if last == "skipped_steps" and role not in totals:
            totals[role] = math.fsum(curve.values)
    totals = {role: total for role, total in totals.items() if total > 0}
    if not totals:
        return []
    roles = ", ".join(f"{role} {total:,.0f}" for role, total in totals.items())
    note = "loss or gradient not finite" + (f"; {roles}" if len(totals) > 1 else "")
    return [Tile("Skipped steps", f"{sum(totals.values()):,.0f}", note)]


def _change(headline: Headline, curve: Curve) -> Tile:
    """Return a tile with the last value of a curve and its change since the first."""
    label, shown = headline.label, headline.shown
    if len(curve.values) == 1:
        return Tile(label, shown(curve.last), f"at step {curve.steps[0]:,}")
    note = f"from {shown(curve.first)} at step {curve.steps[0]:,}"
    if headline.is_fraction:
        note = f"{100 * (curve.last - curve.first):+.1f} points from {shown(curve.first)}"
    return Tile(label, shown(curve.last), note, _spark(curve))


def _spark(curve: Curve) -> str:
    thinned, _ = thin(curve, limit=120)
    values = smooth(thinned.values, len(thinned.values) // 10)
    low, high = min(values), max(values)
    begin, end = thinned.steps[0], thinned.steps[-1]
    points = []
    for step, value in zip(thinned.steps, values, strict=True):
        x = 100 * (step - begin) / max(1, end - begin)
        y = 26 - 24 * (value - low) / (high - low) if high > low else 14
        points.append(f"{x:.1f},{y:.1f}")
    return " ".join(points)
