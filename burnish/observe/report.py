"""``report.html``: one page about a run, generated from its run folder. It works from disk, without
network access.

Reading order: :func:`build_report`, then report_catalog.py (which metrics are in which figure),
report_figures.py (curves and the time split), :func:`memory_table`, report_samples.py (the table's
data), report.html.j2 with report.css and report.js. All text from models and data rows is embedded
as JSON and displayed through ``textContent``. In addition, the page's content security policy
blocks all requests and only runs scripts with a nonce, which data cannot predict.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib import resources
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from burnish.errors import BurnishError
from burnish.observe.errors import SavedRecipeError
from burnish.observe.files import write_text
from burnish.observe.headline import Headline, headlines, model_title
from burnish.observe.metrics import METRICS_FILE, read_metrics
from burnish.observe.progress import LOG_FILE, format_duration
from burnish.observe.public_recipe import CONFIG_FILE, public_yaml, read_recipe
from burnish.observe.report_catalog import MORE, OMITTED_IF_ZERO, arrange
from burnish.observe.report_figures import (
    Curve,
    Figure,
    curve_figure,
    curves_of,
    smooth,
    thin,
    time_splits,
)
from burnish.observe.report_samples import embed_samples
from burnish.small_files import read_small

REPORT_FILE = "report.html"
MAX_METRICS = 1000
"""Different metrics that a report shows."""

_JOBS = {
    "rl": "Reinforcement learning",
    "sft": "Supervised fine-tuning",
    "rm": "Reward model",
    "distill": "Distillation",
    "evaluate": "Evaluation",
    "generate": "Generation",
}


class ReportError(BurnishError, ValueError):
    """No report can be generated from a folder. The message contains the reason."""


@dataclass(frozen=True)
class Tile:
    """A headline number of the page."""

    label: str
    value: str
    note: str = ""
    spark: str = ""
    """Points of a sparkline, "x,y x,y ..." in a box of 100 x 28; "" for none."""


@dataclass(frozen=True)
class ReportSection:
    """A heading of the page and the figures below it."""

    title: str
    anchor: str
    figures: tuple[Figure, ...]
    folded: bool


def build_report(run_dir: Path) -> Path:
    """Write ``run_dir/report.html`` from the current content of the run folder, and return its
    path.

    Works for every job, also while it is running; missing measurements are omitted. Raises
    ReportError if ``run_dir`` is not a run folder (no config.yaml and no metrics.jsonl) or if one
    of the two cannot be read.
    """
    run_dir = Path(run_dir)
    if (run_dir / REPORT_FILE).is_dir():
        raise ReportError(f"{run_dir / REPORT_FILE} is a folder; move it away")
    config_text, config = _read_config(run_dir)
    try:
        metrics, omitted = _with_fewer_names(read_metrics(run_dir))
    except ValueError as error:
        raise ReportError(str(error)) from error
    curves = curves_of(metrics)
    timing = time_splits(metrics)
    samples = embed_samples(run_dir)
    job = str(config.get("job", "run"))
    page = _template().render(
        title=model_title(config, run_dir),
        job=_JOBS.get(job, job.capitalize()),
        facts=_facts(config, run_dir, metrics),
        tiles=_tiles(config, metrics, curves, total_s=timing[0].total_s if timing else None),
        sections=_sections(curves),
        times=timing,
        memory=memory_table(run_dir),
        samples=samples,
        warnings=[*omitted, *read_warnings(run_dir)],
        config=public_yaml(config, config_text),
        css=_asset("report.css"),
        js=_asset("report.js"),
        plotly=get_plotlyjs() if curves else "",
        num_steps=len({line["step"] for line in metrics}),
        nonce=secrets.token_urlsafe(16),
    )
    path = run_dir / REPORT_FILE
    write_text(path, page)
    return path


def _read_config(run_dir: Path) -> tuple[str, dict[str, Any]]:
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        if (run_dir / METRICS_FILE).is_file():
            return "", {}
        problem = "is a file" if run_dir.is_file() else "does not exist"
        if run_dir.is_dir():
            problem = "has neither config.yaml nor metrics.jsonl"
        raise ReportError(
            f"{run_dir} is not a run folder: it {problem}; give the folder that a job wrote "
            "(run_dir in its recipe, printed when the job starts)"
        )
    try:
        return read_recipe(run_dir)
    except SavedRecipeError as error:
        raise ReportError(str(error)) from error


def _with_fewer_names(
    lines: Sequence[Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], list[tuple[str, int]]]:
    """Return the lines with the first :data:`MAX_METRICS` metrics, and a warning with its count if
    some were left out."""
    names = dict.fromkeys(name for line in lines for name in line if name not in ("step", "time"))
    drawn = {"step", "time", *islice(names, MAX_METRICS)}
    reduced = [{name: value for name, value in line.items() if name in drawn} for line in lines]
    omitted = len(names) - MAX_METRICS
    if omitted <= 0:
        return reduced, []
    text = (
        f"this report shows the first {MAX_METRICS:,} of {len(names):,} metrics; {METRICS_FILE} "
        "has all of them"
    )
    return reduced, [(text, 1)]


def _facts(
    config: Mapping[str, Any], run_dir: Path, metrics: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """Return the (name, value) pairs below the title."""
    facts = [("Run", run_dir.resolve().name)]
    if metrics:
        began = datetime.fromtimestamp(float(metrics[0]["time"])).astimezone()
        facts.append(("Started", f"{began:%d %B %Y, %H:%M %Z}".lstrip("0")))
    known = (
        ("Advantage", _below(config, "algorithm", "advantage", "kind")),
        ("LoRA rank", _below(config, "model", "lora", "lora_rank")),
        ("Precision", _below(config, "precision", "dtype")),
        ("Learning rate", _below(config, "train", "lr")),
        ("Seed", config.get("seed")),
    )
    return facts + [(name, str(value)) for name, value in known if value is not None]


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
        shown = f"{top / 2**30:,.2f} GiB" if top >= 2**30 else f"{top / 2**20:,.0f} MiB"
        tiles.append(Tile("Peak memory", shown, "resident, main process"))
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


def _sections(curves: Mapping[str, Curve]) -> list[ReportSection]:
    drawn = [n for n, c in curves.items() if n not in OMITTED_IF_ZERO or any(c.values)]
    charts = arrange(drawn)
    return [
        ReportSection(
            title=title,
            anchor=title.lower().replace(" ", "-"),
            figures=tuple(curve_figure(chart, curves) for chart in group),
            folded=title == MORE,
        )
        for title, group in groupby(charts, key=lambda chart: chart.section)
    ]


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    # Scripts of plotly's fragments run only with the nonce of the page.
    environment.filters["with_nonce"] = lambda fragment, nonce: fragment.replace(
        "<script", f'<script nonce="{nonce}"', 1
    )
    return environment.from_string(_asset("report.html.j2"))


def _asset(name: str) -> str:
    return resources.files("burnish.observe").joinpath(name).read_text(encoding="utf-8")


MEMORY_JSON = "memory.json"
"""File of the run with the bytes of every process and phase."""


@dataclass(frozen=True)
class MemoryTable:
    """The memory table of the page."""

    heads: tuple[str, ...]
    """Headings of the number columns."""
    rows: tuple[tuple[str, str, tuple[str, ...]], ...]
    """(process, phase, numbers)."""
    note: str


def memory_table(run_dir: Path) -> MemoryTable | None:
    """Return the table of a run; None if nothing was measured or the file cannot be read."""
    file = run_dir / MEMORY_JSON
    if not file.is_file():  # (a pipe would be waited for)
        return None
    try:
        tree = json.loads(read_small(file))
        lines = list(tree["lines"])
        on_gpu = any(line["allocated"] is not None for line in lines)
        columns = _GPU if on_gpu else _CPU
        rows = []
        for line in lines:
            process = "this process" if line["role"] == "all" else str(line["role"])
            if len(line["ranks"]) > 1:
                process += f", {len(line['ranks'])} ranks"
            cells = tuple(_cell(line, column) for column in columns.values())
            rows.append((process, str(line["phase"]), cells))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    note = "Maximum over all ranks."
    if on_gpu:
        note += " Planned: tensors. Allocated and reserved: peaks of torch's allocator."
    return MemoryTable(tuple(columns), tuple(rows), note) if rows else None


_GPU: Mapping[str, str | tuple[str, str]] = {
    "Planned": "planned",
    "Allocated": "allocated",
    "Planned / allocated": ("planned", "allocated"),
    "Reserved": "reserved",
    "Host, planned": "host_planned",
    "Host": "host",
}
_CPU: Mapping[str, str | tuple[str, str]] = {
    "Planned": "host_planned",
    "Measured": "host",
    "Planned / measured": ("host_planned", "host"),
}


def _cell(line: Mapping[str, Any], column: str | tuple[str, str]) -> str:
    if isinstance(column, tuple):
        above, below = (line[name] for name in column)
        return f"{above / below:.2f}" if above and below else ""
    value = line[column]
    return "" if value is None else f"{value / 1e9:,.2f} GB"


MAX_WARNINGS = 50
"""Different warnings that a report shows."""
_MAX_CHARS = 2000
_LARGEST = 1 << 30
"""Bytes of a log of any run; one line of a larger one may exhaust the memory."""
_RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ([A-Z]+) +")
"""Beginning of a record in run.log. Lines without it continue the record above."""


def read_warnings(run_dir: Path) -> list[tuple[str, int]]:
    """Return (text, number of times) of each different warning and error of a run, in the order of
    the first. Empty if the run has no log."""
    path = run_dir / LOG_FILE
    if not path.is_file():
        return []
    if (size := path.stat().st_size) > _LARGEST:
        return [(f"{LOG_FILE} has {size} bytes, so its warnings are omitted", 1)]
    counts: Counter[str] = Counter()
    lines: list[str] = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if begin := _RECORD.match(line):
                _count("".join(lines), counts)
                important = begin[1] in ("WARNING", "ERROR", "CRITICAL")
                lines = [line[begin.end() :]] if important else []
            elif lines and len(lines) < MAX_WARNINGS:
                lines.append(line)
    _count("".join(lines), counts)
    return list(counts.items())


def _count(text: str, counts: Counter[str]) -> None:
    text = text.strip()[:_MAX_CHARS]
    if text and (text in counts or len(counts) < MAX_WARNINGS):
        counts[text] += 1
