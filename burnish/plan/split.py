"""Best split of a cluster's GPUs into ranks of the trainer and rollout workers, for runs whose
sampling and training overlap."""

from __future__ import annotations

from dataclasses import dataclass

from burnish.config.job import JobConfig
from burnish.config.load import ConfigError, changed_config
from burnish.config.off_policy import shares_with_policy
from burnish.config.placement import placement_groups
from burnish.plan.hardware import Hardware
from burnish.plan.overlap import seconds_text
from burnish.plan.time import Rates, estimate


@dataclass(frozen=True)
class Split:
    """Numbers of workers, and the estimated time of a step with them."""

    policy_ranks: int
    rollout_workers: int
    seconds: float

    @property
    def workers(self) -> tuple[int, int]:
        """Return (policy ranks, rollout workers)."""
        return self.policy_ranks, self.rollout_workers

    @property
    def overrides(self) -> list[str]:
        """Return the settings of the recipe."""
        return [
            f"cluster.policy_ranks={self.policy_ranks}",
            f"cluster.rollout_workers={self.rollout_workers}",
        ]


def splits(config: JobConfig, hardware: Hardware, rates: Rates | None = None) -> list[Split]:
    """Return every split of the cluster's GPUs that the recipe's batch sizes allow, fastest first;
    empty unless trainer and rollout workers are on different GPUs and work at the same time.

    Ranks of other roles that the recipe does not set follow ``policy_ranks``. Rollout workers take
    all GPUs that remain, at most one for each group that may be in progress.
    """
    job = config.resolve()
    role, trained = job.rollout, job.trained
    if role is None or trained is None or job.batch is None or hardware.gpu is None:
        return []
    if role.on_servers or not role.overlaps or job.inline:
        return []
    if shares_with_policy(config.cluster, job.roles):
        return []
    each = config.cluster.gpus_per_worker * role.tensor_parallel
    unit, size = trained.train.engine.ranks_per_row, job.batch.train_batch_size
    candidates = []
    for parts in (n for n in range(1, hardware.num_gpus // unit + 1) if size % n == 0):
        ranks = parts * unit
        least = _changed(config, ranks, 1)
        if least is None:
            continue
        free = hardware.num_gpus - sum(p.count * p.gpus for p in placement_groups(least))
        if free < 0:
            continue
        workers = min(1 + int(free / each + 1e-9), role.groups_at_once)
        changed = _changed(config, ranks, workers)
        if changed is not None:
            seconds = estimate(changed, hardware, rates).seconds
            candidates.append(Split(ranks, workers, seconds))
    return sorted(candidates, key=lambda split: split.seconds)


def _changed(config: JobConfig, ranks: int, workers: int) -> JobConfig | None:
    """Return the recipe with another split, or None if it is invalid with it."""
    overrides = Split(ranks, workers, 0.0).overrides
    try:
        return changed_config(config, overrides)
    except ConfigError:
        return None


def split_text(config: JobConfig, hardware: Hardware, rates: Rates | None, now: float) -> str:
    """Return one line about the best split, or an empty string if the recipe has none. ``now``:
    seconds per step of the recipe."""
    candidates = splits(config, hardware, rates)
    if not candidates:
        return ""
    best = candidates[0]
    count = f"best split of {hardware.num_gpus} GPUs by this estimate:"
    if best.seconds > 0.99 * now:
        return f"{count} the recipe's own"
    text = f"{count} {' '.join(best.overrides)}, {seconds_text(best.seconds)} s per step"
    return f"{text} (--fit also checks its memory)"
