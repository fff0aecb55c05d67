"""Config of early stopping: end a run before its last step by a metric, or by the KL."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from burnish.config.base import Node
from burnish.config.train import better

_UNSUITABLE = ("time/", "memory/", "observe/")


class EarlyStoppingConfig(Node):
    """End of a run before its last step, by a metric that no longer improves or by the KL to the
    reference. The run ends normally; its ``stopped.txt`` gives the reason."""

    metric: str | None = None
    """Stop if this metric no longer improves, e.g. ``eval/loss``. A metric that the job does not
    measure is an error at load. None: only ``max_kl``."""
    patience: int = Field(3, ge=1)
    """Consecutive measurements of ``metric`` without improvement, after which the run stops. The
    evaluation at step 0 is the first measurement."""
    min_delta: float = Field(0.0, ge=0)
    """A change of ``metric`` counts as an improvement only if it is larger than this."""
    higher_is_better: bool | None = None
    """Direction in which ``metric`` improves. None: by its name, as ``checkpoint.best_mode``."""
    max_kl: float | None = Field(None, gt=0)
    """rl: stop if the KL to the reference (``train/kl``; in the reward: ``rollout/kl``) is above
    this, in nats per token. Needs algorithm.kl.init_kl_coef. None: no limit."""
    max_kl_steps: int = Field(1, ge=1)
    """Consecutive steps above ``max_kl`` after which the run stops."""

    @property
    def wants_higher(self) -> bool:
        """True if larger values of ``metric`` are better."""
        if self.higher_is_better is not None or self.metric is None:
            return bool(self.higher_is_better)
        return better(self.metric) == "max"

    def rules(self) -> Iterator[str]:
        if self.metric is None and self.max_kl is None:
            yield "neither metric nor max_kl is set, so nothing stops the run; set one of them"
        if self.metric is None:
            for name in ("patience", "min_delta", "higher_is_better"):
                if self.is_own(name):
                    yield f"{name} has no effect without metric; set metric, or remove {name}"
        elif self.higher_is_better is None and better(self.metric) is None:
            yield (
                f"metric={self.metric}: its name does not show whether higher or lower is better; "
                "set higher_is_better=true or higher_is_better=false"
            )
        if self.max_kl is None and self.is_own("max_kl_steps"):
            yield "max_kl_steps has no effect without max_kl; set max_kl, or remove max_kl_steps"


def early_stopping_rules(
    config: EarlyStoppingConfig | None, *, eval_every: int | None, eval_key: str, measures_kl: bool
) -> Iterator[str]:
    """Yield an error if a job measures the metric of early stopping too rarely, or no KL.

    ``eval_every``: steps between evaluations, 0 if only the first and the last step have one; None
    if there is no evaluation, which :func:`burnish.config.best_metric.named_metric_rules` reports.
    ``eval_key``: the key that sets it. ``measures_kl``: true if the job measures the KL to the
    reference.
    """
    if config is None:
        return
    metric = config.metric or ""
    if metric.startswith("eval/") and eval_every == 0:
        yield (
            f"early_stopping.metric={metric} is measured only at step 0 and at the end, because "
            f"{eval_key}=0, so it can never stop the run; set {eval_key} to the number of steps "
            "between evaluations"
        )
    if metric.startswith(_UNSUITABLE) or metric.endswith(("tokens_per_s", "loss_spike")):
        yield (
            f"early_stopping.metric={metric} depends on the machine, not on the model; use a "
            "metric of the training or the evaluation"
        )
    if config.max_kl is not None and not measures_kl:
        yield (
            f"early_stopping.max_kl={config.max_kl:g}, but this run measures no KL to a "
            "reference; in rl set algorithm.kl.init_kl_coef (a small value such as 0.0001 only "
            "measures it), or use early_stopping.metric"
        )
