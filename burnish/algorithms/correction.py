"""Mismatch of the sampler's and the trainer's log-probs for the same weights and tokens.

``mismatch_stats`` measures it, ``correction_weights`` returns the factors of each token's loss.
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
    ``correction_weight``, ``correction_frac`` (tokens whose weight was changed); maxima
    ``correction_max`` (before the bounds). If a sampler's log-prob is NaN, its token (or row) has
    weight 0 and counts as changed. Token and truncate is truncated importance sampling (TIS), token
    and mask IcePop (arXiv 2510.18855), geometric and mask masked importance sampling. Raises
    ValueError for another level or mode.
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
    return weights, Stats(means=means, maxima={"correction_max": masked_max(raw, mask)})


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
