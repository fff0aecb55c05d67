"""Losses of given tokens: log-probs of any one shape in, per-token losses of the same shape out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from burnish.tensors import at_least_fp32


def nll(logprobs: Tensor) -> Tensor:
    """Negative log-likelihood per token: L = -log p."""
    return -at_least_fp32(logprobs)


def dft(logprobs: Tensor) -> Tensor:
    """Dynamic fine-tuning: L = -p log p per token, where the factor p has no gradient.

    The gradient of the negative log-likelihood, seen as that of a policy, has the weight 1 / p;
    the factor removes it, so that improbable tokens do not dominate. 0 for a log-prob of -inf.
    Source: arXiv 2508.05629.
    """
    logprobs = at_least_fp32(logprobs)
    p = logprobs.detach().exp()
    return torch.where(p == 0, 0.0, -p * logprobs)


SUPERVISED_LOSSES: dict[str, Callable[[Tensor], Tensor]] = {"nll": nll, "dft": dft}
"""By the name in ``loss`` of the job ``sft``."""
