"""The figures of the report: metric curves and the time split, as plotly HTML fragments.

A figure is a dictionary in plotly's schema, which a test validates. Objects of plotly, which
validate each property, would take several times as long. Line colors are set here and are readable
on light and dark backgrounds. All other colors (text, grid, hover) come from the page's CSS, so the
same figure works in both themes.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from plotly.io import to_html

from burnish.observe.progress import format_duration, time_lanes, time_phases
from burnish.observe.report_catalog import Chart, words

PALETTE = ("#c8652b", "#2b8a8f", "#5677d8", "#a65a9c", "#8c8b2f", "#c24a5a", "#6f7c8a", "#3f9b62")
FONT = "Inter, ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
MAX_POINTS = 1000  # per curve; a laptop screen has fewer pixels across
MAX_BARS = 80
_SMOOTH_FROM = 40  # points; shorter curves are not smoothed
Trace = dict[str, Any]
_CONFIG = {"displayModeBar": False, "responsive": True, "showTips": False, "plotlyServerURL": ""}


@dataclass(frozen=True)
class Curve:
    """One metric over the run, without steps at which it is missing or not finite."""

    steps: list[int]
    values: list[float]

    @property
    def first(self) -> float:
        return self.values[0]

    @property
    def last(self) -> float:
        return self.values[-1]


@dataclass(frozen=True)
class Figure:
    """A plotly fragment with its title, unit and note."""

    title: str
    unit: str
    note: str
    html: str


@dataclass(frozen=True)
class Phase:
    """A row of the time table."""

    name: str
    total: str
    per_step: str
    percent: float
    color: str


def is_finite(value: Any) -> bool:
    """Return whether ``value`` is a number that a float can represent as finite."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


def curves_of(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """Return metric name -> curve, for metrics with at least one finite value."""
    curves: dict[str, Curve] = {}
    for line in metrics:
        for name, value in line.items():
            if name in ("step", "time") or not is_finite(value):
                continue
            curve = curves.setdefault(name, Curve([], []))
            curve.steps.append(int(line["step"]))
            curve.values.append(float(value))
    return curves


def thin(curve: Curve, limit: int = MAX_POINTS) -> tuple[Curve, int]:
    """Return the curve with at most ``limit`` points, and the number of steps that each point
    averages (1: unchanged).

    >>> thin(Curve([1, 2, 3, 4, 5], [1.0, 3.0, 5.0, 7.0, 10.0]), limit=3)
    (Curve(steps=[2, 4, 5], values=[2.0, 6.0, 10.0]), 2)
    """
    size = -(-len(curve.steps) // limit)
    if size <= 1:
        return curve, 1
    starts = range(0, len(curve.steps), size)
    parts = [curve.values[i : i + size] for i in starts]
    ends = [curve.steps[min(i + size, len(curve.steps)) - 1] for i in starts]
    return Curve(ends, [math.fsum(part) / len(part) for part in parts]), size


def step_points(curve: Curve, limit: int = MAX_POINTS) -> Curve:
    """Thin a piecewise constant curve without changing its shape.

    Beyond ``limit`` points, all changes and about ``limit`` of the other points are kept, without
    averaging.

    >>> step_points(Curve([1, 2, 3, 4, 5, 6], [8.0, 8.0, 8.0, 8.0, 4.0, 4.0]), limit=2)
    Curve(steps=[1, 4, 5, 6], values=[8.0, 8.0, 4.0, 4.0])
    """
    count = len(curve.steps)
    size = -(-count // limit)
    indices = [
        i
        for i, value in enumerate(curve.values)
        if i % size == 0 or i == count - 1 or value != curve.values[i - 1]
    ]
    return Curve([curve.steps[i] for i in indices], [curve.values[i] for i in indices])


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the centered running mean: of each value and its neighbors up to ``window // 2`` away
    (fewer at the ends). Peaks are not shifted.

    >>> smooth([2.0, 4.0, 9.0, 5.0], 3)
    [3.0, 5.0, 6.0, 7.0]
    """
    sums = [0.0, *accumulate(values)]
    half, count = window // 2, len(values)
    spans = [(max(0, i - half), min(count, i + half + 1)) for i in range(count)]
    return [(sums[end] - sums[start]) / (end - start) for start, end in spans]


def is_noisy(values: Sequence[float]) -> bool:
    """Return whether neighboring values differ by more than 2% of the range on average, so that a
    running mean is useful."""
    jumps = [abs(b - a) for a, b in pairwise(values)]
    return len(jumps) > 0 and sum(jumps) / len(jumps) > 0.02 * (max(values) - min(values))


def curve_figure(chart: Chart, curves: Mapping[str, Curve]) -> Figure:
    """Return the figure of a chart, with its metrics as lines.

    If there are at most two and a curve is long and noisy, its running mean is drawn too.
    """
    scale, unit = _scale(chart, curves)
    traces: list[Trace] = []
    notes: list[str] = []
    labels = _labels(chart.names)
    for i, name in enumerate(chart.names):
        curve, size = (step_points(curves[name]), 1) if chart.log else thin(curves[name])
        values = [value * scale for value in curve.values]
        label = html.escape(labels[i])
        color = PALETTE[i % len(PALETTE)]
        if size > 1:
            notes.append(f"each point is the mean of {size} entries")
        helped = len(chart.names) <= 2 and len(values) >= _SMOOTH_FROM and not chart.log
        if helped and is_noisy(values):
            window = len(values) // 40 * 2 + 1
            traces.append(_faint_line(curve.steps, values, color, hover=len(chart.names) == 1))
            values, label = (
                smooth(values, window),
                "running mean" if len(chart.names) == 1 else label,
            )
            notes.append(f"strong line: running mean over {window * size} entries")
        traces.append(_line(curve.steps, values, label, color, held=chart.log))
    layout = _layout(220, yaxis=_y_axis(chart, curves, scale))
    layout["showlegend"] = len(chart.names) > 1
    return Figure(chart.title, unit, "; ".join(dict.fromkeys(notes)), _fragment(traces, layout))


@dataclass(frozen=True)
class TimeSplit:
    """Seconds per step of one lane."""

    figure: Figure
    """Bars stacked by phase."""
    phases: list[Phase]
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
    steps = sorted({step for step, _ in lines})
    fragment, note = _stacked_bars(lines, names, steps)
    everything = sum(totals.values())
    table = [
        Phase(
            name=words(name),
            total=format_duration(totals[name]),
            per_step=f"{totals[name] / len(steps):,.3g} s",
            percent=100 * totals[name] / everything if everything else 0.0,
            color=PALETTE[i % len(PALETTE)],
        )
        for i, name in enumerate(names)
    ]
    title = "Time per step" + (f", {lane}" if lane else "")
    return TimeSplit(Figure(title, "seconds", note, fragment), table, everything)


def _phases(line: Mapping[str, Any], lane: str) -> dict[str, float]:
    """Return the seconds of each phase of a lane, and the rest of the step's time as ``other``."""
    phases = {n: s for n, s in time_phases(line, lane).items() if s > 0}  # NaN is not above 0
    if lane and not phases:
        return {}
    whole = line.get("time/step_s", 0.0)
    rest = whole - sum(phases.values())
    return {**phases, "other": rest} if rest > 0.005 * whole > 0 else phases


def _stacked_bars(
    lines: Sequence[tuple[int, Mapping[str, float]]], names: Sequence[str], steps: Sequence[int]
) -> tuple[str, str]:
    """Return the fragment of the bars, and its note."""
    size = -(-len(steps) // MAX_BARS)
    bar_of = {step: i // size for i, step in enumerate(steps)}
    num_bars = bar_of[steps[-1]] + 1
    starts = [steps[i * size] for i in range(num_bars)]
    ends = [steps[min((i + 1) * size, len(steps)) - 1] for i in range(num_bars)]
    counts = [min(size, len(steps) - i * size) for i in range(num_bars)]
    traces: list[Trace] = []
    for i, name in enumerate(names):
        heights = [0.0] * num_bars
        for step, phases in lines:
            heights[bar_of[step]] += phases.get(name, 0.0) / counts[bar_of[step]]
        traces.append(
            {
                "type": "bar",
                "x": [(a + b) / 2 for a, b in zip(starts, ends, strict=True)],
                "y": heights,
                "name": html.escape(words(name)),
                "marker": {"color": PALETTE[i % len(PALETTE)], "line": {"width": 0}},
                "hovertemplate": "%{y:.3~g} s",
            }
        )
    layout = _layout(280, yaxis={"rangemode": "tozero"})
    layout |= {"barmode": "stack", "bargap": 0.18, "showlegend": False}  # the table is the legend
    if size > 1:
        layout["xaxis"]["unifiedhovertitle"] = {"text": f"{size} steps around %{{x:.0f}}"}
    return _fragment(traces, layout), f"each bar is the mean of {size} steps" if size > 1 else ""


def _line(
    steps: Sequence[int], values: Sequence[float], name: str, color: str, *, held: bool = False
) -> Trace:
    """Return a line of a figure. ``held``: draw steps, each value held until the next one."""
    return {
        "type": "scatter",
        "x": list(steps),
        "y": list(values),
        "name": name,
        "mode": "lines+markers" if len(steps) <= 12 else "lines",
        "line": {"color": color, "width": 2, **({"shape": "hv"} if held else {})},
        "marker": {"size": 6},
    }


def _faint_line(steps: Sequence[int], values: Sequence[float], color: str, *, hover: bool) -> Trace:
    """Return a faint line with the raw values, drawn behind their running mean."""
    return {
        "type": "scatter",
        "x": list(steps),
        "y": list(values),
        "name": "this step",
        "mode": "lines",
        "line": {"color": color, "width": 1},
        "opacity": 0.32,
        "showlegend": False,
        **({} if hover else {"hoverinfo": "skip"}),
    }


def _layout(height: int, *, yaxis: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layout of a figure. ``yaxis``: properties of its y axis."""
    axis = {
        "gridcolor": "#e6e3df",
        "zeroline": False,
        "ticks": "",
        "automargin": True,
        "ticklabelstandoff": 6,
        "tickfont": {"size": 11},
        "fixedrange": True,
    }
    return {
        "height": height,
        "margin": {"l": 8, "r": 12, "t": 6, "b": 4},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 12},
        "hovermode": "x unified",
        "hoverlabel": {"font": {"family": FONT, "size": 12}, "namelength": -1},
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 1.02,
            "yanchor": "bottom",
            "font": {"size": 11},
        },
        "xaxis": {
            **axis,
            "showgrid": False,
            "unifiedhovertitle": {"text": "step %{x}"},
            "title": {"text": "step", "font": {"size": 11}, "standoff": 6},
        },
        "yaxis": {**axis, "nticks": 5, **yaxis},
    }


def _scale(chart: Chart, curves: Mapping[str, Curve]) -> tuple[float, str]:
    """Return the factor for the values, and the unit of the products."""
    if chart.unit == "fraction":
        return 1.0, "percent"
    if chart.unit != "bytes":
        return 1.0, chart.unit
    gib = max(max(curves[name].values) for name in chart.names) >= 2**30
    return (2.0**-30, "GiB") if gib else (2.0**-20, "MiB")


def _y_axis(chart: Chart, curves: Mapping[str, Curve], scale: float) -> dict[str, Any]:
    values = [value * scale for name in chart.names for value in curves[name].values]
    top = max(values)
    if chart.log and min(values) > 0:  # a logarithmic axis cannot show 0
        first, last = math.floor(math.log2(min(values))), math.ceil(math.log2(top))
        if first == last:
            first, last = first - 1, last + 1
        ticks = range(first, last + 1, -(-(last - first) // 5))
        return {
            "type": "log",
            "range": [(first - 0.3) * math.log10(2), (last + 0.3) * math.log10(2)],
            "tickmode": "array",
            "tickvals": [2.0**k for k in ticks],
            "ticktext": [f"2<sup>{k}</sup>" for k in ticks],
            "hoverformat": ",.12~g",  # 65,536 and not 6.554e+4
        }
    if top == min(values) == 0:  # the default axis would be from -1 to 1
        return {"range": [-0.02, 1], "tickformat": "~g"}
    if chart.unit == "fraction":
        return {
            "tickformat": ".0%" if top > 0.05 else ".1~%",
            "hoverformat": ".1%",
            "rangemode": "tozero",
        }
    if chart.unit in ("bytes", "tokens", "tokens per second"):
        return {"tickformat": ",.3~r", "hoverformat": ",.4~r", "rangemode": "tozero"}
    if 0 < top < 1e-2:
        return {"exponentformat": "e", "minexponent": 2, "hoverformat": ".4~g"}
    return {"tickformat": "~g", "hoverformat": ".4~g"}


def _labels(names: Sequence[str]) -> list[str]:
    """Return the shortest distinct labels for the lines of one figure: last part, else group, else
    full name."""
    for label in (words, lambda name: name.partition("/")[0]):
        if len({label(name) for name in names}) == len(names):
            return [label(name) for name in names]
    return list(names)


def _fragment(traces: Sequence[Trace], layout: Mapping[str, Any]) -> str:
    text: str = to_html(
        {"data": list(traces), "layout": dict(layout)},
        validate=False,
        full_html=False,
        include_plotlyjs=False,
        config=_CONFIG,
    )
    return text
