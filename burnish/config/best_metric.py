"""Rule of the metrics that a recipe names (``checkpoint.best_metric``, ``early_stopping.metric``):
the job must write the metric."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from burnish.config.explain import nearest
from burnish.config.train import CheckpointConfig

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
        if metric is None or metric in known or _extends(metric, open_ended):
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


def _extends(metric: str, prefixes: tuple[str, ...]) -> bool:
    return any(metric.startswith(prefix) and metric != prefix for prefix in prefixes)
