"""Learning curve of one run of a recipe, for ``learning.py`` and ``learning_staleness.py``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import cpu_seconds, inline_runtime
from learning_tasks import Task

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


def learn(
    task: Task,
    seed: int,
    recipe: Callable[[Path], dict[str, Any]],
    *,
    change: Callable[[Any], Any] = lambda parts: parts,
    see: Callable[[dict[str, float]], object] = lambda metrics: None,
) -> Curve:
    """Train with the library's own step, outside of a session, and return the learning curve.

    ``recipe`` returns the recipe for a folder of temporary files. ``change`` replaces components
    (``burnish.steps.rl.RL``) before the first step; ``see`` gets the metrics of each step.
    """
    import torch

    from burnish.config import RLConfig, load_config
    from burnish.driver.base import seed_everything
    from burnish.jobs.rl import build_rl
    from burnish.steps.rl import rl_step

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        config = load_config(recipe(folder))
        assert isinstance(config, RLConfig)
        seed_everything(seed)
        runtime = inline_runtime(config)
        parts, evaluator = build_rl(config, runtime, {"": task.reward}, folder / "run")
        assert evaluator is not None
        parts = change(parts)
        curve = Curve()
        curve.measured(evaluator.evaluate(0)["eval/pass@1"])
        for step in range(1, config.num_steps + 1):
            cpu = cpu_seconds()
            metrics = rl_step(parts, step)
            sampled = metrics.get("rollout/samples", task.prompts * task.samples)
            curve.step(cpu_seconds() - cpu, int(sampled), metrics["reward/mean"])
            see(metrics)
            if step % task.eval_every == 0:
                curve.measured(evaluator.evaluate(step)["eval/pass@1"])
    return curve
