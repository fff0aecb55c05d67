"""Losses and correlations of reward models that predict scores or classes of single responses.

Losses: outputs and targets in, [N] out, no denominators. Responses have A scores or C classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from burnish.tensors import at_least_fp32


def squared_error(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error over the attributes [N]: L = mean over a of (s_a - t_a)^2.

    ``scores``, ``targets`` [N, A]. Source: HelpSteer2 (arXiv 2406.08673, section 4)."""
    return (at_least_fp32(scores) - targets.to(scores.device)).square().mean(1)


def huber(scores: Tensor, targets: Tensor, *, delta: float) -> Tensor:
    """Huber loss, as a mean over the attributes [N]: e^2 / 2 if |e| <= delta, else
    delta (|e| - delta / 2), with e = s_a - t_a.

    ``scores``, ``targets`` [N, A]. Source: Huber 1964."""
    wide = at_least_fp32(scores)
    return F.huber_loss(wide, targets.to(wide), delta=delta, reduction="none").mean(1)


def class_cross_entropy(logits: Tensor, classes: Tensor) -> Tensor:
    """Cross-entropy of the classes [N]: L = -log softmax(logits)_y; with one output
    L = -(y log sigmoid(z) + (1 - y) log(1 - sigmoid(z))).

    ``logits`` [N, C], ``classes`` [N] int64 (0 or 1 if C is 1)."""
    wide, classes = at_least_fp32(logits), classes.to(logits.device)
    if wide.shape[1] == 1:
        return F.binary_cross_entropy_with_logits(
            wide[:, 0], classes.to(wide.dtype), reduction="none"
        )
    return F.cross_entropy(wide, classes, reduction="none")


def pearson(x: Tensor, y: Tensor) -> Tensor:
    """Pearson correlation of two [N], a scalar; NaN if one of them is constant."""
    a, b = x.double() - x.double().mean(), y.double() - y.double().mean()
    return (a * b).sum() / (a.square().sum() * b.square().sum()).sqrt()


def spearman(x: Tensor, y: Tensor) -> Tensor:
    """Spearman correlation of two [N], a scalar: Pearson's of the ranks; equal entries have the
    mean of their ranks. NaN if one of them is constant."""
    return pearson(_ranks(x), _ranks(y))


def _ranks(x: Tensor) -> Tensor:
    inverse: Tensor
    _, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks: Tensor = last - (counts.double() - 1) / 2
    return ranks[inverse]
