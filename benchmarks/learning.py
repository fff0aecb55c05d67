"""Does it learn? Reward against samples and CPU time, of every algorithm and of TRL's GRPO.

    burnish sft recipes/tiny_1_sft.yaml && burnish export runs/tiny-sft --out runs/tiny-sft-model
    python benchmarks/learning.py run --task sort [--names grpo trl_grpo ...] [--seeds 0 1 2]
    python benchmarks/learning.py run --task chain_sum
    python benchmarks/learning.py preference
    python benchmarks/learning.py hacking
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
import tempfile
from pathlib import Path
from typing import Any

from common import cpu_seconds, inline_runtime
from learning_results import Results, run_in_process
from learning_tasks import TASKS, TRL, VARIANTS, Task, recipe

OUT = Path("runs/learning.jsonl")
Line = dict[str, float]


class Curve:
    """The record of a run: a line per held-out measurement, one of them before the first step."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.rewards: list[float] = []
        self._cpu = 0.0
        self._samples = 0

    def step(self, cpu_s: float, samples: int, reward: float) -> None:
        """A step is done."""
        self._cpu, self._samples = self._cpu + cpu_s, self._samples + samples
        self.rewards.append(reward)

    def measured(self, accuracy: float) -> None:
        """Held-out accuracy at this point."""
        self.lines.append(
            {
                "step": len(self.rewards),
                "samples": self._samples,
                "cpu_s": round(self._cpu, 3),
                "accuracy": accuracy,
            }
        )


def run_burnish(task: Task, name: str, seed: int) -> Curve:
    """The library's own step, outside of a session."""
    import torch

    from burnish.config import RLConfig, load_config
    from burnish.jobs.base import seed_everything
    from burnish.jobs.rl import rl_step
    from burnish.jobs.rl_job import build_rl

    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    config = load_config(recipe(task, name, seed, folder))
    assert isinstance(config, RLConfig)
    seed_everything(seed)
    runtime = inline_runtime(config)
    parts, evaluator = build_rl(config, runtime, {"": task.reward}, folder / "run")
    assert evaluator is not None
    curve = Curve()
    curve.measured(evaluator.evaluate(0)["eval/pass@1"])
    for step in range(1, task.steps + 1):
        cpu = cpu_seconds()
        metrics = rl_step(parts, step)
        sampled = metrics.get("rollout/samples", task.prompts * task.samples)
        curve.step(cpu_seconds() - cpu, int(sampled), metrics["reward/mean"])
        if step % task.eval_every == 0:
            curve.measured(evaluator.evaluate(step)["eval/pass@1"])
    return curve


def one(args: argparse.Namespace) -> None:
    """A single run, in this process."""
    task = TASKS[args.task]()
    if args.name == TRL:
        from learning_trl import run_trl

        curve = run_trl(task, args.seed, Curve())
    else:
        curve = run_burnish(task, args.name, args.seed)
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
    part("episodes", episodes).add_argument("folders", type=Path, nargs="+")
    part("table", table)
    part("figures", figures).add_argument("--to", type=Path, default=Path("docs/figures"))
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
