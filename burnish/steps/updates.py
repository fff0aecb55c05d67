"""Optimizer steps of one training step, with statistics by role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from burnish.algorithms.correction import MOMENTS, effective_sample_frac
from burnish.algorithms.value_losses import explained_variance
from burnish.driver.base import Metrics
from burnish.driver.errors import StoppedError
from burnish.train.base import NonFiniteError, StepStats, TrainEngine
from burnish.types import Stats


@dataclass
class Updates:
    """Statistics of all updates of one step, by role."""

    stats: dict[str, Stats] = field(default_factory=dict)
    steps: dict[str, list[StepStats]] = field(default_factory=dict)
    failures: dict[str, NonFiniteError] = field(default_factory=dict)

    def add(self, role: str, stats: Stats) -> None:
        """Add the stats of one forward_backward."""
        self.stats[role] = self.stats.get(role, Stats()) + stats

    def step(self, role: str, engine: TrainEngine) -> None:
        """Take an optimizer step. If it raises NonFiniteError, record the error and continue, so
        that the RL step is completed and its saved state is consistent."""
        try:
            stats = engine.optim_step()
        except NonFiniteError as error:
            stats = error.stats
            self.failures.setdefault(role, error)  # keep the first, which shows where it began
        self.steps.setdefault(role, []).append(stats)

    def checked(self, metrics: Metrics) -> Metrics:
        """Return ``metrics``. Raises StoppedError with them if an update reported a failure."""
        if self.failures:
            first = next(iter(self.failures.values()))
            raise StoppedError(" Also: ".join(map(str, self.failures.values())), metrics) from first
        return metrics

    def metrics(self) -> Metrics:
        """Return the metrics as numbers. Losses, which are sums over one update, become means over
        the updates. Moments of importance weights become an effective sample size. Ages without
        tokens are left out."""
        out: Metrics = {}
        for role, added in self.stats.items():
            stats, steps = added.plain(), self.steps[role]
            mean_sums = {name: (value, len(steps)) for name, value in stats.sums.items()}
            means = {
                name: (total, count)
                for name, (total, count) in stats.means.items()
                if name not in MOMENTS and (count or not name.startswith("age_"))
            }
            out |= Stats({**means, **mean_sums}, stats.maxima).floats(f"{role}/")
            out |= {f"{role}/{name}": value for name, value in step_metrics(steps).items()}
            if stats.means.keys() >= set(MOMENTS):
                out[f"{role}/effective_sample_frac"] = effective_sample_frac(stats)
            if role == "critic":
                out["critic/explained_variance"] = explained_variance(stats)
        return out


def step_metrics(steps: Sequence[StepStats]) -> Metrics:
    """Return the metrics of the optimizer steps of one role. They are the mean norm of the steps
    taken (of all, if none was), the counts of skipped steps, overflows, out-of-memory retries and
    replaced kernels, and the last learning rate and loss scale."""
    taken = [s for s in steps if not s.skipped] or steps
    out = {
        "grad_norm": sum(s.grad_norm for s in taken) / len(taken),
        "lr": steps[-1].lr,
        "skipped_steps": float(sum(s.skipped for s in steps)),
        "skipped_total": float(steps[-1].skipped_total),
    }
    if steps[-1].scaled:
        out["loss_scale"] = steps[-1].loss_scale
        out["overflows"] = float(sum(s.overflow for s in steps))
    if steps[-1].oom_retries is not None:
        out["oom_retries"] = float(sum(s.oom_retries or 0 for s in steps))
    if steps[-1].kernel_fallbacks:
        out["kernel_fallbacks"] = float(steps[-1].kernel_fallbacks)
    return out
