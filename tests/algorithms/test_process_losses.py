"""A loss on every step, and one score from the probabilities of several steps."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck

from burnish.algorithms.process import AGGREGATIONS, aggregate_steps, step_cross_entropy


def test_cross_entropy_of_hard_and_soft_labels_by_hand() -> None:
    """Logit 0 is p = 1/2: ln 2 for any label. Logit ln 3 is p = 3/4: label 1 costs -ln 0.75 =
    0.287682, label 0 -ln 0.25 = 1.386294, label 0.25 0.25 x 0.287682 + 0.75 x 1.386294 =
    1.111641."""
    logits = torch.tensor([0.0, math.log(3), math.log(3), math.log(3)])
    out = step_cross_entropy(logits, torch.tensor([0.3, 1.0, 0.0, 0.25]))
    # 1e-6: six written decimals and fp32
    expected = torch.tensor([0.693147, 0.287682, 1.386294, 1.111641])
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=0)


def test_the_loss_of_a_soft_label_is_minimal_at_its_probability() -> None:
    """d/dx of the loss is sigmoid(x) - y: zero at x = logit(y)."""
    label = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    x = torch.logit(label).requires_grad_()
    (grad,) = torch.autograd.grad(step_cross_entropy(x, label).sum(), x)
    torch.testing.assert_close(grad, torch.zeros(3, dtype=torch.float64), atol=1e-15, rtol=0)
    assert (step_cross_entropy(x, label) < step_cross_entropy(x + 0.1, label)).all()
    assert (step_cross_entropy(x, label) < step_cross_entropy(x - 0.1, label)).all()


def test_gradients_agree_with_finite_differences() -> None:
    x = torch.tensor([-3.0, -0.2, 0.0, 4.0], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([1.0, 0.3, 0.0, 0.7], dtype=torch.float64)
    assert gradcheck(lambda x: step_cross_entropy(x, y), (x,))


def test_extreme_scores_neither_overflow_nor_vanish() -> None:
    """-log sigmoid(-1000) = 1000."""
    out = step_cross_entropy(torch.tensor([-1000.0, 1000.0]), torch.tensor([1.0, 1.0]))
    assert out.tolist() == [1000.0, 0.0]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("min", [0.4, 0.9]),
        ("product", [0.16, 0.9]),  # 0.8 x 0.4 x 0.5
        ("last", [0.5, 0.9]),
        ("mean", [17 / 30, 0.9]),  # (0.8 + 0.4 + 0.5) / 3 = 1.7 / 3
    ],
)
def test_steps_become_one_score_by_hand(how: str, expected: list[float]) -> None:
    """Steps 0.8, 0.4, 0.5 of one response and 0.9 of another, which has one step: all four ways
    agree on that one."""
    probs, rows = torch.tensor([0.8, 0.4, 0.5, 0.9]), torch.tensor([0, 0, 0, 1])
    out = aggregate_steps(probs, rows, num_rows=2, how=how)
    torch.testing.assert_close(out, torch.tensor(expected))  # fp32 rounding


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_no_aggregation_mixes_responses(how: str) -> None:
    """The score of a response is the same alone and among others."""
    probs = torch.rand(7, generator=torch.Generator().manual_seed(1))
    rows = torch.tensor([0, 1, 1, 1, 2, 2, 3])
    together = aggregate_steps(probs, rows, num_rows=4, how=how)
    for row in range(4):
        own = probs[rows == row]
        alone = aggregate_steps(own, torch.zeros(len(own), dtype=torch.int64), num_rows=1, how=how)
        assert float(alone[0]) == pytest.approx(float(together[row]), rel=1e-6)  # fp32 sums


def test_hard_labels_may_be_booleans_or_integers() -> None:
    logits, labels = torch.tensor([0.5, -1.0]), torch.tensor([1.0, 0.0])
    expected = step_cross_entropy(logits, labels)
    assert torch.equal(step_cross_entropy(logits, labels.bool()), expected)
    assert torch.equal(step_cross_entropy(logits, labels.long()), expected)
