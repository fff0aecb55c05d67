"""Tables of runs for the terminal."""

from __future__ import annotations

import io
import math
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from burnish.messages import visible
from burnish.observe.progress import format_duration
from burnish.runs.compare import MetricRow, short_names
from burnish.runs.errors import RunFolderError
from burnish.runs.folder import Run

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 12
_NARROWEST, _NARROW, _WIDE = 80, 120, 240
"""Columns of the terminals that get a shorter table, and of a table that no terminal shows."""
_COLUMNS = ("run", "state", "changed", "job", "model", "step", "headline")
_LEAST = {"state": 8, "step": 7}
_COLORS = {"running": "green", "failed": "red", "died": "red", "silent": "yellow"}


def sparkline(values: Sequence[float], width: int = _WIDTH) -> str:
    """Return the course of values as bars: means of ``width`` equal parts, from the smallest to the
    largest. A constant is a line in the middle.

    >>> sparkline([0.0, 1.0, 2.0, 3.0, 7.0])
    '▁▂▃▄█'
    """
    if not values:
        return ""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    parts = [values[a:b] for a, b in pairwise(edges)]
    means = [math.fsum(value / len(part) for value in part) for part in parts]
    low, high = min(means), max(means)
    top = len(_BARS) - 1
    if high / 2 <= low / 2:
        return _BARS[top // 2] * count
    half = high / 2 - low / 2  # (high - low may be infinite)
    return "".join(_BARS[round(top * ((mean / 2 - low / 2) / half))] for mean in means)


def console() -> Console:
    """Return the console for tables: wide where no terminal limits it."""
    screen = Console()
    if "utf" not in screen.encoding.lower() and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    return screen if screen.is_terminal else Console(width=_WIDE)


def runs_table(runs: Sequence[Run], folder: Path, *, width: int) -> Table:
    """Return a row per run: state, age of the last sign of life, job, model, step, headline. Runs
    are named by their path in ``folder``. Below ``width`` 120, long texts are cut; below 80, there
    are no age, job and model."""
    shown = _COLUMNS if width >= _NARROWEST else ("run", "state", "step", "headline")
    heads = [Column(name, no_wrap=name == "step", min_width=_LEAST.get(name)) for name in shown]
    table = Table(*heads, box=None, padding=(0, 2, 0, 0))
    for run in runs:
        inside = run.folder.is_relative_to(folder) and run.folder != folder
        name = visible(str(run.folder.relative_to(folder) if inside else run.folder))
        try:
            cells = _row(run, is_narrow=width < _NARROW)
        except (RunFolderError, OSError) as error:
            state = Text("unreadable", "red")
            cells = [state, *[Text()] * 4, Text(visible(str(error)))]
        row = dict(zip(_COLUMNS, [Text(name), *cells], strict=True))
        table.add_row(*(row[name] for name in shown))
    return table


def _row(run: Run, *, is_narrow: bool) -> list[Text]:
    state, headline = run.state, run.headline
    values = [] if headline is None else run.curve(headline.metric).values
    shown = ""
    if headline is not None:
        change = [values[0], values[-1]] if len(values) > 1 and not is_narrow else values[-1:]
        label = headline.metric if is_narrow else headline.label
        numbers = " → ".join(map(headline.shown, change))
        shown = f"{label} {numbers} {sparkline(values, _WIDTH // 2 if is_narrow else _WIDTH)}"
    planned = run.recipe.get("max_steps")
    step = "" if run.step is None else f"{run.step:,}"
    if isinstance(planned, int) and step:
        step += f"/{planned:,}"
    age = "" if state.changed is None else f"{format_duration(time.time() - state.changed)} ago"
    reason = state.reason if state.kind in ("stopped", "failed") and not is_narrow else ""
    kind = reason if reason.startswith(state.kind) else f"{state.kind}: {reason}".removesuffix(": ")
    texts = [age, run.job, run.model, step, shown]
    cut = [shorten(visible(text), 14 if is_narrow else 60) for text in texts[:-1]]
    return [
        Text(shorten(visible(kind), 60), _COLORS.get(state.kind, "")),
        *map(Text, [*cut, visible(shown)]),
    ]


def print_damage(screen: Console, runs: Sequence[Run]) -> None:
    """Print a line for each run with damaged lines of metrics."""
    for run, name in zip(runs, short_names(runs), strict=True):
        with suppress(RunFolderError, OSError):  # (the table says so)
            if run.damage:
                screen.print(f"{visible(name)}: {run.damage}", markup=False, highlight=False)


def shorten(text: str, length: int) -> str:
    """Return a text of at most ``length`` characters.

    >>> shorten("abcdef", 4), shorten("abcd", 4)
    ('abc…', 'abcd')
    """
    return text if len(text) <= length else text[: length - 1] + "…"


def _by_run(first: str, title: str, runs: Sequence[Run]) -> Table:
    names = [Column(escape(visible(name))) for name in short_names(runs)]
    return Table(first, *names, title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))


def difference_table(runs: Sequence[Run], difference: dict[str, tuple[str, ...]]) -> Table:
    """Return a row per key that differs."""
    table = _by_run("key", "Recipes", runs)
    for key, values in difference.items():
        table.add_row(*(Text(visible(text)) for text in (key, *values)))
    return table


def metrics_table(runs: Sequence[Run], rows: Sequence[MetricRow]) -> Table:
    """Return a row per metric: its last value in each run, and below it the smallest and the
    largest."""
    table = _by_run("metric", "Metrics", runs)
    for row in rows:
        cells = [
            "" if value is None else f"{value[0]:.6g} ({value[1]:.4g} to {value[2]:.4g})"
            for value in row.values
        ]
        table.add_row(*(Text(visible(text)) for text in (row.metric, *cells)))
    return table
