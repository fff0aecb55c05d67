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
from itertools import pairwise
from typing import Any

from plotly.io import to_html

from burnish.report.catalog import Chart
from burnish.report.charts import ChartData, labels_of, smooth, step_points, thin
from burnish.runs.curves import Curve

PALETTE = ("#c8652b", "#2b8a8f", "#5677d8", "#a65a9c", "#8c8b2f", "#c24a5a", "#6f7c8a", "#3f9b62")
FONT = "Inter, ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
_SMOOTH_FROM = 40  # points; shorter curves are not smoothed
Trace = dict[str, Any]
_CONFIG = {"displayModeBar": False, "responsive": True, "showTips": False, "plotlyServerURL": ""}


@dataclass(frozen=True)
class Figure:
    """A plotly fragment with its title, unit and note."""

    title: str
    unit: str
    note: str
    html: str


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
    labels = labels_of(chart.names)
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


def split_figure(chart: ChartData) -> Figure:
    """Return the figure of stacked bars."""
    traces: list[Trace] = []
    for i, line in enumerate(chart.lines):
        traces.append(
            {
                "type": "bar",
                "x": list(chart.x),
                "y": list(line.values),
                "name": html.escape(line.name),
                "marker": {"color": PALETTE[i % len(PALETTE)], "line": {"width": 0}},
                "hovertemplate": "%{y:.3~g} s",
            }
        )
    layout = _layout(280, yaxis={"rangemode": "tozero"})
    layout |= {"barmode": "stack", "bargap": 0.18, "showlegend": False}  # the table is the legend
    return Figure(chart.title, chart.unit, chart.note, _fragment(traces, layout))


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


def _fragment(traces: Sequence[Trace], layout: Mapping[str, Any]) -> str:
    text: str = to_html(
        {"data": list(traces), "layout": dict(layout)},
        validate=False,
        full_html=False,
        include_plotlyjs=False,
        config=_CONFIG,
    )
    return text
