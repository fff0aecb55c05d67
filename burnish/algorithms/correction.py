"""Mismatch of the sampler's and the trainer's log-probs for the same tokens.

The trainer's policy is the proximal policy of decoupled PPO, the sampler's the behavior policy.
``mismatch_stats`` and ``age_stats`` measure the mismatch, ``correction_weights`` returns the
factors of each token's loss.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from burnish.algorithms.kl import k3
from burnish.algorithms.policy_losses import MAX_LOG_RATIO
from burnish.algorithms.reduce import row_mean, row_sum
from burnish.tensors import at_least_fp32, masked_max, masked_sum
from burnish.types import Stats

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "clip", "mask"]

LAST_AGE = 8
"""In RL steps. Tokens of this age and older ones have one metric together."""

MOMENTS = ("weight", "weight_square")
"""Means in the stats of weights, for :func:`effective_sample_frac`."""


def correction_weights(  # house: ok the terms of the equation
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    level: Level,
    mode: Mode,
    low: float,
    high: float,
    row_ids: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """The importance weight of the trainer's policy over the sampler's, bounded; no gradient.

    g = old_logprobs - sampler_logprobs;  w = exp(g) (token), exp(sum of g over the row) (sequence)
    or exp(mean of g over the row) (geometric). Then truncate: min(w, high); clip: w into
    [low, high]; mask: w inside [low, high] and 0 outside (the token, or the entire row, is
    excluded; denominators do not change).

    Tensors are padded [N, T], or packed [M] with ``row_ids`` [M] (of an episode with several rows:
    one id for all of them); returns weights of that shape, 1 outside the mask. Stats: means
    ``correction_weight``, ``correction_frac`` (tokens whose weight was changed) and those of
    :func:`weight_moments`; maxima ``correction_max`` (before the bounds). If a sampler's log-prob
    is NaN, its token (or row) has weight 0 and counts as changed. Token and truncate is truncated
    importance sampling (TIS), token and mask IcePop (arXiv 2510.18855), geometric and mask masked
    importance sampling. Of stale samples, it is the weight of decoupled PPO (arXiv 2110.00641).
    Raises ValueError for another level or mode.
    """
    sampler = at_least_fp32(sampler_logprobs.detach())
    gap = at_least_fp32(old_logprobs.detach()) - sampler
    if level == "sequence":
        gap, sampler = (row_sum(x, mask, row_ids) for x in (gap, sampler))
    elif level == "geometric":
        gap, sampler = (row_mean(x, mask, row_ids) for x in (gap, sampler))
    elif level != "token":
        raise ValueError(f"unknown level {level!r}; use token, sequence or geometric")
    unknown = sampler.isnan()
    raw = torch.where(unknown, 0.0, gap.clamp(max=MAX_LOG_RATIO).exp())
    if mode == "truncate":
        bounded = raw.clamp(max=high)
    elif mode == "clip":
        bounded = raw.clamp(low, high)
    elif mode == "mask":
        bounded = torch.where((raw >= low) & (raw <= high), raw, 0.0)
    else:
        raise ValueError(f"unknown mode {mode!r}; use truncate, clip or mask")
    weights = torch.where(mask, bounded.masked_fill(unknown, 0.0), 1.0)
    count = mask.sum()
    means = {
        "correction_weight": (masked_sum(weights, mask), count),
        "correction_frac": (masked_sum((weights != raw) | unknown, mask), count),
    }
    stats = Stats(means=means, maxima={"correction_max": masked_max(raw, mask)})
    return weights, stats + weight_moments(weights, mask)


@torch.no_grad()
def off_policy_mask(  # house: ok the terms of the equation
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    threshold: float,
    row_ids: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """Tokens that the policy loss keeps (bool): all but those with a negative advantage in a
    sequence that the current policy would rarely draw.

    Masked: A < 0 and mean over the row of (sampler_logprobs - logprobs) > ``threshold``, in nats
    per token. No gradient. Denominators do not change. A sampler's log-prob of NaN counts as no
    difference.

    Tensors are padded [N, T], or packed [M] with ``row_ids`` [M] (of an episode with several rows:
    one id for all of them). Stats: mean ``off_policy_mask_frac`` (masked tokens). Source:
    DeepSeek-V3.2, arXiv 2512.02556.
    """
    gap = at_least_fp32(sampler_logprobs) - at_least_fp32(logprobs)
    gap = torch.where(sampler_logprobs.isnan(), 0.0, gap)
    masked = mask & (advantages < 0) & (row_mean(gap, mask, row_ids) > threshold)
    means = {"off_policy_mask_frac": (masked.sum(), mask.sum())}
    return ~masked, Stats(means=means)


def mismatch_stats(trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Stats:
    """The mismatch meter, over action tokens, g = trainer_logprobs - sampler_logprobs.

    Means ``mismatch_abs`` = |g| and ``mismatch_k3`` = exp(g) - 1 - g (KL of the trainer from the
    sampler, which drew the tokens); maxima ``mismatch_max`` = max |g|; all in nats. Tensors of one
    shape, [N, T] or [M]; no gradient. Entries outside the mask may be NaN or infinite.
    """
    trainer, sampler = (at_least_fp32(x.detach()) for x in (trainer_logprobs, sampler_logprobs))
    gap, count = (trainer - sampler).abs(), mask.sum()
    return Stats(
        means={
            "mismatch_abs": (masked_sum(gap, mask), count),
            "mismatch_k3": (masked_sum(k3(sampler, trainer), mask), count),
        },
        maxima={"mismatch_max": masked_max(gap, mask)},
    )


def sampler_ratio(trainer_logprobs: Tensor, sampler_logprobs: Tensor) -> Tensor:
    """The trainer's probability over the sampler's, per token, without a bound except
    exp(MAX_LOG_RATIO); no gradient. Tensors of any one shape."""
    trainer, sampler = (at_least_fp32(x.detach()) for x in (trainer_logprobs, sampler_logprobs))
    return (trainer - sampler).clamp(max=MAX_LOG_RATIO).exp()


def age_stats(
    trainer_logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    *,
    ages: Tensor,
    max_age: int,
) -> Stats:
    """Ratio and KL of the proximal policy (the trainer's) to the behavior policy (the sampler's),
    by the age of the action tokens.

    Means ``<name>_behavior_ratio`` = exp(g) and ``<name>_behavior_kl`` = exp(g) - 1 - g in nats, g
    as in :func:`mismatch_stats`, for each name of :func:`age_name`. The mean ratio is 1 in
    expectation. Names and their order depend on ``max_age`` alone, as ranks must have the same.
    Tensors of one shape; ``ages`` int64, in RL steps.
    """
    ratio = sampler_ratio(trainer_logprobs, sampler_logprobs)
    kl = k3(sampler_logprobs.detach(), trainer_logprobs.detach())
    means = {}
    for age in range(min(max_age, LAST_AGE) + 1):
        own = mask & (ages.clamp(max=LAST_AGE) == age)
        means[f"{age_name(age)}_behavior_ratio"] = (masked_sum(ratio, own), own.sum())
        means[f"{age_name(age)}_behavior_kl"] = (masked_sum(kl, own), own.sum())
    return Stats(means=means)


def age_name(age: int) -> str:
    """The part of a metric's name for tokens of an age in RL steps.

    >>> [age_name(age) for age in (0, 7, 8, 30)]
    ['age_0', 'age_7', 'age_8_up', 'age_8_up']
    """
    return f"age_{LAST_AGE}_up" if age >= LAST_AGE else f"age_{age}"


def weight_moments(weights: Tensor, mask: Tensor) -> Stats:
    """First and second moment of importance weights over action tokens, for
    :func:`effective_sample_frac`. Tensors of one shape; no gradient."""
    w, count = at_least_fp32(weights.detach()), mask.sum()
    first, second = MOMENTS
    means = {first: (masked_sum(w, mask), count), second: (masked_sum(w.square(), mask), count)}
    return Stats(means=means)


def effective_sample_frac(stats: Stats) -> float:
    """(sum w)^2 / (n sum w^2), from added-up stats of :func:`weight_moments`: the effective sample
    size of n weights, as a share of n.

    1: equal weights; 1 / n: a single weight above 0; 0: all weights are 0. NaN without weights.
    Source: Kong 1992.
    """
    mean = stats.floats()
    first, second = (mean[name] for name in MOMENTS)
    return first**2 / second if second else 0.0
