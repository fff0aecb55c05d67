"""Per-token policy losses: [N, T] or packed [M] in, the same shape out, 0 outside the mask.

No denominators. All operations are elementwise, at least in fp32. Entries outside the mask may be
NaN or infinite. ``old_logprobs`` and ``advantages`` are constants without gradient.

Inside the mask a log-prob of -inf has the limit of the loss, if there is one: a ratio of 0, or of
exp(MAX_LOG_RATIO) if the old one is -inf. NaN gives NaN at that token (``gspo``: in that row).
An engine skips a step whose loss is not finite, and counts it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from burnish.algorithms.kl import k3
from burnish.algorithms.reduce import row_mean, row_sum
from burnish.tensors import at_least_fp32, masked_max, masked_sum
from burnish.types import Stats

MAX_LOG_RATIO = 20.0
"""exp(20) = 4.9e8: beyond it a ratio is noise, and without a bound an infinite ratio times an
advantage of 0 is NaN. The gradient is 0 there, in all losses."""


def ppo(  # house: ok the terms of the equation
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Stats]:
    """The clipped surrogate, with separate lower and upper bounds and an optional dual clip.

    r = exp(logprobs - old_logprobs);  L = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A);
    with dual clip c > 1, where A < 0:  L = min(L, -c A).

    All tensors have one shape, [N, T] or [M]; ``mask`` is bool. Stats: means ``clip_frac`` (tokens
    for which the clipped term is the one that counts), ``ratio``, ``approx_kl`` (k3, old to new),
    with a dual clip ``dual_clip_frac``; maxima ``ratio_max``. Sources: arXiv 1707.06347 (equation
    7), 2503.14476 (clip-higher), 1912.09729 (dual clip).
    """
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    ratio = log_ratio.exp()
    adv = torch.where(mask, at_least_fp32(advantages.detach()), 0.0)
    loss, clipped = _pessimistic(ratio, adv, low=1 - clip_low, high=1 + clip_high)
    loss, found = _dual_clip(loss, adv, mask, dual_clip)
    clips = Stats(means={"clip_frac": (masked_sum(clipped, mask), mask.sum())}) + found
    return loss, clips + _ratio_stats(log_ratio, mask)


def gspo(  # house: ok the terms of the equation
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    row_ids: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """The clipped surrogate with one ratio for the whole sequence.

    s = exp(mean over the row's tokens of (logprobs - old_logprobs));
    L = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) at every token of the row, where the
    gradient of a token's s is s times that of its own log-prob (the token form, equation 9, which
    is the sequence form if A is one number per row). With dual clip c > 1, if A < 0:
    L = min(L, -c A), as in :func:`ppo`.

    Tensors are padded [N, T], or packed [M] with ``row_ids`` [M] (of an episode with several rows:
    one id for all of them). The bounds are far smaller than PPO's (3e-4 and 4e-4 in the paper): s
    is a mean. Stats as :func:`ppo`, ``clip_frac`` over tokens, and means ``sequence_ratio``.
    Source: arXiv 2507.18071 (equations 5, 7, 9).
    """
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    difference = at_least_fp32(logprobs.detach()) - at_least_fp32(old_logprobs.detach())
    mean = row_mean(difference, mask, row_ids).clamp(max=MAX_LOG_RATIO)
    moves = mask & (mean < MAX_LOG_RATIO) & logprobs.detach().isfinite()
    own = torch.where(moves, at_least_fp32(logprobs), 0.0)
    ratio = (mean + own - own.detach()).exp()
    adv = torch.where(mask, at_least_fp32(advantages.detach()), 0.0)
    loss, clipped = _pessimistic(ratio, adv, low=1 - clip_low, high=1 + clip_high)
    loss, found = _dual_clip(loss, adv, mask, dual_clip)
    count = mask.sum()
    means = {
        "clip_frac": (masked_sum(clipped, mask), count),
        "sequence_ratio": (masked_sum(ratio.detach(), mask), count),
    }
    return loss, Stats(means=means) + found + _ratio_stats(log_ratio, mask)


def cispo(  # house: ok the terms of the equation
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    max_ratio: float | None = None,
) -> tuple[Tensor, Stats]:
    """The score function under a clipped importance weight: no token's gradient is dropped.

    L = -w A logprobs, w = clip(r, 1 - clip_low, 1 + clip_high) without gradient, r as in
    :func:`ppo`. With ``max_ratio`` the upper bound is that number itself, whatever ``clip_high``.

    All tensors have one shape, [N, T] or [M]; ``mask`` is bool. Stats as :func:`ppo`
    (``clip_frac``: tokens whose weight is a bound). Sources: arXiv 2506.13585 (equation 4); an
    absolute upper bound: arXiv 2510.13786.
    """
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    ratio = log_ratio.detach().exp()
    high = 1 + clip_high if max_ratio is None else max_ratio
    weight = ratio.clamp(1 - clip_low, high)
    adv = torch.where(mask, at_least_fp32(advantages.detach()), 0.0)
    loss = _score(weight * adv, logprobs, mask)
    means = {"clip_frac": (masked_sum(weight != ratio, mask), mask.sum())}
    return loss, Stats(means=means) + _ratio_stats(log_ratio, mask)


def sapo(  # house: ok the terms of the equation
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tau_pos: float,
    tau_neg: float,
) -> tuple[Tensor, Stats]:
    """Soft adaptive policy optimization: a smooth gate in place of the clip.

    L = -(4 / tau) sigmoid(tau (r - 1)) A, tau = ``tau_pos`` where A > 0, else ``tau_neg``; r as in
    :func:`ppo`. The gradient is that of -r A, times 4 q (1 - q) with q = sigmoid(tau (r - 1)),
    which is 1 at r = 1 and falls on both sides.

    All tensors have one shape, [N, T] or [M]; ``mask`` is bool. Stats: means ``gate`` (4 q (1 -
    q)), ``ratio``, ``approx_kl``; maxima ``ratio_max``. Source: arXiv 2511.20347.
    """
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    adv = torch.where(mask, at_least_fp32(advantages.detach()), 0.0)
    tau = torch.where(adv > 0, tau_pos, tau_neg)
    soft = torch.sigmoid(tau * torch.expm1(log_ratio))
    gate = 4 * (soft * (1 - soft)).detach()
    means = {"gate": (masked_sum(gate, mask), mask.sum())}
    return -4 / tau * soft * adv, Stats(means=means) + _ratio_stats(log_ratio, mask)


def vespo(  # house: ok the terms of the equation
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    k_pos: float,
    lambda_pos: float,
    k_neg: float,
    lambda_neg: float,
    row_ids: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """The score function under a smooth weight of the entire sequence.

    L = -phi A logprobs, phi = w^k exp(lambda (1 - w)) without gradient, w = exp(sum over the row's
    tokens of (logprobs - old_logprobs)); k and lambda are ``_pos`` where A >= 0, else ``_neg``.
    phi is 1 at w = 1, has its maximum at w = k / lambda, and falls to 0 on both sides.

    Tensors are padded [N, T], or packed [M] with ``row_ids`` [M] (of an episode with several rows:
    one id for all of them). Stats: means ``sequence_weight`` (phi over tokens), ``ratio``,
    ``approx_kl``; maxima ``ratio_max``. Source: VESPO, arXiv 2602.10693.
    """
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    total = row_sum(log_ratio.detach(), mask, row_ids)
    adv = torch.where(mask, at_least_fp32(advantages.detach()), 0.0)
    k = torch.where(adv >= 0, k_pos, k_neg)
    decay = torch.where(adv >= 0, lambda_pos, lambda_neg)
    phi = torch.exp(k * total - decay * torch.expm1(total))
    loss = _score(phi * adv, logprobs, mask)
    means = {"sequence_weight": (masked_sum(phi, mask), mask.sum())}
    return loss, Stats(means=means) + _ratio_stats(log_ratio, mask)


def reinforce(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Stats]:
    """The score function, L = -A logprobs, no ratio: right only while the policy is the sampler.

    All tensors have one shape, [N, T] or [M]; ``mask`` is bool. ``old_logprobs`` only serves the
    stats (means ``ratio``, ``approx_kl``; maxima ``ratio_max``), which show whether that still
    holds. Source: Williams 1992, doi 10.1007/BF00992696.
    """
    adv = torch.where(mask, at_least_fp32(advantages.detach()), 0.0)
    loss = _score(adv, logprobs, mask)
    return loss, _ratio_stats(_log_ratio(logprobs, old_logprobs, mask), mask)


POLICY_LOSSES: dict[str, Callable[..., tuple[Tensor, Stats]]] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "vespo": vespo,
    "reinforce": reinforce,
}
"""Losses by the name in ``algorithm.policy_loss``, all f(logprobs, old_logprobs, advantages, mask,
*, ...) -> (per_token_loss, Stats). The keywords are the fields of that config node, and
``row_ids`` for those in :data:`BY_ROW`, for packed rows."""

BY_ROW = frozenset({"gspo", "vespo"})
"""Losses that need to know which tokens belong to the same sequence."""


def token_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """New over old probability of each token, with gradient; 1 outside the mask, at most
    exp(MAX_LOG_RATIO). Tensors of one shape."""
    return _log_ratio(logprobs, old_logprobs, mask).exp()


def _pessimistic(ratio: Tensor, adv: Tensor, *, low: float, high: float) -> tuple[Tensor, Tensor]:
    """(-min(r A, clip(r, low, high) A), where the clipped term is the one that counts)."""
    plain, clipped = -ratio * adv, -ratio.clamp(low, high) * adv
    return torch.maximum(plain, clipped), clipped > plain


def _dual_clip(
    loss: Tensor, adv: Tensor, mask: Tensor, bound: float | None
) -> tuple[Tensor, Stats]:
    """Return min(L, -c A) if A < 0, and where the bound applies. ``bound`` None: L unchanged."""
    if bound is None:
        return loss, Stats()
    highest = -bound * adv
    over = (adv < 0) & (loss > highest)
    means = {"dual_clip_frac": (masked_sum(over, mask), mask.sum())}
    return torch.where(over, highest, loss), Stats(means=means)


def _score(weight: Tensor, logprobs: Tensor, mask: Tensor) -> Tensor:
    """-weight x logprob; 0 if the weight is 0, also for a log-prob of -inf."""
    return -weight * torch.where(mask & (weight != 0), at_least_fp32(logprobs), 0.0)


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log of new / old probability, 0 outside the mask, at most MAX_LOG_RATIO."""
    difference = at_least_fp32(logprobs) - at_least_fp32(old_logprobs.detach())
    return torch.where(mask, difference, 0.0).clamp(max=MAX_LOG_RATIO)


def _ratio_stats(log_ratio: Tensor, mask: Tensor) -> Stats:
    log_ratio = log_ratio.detach()
    ratio, count = log_ratio.exp(), mask.sum()
    approx_kl = k3(torch.zeros_like(log_ratio), log_ratio)
    return Stats(
        means={
            "ratio": (masked_sum(ratio, mask), count),
            "approx_kl": (masked_sum(approx_kl, mask), count),
        },
        maxima={"ratio_max": masked_max(ratio, mask)},
    )
