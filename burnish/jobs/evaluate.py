"""Held-out evaluation: pass@1 and pass@k, during a run and as a job of its own."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from burnish.config import dump_yaml
from burnish.config.jobs import EvaluateConfig
from burnish.config.rollout import EvalConfig
from burnish.jobs.memory_monitor import MemoryMonitor
from burnish.observe.files import write_text
from burnish.observe.memory import memory_metrics
from burnish.observe.metrics import MetricsLog
from burnish.observe.progress import FILE_ONLY, close_logging, setup_logging, tell
from burnish.observe.timeline import Timeline
from burnish.observe.trackers import open_trackers
from burnish.rewards.base import sum_of_part
from burnish.rollout.runner import Runner
from burnish.types import ROUNDING, Group, Prompt

log = logging.getLogger("burnish")


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
        n, to_pass = self.config.n_samples_per_prompt, self.runner.rewards.to_pass
        passed = [
            sum(to_pass(s) >= self.config.pass_threshold - ROUNDING for s in group.samples)
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


class EvaluateRun:
    """The evaluate job around its one measurement: log, metrics, timeline, score. Use as a context
    manager."""

    def __init__(
        self,
        config: EvaluateConfig,
        run_dir: Path,
        memory_monitor: MemoryMonitor,
        timeline: Timeline,
    ) -> None:
        self.config, self.run_dir, self.memory_monitor, self.timeline = (
            config,
            run_dir,
            memory_monitor,
            timeline,
        )
        setup_logging(run_dir)
        self.metrics = MetricsLog(run_dir, open_trackers(config, run_dir))

    def __enter__(self) -> EvaluateRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with suppress(Exception):  # must not hide the error that ended the run
            self.memory_monitor.finish()
        self.timeline.save(self.run_dir / "timeline.json")
        self.metrics.close(ended_by=kind)
        close_logging()

    def run(self, evaluator: Evaluator) -> dict[str, float]:
        """Measure once, write the metrics and print the score. Returns the metrics."""
        for warning in self.config.warnings():  # the terminal got them when the recipe was loaded
            log.warning(warning, extra=FILE_ONLY)
        write_text(self.run_dir / "config.yaml", dump_yaml(self.config))
        self.metrics.start_trackers()
        samples = self.config.eval.n_samples_per_prompt
        tell(f"evaluating {len(evaluator.prompts):,} prompts, {samples} samples of each")
        started = time.perf_counter()
        metrics = evaluator.evaluate(0)
        metrics["time/step_s"] = time.perf_counter() - started
        seconds = self.timeline.collect()
        metrics |= {f"time/{name}_s": value for name, value in seconds.items()}
        metrics |= memory_metrics() | self.memory_monitor.metrics()
        self.metrics.log(0, metrics)
        for line in score_lines(metrics, threshold=self.config.eval.pass_threshold):
            tell(line)
        return metrics


def score_lines(metrics: Mapping[str, float], *, threshold: float) -> list[str]:
    """Every ``eval/`` metric as one printed line.

    >>> score_lines({"eval/pass@1": 0.25, "eval/reward": 0.5, "time/eval_s": 1.0}, threshold=1.0)
    ['pass@1        0.2500  (a response passes with a reward of 1 or more)', 'reward        0.5000']
    """
    scores = {n.removeprefix("eval/"): v for n, v in metrics.items() if n.startswith("eval/")}
    width = max(12, *map(len, scores))
    lines = []
    for name, value in scores.items():
        shown = f"{value:,.0f}" if name == "prompts" else f"{value:.4f}"
        lines.append(f"{name:<{width}}  {shown}")
    lines[0] += f"  (a response passes with a reward of {threshold:g} or more)"
    return lines
