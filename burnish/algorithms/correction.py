"""How far the sampler's log-probs are from the trainer's for the same weights and tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.algorithms.kl import k3
from burnish.tensors import at_least_fp32, masked_max, masked_sum
from burnish.types import Stats


def mismatch_stats(trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Stats:
    """The mismatch meter, over action tokens, g = trainer_logprobs - sampler_logprobs.

    Means ``mismatch_abs`` = |g| and ``mismatch_k3`` = exp(g) - 1 - g (KL of the trainer from the
    sampler, which drew the tokens); maxima ``mismatch_max`` = max |g|; all in nats. Tensors of one
    shape, [N, T] or [M]; no gradient. What stands outside the mask may be NaN or infinite.
    """
    trainer, sampler = (
        torch.where(mask, at_least_fp32(x.detach()), 0.0)
        for x in (trainer_logprobs, sampler_logprobs)
    )
    gap, count = (trainer - sampler).abs(), mask.sum()
    return Stats(
        means={
            "mismatch_abs": (masked_sum(gap, mask), count),
            "mismatch_k3": (masked_sum(k3(sampler, trainer), mask), count),
        },
        maxima={"mismatch_max": masked_max(gap, mask)},
    )
