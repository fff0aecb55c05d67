"""Counters of early stopping (config ``early_stopping``). They are part of a checkpoint, so a
resumed run stops at the same step as an uninterrupted one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from burnish.config.early_stopping import EarlyStoppingConfig, WatchedMetric


@dataclass(frozen=True)
class StopCounters:
    """Measurements since the last improvement, and steps above the limit of the KL."""

    metric: str | None = None
    """Metric that ``best`` and ``without_improvement`` belong to."""
    best: float | None = None
    """Best value of the metric; None before its first measurement."""
    without_improvement: int = 0
    """Consecutive measurements that did not improve ``best``."""
    kl_steps: int = 0
    """Consecutive steps with a KL above ``max_kl``."""

    def after(self, config: EarlyStoppingConfig, metrics: Mapping[str, float]) -> Self:
        """Return the counters after a step with ``metrics``.

        Example: patience 2 and ``eval/loss`` 1.0, 0.8, 0.9, 0.85: ``without_improvement`` is 0, 0,
        1, 2, so the run stops at the fourth measurement. A value that is not finite is no
        improvement.
        """
        counters, watched = self, config.metric
        name = None if watched is None else watched.name
        if name != self.metric:  # a resumed run may watch another metric
            counters = replace(counters, metric=name, best=None, without_improvement=0)
        if watched is not None and watched.name in metrics:
            counters = counters._measured(watched, metrics[watched.name])
        kl = kl_of(metrics)
        if config.max_kl is not None and kl is not None:
            above = not kl <= config.max_kl.limit  # true if the KL is NaN
            counters = replace(counters, kl_steps=counters.kl_steps + 1 if above else 0)
        return counters

    def _measured(self, config: WatchedMetric, value: float) -> Self:
        better = math.isfinite(value) and self.best is None
        if math.isfinite(value) and self.best is not None:
            gain = value - self.best if config.wants_higher else self.best - value
            better = gain > config.min_delta
        if better:
            return replace(self, best=value, without_improvement=0)
        return replace(self, without_improvement=self.without_improvement + 1)

    def reason(self, config: EarlyStoppingConfig) -> str | None:
        """Return the reason to stop, or None if the run continues."""
        watched, limit = config.metric, config.max_kl
        if (
            watched is not None
            and watched.name == self.metric
            and self.without_improvement >= watched.patience
        ):
            best = "no finite value" if self.best is None else f"the best value {self.best:.6g}"
            return (
                f"{self.metric} did not improve in {self.without_improvement} consecutive "
                f"measurements ({best}; early_stopping.metric.patience="
                f"{watched.patience}, min_delta={watched.min_delta:g})"
            )
        if limit is not None and self.kl_steps >= limit.steps:
            return (
                f"the KL to the reference was above early_stopping.max_kl={limit.limit:g} in "
                f"{self.kl_steps} consecutive steps (early_stopping.max_kl.steps={limit.steps})"
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the counters for :meth:`of_state`."""
        return asdict(self)

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the counters that :meth:`state_dict` wrote; new ones for an older checkpoint."""
        return cls(**state)


def kl_of(metrics: Mapping[str, float]) -> float | None:
    """Return the KL to the reference of a step, in nats per token, or None if it was not
    measured."""
    return metrics.get("rollout/kl", metrics.get("train/kl"))
