"""GSPO: one ratio for an entire sequence; by hand, against finite differences, packed and
padded."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from burnish.algorithms import reduce
from burnish.algorithms.policy_losses import MAX_LOG_RATIO, gspo
from burnish.algorithms.reduce import row_mean, row_sum

CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def rows(seed: int, n: int = 3, t: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logprobs, old_logprobs, one advantage per row (fp64), and a mask with every row in it."""
    g = torch.Generator().manual_seed(seed)
    logprobs, moved, advantages = torch.randn(3, n, t, generator=g, dtype=torch.float64)
    mask = torch.rand(n, t, generator=g) < 0.7
    mask[:, 0] = True
    return logprobs - 2, logprobs - 2 + 0.4 * moved, advantages[:, :1].expand(n, t), mask


def test_the_ratio_is_the_geometric_mean_over_the_sequence() -> None:
    """Row 0: log-ratios ln 2, ln 8, masked: s = exp((ln 2 + ln 8) / 2) = 4, A 1, clipped to 1.3:
    -min(4, 1.3) = -1.3 at both tokens. Row 1: ln 0.25 at one token, A -1: -min(-0.25, -0.8) = 0.8.
    Row 2: no token: 0. Clipped: 3 of 3 tokens; mean s (4 + 4 + 0.25) / 3 = 2.75."""
    log_ratio = torch.tensor([[2.0, 8, 1], [0.25, 1, 1], [1, 1, 1]], dtype=torch.float64).log()
    mask = torch.tensor([[True, True, False], [True, False, False], [False] * 3])
    advantages = torch.tensor([[1.0], [-1], [1]]).expand(3, 3)
    loss, stats = gspo(log_ratio, torch.zeros(3, 3), advantages, mask, **CLIP)
    expected = torch.tensor([[-1.3, -1.3, 0], [0.8, 0, 0], [0, 0, 0]], dtype=torch.float64)
    # 1e-12: exp(log r) in fp64
    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=0)
    found = stats.floats()
    assert found["clip_frac"] == 1.0
    assert found["sequence_ratio"] == pytest.approx(2.75)
    assert found["ratio_max"] == pytest.approx(8.0), "of single tokens"


def test_inside_the_bounds_the_gradient_is_that_of_the_sequence_form() -> None:
    """mean over rows of -s A, s = exp(mean of log-ratios): differences of that, not of the code."""
    logprobs, old, advantages, mask = rows(0)
    wide = {"clip_low": 0.99, "clip_high": 99.0}
    x = logprobs.clone().requires_grad_()
    loss, _ = gspo(x, old, advantages, mask, **wide)
    counts = {"num_tokens": int(mask.sum()), "num_sequences": len(mask)}
    scalar = reduce(loss, mask, aggregation="sequence_mean", **counts)
    (grad,) = torch.autograd.grad(scalar, x)

    def sequence_form(y: Tensor) -> float:
        mean = torch.where(mask, y - old, 0.0).sum(1) / mask.sum(1)
        return float((-mean.exp() * advantages[:, 0]).mean())

    step = 1e-6
    for i in range(mask.shape[0]):
        for j in range(mask.shape[1]):
            up, down = logprobs.clone(), logprobs.clone()
            up[i, j] += step
            down[i, j] -= step
            difference = (sequence_form(up) - sequence_form(down)) / (2 * step)
            # 1e-8: rounding of differences in fp64 over 2e-6
            assert grad[i, j].item() == pytest.approx(difference, abs=1e-8)


def test_a_clipped_sequence_has_no_gradient() -> None:
    x = torch.tensor([[1.0, 1.0]]).double().requires_grad_()
    args = (torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2).bool())
    (grad,) = torch.autograd.grad(gspo(x, *args, **CLIP)[0].sum(), x)
    assert grad.abs().sum() == 0


@given(seed=st.integers(0, 2**31 - 1))
def test_packed_and_padded_rows_give_equal_losses(seed: int) -> None:
    *inputs, mask = rows(seed)
    ids = torch.arange(len(mask))[:, None].expand_as(mask)
    padded, stats = gspo(*inputs, mask, **CLIP)
    flat = [x[mask] for x in inputs]
    packed, packed_stats = gspo(*flat, mask[mask], **CLIP, row_ids=7 - ids[mask])
    # 1e-12: fp64 sums in another order
    torch.testing.assert_close(packed, padded[mask], atol=1e-12, rtol=0)
    assert packed_stats.floats() == pytest.approx(stats.floats(), abs=1e-12)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_outside_the_mask_is_ignored(garbage: float) -> None:
    *clean, mask = rows(2)
    dirty = [x.masked_fill(~mask, garbage) for x in clean]
    results = []
    for logprobs, *rest in (clean, dirty):
        x = logprobs.clone().requires_grad_()
        loss, stats = gspo(x, *rest, mask, **CLIP)
        results.append((loss, torch.autograd.grad(loss.sum(), x)[0], stats.floats()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]


def test_an_extreme_ratio_stays_finite() -> None:
    x = torch.tensor([[500.0, 400.0]], requires_grad=True)
    advantages = torch.tensor([[0.0, 1.0]])
    loss, stats = gspo(x, torch.zeros(1, 2), advantages, torch.ones(1, 2).bool(), **CLIP)
    (grad,) = torch.autograd.grad(loss.sum(), x)
    assert loss.isfinite().all() and grad.isfinite().all()
    # 1e-6: fp32 exp
    assert stats.floats()["sequence_ratio"] == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-6)


def test_row_sums_and_means_by_hand() -> None:
    """Rows (1, 2, -) and (5, -, -): sums 3 and 5, means 1.5 and 5; a row without tokens: 0."""
    x = torch.tensor([[1.0, 2, 9], [5, 9, 9], [9, 9, 9]])
    mask = torch.tensor([[True, True, False], [True, False, False], [False] * 3])
    assert row_sum(x, mask).tolist() == [[3] * 3, [5] * 3, [0] * 3]
    assert row_mean(x, mask).tolist() == [[1.5] * 3, [5] * 3, [0] * 3]
    with pytest.raises(ValueError, match="pass row_ids"):
        row_sum(x[mask], mask[mask])
