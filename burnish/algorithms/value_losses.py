"""The critic's per-token loss: [N, T] or packed [M] in, the same shape out, 0 outside the mask."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from burnish.tensors import at_least_fp32, masked_sum
from burnish.types import Stats


def clipped_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    value_clip: float | None,
) -> tuple[Tensor, Stats]:
    """Squared error without benefit from moving further than ``value_clip`` from the old value.

    V_c = V_old + clip(V - V_old, -value_clip, value_clip);  L = max((V - R)^2, (V_c - R)^2) / 2;
    ``value_clip`` None: (V - R)^2 / 2.

    All tensors have one shape, [N, T] or [M]; ``mask`` is bool; old values and returns are
    constants. Stats: means ``clip_frac`` (tokens for which the clipped term counts), and ``value``,
    ``return``, ``return_square``, ``error``, ``error_square`` for :func:`explained_variance`.
    Source: arXiv 2005.12729.
    """
    v = torch.where(mask, at_least_fp32(values), 0.0)
    old, target = (torch.where(mask, at_least_fp32(x.detach()), 0.0) for x in (old_values, returns))
    plain = clipped = (v - target).square()
    if value_clip is not None:
        clipped = (v.clamp(old - value_clip, old + value_clip) - target).square()
    wide_return, error = target.double(), (target - v).double()
    measured = {
        "clip_frac": clipped > plain,
        "value": v,
        "return": wide_return,
        "return_square": wide_return.square(),
        "error": error,
        "error_square": error.square(),
    }
    count = mask.sum()
    means = {k: (masked_sum(x.detach(), mask), count) for k, x in measured.items()}
    return 0.5 * torch.maximum(plain, clipped), Stats(means=means)


def explained_variance(stats: Stats) -> float:
    """1 - Var(R - V) / Var(R), from added-up stats of :func:`clipped_value_loss`.

    1: the critic knows the return; 0: as good as a constant; below 0: worse. NaN where the returns
    do not vary by more than the rounding of their squares (1e-12 of them).
    """
    mean = stats.floats()
    return_var = mean["return_square"] - mean["return"] ** 2
    error_var = mean["error_square"] - mean["error"] ** 2
    varies = return_var > 1e-12 * mean["return_square"]
    return 1.0 - error_var / return_var if varies else math.nan
