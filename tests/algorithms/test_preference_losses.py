"""Losses on preference pairs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from burnish.algorithms.preference import bradley_terry, centering, log_exp

quick = settings(max_examples=30, deadline=None)


def test_bradley_terry_by_hand() -> None:
    """Equal scores: ln 2 = 0.693147. 1 ahead: ln(1 + e^-1) = 0.313262. 1 behind: 0.313262 + 1."""
    out = bradley_terry(torch.tensor([0.5, 3.0, 2.0]), torch.tensor([0.5, 2.0, 3.0]))
    # 1e-6: six written decimals and fp32
    torch.testing.assert_close(out, torch.tensor([0.693147, 0.313262, 1.313262]), atol=1e-6, rtol=0)


def test_a_margin_is_the_required_score_difference() -> None:
    """3 - 2 - 1 = 0: ln 2. 3 - 2 - 2 = -1: 1.313262."""
    three, two = torch.full((2,), 3.0), torch.full((2,), 2.0)
    out = bradley_terry(three, two, margins=torch.tensor([1.0, 2.0]))
    # 1e-6: six written decimals and fp32
    torch.testing.assert_close(out, torch.tensor([0.693147, 1.313262]), atol=1e-6, rtol=0)


def test_large_differences_neither_overflow_nor_vanish() -> None:
    """-log sigmoid(-1000) = 1000; -log sigmoid(20) = e^-20 = 2.0612e-9."""
    out = bradley_terry(torch.tensor([-1000.0, 20.0]), torch.zeros(2))
    assert out[0].item() == 1000
    # 1e-4: five written digits
    assert out[1].item() == pytest.approx(2.0612e-9, rel=1e-4)


def test_scores_in_bf16_are_compared_in_fp32() -> None:
    x = torch.tensor([1.0]).bfloat16()
    assert bradley_terry(x, x).dtype == torch.float32


@quick
@given(chosen=st.floats(-20, 20), rejected=st.floats(-20, 20), shift=st.floats(-20, 20))
def test_only_the_score_difference_matters_and_both_orders_sum_to_one(
    chosen: float, rejected: float, shift: float
) -> None:
    a, b = (torch.tensor([x], dtype=torch.float64) for x in (chosen, rejected))
    out = bradley_terry(a, b).item()
    # 1e-9: fp64 rounding of sums up to 60
    assert bradley_terry(a + shift, b + shift).item() == pytest.approx(out, rel=1e-9, abs=1e-9)
    assert math.exp(-out) + math.exp(-bradley_terry(b, a).item()) == pytest.approx(1, abs=1e-12)


def test_gradients_agree_with_finite_differences() -> None:
    a, b, margins = torch.randn(
        3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    inputs = (a.requires_grad_(), b.requires_grad_())
    assert gradcheck(lambda x, y: bradley_terry(x, y, margins=margins), inputs)


def test_log_exp_is_bradley_terry_without_margins() -> None:
    chosen, rejected = torch.tensor([0.5, 3.0, -900.0]), torch.tensor([0.5, 2.0, 900.0])
    assert torch.equal(log_exp(chosen, rejected), bradley_terry(chosen, rejected))


def test_centering_is_the_square_of_the_pairs_sum() -> None:
    """(1 + 2)^2 = 9; (3 - 3)^2 = 0: only the sum counts, never the difference."""
    assert centering(torch.tensor([1.0, 3.0]), torch.tensor([2.0, -3.0])).tolist() == [9, 0]


def test_gradients_of_the_other_losses_of_scores_agree_with_finite_differences() -> None:
    a, b = torch.randn(2, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs = (a.requires_grad_(), b.requires_grad_())
    assert gradcheck(log_exp, inputs)
    assert gradcheck(centering, inputs)
