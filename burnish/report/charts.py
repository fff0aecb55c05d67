"""The charts of a page: the lines of each chart of the catalog, thinned, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from burnish.report.catalog import Chart, words
from burnish.report.number_text import format_number
from burnish.runs.curves import Curve

MAX_POINTS = 500  # per line; a card has fewer pixels across


@dataclass(frozen=True)
class Line:
    """A line of a chart: one metric."""

    name: str
    metric: str
    values: tuple[float | None, ...]
    """A value per x of the chart; None where the metric was not measured."""


@dataclass(frozen=True)
class ChartData:
    """A chart as ``BurnishCharts.draw`` (charts.js) draws it. Values are not scaled: a chart in
    bytes is drawn in GiB, a fraction in percent."""

    title: str
    unit: str
    x: tuple[int, ...]
    """Steps, in ascending order."""
    lines: tuple[Line, ...]
    note: str = ""
    log: bool = False
    """True if values are powers of two that change in steps: drawn as steps on an axis of powers of
    two."""
    bars: bool = False
    """True if values are drawn as stacked bars."""


@dataclass(frozen=True)
class Constant:
    """A chart whose lines never change, as text.

    >>> curve = Curve([1, 2, 3], [1e-5] * 3)
    >>> constant_of(chart_data(Chart("", "Learning rate", "", ("train/lr",)), {"train/lr": curve}))
    Constant(title='Learning rate', unit='', value='1e-5', note='over 3 steps')
    """

    title: str
    unit: str
    value: str
    note: str
    """Number of steps, or the only one."""


def chart_data(chart: Chart, curves: Mapping[str, Curve]) -> ChartData:
    """Return a chart of the catalog with the curves of its metrics, at most about
    :data:`MAX_POINTS` each."""
    notes: list[str] = []
    columns: list[dict[int, float]] = []
    for name in chart.names:
        curve, size = (step_points(curves[name]), 1) if chart.log else thin(curves[name])
        columns.append(dict(zip(*curve, strict=True)))
        if size > 1:
            notes.append(f"each point is the mean of {size} entries")
    x = sorted(set().union(*columns))
    lines = [
        Line(label, name, tuple(column.get(step) for step in x))
        for label, name, column in zip(labels_of(chart.names), chart.names, columns, strict=True)
    ]
    return ChartData(
        chart.title,
        chart.unit,
        tuple(x),
        tuple(lines),
        note="; ".join(dict.fromkeys(notes)),
        log=chart.log,
    )


def constant_of(chart: ChartData) -> Constant | None:
    """Return the text that replaces a chart whose lines never change; None if one changes."""
    measured = [[v for v in line.values if v is not None] for line in chart.lines]
    if any(len(set(values)) > 1 for values in measured):
        return None
    texts = [format_number(values[0], chart.unit) for values in measured]
    if len(set(texts)) > 1:
        named = zip(chart.lines, texts, strict=True)
        value = ", ".join(f"{line.name} {text}" for line, text in named)
    else:
        value = texts[0]
    steps = len(chart.x)
    note = f"at step {chart.x[0]:,}" if steps == 1 else f"over {steps:,} steps"
    return Constant(chart.title, chart.unit, value, note)


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


def labels_of(names: Sequence[str]) -> list[str]:
    """Return the shortest distinct labels for the lines of one chart: last part, else group, else
    full name."""
    for label in (words, lambda name: name.partition("/")[0]):
        if len({label(name) for name in names}) == len(names):
            return [label(name) for name in names]
    return list(names)
