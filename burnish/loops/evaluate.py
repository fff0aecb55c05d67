"""Held-out evaluation: pass@1 and pass@k."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from burnish.config.rollout import EvalConfig
from burnish.rewards.base import sum_of_part
from burnish.rollout.runner import Runner
from burnish.types import ROUNDING, Group, Prompt


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Probability that at least one of k samples drawn without replacement passes (arXiv
    2107.03374, eq. 1).

    1 - C(n - c, k) / C(n, k). Example: n = 4, c = 1, k = 2: 1 - C(3, 2) / C(4, 2) = 1 - 3/6 = 0.5.
    """
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


@dataclass(frozen=True)
class Evaluator:
    """Samples answers to held-out prompts and reports how many pass."""

    config: EvalConfig
    prompts: Sequence[Prompt]
    runner: Runner
    keep_samples: Callable[[int, Sequence[Group]], None]

    def evaluate(self, step: int) -> dict[str, float]:
        """``eval/pass@k`` for every k asked for, ``eval/reward`` (where it is made of several, also
        each of them, as it came) and ``eval/response_len``."""
        groups = self.runner.run(self.prompts).groups
        self.keep_samples(step, groups)
        n = self.config.n_samples_per_prompt
        passed = [
            sum(s.reward >= self.config.pass_threshold - ROUNDING for s in group.samples)
            for group in groups
        ]
        samples = [s for group in groups for s in group.samples]
        metrics = {
            f"eval/pass@{k}": sum(pass_at_k(n, c, k) for c in passed) / len(passed)
            for k in sorted({1, *self.config.pass_k})
        }
        names = dict.fromkeys(name for sample in samples for name in sample.reward_parts)
        if len(names) > 1:
            count = len(samples)
            metrics |= {f"eval/reward/{n}": sum_of_part(samples, n) / count for n in names}
        return metrics | {
            "eval/reward": sum(s.reward for s in samples) / len(samples),
            "eval/response_len": sum(len(s.response_ids) for s in samples) / len(samples),
            "eval/prompts": float(len(groups)),
        }
