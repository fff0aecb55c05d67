"""Variants of the log-ratios that preference losses compare: divergences other than the reverse KL,
smaller weights for the ends of long responses, and ranks for optimal transport."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from burnish.algorithms.reduce import sum_by_row
from burnish.tensors import at_least_fp32

Divergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]

MAX_EXPONENT = 30.0
"""In nats. exp(30) = 1e13: :func:`divergence_scores` is a straight line beyond it, so that
differences stay finite in fp32 and the gradient does not vanish."""


def divergence_scores(log_ratios: Tensor, *, divergence: Divergence, alpha: float = 0.5) -> Tensor:
    """Return the score f'(u) of u = policy / reference, without constants, of any shape.

    reverse_kl: log u (DPO);  forward_kl: 1 - 1 / u;  js: log(2 u / (1 + u));
    alpha: (1 - u^-alpha) / alpha, 0 < alpha < 1, between reverse_kl (0) and forward_kl (1).

    ``log_ratios``: log u in nats. A loss of DPO's form takes scores of chosen and rejected
    responses in place of log-ratios. u^-a is exp(-a log u), and its tangent if -a log u >
    :data:`MAX_EXPONENT`. Source: f-DPO, arXiv 2309.16240.
    """
    log_ratios = at_least_fp32(log_ratios)
    if divergence == "reverse_kl":
        return log_ratios
    if divergence == "js":
        return math.log(2) + logsigmoid(log_ratios)
    alpha = 1.0 if divergence == "forward_kl" else alpha
    exponent = -alpha * log_ratios
    beyond = torch.relu(exponent - MAX_EXPONENT) * math.exp(MAX_EXPONENT)
    return -(torch.expm1(exponent.clamp(max=MAX_EXPONENT)) + beyond) / alpha


def desensitized(
    logprobs: Tensor, mask: Tensor, *, row_ids: Tensor, num_rows: int, ld_alpha: float
) -> Tensor:
    """Return the log-probs of a batch of pairs, times ``ld_alpha`` after the length of the shorter
    response of the pair, [M].

    Their sum over a response is log p = sum_(t <= l) log p_t + ld_alpha sum_(t > l) log p_t, where
    l is the smaller number of tokens of the two responses, so length beyond l counts less.
    ``logprobs``, ``mask`` (bool), ``row_ids`` [M]: packed rows, row 2i chosen and 2i + 1 rejected.
    Source: LD-DPO, arXiv 2409.06411.
    """
    counts = sum_by_row(mask, mask, row_ids=row_ids, num_rows=num_rows).long()
    before = counts.cumsum(0) - counts
    position = mask.cumsum(0) - before[row_ids]  # 1 is the first token of the response
    shorter = counts.view(-1, 2).amin(1).repeat_interleave(2)
    return torch.where(position > shorter[row_ids], ld_alpha * logprobs, logprobs)


def likelihood_weights(mean_logprobs: Tensor, mean_entropies: Tensor) -> Tensor:
    """Return the weight of each pair [N]: the product of its responses' likelihoods under the
    policy, w(y) = exp(mean over tokens of (log p_t - log sum_v p(v)^2)).

    A response that the policy would sample has a weight near 1. ``mean_logprobs``: means of log p_t
    over the responses [2N]; ``mean_entropies``: means of the collision entropies -log sum p^2 [2N].
    No gradient. Source: WPO, arXiv 2406.11827 (sampled alignment).
    """
    logs = at_least_fp32(mean_logprobs.detach()) + at_least_fp32(mean_entropies.detach())
    return (logs[0::2] + logs[1::2]).exp()


def of_equal_rank(x: Tensor, y: Tensor) -> Tensor:
    """Return, for each entry of ``x`` [N], the entry of ``y`` [N] with the same rank: optimal
    transport in one dimension. Equal entries are matched in their order."""
    return y.sort(stable=True).values[x.argsort(stable=True).argsort(stable=True)]
