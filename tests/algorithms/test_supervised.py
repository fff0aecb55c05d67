"""Losses of given tokens: by hand."""

from __future__ import annotations

import math

import pytest
import torch

from burnish.algorithms.supervised import SUPERVISED_LOSSES, dft


def test_dynamic_fine_tuning_weighs_tokens_by_their_probability() -> None:
    """Probabilities 1/2, 1/4, 1, 0: p (-log p) = ln 2 (1/2, 1/2, 0, 0). The gradient is -p: p
    itself is a constant. A log-prob of -inf has a loss of 0, NaN stays NaN."""
    x = torch.tensor([0.5, 0.25, 1, 0], dtype=torch.float64).log().requires_grad_()
    loss = SUPERVISED_LOSSES["dft"](x)
    # 1e-12: fp64
    assert loss.tolist() == pytest.approx([math.log(2) / 2, math.log(2) / 2, 0, 0], abs=1e-12)
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    assert gradient.tolist() == pytest.approx([-0.5, -0.25, -1, 0], abs=1e-12)
    assert dft(torch.tensor([math.nan])).isnan().all()


def test_the_log_likelihood_is_negative_and_both_are_computed_in_fp32() -> None:
    half = torch.tensor([-1.0, -3.015625]).bfloat16()
    nll = SUPERVISED_LOSSES["nll"](half)
    assert nll.tolist() == [1.0, 3.015625] and nll.dtype == torch.float32
    assert torch.equal(dft(half), dft(half.float()))
