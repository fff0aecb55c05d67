"""Loss scale, skipped steps, loss spikes and the mismatch meter in the report (P12, P13)."""

from __future__ import annotations

import doctest
import json
import math
import re
from itertools import product
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from burnish.observe.metrics import MetricsLog
from burnish.report import charts, number_text
from burnish.report.build import build_report
from burnish.report.catalog import ROLLOUT, UPDATE, Chart, arrange
from burnish.report.charts import MAX_POINTS, step_points
from burnish.report.figures import Figure, curve_figure, split_figure
from burnish.report.times import time_splits
from burnish.runs.curves import Curve

SCALE = Chart(UPDATE, "Loss scale", "log scale", ("train/loss_scale",), log=True)


def drawn(figure: Figure) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The traces and the layout in a figure's fragment."""
    arguments = figure.html.partition("Plotly.newPlot(")[2]
    start, decoder = arguments.index("["), json.JSONDecoder()
    data, end = decoder.raw_decode(arguments, start)
    layout, _ = decoder.raw_decode(arguments, arguments.index("{", end))
    return data, layout


def scale_figure(values: list[float], chart: Chart = SCALE) -> tuple[list[Any], dict[str, Any]]:
    curve = Curve(list(range(1, len(values) + 1)), values)
    return drawn(curve_figure(chart, {name: curve for name in chart.names}))


def test_figures_are_valid_in_plotlys_schema() -> None:
    """``go.Figure`` refuses unknown properties and values. Each unit, range, number of lines and
    length has its own layout; 50 noisy points also have a running mean."""
    names = "train/loss", "train/kl", "<b>/x"
    units, counts = ("", "fraction", "bytes", "tokens"), (3, 50, 2 * MAX_POINTS)
    for count, top, unit, log in product(counts, (0.0, 1e-3, 1.0, 2.0**31), units, (False, True)):
        curve = Curve([*range(1, count + 1)], [top * (step % 3) / 2 for step in range(count)])
        chart = Chart(UPDATE, "", unit, names if log else names[:1], log=log)
        data, layout = drawn(curve_figure(chart, dict.fromkeys(names, curve)))
        assert len(go.Figure(data=data, layout=layout).data) >= len(chart.names)
    for count in counts:
        lines = [{"step": i, "time/step_s": 2.0, "time/a_s": 0.5} for i in range(1, count + 1)]
        data, layout = drawn(split_figure(time_splits(lines)[0].chart))
        assert {trace.type for trace in go.Figure(data=data, layout=layout).data} == {"bar"}


def test_every_metric_of_precision_has_its_chart_in_the_update_section() -> None:
    names = [
        *(f"train/mismatch_{what}" for what in ("abs", "max", "k3")),
        *("train/loss_scale", "critic/loss_scale", "train/loss_spike"),
        *("train/skipped_steps", "critic/skipped_steps", "train/overflows", "train/skipped_total"),
    ]
    charts = arrange(names)
    assert {chart.section for chart in charts} == {UPDATE}
    assert {chart.title: (chart.names, chart.log) for chart in charts} == {
        "Loss scale": (("train/loss_scale", "critic/loss_scale"), True),
        "Skipped steps": (
            ("train/skipped_steps", "critic/skipped_steps", "train/overflows"),
            False,
        ),
        "Skipped steps, total": (("train/skipped_total",), False),
        "Loss spikes": (("train/loss_spike",), False),
        "Trainer vs. sampler": (("train/mismatch_abs",), False),
        "Trainer vs. sampler, largest": (("train/mismatch_max",), False),
        "Trainer vs. sampler, KL": (("train/mismatch_k3",), False),
    }


def test_every_metric_of_ages_and_weights_has_its_chart() -> None:
    update = [
        *("train/age_0_behavior_ratio", "train/age_0_behavior_kl", "train/effective_sample_frac"),
        *("train/correction_frac", "train/correction_weight", "train/correction_max"),
    ]
    rollout = [
        *("rollout/age_0_frac", "rollout/age_8_up_frac", "rollout/age_mean", "rollout/age_max"),
        *("rollout/age_of_tokens_mean", "rollout/age_optimizer_steps_mean"),
    ]
    charts = arrange(update + rollout)
    assert [chart.section for chart in charts] == [UPDATE] * 6 + [ROLLOUT] * 3
    assert charts[-3].names == ("rollout/age_0_frac", "rollout/age_8_up_frac")


def test_the_loss_scale_is_drawn_in_steps_on_an_axis_of_powers_of_two() -> None:
    """From 2^13 to 2^16: four ticks, and an axis 0.3 doublings wider at both ends."""
    data, layout = scale_figure([2.0**16, 2.0**15, 2.0**14, 2.0**13, 2.0**14])
    assert [(t["line"]["shape"], t["y"]) for t in data] == [
        ("hv", [2.0**16, 2.0**15, 2.0**14, 2.0**13, 2.0**14])
    ]
    axis = layout["yaxis"]
    assert axis["type"] == "log"
    assert axis["tickvals"] == [2.0**13, 2.0**14, 2.0**15, 2.0**16]
    assert axis["ticktext"] == [f"2<sup>{k}</sup>" for k in (13, 14, 15, 16)]
    # plotly wants decimal exponents; one float product, so far inside the default relative 1e-6
    assert axis["range"] == pytest.approx([12.7 * math.log10(2), 16.3 * math.log10(2)])


def test_a_wide_range_has_few_ticks_and_a_constant_scale_is_centered() -> None:
    """2^0 to 2^24 in at most 5 gaps: every 5th power, 0, 5, 10, 15, 20."""
    _, layout = scale_figure([2.0**24, 1.0])
    assert layout["yaxis"]["tickvals"] == [2.0**k for k in (0, 5, 10, 15, 20)]
    _, layout = scale_figure([1024.0, 1024.0])
    assert layout["yaxis"]["tickvals"] == [512.0, 1024.0, 2048.0]
    _, layout = scale_figure([1000.0])  # a constant scale need not be a power of two
    assert layout["yaxis"]["tickvals"] == [512.0, 1024.0]


def test_a_scale_of_zero_has_no_logarithm_and_is_drawn_on_a_plain_axis() -> None:
    _, layout = scale_figure([0.0, 4.0])
    assert "type" not in layout["yaxis"]


def test_a_long_loss_scale_is_neither_averaged_nor_smoothed() -> None:
    """5000 steps that halve every 7th and double back at once: each drawn value is one that was
    measured at that step, and every change is there. The same curve without ``log`` is averaged."""
    values = [2.0**15 if step % 7 == 0 else 2.0**16 for step in range(1, 5001)]
    data, _ = scale_figure(values)
    assert len(data) == 1 and data[0]["name"] == "loss scale"
    measured = dict(enumerate(values, start=1))
    assert all(measured[x] == y for x, y in zip(data[0]["x"], data[0]["y"], strict=True))
    changes = {s for s in range(2, 5001) if measured[s] != measured[s - 1]}
    assert changes <= set(data[0]["x"]) and {1, 5000} <= set(data[0]["x"])
    averaged, _ = scale_figure(values, Chart(UPDATE, "Loss scale", "", ("train/loss_scale",)))
    assert not set(averaged[-1]["y"]) <= {2.0**15, 2.0**16}


def test_a_long_steady_scale_is_drawn_in_few_points() -> None:
    points = step_points(Curve(list(range(100_000)), [8.0] * 50_000 + [16.0] * 50_000))
    assert len(points.steps) <= MAX_POINTS + 2
    assert 50_000 in points.steps and points.steps[-1] == 99_999


def test_a_metric_that_is_always_zero_is_drawn_at_the_bottom() -> None:
    chart = Chart(UPDATE, "Skipped steps", "per step", ("train/skipped_steps",))
    _, layout = scale_figure([0.0] * 10, chart)
    assert layout["yaxis"]["range"] == [-0.02, 1]


def _log(run_dir: Path, lines: list[dict[str, float]]) -> str:
    log = MetricsLog(run_dir)
    for step, line in enumerate(lines, start=1):
        log.log(step, line)
    log.close()
    return build_report(run_dir).read_text(encoding="utf-8")


def _tile(page: str, label: str) -> tuple[str, str] | None:
    found = re.search(
        rf'<p class="label">{label}</p>\s*<p class="value">(.*?)</p>\s*<p class="note">(.*?)</p>',
        page,
    )
    return (found[1], found[2]) if found else None


def test_the_page_shows_the_loss_scale_and_what_it_cost(tmp_path: Path) -> None:
    """An fp16 run: the second overflow halves the scale; two of the six steps are skipped."""
    scales = [65536.0, 65536.0, 65536.0, 32768.0, 32768.0, 32768.0]
    page = _log(
        tmp_path,
        [
            {
                "train/loss_scale": scale,
                "train/skipped_steps": float(i in (1, 2)),
                "train/overflows": float(i in (1, 2)),
                "train/skipped_total": float(min(i, 2)),
                "train/mismatch_abs": 0.001,
                "train/mismatch_max": 0.02,
                "train/mismatch_k3": 1e-6,
            }
            for i, scale in enumerate(scales)
        ],
    )
    assert "<b>Loss scale</b> <span>log scale</span>" in page
    assert '"type":"log"' in page and "[65536.0,65536.0,65536.0,32768.0,32768.0,32768.0]" in page
    assert '"shape":"hv"' in page and page.count('"type":"log"') == 1
    for title in ("Skipped steps", "Skipped steps, total", "Trainer vs. sampler, KL"):
        assert f"<b>{title}</b>" in page
    assert _tile(page, "Skipped steps") == ("2", "loss or gradient not finite")


def test_without_a_running_total_the_skipped_steps_are_summed_by_role(tmp_path: Path) -> None:
    """Policy 1 + 0 + 2 = 3 from its counts, critic 4 from its total: 7."""
    page = _log(
        tmp_path,
        [
            {"train/skipped_steps": p, "critic/skipped_steps": 1.0, "critic/skipped_total": c}
            for p, c in ((1.0, 1.0), (0.0, 2.0), (2.0, 4.0))
        ],
    )
    assert _tile(page, "Skipped steps") == (
        "7",
        "loss or gradient not finite; critic 4, train 3",
    )


def test_a_run_without_skipped_steps_has_no_tile_for_them(tmp_path: Path) -> None:
    page = _log(tmp_path, [{"train/skipped_steps": 0.0, "train/skipped_total": 0.0}] * 3)
    assert _tile(page, "Skipped steps") is None
    assert "<b>Skipped steps</b>" in page


def test_the_examples_in_the_docstrings_hold() -> None:
    for module in (charts, number_text):
        assert doctest.testmod(module).failed == 0
