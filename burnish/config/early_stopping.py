"""Config of early stopping: end a run before its last step by a metric, or by the KL. Rules of the
metrics that a recipe names (``checkpoint.best_metric``, ``early_stopping.metric``)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from pydantic import Field

from burnish.config.base import Node, OlderKeys, switched_by
from burnish.config.explain import nearest
from burnish.config.train import CheckpointConfig, better

_UNSUITABLE = ("time/", "memory/", "observe/")


class WatchedMetric(Node):
    """A metric that should improve."""

    short_key = "name"

    name: str
    """Name, e.g. ``eval/loss``. A metric that the job does not measure is an error at load."""
    patience: int = Field(3, ge=1)
    """Consecutive measurements without improvement, after which the run stops. The evaluation at
    step 0 is the first measurement."""
    min_delta: float = Field(0.0, ge=0)
    """A change counts as an improvement only if it is larger than this."""
    higher_is_better: bool | None = None
    """Direction in which it improves. None: by its name, as ``checkpoint.best_mode``."""

    @property
    def wants_higher(self) -> bool:
        """True if larger values are better."""
        if self.higher_is_better is not None:
            return self.higher_is_better
        return better(self.name) == "max"

    def rules(self) -> Iterator[str]:
        if self.higher_is_better is None and better(self.name) is None:
            yield (
                f"name={self.name}: its name does not show whether higher or lower is better; "
                "set higher_is_better=true or higher_is_better=false"
            )


class KlLimit(Node):
    """Upper limit of the KL to the reference."""

    short_key = "limit"

    limit: float = Field(gt=0)
    """Nats per token (``train/kl``; in the reward: ``rollout/kl``)."""
    steps: int = Field(1, ge=1)
    """Consecutive steps above it after which the run stops."""


class EarlyStoppingConfig(Node):
    """End of a run before its last step, by a metric that no longer improves or by the KL to the
    reference. The run ends normally; its ``stopped.txt`` gives the reason."""

    older_keys = (
        OlderKeys(
            "metric",
            "metric",
            switched_by("name"),
            {
                "patience": ("patience", 3),
                "min_delta": ("min_delta", 0.0),
                "higher_is_better": ("higher_is_better", None),
            },
        ),
        OlderKeys("max_kl", "max_kl", switched_by("limit"), {"max_kl_steps": ("steps", 1)}),
    )

    metric: WatchedMetric | None = None
    """Stop if this metric no longer improves: its name, or a mapping. None: only ``max_kl``."""
    max_kl: KlLimit | None = None
    """rl: stop if the KL to the reference is above this: a number, or a mapping. Needs
    algorithm.kl.init_kl_coef. None: no limit."""

    def rules(self) -> Iterator[str]:
        if self.metric is None and self.max_kl is None:
            yield "neither metric nor max_kl is set, so nothing stops the run; set one of them"


def early_stopping_rules(
    config: EarlyStoppingConfig | None, *, eval_every: int | None, measures_kl: bool
) -> Iterator[str]:
    """Yield an error if a job measures the metric of early stopping too rarely, or no KL.

    ``eval_every``: steps between evaluations, 0 if only the first and the last step have one; None
    if there is no evaluation, which :func:`named_metric_rules` reports. ``measures_kl``: true if
    the job measures the KL to the reference.
    """
    if config is None:
        return
    metric = "" if config.metric is None else config.metric.name
    if metric.startswith("eval/") and eval_every == 0:
        yield (
            f"early_stopping.metric={metric} is measured only at step 0 and at the end, because "
            "eval.every_n_steps=0, so it can never stop the run; set eval.every_n_steps to the "
            "number of steps between evaluations"
        )
    if metric.startswith(_UNSUITABLE) or metric.endswith(("tokens_per_s", "loss_spike")):
        yield (
            f"early_stopping.metric={metric} depends on the machine, not on the model; use a "
            "metric of the training or the evaluation"
        )
    if config.max_kl is not None and not measures_kl:
        yield (
            f"early_stopping.max_kl={config.max_kl.limit:g}, but this run measures no KL to a "
            "reference; in rl set algorithm.kl.init_kl_coef (a small value such as 0.0001 only "
            "measures it), or use early_stopping.metric"
        )


PREFIXES = ("train/", "data/", "time/", "memory/", "observe/")
"""Beginnings of metrics that every training job writes. The rest of such a name is not checked: it
may depend on the machine, the engine and the model."""


def named_metric_rules(
    named: Mapping[str, str | None],
    evaluated: Collection[str],
    *,
    names: Collection[str] = (),
    prefixes: tuple[str, ...] = (),
) -> Iterator[str]:
    """Yield an error for each metric of ``named`` (key -> metric) that a job does not write.

    ``evaluated``: names after ``eval/`` of the metrics of an evaluation; empty if there is none.
    ``names``: other metrics. ``prefixes``: beginnings of other metrics whose names a recipe does
    not determine.
    """
    open_ended = (*PREFIXES, *prefixes)
    known = [*(f"eval/{name}" for name in sorted(evaluated)), *sorted(names)]
    listed = ", ".join([*known, *(f"{prefix}..." for prefix in open_ended)])
    for key, metric in named.items():
        if metric is None or metric in known:
            continue
        if any(metric.startswith(prefix) and metric != prefix for prefix in open_ended):
            continue
        if metric.startswith("eval/") and not evaluated:
            yield (
                f"{key}={metric} is measured by eval, which is not set; set eval, or another metric"
            )
            continue
        yield (
            f"{key}={metric} is never measured{nearest(metric, known)}; use a metric of this job: "
            f"{listed}"
        )


def best_metric_advice(checkpoint: CheckpointConfig, eval_every: int) -> Iterator[str]:
    """Warn if the weights of some evaluations are not saved, so that the best of them may be lost.
    ``eval_every``: steps between evaluations; 0: only the first and the last step."""
    metric, every = checkpoint.best_metric, checkpoint.every_n_steps
    if not (metric or "").startswith("eval/") or not eval_every:
        return
    if not every or eval_every % every:
        yield (
            f"checkpoint.best_metric={metric} is measured every {eval_every} steps, but weights "
            f"are saved {f'every {every} steps' if every else 'at the end alone'}, so the best may "
            f"be lost; set checkpoint.every_n_steps to {eval_every} or a divisor of it"
        )
