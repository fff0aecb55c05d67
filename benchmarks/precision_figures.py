"""``precision.py figures``: what ``learn`` left in ``summary.json``, drawn as SVG files.

The same numbers give the same files, byte for byte: no dates, no random ids. White background, so
they can be read on light and dark pages.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import use_svg_style

# Colors that color-blind readers can distinguish (Okabe and Ito).
STYLE = {
    "fp32": ("#555555", "-"),
    "bf16": ("#d55e00", "-"),
    "fp16": ("#0072b2", "-"),
    "fp32-bf16": ("#e69f00", "--"),
    "fp32-fp16": ("#56b4e9", "--"),
    "bf16-fp32": ("#cc79a7", "--"),
}
PLAIN = ("fp32", "bf16", "fp16")
OVERFLOWS = (30, 31, 34, 62, 63, 64, 100, 102, 104)
"""Steps of the synthetic trace whose gradient overflows."""
SYNTHETIC_STEPS = 140
SCALERS: dict[str, dict[str, Any]] = {
    "window 20, hysteresis 1": {"hysteresis": 1},
    "window 20, hysteresis 2": {"hysteresis": 2},
    "the same, consecutive_hysteresis": {"hysteresis": 2, "consecutive_hysteresis": True},
}
Runs = list[dict[str, Any]]


def add_arguments(parts: Any) -> None:
    """The subcommand and its options."""
    parser = parts.add_parser("figures", help="SVG figures of the results of learn")
    parser.add_argument("--results", type=Path, default=Path("runs/precision"))
    parser.add_argument("--to", type=Path, default=Path("docs/figures"))
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> None:
    """Draw every figure."""
    use_svg_style()
    summary = args.results / "summary.json"
    if not summary.is_file():
        raise SystemExit(
            f"{summary} does not exist; create it with 'precision.py learn --out {args.results}'"
        )
    runs = json.loads(summary.read_text())["runs"]
    args.to.mkdir(parents=True, exist_ok=True)
    figures = {
        "precision_learning": draw_learning(runs),
        "precision_gap": draw_gap(runs),
        "precision_loss_scale": draw_loss_scale(runs),
    }
    for name, figure in figures.items():
        file = args.to / f"{name}.svg"
        figure.savefig(file, metadata={"Date": None, "Creator": None}, bbox_inches="tight")
        print(file)


def draw_learning(runs: Runs) -> Any:
    """Reward per step and held-out accuracy, one line per format."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.6), layout="constrained")
    for kind in _kinds(runs, PLAIN):
        _draw_band(left, runs, kind, "reward/mean")
        _draw_band(right, runs, kind, "eval/pass@1", marker="o")
    left.set(xlabel="step", ylabel="mean reward of the rollout", title="Training")
    right.set(xlabel="step", ylabel="held-out accuracy (greedy)", title="Held-out problems")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        _whole_steps(axes)
    left.legend(loc="lower right", title=_spread_note(runs))
    return figure


def draw_gap(runs: Runs) -> Any:
    """Mean and largest gap between the trainer's and the sampler's log-probs, per step."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9.2, 3.6), layout="constrained", sharey=True)
    names = {"train/mismatch_abs": "Mean over tokens", "train/mismatch_max": "Largest of the step"}
    for axes, (name, title) in zip(panels, names.items(), strict=True):
        for kind in _kinds(runs, STYLE):
            _draw_band(axes, runs, kind, name)
        axes.set(xlabel="step", title=title, yscale="log")
        axes.tick_params(labelleft=True)
        _whole_steps(axes)
    panels[0].set_ylabel("|trainer - sampler|, nats per token")
    handles, labels = panels[0].get_legend_handles_labels()
    if handles:
        note = _spread_note(runs)
        figure.legend(handles, labels, loc="outside right center", title=f"trainer-sampler\n{note}")
    return figure


def draw_loss_scale(runs: Runs) -> Any:
    """The loss scale of the fp16 runs, and of three settings under the same made-up overflows."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.6), layout="constrained")
    _draw_measured_scale(left, runs)
    for (label, options), style in zip(SCALERS.items(), ("-", "--", ":"), strict=True):
        trace = synthetic_trace(options)
        right.step(range(1, len(trace) + 1), trace, style, where="mid", label=label, linewidth=1.8)
    for step in OVERFLOWS:
        right.axvline(step, color="#b00020", alpha=0.35, linewidth=0.8, zorder=0)
    right.set(xlabel="step", title="Three settings, the same overflows (red)")
    right.set_yscale("log", base=2)
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize=9)
    return figure


def _draw_measured_scale(axes: Any, runs: Runs) -> None:
    own = [r for r in runs if r["dtype"] == "fp16"]
    for run, style in zip(own, ("-", "--", ":", "-.") * len(own), strict=False):
        lines = [x for x in run["steps"] if "train/loss_scale" in x]
        steps, scale = [x["step"] for x in lines], [x["train/loss_scale"] for x in lines]
        axes.step(steps, scale, style, where="mid", label=f"seed {run['seed']}")
        missed = [(x["step"], x["train/loss_scale"]) for x in lines if x.get("train/skipped_steps")]
        axes.plot(*zip(*missed, strict=True) if missed else ((), ()), "x", color="#b00020")
    axes.set(xlabel="step", ylabel="loss scale", title="fp16 runs (x: step skipped)")
    if own:
        axes.set_yscale("log", base=2)
        _whole_steps(axes)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize=9, ncol=3)
    else:
        axes.text(0.5, 0.5, "no fp16 run", ha="center", transform=axes.transAxes)


def synthetic_trace(options: dict[str, Any]) -> list[float]:
    """The scale after each of ``SYNTHETIC_STEPS`` steps that overflow where ``OVERFLOWS`` says."""
    from burnish.train.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(initial_scale_power=16, loss_scale_window=20, **options)
    trace = []
    for step in range(1, SYNTHETIC_STEPS + 1):
        scaler.update(step in OVERFLOWS)
        trace.append(scaler.scale)
    return trace


# ---- parts -------------------------------------------------------------------------------------


def _kinds(runs: Runs, wanted: Sequence[str] | dict[str, Any]) -> list[str]:
    have = {r["kind"] for r in runs}
    return [kind for kind in wanted if kind in have]


def _draw_band(axes: Any, runs: Runs, kind: str, name: str, *, marker: str | None = None) -> None:
    """Mean over the seeds as a line, least to most as a band. A value of 0 is left out of a
    logarithmic axis by matplotlib."""
    by_step: dict[int, list[float]] = {}
    for run in runs:
        lines = run["steps"] if run["kind"] == kind else ()
        for line in lines:
            if math.isfinite(line.get(name, math.nan)):
                by_step.setdefault(line["step"], []).append(line[name])
    colour, style = STYLE[kind]
    steps = sorted(by_step)
    axes.plot(
        steps, [statistics.fmean(by_step[s]) for s in steps],
        style, color=colour, label=kind, marker=marker, markersize=4, linewidth=1.6,
    )  # fmt: skip
    low, high = [min(by_step[s]) for s in steps], [max(by_step[s]) for s in steps]
    axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)


def _spread_note(runs: Runs) -> str:
    seeds = len({r["seed"] for r in runs})
    return f"mean of {seeds} seeds,\nleast to most" if seeds > 1 else "one seed"


def _whole_steps(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
