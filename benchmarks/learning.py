"""Does it learn? Reward against samples and CPU time, of every algorithm and of TRL's GRPO.

    burnish sft recipes/tiny_1_sft.yaml && burnish export runs/tiny-sft --out runs/tiny-sft-model
    python benchmarks/learning.py run --task sort [--names grpo trl_grpo ...] [--seeds 0 1 2]
    python benchmarks/learning.py run --task chain_sum
    python benchmarks/learning.py preference
    python benchmarks/learning.py hacking
    python benchmarks/learning.py staleness --task sort   # see learning_staleness.py
    python benchmarks/learning.py episodes FOLDERS   # see learning_episodes.py
    python benchmarks/learning.py table && python benchmarks/learning.py figures

Every run is a process of its own with one thread and adds a line to ``--out``
(runs/learning.jsonl); what is there is not run again. ``table`` prints docs/learning.md's tables
from it, ``figures`` draws docs/figures/learning_*.svg; the runs of those are in
docs/figures/learning.jsonl. Same model, prompts, samples per step, learning rate, AdamW and
clipping everywhere; two optimizer steps per rollout; no KL term. Seconds are user-CPU seconds
without loading and without the held-out measurements. Needs the extra ``bench``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from learning_curve import Curve, learn
from learning_results import Results, run_in_process
from learning_tasks import TASKS, TRL, VARIANTS, recipe

OUT = Path("runs/learning.jsonl")


def one(args: argparse.Namespace) -> None:
    """A single run, in this process."""
    task = TASKS[args.task]()
    if args.name == TRL:
        from learning_trl import run_trl

        curve = run_trl(task, args.seed, Curve())
    else:
        curve = learn(task, args.seed, lambda to: recipe(task, args.name, args.seed, to))
    found = {"task": args.task, "name": args.name, "seed": args.seed}
    found |= {"lines": curve.lines, "rewards": curve.rewards}
    Results(args.out).add(found)


def run(args: argparse.Namespace) -> None:
    """All that is missing, one after the other."""
    results = Results(args.out)
    for seed in args.seeds:
        for name in args.names:
            if results.has(args.task, name, seed):
                continue
            run_in_process(
                args.out, "one", "--task", args.task, "--name", name, "--seed", str(seed)
            )
            print(args.task, name, seed, flush=True)


def main() -> None:  # house: ok one parser
    """Parse and do."""
    from learning_episodes import episodes
    from learning_figures import figures, table
    from learning_others import hacking, one_hacking, preference
    from learning_staleness import AGES, CASES, WEIGHTS, one_staleness, staleness

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parts = parser.add_subparsers(required=True)

    def part(name: str, call: Any) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = parts.add_parser(name)
        made.set_defaults(call=call)
        return made

    many = part("run", run)
    many.add_argument("--task", choices=sorted(TASKS), required=True)
    many.add_argument("--names", nargs="+", choices=[*VARIANTS, TRL], default=[*VARIANTS, TRL])
    many.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    single = part("one", one)
    single.add_argument("--task", choices=sorted(TASKS), required=True)
    single.add_argument("--name", required=True)
    single.add_argument("--seed", type=int, required=True)
    pairs = part("preference", preference)
    pairs.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    part("hacking", hacking).add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    hacked = part("one-hacking", one_hacking)
    hacked.add_argument("--kl", type=float, required=True)
    hacked.add_argument("--seed", type=int, required=True)
    stale = part("staleness", staleness)
    stale.add_argument("--task", choices=sorted(TASKS), required=True)
    stale.add_argument("--cases", nargs="+", choices=CASES, default=["usual"])
    stale.add_argument("--ages", type=int, nargs="+", default=AGES, help="in RL steps")
    stale.add_argument("--weights", nargs="+", choices=WEIGHTS, default=["none", "token"])
    stale.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    stale.add_argument("--steps", type=int, default=0, help="RL steps; 0: those of the task")
    stale_one = part("one-staleness", one_staleness)
    stale_one.add_argument("--task", choices=sorted(TASKS), required=True)
    stale_one.add_argument("--case", choices=CASES, required=True)
    stale_one.add_argument("--age", type=int, required=True)
    stale_one.add_argument("--weights", choices=WEIGHTS, required=True)
    stale_one.add_argument("--seed", type=int, required=True)
    stale_one.add_argument("--steps", type=int, required=True)
    part("episodes", episodes).add_argument("folders", type=Path, nargs="+")
    part("table", table)
    part("figures", figures).add_argument("--to", type=Path, default=Path("docs/figures"))
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
