"""Metrics of the ages of trained groups and tokens, in asynchronous runs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from burnish.algorithms.correction import LAST_AGE, age_name
from burnish.driver.base import Metrics
from burnish.types import Batch


def age_metrics(
    batch: Batch, ages: Mapping[int, int] | None, *, version: int, max_staleness: int
) -> Metrics:
    """Return the ages of a rollout's groups and action tokens; empty in a synchronous run.

    Of the groups, whose age is that of their oldest token, in RL steps: ``rollout/age_<k>_frac``,
    the share of each age up to ``max_staleness`` (:func:`age_name`), ``rollout/age_mean`` and
    ``rollout/age_max``. Of the tokens: ``rollout/age_of_tokens_mean`` in RL steps,
    ``rollout/age_optimizer_steps_mean`` and ``_max`` in optimizer steps. ``ages`` maps versions of
    the policy to ages in RL steps, as for ``groups_to_batch``; ``version``: that of the policy
    before the update.
    """
    if batch.ages is None or ages is None or not bool(batch.action_mask.any()):
        return {}
    groups, tokens = _oldest(batch), batch.ages[batch.action_mask]
    apart = min(max_staleness, LAST_AGE) + 1
    shares = torch.bincount(groups.clamp(max=LAST_AGE), minlength=apart) / groups.numel()
    counts = torch.bincount(tokens).double()
    known = torch.arange(counts.numel())
    optimizer_steps = torch.zeros(counts.numel())
    for sampled_by, age in ages.items():
        if age < counts.numel():
            optimizer_steps[age] = version - sampled_by
    return {
        **{f"rollout/{age_name(age)}_frac": share for age, share in enumerate(shares.tolist())},
        "rollout/age_mean": float(groups.double().mean()),
        "rollout/age_max": float(groups.max()),
        "rollout/age_of_tokens_mean": float((counts * known).sum()) / tokens.numel(),
        "rollout/age_optimizer_steps_mean": float((counts * optimizer_steps).sum())
        / tokens.numel(),
        "rollout/age_optimizer_steps_max": float(optimizer_steps[counts > 0].max()),
    }


def _oldest(batch: Batch) -> Tensor:
    """Return the age of each group's oldest action token."""
    assert batch.ages is not None
    index = torch.unique(batch.group_ids, return_inverse=True)[1]
    groups = torch.zeros(int(index.max()) + 1, dtype=torch.int64)
    ages = torch.where(batch.action_mask, batch.ages, 0)
    return groups.scatter_reduce(0, index[batch.row_ids], ages, "amax")
