"""Draw the main curves of a run's report as an SVG file, for pages that cannot show the report.

``python benchmarks/report_figure.py runs/tiny-grpo --out docs/figures/report.svg``. The same
metrics give the same bytes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from common import use_svg_style

from burnish.report.catalog import arrange
from burnish.runs.folder import load_run

PALETTE = ("#c8652b", "#2b8a8f", "#5677d8", "#a65a9c")
SHOWN = ("Mean reward", "Held-out pass rate", "Entropy")
"""Titles of charts in the report, from left to right."""


def draw(run: Path, out: Path) -> None:
    """Draw the charts of ``SHOWN``. Raises ValueError if the run has no metric of one of them."""
    import matplotlib.pyplot as plt

    use_svg_style()
    curves = load_run(run).curves
    charts = {chart.title: chart for chart in arrange(list(curves))}
    if missing := [title for title in SHOWN if title not in charts]:
        raise ValueError(f"{run} has no metrics for: {', '.join(missing)}")
    figure, panels = plt.subplots(1, len(SHOWN), figsize=(11, 2.8), layout="constrained")
    for axes, title in zip(panels, SHOWN, strict=True):
        chart = charts[title]
        for name, color in zip(chart.names, PALETTE, strict=False):
            curve = curves[name]
            marker = "o" if len(curve.steps) < 10 else ""
            axes.plot(curve.steps, curve.values, color=color, label=name, marker=marker)
        axes.set(xlabel="step", title=f"{title} ({chart.unit})" if chart.unit else title)
        axes.legend()
    figure.savefig(out, metadata={"Date": None, "Creator": None})
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the figure of the run that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run folder of the job rl with eval")
    parser.add_argument("--out", type=Path, required=True, help="the SVG file to write")
    options = parser.parse_args(arguments)
    draw(options.run, options.out)
    print(options.out)


if __name__ == "__main__":
    main()
