"""Curves of runs as a matplotlib figure, for notebooks."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from burnish.runs.compare import chosen_metrics, short_names
from burnish.runs.errors import RunFolderError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from burnish.runs.folder import Run

_COLUMNS = 3
_WIDTH, _HEIGHT = 4.6, 2.9


def plot_runs(runs: Sequence[Run], metrics: Sequence[str] = ()) -> Figure:
    """Return a figure with a panel per metric, in which every run that has it is a line.

    ``metrics`` are names or patterns (``reward/*``); without them, the headlines of the runs are
    drawn. Raises RunFolderError if no run has such a metric, and without matplotlib.
    """
    names = chosen_metrics(runs, metrics)
    if not names:
        wanted = f" that matches {', '.join(metrics)}" if metrics else ""
        known = ", ".join(list(dict.fromkeys(name for run in runs for name in run.curves))[:8])
        raise RunFolderError(f"no run has a metric{wanted}; metrics: {known or 'none yet'}")
    pyplot = _pyplot()
    columns = min(_COLUMNS, len(names))
    rows = -(-len(names) // columns)
    size = (_WIDTH * columns, _HEIGHT * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="tight")
    pyplot.close(figure)  # a notebook would show it twice
    panels = axes.flat
    for panel, name in zip(panels, names, strict=False):
        for run, label in zip(runs, short_names(runs), strict=True):
            curve = run.curve(name)
            marker = "o" if len(curve.steps) < 12 else None
            panel.plot(curve.steps, curve.values, label=label, marker=marker, markersize=3)
        panel.set_title(name, fontsize=10)
        panel.set_xlabel("step", fontsize=9)
        panel.grid(alpha=0.3)
    for panel in list(panels)[len(names) :]:
        panel.remove()
    if len(runs) > 1:
        axes[0, 0].legend(fontsize=8)
    return figure


def _pyplot() -> Any:
    try:
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise RunFolderError(
            f"drawing needs matplotlib, but importing it failed ({error}); install it with: "
            "pip install 'burnish[notebook]'"
        ) from error
