"""Learning from stale samples with and without a correction, a part of ``learning.py``.

    python benchmarks/learning.py staleness --task sort [--cases usual ...] [--ages 0 1 2 4 8]
    python benchmarks/learning.py staleness --task chain_sum

Ages are exact and do not depend on timing: every group is trained ``age`` RL steps after the
weights that sampled it (``learning_fixed_age.py``), except the first steps, whose groups are all
sampled with the initial weights. An asynchronous run with ``max_staleness`` = ``age`` trains groups
of at most this age. Every age trains the same prompts in the same order, so only the age differs.

The recipe is that of a synchronous run, because a recipe with ``max_staleness`` and without a
correction is refused.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from common import markdown_table
from learning_curve import learn
from learning_results import Results, Run, run_in_process, spread
from learning_tasks import TASKS, Task, recipe

AGES = (0, 1, 2, 4, 8)
WEIGHTS: dict[str, dict[str, Any]] = {
    "none": {},
    "token": {"correction": {"level": "token", "mode": "truncate"}},
    "sampler": {"old_policy": "sampler"},
    "mask": {"correction": {"level": "token", "mode": "mask"}},
    "sequence": {"correction": {"level": "sequence", "mode": "truncate"}},
}
"""Name -> settings of ``algorithm`` that correct for the age. none: no term of the loss depends on
the policy that sampled."""


@dataclass(frozen=True)
class Case:
    """Difference of a case from the recipe of ``learning.py``."""

    lr: float = 1.0
    """Learning rate, relative to the task's."""
    updates: int = 2
    """Optimizer steps per epoch of a rollout."""
    epochs: int = 1
    """``epochs_per_rollout``."""
    clipped: bool = True
    """False: the ratio has no bounds."""


CASES = {
    "usual": Case(),
    "lr x 3": Case(lr=3),
    "1 update": Case(updates=1),
    "8 updates": Case(updates=8),
    "not clipped": Case(clipped=False),
}


def staleness(args: argparse.Namespace) -> None:
    """Make all runs that are missing, seed by seed."""
    results = Results(args.out)
    wanted = itertools.product(args.seeds, args.cases, args.ages, args.weights)
    for seed, case, age, weights in wanted:
        if results.has(result_task(args.task), _name(case, age, weights), seed):
            continue
        words = ["--case", case, "--age", str(age), "--weights", weights]
        words += ["--task", args.task, "--seed", str(seed), "--steps", str(args.steps)]
        run_in_process(args.out, "one-staleness", *words)
        print(args.task, case, "age", age, weights, "seed", seed, flush=True)


def one_staleness(args: argparse.Namespace) -> None:
    """Add one run: its curve, the groups trained at each age, and the distance of the policies."""
    from learning_fixed_age import FixedAge

    case = CASES[args.case]
    task = TASKS[args.task]()
    if args.steps:
        task = replace(task, steps=args.steps, eval_every=max(1, args.steps // 4))
    ages: Counter[int] = Counter()
    seen: dict[str, list[float]] = {"kl": [], "correction_frac": []}

    def change(parts: Any) -> Any:
        policy, source = parts.policy, parts.source
        fixed = FixedAge(source, args.age, steps=task.steps, version=lambda: policy.version)
        return replace(parts, source=fixed)

    def see(metrics: dict[str, float]) -> None:
        assert metrics["rollout/age_mean"] == metrics["rollout/age_max"]
        ages[int(metrics["rollout/age_max"])] += task.prompts
        seen["kl"].append(metrics["train/mismatch_k3"])
        if "train/correction_frac" in metrics:
            seen["correction_frac"].append(metrics["train/correction_frac"])

    def tree(folder: Path) -> dict[str, Any]:
        return _recipe(task, case, args.weights, args.seed, folder)

    curve = learn(task, args.seed, tree, change=change, see=see)
    found: Run = {"task": result_task(args.task), "name": _name(args.case, args.age, args.weights)}
    found |= {"seed": args.seed, "case": args.case, "age": args.age, "weights": args.weights}
    found |= {"settings": asdict(case), "lines": curve.lines, "rewards": curve.rewards}
    found |= {"groups_by_age": {str(age): ages[age] for age in sorted(ages)}}
    rounded = {key: [round(x, 5) for x in values] for key, values in seen.items()}
    Results(args.out).add(found | rounded)


def _recipe(task: Task, case: Case, weights: str, seed: int, folder: Path) -> dict[str, Any]:
    """Return the recipe of GRPO with the changes of a case."""
    tree = recipe(task, "grpo", seed, folder)
    tree["train"]["lr"] = case.lr * task.lr
    tree["train"]["train_batch_size"] = task.prompts * task.samples // case.updates
    tree["train"]["epochs_per_rollout"] = case.epochs
    tree["algorithm"] |= WEIGHTS[weights]
    if not case.clipped:
        bounds = {"kind": "ppo", "clip_low": 0.999999, "clip_high": 1e6}
        tree["algorithm"]["policy_loss"] = bounds
    return tree


def _name(case: str, age: int, weights: str) -> str:
    return f"{case}, age {age:02d}, {weights}"


# ---- tables and figures --------------------------------------------------------------------------

COLORS = ("#000000", "#0072b2", "#009e73", "#e69f00", "#d55e00", "#7a5195")
"""By age, in increasing order."""
TITLES = {
    "none": "no correction",
    "token": "correction: token, truncate",
    "sampler": "old_policy: sampler",
    "mask": "correction: token, mask",
    "sequence": "correction: sequence, truncate",
}


def result_task(task: str) -> str:
    """Return the name under which the results have the runs of a task."""
    return f"staleness_{task}"


def rows(runs: Sequence[Run]) -> Iterator[str]:
    """Return the lines of the table: by case and age, the accuracy with each correction."""
    used = [weights for weights in TITLES if any(r["weights"] == weights for r in runs)]
    heads = ["", "age", "seeds", *(TITLES[w] for w in used), "KL without", "tokens bounded"]
    cases = sorted({(list(CASES).index(r["case"]), r["case"], r["age"]) for r in runs})
    cells = []
    for _, case, age in cases:
        own = {w: [r for r in runs if (r["case"], r["age"], r["weights"]) == (case, age, w)]
               for w in used}  # fmt: skip
        seeds = sorted({len(found) for found in own.values() if found})
        found = [spread([_late(r) for r in own[w]]) if own[w] else "not run" for w in used]
        kl = [_second_half(r["kl"]) for r in own.get("none", ())]
        bounded = [_second_half(r["correction_frac"]) for r in own.get("token", ())]
        cells.append(
            [case, str(age), " to ".join(map(str, seeds[:1] + seeds[1:][-1:])), *found,
             f"{statistics.fmean(kl):.3f}" if kl else "not run",
             f"{100 * statistics.fmean(bounded):.1f}%" if bounded else "not run"]
        )  # fmt: skip
    return markdown_table(heads, cells)


def _late(run: Run) -> float:
    """Return the mean held-out accuracy of the second half of the steps."""
    half = run["lines"][-1]["step"] / 2
    return statistics.fmean(line["accuracy"] for line in run["lines"] if line["step"] > half)


def _second_half(values: Sequence[float]) -> float:
    return statistics.fmean(values[len(values) // 2 :])


def draw(runs: Sequence[Run], title: str) -> Any:
    """Draw the held-out accuracy of the usual case by step, a panel for each correction and a line
    for each age."""
    import matplotlib.pyplot as plt

    runs = [r for r in runs if r["case"] == "usual" and r["age"] in AGES]
    used = [w for w in ("none", "token", "sampler") if any(r["weights"] == w for r in runs)]
    if not runs:
        return None
    width = 1.6 + 3.1 * len(used)
    figure, panels = plt.subplots(
        1, len(used), figsize=(width, 3.6), layout="constrained", sharey=True, squeeze=False
    )
    for axes, weights in zip(panels[0], used, strict=True):
        for age, color in zip(AGES, COLORS, strict=False):
            own = [r["lines"] for r in runs if (r["weights"], r["age"]) == (weights, age)]
            if not own:
                continue
            points = list(zip(*own, strict=True))
            at = [point[0]["step"] for point in points]
            values = [[line["accuracy"] for line in point] for point in points]
            mean = [statistics.fmean(v) for v in values]
            axes.plot(at, mean, color=color, label=f"{age}", linewidth=1.7, marker=".")
            low, high = [*map(min, values)], [*map(max, values)]
            axes.fill_between(at, low, high, color=color, alpha=0.08, linewidth=0)
        axes.set(xlabel="RL step", title=TITLES[weights])
    panels[0][0].set(ylabel="held-out accuracy")
    figure.suptitle(title)
    handles, labels = panels[0][0].get_legend_handles_labels()
    note = "age in RL steps\n(mean of the seeds;\nband: least to most)"
    figure.legend(handles, labels, loc="outside right center", title=note)
    return figure
