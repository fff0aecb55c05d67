"""Learning curves of recipes/tiny_multi_turn.yaml, a part of ``learning.py``.

burnish rl recipes/tiny_multi_turn.yaml seed=0 run_dir=runs/guess-0   # and 1, 2
python benchmarks/learning.py episodes runs/guess-0 runs/guess-1 runs/guess-2
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common import markdown_table
from learning_results import Results, Run, spread

TASK = "multi_turn"
RANDOM, ONE_TURN = 1 - (6 / 7) ** 3, 1 / 7
"""Chance of three independent guesses, and of one guess, among seven numbers."""


def episodes(args: argparse.Namespace) -> None:
    """Add the runs in the given folders to the results."""
    for folder in args.folders:
        Results(args.out).add(run_of(folder))


def run_of(folder: Path) -> Run:
    """Return the record of a run folder."""
    from burnish.config import RLConfig, load_config
    from burnish.observe.metrics import read_metrics

    config = load_config(folder / "config.yaml")
    assert isinstance(config, RLConfig)
    lines, samples = [], 0
    rewards = []
    for metrics in read_metrics(folder):
        samples += int(metrics.get("rollout/samples", 0))
        if "reward/found" in metrics:
            rewards.append(metrics["reward/found"])
        if "eval/pass@1" in metrics:
            step = int(metrics["step"])
            lines.append({"step": step, "samples": samples, "accuracy": metrics["eval/pass@1"]})
    name = config.algorithm.advantage.kind
    return {"task": TASK, "name": name, "seed": config.seed, "lines": lines, "rewards": rewards}


def rows(runs: Sequence[Run]) -> Iterator[str]:
    """Return the lines of the table: sampled in training, and greedy on held-out seeds."""
    heads = ["", "seeds", "first 10 steps", "half way", "last 10 steps", "episodes"]
    half = len(runs[0]["rewards"]) // 2
    parts = (slice(0, 10), slice(half - 5, half + 5), slice(-10, None))
    sampled = [spread([statistics.fmean(r["rewards"][p]) for r in runs]) for p in parts]
    lines = [[r["lines"][i]["accuracy"] for r in runs] for i in (0, len(runs[0]["lines"]) // 2, -1)]
    count = str(runs[0]["lines"][-1]["samples"])
    return markdown_table(
        heads,
        [
            ["sampled, training", str(len(runs)), *sampled, count],
            ["greedy, held out", str(len(runs)), *map(spread, lines), count],
        ],
    )


def draw(runs: Sequence[Run]) -> Any:
    """Draw the share of episodes that find the number against the episodes played."""
    import matplotlib.pyplot as plt

    if not runs:
        return None
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    points = list(zip(*(_smooth(r["rewards"]) for r in runs), strict=True))
    per_step = runs[0]["lines"][-1]["samples"] / len(points)
    at = [per_step * (i + 1) for i in range(len(points))]
    mean = [statistics.fmean(p) for p in points]
    axes.plot(at, mean, color="#0072b2", linewidth=1.7, label="sampled, training")
    axes.fill_between(
        at, [*map(min, points)], [*map(max, points)], color="#0072b2", alpha=0.12, linewidth=0
    )
    held_out = list(zip(*(r["lines"] for r in runs), strict=True))
    axes.plot(
        [p[0]["samples"] for p in held_out],
        [statistics.fmean(x["accuracy"] for x in p) for p in held_out],
        "--", color="#d55e00", marker=".", linewidth=1.7, label="greedy, held out",
    )  # fmt: skip
    marks = ((1.0, "halving the range"), (RANDOM, "three random guesses"), (ONE_TURN, "one guess"))
    for value, text in marks:
        axes.axhline(value, color="#777777", linewidth=0.9, linestyle=":")
        axes.text(at[-1], value, f"{text} ", ha="right", va="bottom", color="#555555", fontsize=8)
    axes.set(xlabel="episodes", ylabel="share that finds the number", ylim=(-0.02, 1.06))
    axes.set_title("Find a number from 1 to 7 in three turns")
    axes.legend(loc="center right", title=f"mean of {len(runs)} seeds;\nband: least to most")
    return figure


def _smooth(values: Sequence[float], width: int = 5) -> list[float]:
    """Return means over the last ``width`` values."""
    return [statistics.fmean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]
