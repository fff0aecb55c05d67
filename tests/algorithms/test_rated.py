"""Losses and correlations of scores and classes: by hand, and against float64 formulas."""

from __future__ import annotations

import math
from statistics import correlation, fmean

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from burnish.algorithms.rated import (
    class_cross_entropy,
    huber,
    pearson,
    spearman,
    squared_error,
)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_errors_of_scores_by_hand() -> None:
    """Errors 1 and -3: (1 + 9) / 2 = 5. Huber with delta 2: 1/2 and 2 (3 - 1) = 4, mean 2.25."""
    scores, targets = torch.tensor([[2.0, 1.0]]), torch.tensor([[1.0, 4.0]])
    assert squared_error(scores, targets).tolist() == [5.0]
    assert huber(scores, targets, delta=2.0).tolist() == [2.25]


def test_cross_entropies_by_hand() -> None:
    """Logit ln 3 is p = 3/4: pass costs 0.287682, fail 1.386294. Logits (0, ln 3, 0) give the
    classes 1/5, 3/5 and 1/5: -ln 0.6 = 0.510826, -ln 0.2 = 1.609438."""
    third = math.log(3)
    binary = class_cross_entropy(torch.tensor([[third], [third]]), torch.tensor([1, 0]))
    many = class_cross_entropy(torch.tensor([[0.0, third, 0.0]] * 2), torch.tensor([1, 2]))
    # 1e-6: six written decimals
    assert binary.tolist() == pytest.approx([0.287682, 1.386294], abs=1e-6)
    assert many.tolist() == pytest.approx([0.510826, 1.609438], abs=1e-6)


def test_losses_in_bf16_agree_with_float64_formulas_and_finite_differences() -> None:
    scores, targets = drawn(6, 3), 2 * drawn(6, 3).flip(0)
    error = (scores.bfloat16().double() - targets).abs()
    low = squared_error(scores.bfloat16(), targets.float())
    # 1e-6: fp32 sums of numbers near 1, from the same rounded inputs
    torch.testing.assert_close(low.double(), error.square().mean(1), rtol=1e-6, atol=1e-6)
    expected = torch.where(error <= 0.7, error.square() / 2, 0.7 * (error - 0.35)).mean(1)
    found = huber(scores.bfloat16(), targets.float(), delta=0.7)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    rounded = targets.bfloat16()  # both are: the difference is not rounded
    error = (scores.bfloat16().double() - rounded.double()).abs()
    low = squared_error(scores.bfloat16(), rounded)
    torch.testing.assert_close(low.double(), error.square().mean(1), rtol=1e-6, atol=1e-6)
    expected = torch.where(error <= 0.7, error.square() / 2, 0.7 * (error - 0.35)).mean(1)
    found = huber(scores.bfloat16(), rounded, delta=0.7)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    classes = torch.tensor([0, 2, 1, 1, 0, 2])
    wide = scores.bfloat16().double()
    expected = (wide.exp().sum(1) / wide.exp()[torch.arange(6), classes]).log()
    found = class_cross_entropy(scores.bfloat16(), classes)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    x = scores.requires_grad_()
    assert gradcheck(lambda x: squared_error(x, targets), (x,))
    assert gradcheck(lambda x: huber(x, targets, delta=0.7), (x,))
    assert gradcheck(lambda x: class_cross_entropy(x, classes), (x,))
    assert gradcheck(lambda x: class_cross_entropy(x[:, :1], classes % 2), (x,))


def test_correlations_by_hand_and_with_ties() -> None:
    """x = (1, 2, 3), y = (1, 3, 2): deviations (-1, 0, 1) and (-1, 1, 0), so 1 / 2. With ties
    (1, 1, 2) has the ranks (1.5, 1.5, 3); against (1, 2, 3) that is sqrt(3) / 2."""
    x = torch.tensor([1.0, 2.0, 3.0])
    assert float(pearson(x, torch.tensor([1.0, 3.0, 2.0]))) == pytest.approx(0.5)
    assert float(spearman(x.exp(), torch.tensor([10.0, 300.0, 20.0]))) == pytest.approx(0.5)
    tied = torch.tensor([1.0, 1.0, 2.0])
    assert float(spearman(tied, x)) == pytest.approx(math.sqrt(3) / 2)
    assert math.isnan(float(pearson(x, torch.ones(3))))


def test_correlations_agree_with_those_of_the_standard_library() -> None:
    """Of fp32 numbers far from 0, and of whole numbers with many ties, whose rank is the mean of
    their places among all."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        x, y = torch.randint(0, 16, (2, 9), generator=generator) / 16
        x, y = x + 1e5, y * y - 1e5
        expected = correlation(x.tolist(), y.tolist())
        assert float(pearson(x, y)) == pytest.approx(expected, abs=1e-9)
        x, y = torch.randint(0, 4, (2, 9), generator=generator).float()
        ranks = [
            [fmean(1 + i for i, b in enumerate(sorted(z)) if b == a) for a in z] for z in (x, y)
        ]
        assert float(spearman(x, y)) == pytest.approx(correlation(*ranks), abs=1e-9)
