"""Metrics of the ages of trained tokens and groups, in asynchronous runs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from burnish.algorithms.correction import LAST_AGE, age_name
from burnish.jobs.base import Metrics
from burnish.types import Batch


def age_metrics(
    batch: Batch, ages: Mapping[int, int] | None, *, version: int, max_staleness: int
) -> Metrics:
    """Return the ages of a rollout's action tokens; empty in a synchronous run.

    ``rollout/age_<k>_frac``: share of the tokens of each age, in RL steps (:func:`age_name`);
    ``rollout/age_mean``, ``rollout/age_max``: of the tokens; ``rollout/group_age_mean``: of the
    groups, whose age is that of their oldest token; ``rollout/age_optimizer_steps_mean``, ``_max``:
    of the tokens, in optimizer steps. ``ages`` maps versions of the policy to ages in RL steps, as
    for ``groups_to_batch``; ``version``: that of the policy before the update.
    """
    if batch.ages is None or ages is None or not bool(batch.action_mask.any()):
        return {}
    counts = torch.bincount(batch.ages[batch.action_mask], minlength=max_staleness + 1)
    of_age = torch.arange(counts.numel())
    optimizer_steps = torch.zeros(counts.numel(), dtype=torch.int64)
    for sampled_by, age in ages.items():
        if age < counts.numel():
            optimizer_steps[age] = version - sampled_by
    total, seen = int(counts.sum()), counts > 0
    apart = torch.bincount(of_age.clamp(max=LAST_AGE), weights=counts.double()) / total
    return {
        **{f"rollout/{age_name(age)}_frac": share for age, share in enumerate(apart.tolist())},
        "rollout/age_mean": float((counts * of_age).sum()) / total,
        "rollout/age_max": float(of_age[seen].max()),
        "rollout/group_age_mean": float(_oldest(batch).double().mean()),
        "rollout/age_optimizer_steps_mean": float((counts * optimizer_steps).sum()) / total,
        "rollout/age_optimizer_steps_max": float(optimizer_steps[seen].max()),
    }


def _oldest(batch: Batch) -> Tensor:
    """Return the age of each group's oldest action token."""
    assert batch.ages is not None
    index = torch.unique(batch.group_ids, return_inverse=True)[1]
    groups = torch.zeros(int(index.max()) + 1, dtype=torch.int64)
    ages = torch.where(batch.action_mask, batch.ages, 0)
    return groups.scatter_reduce(0, index[batch.row_ids], ages, "amax")
