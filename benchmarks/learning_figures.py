"""Tables and figures of what ``learning.py`` left: the same files give the same bytes."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from common import markdown_table, use_svg_style, versions
from learning_episodes import TASK as EPISODES
from learning_episodes import draw as draw_episodes
from learning_episodes import rows as episode_rows
from learning_results import Results, Run, spread
from learning_staleness import draw as draw_staleness
from learning_staleness import result_task
from learning_staleness import rows as staleness_rows
from learning_tasks import TRL, VARIANTS

# Colors that color-blind readers can distinguish (Okabe and Ito; gray for the other library).
COLOURS = {
    "grpo": "#0072b2", "dr_grpo": "#56b4e9", "rloo": "#009e73", "reinforce_pp_baseline": "#e69f00",
    "dapo": "#d55e00", "gspo": "#cc79a7", "cispo": "#b8a600", "ppo": "#7a5195", TRL: "#333333",
}  # fmt: skip
TITLES = {
    "sort": "Sorting four digits (0.4M parameters)",
    "chain_sum": "Sums of two numbers (SmolLM2-135M)",
}


def _by_name(runs: Sequence[Run]) -> dict[str, list[Run]]:
    order = [*VARIANTS, TRL]
    return {
        n: [r for r in runs if r["name"] == n] for n in order if any(r["name"] == n for r in runs)
    }


# ---- tables --------------------------------------------------------------------------------------


def table(args: argparse.Namespace) -> None:
    """Print every table."""
    print(versions("torch", "transformers", "trl") + "\n")
    for task, title in TITLES.items():
        if runs := Results(args.out).runs(task):
            print(f"### {title}\n\n" + "\n".join(_learning_rows(runs)) + "\n")
    if runs := Results(args.out).runs("preference"):
        print("### Preferences\n\n" + "\n".join(_preference_rows(runs)) + "\n")
    if runs := Results(args.out).runs("hacking"):
        print("### A reward that can be cheated\n\n" + "\n".join(_hacking_rows(runs)) + "\n")
    if runs := Results(args.out).runs(EPISODES):
        print("### A guessing game in turns\n\n" + "\n".join(episode_rows(runs)) + "\n")
    for task, title in TITLES.items():
        if runs := Results(args.out).runs(result_task(task)):
            print(f"### Stale samples: {title}\n\n" + "\n".join(staleness_rows(runs)) + "\n")


def _learning_rows(runs: Sequence[Run]) -> Iterator[str]:
    heads = ["", "seeds", "before", "half way", "at the end", "samples", "user-CPU s"]
    rows = []
    for name, own in _by_name(runs).items():
        first, half, last = (
            [r["lines"][i]["accuracy"] for r in own] for i in (0, len(own[0]["lines"]) // 2, -1)
        )
        samples = statistics.fmean(r["lines"][-1]["samples"] for r in own)
        cpu = [r["lines"][-1]["cpu_s"] for r in own]
        rows.append(
            [name, str(len(own)), spread(first), spread(half), spread(last), f"{samples:.0f}",
             spread(cpu, 1)]
        )  # fmt: skip
    return markdown_table(heads, rows)


def _preference_rows(runs: Sequence[Run]) -> Iterator[str]:
    heads = ["", "seeds", "rows", "right before", "right after", "win rate over the model before"]
    rows = []
    for name in dict.fromkeys(r["name"] for r in runs):
        own = [r for r in runs if r["name"] == name]
        cells = [spread([r[key] for r in own]) for key in ("before", "after", "win_rate")]
        rows.append(
            [name, str(len(own)), f"{statistics.fmean(r['rows'] for r in own):.0f}", *cells]
        )
    return markdown_table(heads, rows)


def _hacking_rows(runs: Sequence[Run]) -> Iterator[str]:
    heads = ["KL weight", "seeds", "", "sentiment", "KL per token", "distinct words", "entropy"]
    rows = []
    for coef in dict.fromkeys(r["name"] for r in runs):
        own = [r for r in runs if r["name"] == coef]
        for when, part in (("first step", slice(0, 1)), ("last 5 steps", slice(-5, None))):
            cells = [
                spread([statistics.fmean(s[key] for s in r["steps"][part]) for r in own])
                for key in ("reward", "kl", "distinct", "entropy")
            ]
            rows.append([coef, str(len(own)), when, *cells])
    return markdown_table(heads, rows)


# ---- figures -------------------------------------------------------------------------------------


def figures(args: argparse.Namespace) -> None:
    """Draw what there are runs for."""
    use_svg_style()
    args.to.mkdir(parents=True, exist_ok=True)
    drawn = {
        task: _draw_task(Results(args.out).runs(task), title) for task, title in TITLES.items()
    }
    drawn["hacking"] = _draw_hacking(Results(args.out).runs("hacking"))
    drawn[EPISODES] = draw_episodes(Results(args.out).runs(EPISODES))
    for task, title in TITLES.items():
        runs = Results(args.out).runs(result_task(task))
        drawn[f"staleness_{task}"] = draw_staleness(runs, title)
    for name, figure in drawn.items():
        if figure is not None:
            file = args.to / f"learning_{name}.svg"
            figure.savefig(file, metadata={"Date": None, "Creator": None}, bbox_inches="tight")
            print(file)


def _draw_task(runs: Sequence[Run], title: str) -> Any:
    """Held-out accuracy against samples and against CPU time; mean over seeds, least to most."""
    import matplotlib.pyplot as plt

    if not runs:
        return None
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for name, own in _by_name(runs).items():
        points = list(zip(*(r["lines"] for r in own), strict=True))
        mean = [statistics.fmean(x["accuracy"] for x in p) for p in points]
        for axes, key in zip(panels, ("samples", "cpu_s"), strict=True):
            at = [statistics.fmean(x[key] for x in p) for p in points]
            style = "--" if name == TRL else "-"
            axes.plot(at, mean, style, color=COLOURS[name], label=name, linewidth=1.7, marker=".")
            if name in ("grpo", TRL):
                low, high = ([f(x["accuracy"] for x in p) for p in points] for f in (min, max))
                axes.fill_between(at, low, high, color=COLOURS[name], alpha=0.12, linewidth=0)
    panels[0].set(xlabel="samples", ylabel="held-out accuracy", title=title)
    panels[1].set(xlabel="user-CPU seconds (one thread)", title="The same against time")
    handles, labels = panels[0].get_legend_handles_labels()
    counts = sorted({len(own) for own in _by_name(runs).values()})
    seeds = " or ".join(map(str, counts))
    note = f"mean of {seeds} seeds;\nband (grpo, {TRL}):\nleast to most"
    figure.legend(handles, labels, loc="outside right center", title=note)
    return figure


def _draw_hacking(runs: Sequence[Run]) -> Any:
    """Reward, KL and distinct words per step, without and with a KL term."""
    import matplotlib.pyplot as plt

    if not runs:
        return None
    names = {"reward": "sentiment (the reward)", "kl": "KL to the first model, per token",
             "distinct": "distinct words of a text"}  # fmt: skip
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    colours = dict(
        zip(dict.fromkeys(r["name"] for r in runs), ("#d55e00", "#e69f00", "#0072b2"), strict=False)
    )
    for axes, (key, label) in zip(panels, names.items(), strict=True):
        for coef, colour in colours.items():
            own = [[s[key] for s in r["steps"]] for r in runs if r["name"] == coef]
            points = list(zip(*own, strict=True))
            steps = range(1, len(points) + 1)
            mean = [statistics.fmean(p) for p in points]
            axes.plot(steps, mean, color=colour, label=f"KL weight {coef}", linewidth=1.7)
            axes.fill_between(
                steps,
                [*map(min, points)],
                [*map(max, points)],
                color=colour,
                alpha=0.15,
                linewidth=0,
            )
        axes.set(xlabel="step", title=label)
    panels[0].legend(loc="lower right")
    return figure
