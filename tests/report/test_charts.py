"""Charts: which metrics they have, their data, and their tables in the page."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

from burnish.observe.metrics import MetricsLog
from burnish.report import charts, number_text
from burnish.report.build import build_report
from burnish.report.catalog import ROLLOUT, UPDATE, Chart, arrange
from burnish.report.charts import MAX_POINTS, ChartData, chart_data, constant_of, step_points
from burnish.runs.curves import Curve

SCALE = Chart(UPDATE, "Loss scale", "log scale", ("train/loss_scale",), log=True)


def _chart(unit: str = "", log: bool = False, **lines: dict[int, float]) -> ChartData:
    """A chart with a line per name, as step -> value."""
    curves = {f"train/{n}": Curve(list(v), list(v.values())) for n, v in lines.items()}
    return chart_data(Chart(UPDATE, "A chart", unit, tuple(curves), log=log), curves)


def test_lines_measured_at_different_steps_share_their_steps() -> None:
    chart = _chart(loss={1: 4.0, 3: 2.0}, kl={2: 0.5, 3: 0.25})
    assert chart.x == (1, 2, 3)
    assert [(line.name, line.metric, line.values) for line in chart.lines] == [
        ("loss", "train/loss", (4.0, None, 2.0)),
        ("kl", "train/kl", (None, 0.5, 0.25)),
    ]


def test_lines_that_never_change_are_a_text() -> None:
    """Equal values once, different ones with their names; a change in one line makes a chart."""
    both = _chart(a={1: 1e-5, 2: 1e-5}, b={1: 1e-5, 2: 1e-5})
    fixed = constant_of(both)
    assert fixed is not None and (fixed.value, fixed.note) == ("1e-5", "over 2 steps")
    fixed = constant_of(_chart("fraction", a={4: 0.5}, b={4: 0.0}))
    assert fixed is not None and (fixed.value, fixed.note) == ("a 50%, b 0%", "at step 4")
    assert constant_of(_chart(a={1: 1.0, 2: 1.0}, b={1: 1.0, 2: 1.1})) is None


def test_a_long_loss_scale_is_never_averaged() -> None:
    """5000 steps that halve every 7th and double back at once: each value is one that was measured
    at that step, and every change is there. The same curve without ``log`` is averaged."""
    values = {step: 2.0**15 if step % 7 == 0 else 2.0**16 for step in range(1, 5001)}
    chart = _chart(log=True, scale=values)
    assert all(values[x] == y for x, y in zip(chart.x, chart.lines[0].values, strict=True))
    changes = {s for s in range(2, 5001) if values[s] != values[s - 1]}
    assert changes <= set(chart.x) and {1, 5000} <= set(chart.x)
    averaged = _chart(scale=values)
    assert len(averaged.x) <= MAX_POINTS and not set(averaged.lines[0].values) <= {2.0**15, 2.0**16}
    assert averaged.note == "each point is the mean of 10 entries"


def test_a_long_steady_scale_is_drawn_in_few_points() -> None:
    points = step_points(Curve(list(range(100_000)), [8.0] * 50_000 + [16.0] * 50_000))
    assert len(points.steps) <= MAX_POINTS + 2
    assert 50_000 in points.steps and points.steps[-1] == 99_999


def _table(page: str, title: str) -> tuple[str, list[str], list[list[str]]]:
    """The attributes, heads and cells of a chart's table."""
    found = re.search(rf'<table data-title="{title}"(.*?)>(.*?)</table>', page, re.DOTALL)
    assert found, title
    head, _, body = found[2].replace("</tbody>", "").partition("<tbody>")
    rows = [re.split("<td>", row) for row in body.split("<tr><th>")[1:]]
    heads = re.findall('<th scope="col">(.*?)</th>', head)
    return found[1], heads, [[cell.strip() for cell in row] for row in rows]


def test_the_table_of_a_chart_has_the_numbers_that_are_drawn(tmp_path: Path) -> None:
    """Fractions in percent, bytes in GiB if the largest is one, small numbers with their digits."""
    page = _log(
        tmp_path,
        [
            {"eval/pass@1": 0.125, "train/lr": 1e-5, "memory/peak_rss_bytes": 2.0**29},
            {"train/lr": 2e-5, "memory/peak_rss_bytes": 3.0 * 2**29, "train/kl": 12345.678},
            {"eval/pass@1": 1 / 3, "train/lr": 1e-5, "train/kl": 0.1},
        ],
    )
    attributes, heads, rows = _table(page, "Held-out pass rate")
    assert 'data-unit="fraction" data-factor="0.01"' in attributes
    assert heads == ["step", "pass@1"] and rows == [["1", "12.5"], ["3", "33.3333"]]
    assert _table(page, "Learning rate")[2] == [["1", "1e-5"], ["2", "2e-5"], ["3", "1e-5"]]
    attributes, _, rows = _table(page, "Memory")
    assert 'data-factor="1073741824"' in attributes and rows == [["1", "0.5"], ["2", "1.5"]]
    assert _table(page, "KL to the reference")[2] == [["2", "12345.7"], ["3", "0.1"]]


def test_the_page_shows_the_loss_scale_and_what_it_cost(tmp_path: Path) -> None:
    """An fp16 run: the second overflow halves the scale; two of the six steps are skipped."""
    scales = [65536.0, 65536.0, 65536.0, 32768.0, 32768.0, 32768.0]
    names = ("train/skipped_steps", "train/overflows")
    lines: list[dict[str, float]] = [
        {"train/loss_scale": scale, "train/skipped_total": min(i, 2.0)}
        | dict.fromkeys(names, float(i in (1, 2)))
        for i, scale in enumerate(scales)
    ]
    page = _log(tmp_path, lines)
    attributes, _, rows = _table(page, "Loss scale")
    assert " data-log" in attributes and page.count(" data-log>") == 1
    assert rows == [[str(i), f"{scale:.0f}"] for i, scale in enumerate(scales, start=1)]
    assert _table(page, "Skipped steps")[1] == ["step", "skipped steps", "overflows"]
    assert _tile(page, "Skipped steps") == ("2", "loss or gradient not finite")


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
    assert "<dt>Skipped steps <span>per step</span></dt><dd><b>0</b> over 3 steps</dd>" in page


def test_the_examples_in_the_docstrings_hold() -> None:
    for module in (charts, number_text):
        assert doctest.testmod(module).failed == 0
