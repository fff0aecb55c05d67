"""The critic's loss: both sides of the clip by hand, gradients, and invariances."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from burnish.algorithms.value_losses import clipped_value_loss, explained_variance

quick = settings(max_examples=30, deadline=None)
seeds = st.integers(0, 2**31 - 1)


def tokens(seed: int, n: int = 3, t: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """values, old values, returns (fp64) and a mask."""
    g = torch.Generator().manual_seed(seed)
    values, old, returns = torch.randn(3, n, t, generator=g, dtype=torch.float64)
    mask = torch.rand(n, t, generator=g) < 0.7
    mask[0, :2] = True
    return values, old, returns, mask


def test_the_larger_of_plain_and_clipped_error_by_hand() -> None:
    """value_clip 0.5, old value 1:

    V 1.25, R 2: inside the clip, (0.75)^2 / 2 = 0.28125.
    V 2, R 2: clipped to 1.5, error 0.5 beats 0: 0.125 (clipped counts).
    V 3, R 0: plain 3 beats clipped 1.5: 4.5.
    V 0, R 0: clipped to 0.5, 0.125 (clipped counts).
    """
    values = torch.tensor([1.25, 2.0, 3.0, 0.0, math.nan])
    returns = torch.tensor([2.0, 2.0, 0.0, 0.0, math.inf])
    mask = torch.tensor([True] * 4 + [False])
    loss, stats = clipped_value_loss(values, torch.ones(5), returns, mask, value_clip=0.5)
    assert loss.tolist() == [0.28125, 0.125, 4.5, 0.125, 0.0]
    assert stats.floats()["clip_frac"] == 0.5


def test_without_a_clip_it_is_half_the_squared_error() -> None:
    """(3 - 1)^2 / 2 = 2, for any old value."""
    one = torch.ones(1)
    loss, stats = clipped_value_loss(3 * one, -9 * one, one, one.bool(), value_clip=None)
    assert loss.tolist() == [2] and stats.floats()["clip_frac"] == 0


def test_an_unclipped_token_is_not_counted_as_clipped_by_rounding() -> None:
    """0.1 + (0.7 - 0.1) is not 0.7 in floating point; no value here is outside the clip."""
    values, old, returns, mask = tokens(0, n=50, t=50)
    _, stats = clipped_value_loss(
        values.float(), old.float(), returns.float(), mask, value_clip=100.0
    )
    assert stats.floats()["clip_frac"] == 0


def test_explained_variance_by_hand() -> None:
    """Returns 0, 4, variance 4; values 1, 3, errors -1, 1, variance 1: 1 - 1/4 = 0.75. Exact
    values: 1. A constant: 0."""
    returns, mask = torch.tensor([0.0, 4.0]), torch.ones(2, dtype=torch.bool)

    def of(*values: float) -> float:
        v = torch.tensor(values)
        return explained_variance(clipped_value_loss(v, v, returns, mask, value_clip=None)[1])

    assert of(1, 3) == 0.75
    assert of(0, 4) == 1
    assert of(7, 7) == 0


def test_explained_variance_of_constant_returns_is_nan() -> None:
    """The mean of equal squares minus the square of the mean is not always 0 in floating point."""
    for n in range(1, 30):
        x = torch.full((n,), 0.1, dtype=torch.float64)
        _, stats = clipped_value_loss(x - 1, x, x, x > 0, value_clip=0.2)
        assert math.isnan(explained_variance(stats))


@quick
@given(seed=seeds, parts=st.integers(1, 4))
def test_explained_variance_of_added_micro_batches_is_that_of_the_batch(
    seed: int, parts: int
) -> None:
    batch = tokens(seed, n=8)
    values, _, returns, mask = batch
    pieces = [
        clipped_value_loss(*rows, value_clip=0.2)[1]
        for rows in zip(*(x.chunk(parts) for x in batch), strict=True)
    ]
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    error, target = (returns - values)[mask], returns[mask]
    expected = 1 - error.var(correction=0) / target.var(correction=0)
    # 1e-9: fp64, with a variance taken as a difference of means of squares
    assert explained_variance(total) == pytest.approx(expected.item(), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("value_clip", [None, 0.3])
def test_gradients_agree_with_finite_differences(value_clip: float | None) -> None:
    values, old, returns, mask = tokens(1)
    x = values.requires_grad_()
    assert gradcheck(
        lambda v: clipped_value_loss(v, old, returns, mask, value_clip=value_clip)[0], (x,)
    )


def test_old_values_and_returns_are_constants() -> None:
    values, old, returns, mask = tokens(1)
    inputs = [x.requires_grad_() for x in (values, old, returns)]
    loss, _ = clipped_value_loss(*inputs, mask, value_clip=0.2)
    grads = torch.autograd.grad(loss.sum(), inputs, allow_unused=True)
    assert grads[0] is not None and grads[1] is None and grads[2] is None


@pytest.mark.parametrize("value_clip", [None, 0.3])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_garbage_outside_the_mask_is_ignored(value_clip: float | None, garbage: float) -> None:
    results = []
    *clean, mask = tokens(2)
    for inputs in (clean, [x.masked_fill(~mask, garbage) for x in clean]):
        x = inputs[0].clone().requires_grad_()
        out, stats = clipped_value_loss(x, *inputs[1:], mask, value_clip=value_clip)
        results.append((out.detach(), torch.autograd.grad(out.sum(), x)[0], stats.floats()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]


@quick
@given(seed=seeds)
def test_packed_tokens_and_permuted_rows_give_the_same_losses(seed: int) -> None:
    *padded, mask = tokens(seed)
    out, _ = clipped_value_loss(*padded, mask, value_clip=0.2)
    packed, _ = clipped_value_loss(*[x[mask] for x in padded], mask[mask], value_clip=0.2)
    flipped, _ = clipped_value_loss(*[x.flip(0) for x in padded], mask.flip(0), value_clip=0.2)
    assert torch.equal(packed, out[mask])
    assert torch.equal(flipped, out.flip(0))


@pytest.mark.parametrize("value_clip", [None, 0.2])
def test_half_precision_inputs_are_computed_in_fp32(value_clip: float | None) -> None:
    *inputs, mask = (x.bfloat16() if x.is_floating_point() else x for x in tokens(3))
    narrow, stats = clipped_value_loss(*inputs, mask, value_clip=value_clip)
    wide, expected = clipped_value_loss(*[x.float() for x in inputs], mask, value_clip=value_clip)
    assert narrow.dtype == torch.float32 and torch.equal(narrow, wide)
    assert stats.floats() == expected.floats()


@pytest.mark.parametrize("value_clip", [None, 0.2])
def test_the_stats_have_no_gradient(value_clip: float | None) -> None:
    values, old, returns, mask = tokens(3)
    _, stats = clipped_value_loss(
        values.requires_grad_(), old, returns, mask, value_clip=value_clip
    )
    assert not any(number.requires_grad for number, _ in stats.means.values())


def test_the_stats_of_the_critic_by_hand() -> None:
    """Values 1, 3, returns 0, 4: means 2, 2; squares of the returns 8; errors -1, 1: 0 and 1."""
    values, returns = torch.tensor([1.0, 3.0, 99.0]), torch.tensor([0.0, 4.0, 99.0])
    mask = torch.tensor([True, True, False])
    found = clipped_value_loss(values, values, returns, mask, value_clip=None)[1].floats()
    expected = {
        "value": 2.0,
        "return": 2.0,
        "return_square": 8.0,
        "error": 0.0,
        "error_square": 1.0,
    }
    assert found == {"clip_frac": 0.0, **expected}


def test_returns_far_from_zero_keep_their_variance() -> None:
    """4096 and 4097 in fp32: squares near 2^24, at which fp32 resolves only integers; their
    variance is 1/4. Errors -4096 and -4098 have variance 1: 1 - 1 / (1/4) = -3."""
    mask = torch.ones(2, dtype=torch.bool)

    def of(*values: float) -> float:
        v, returns = torch.tensor(values), torch.tensor([4096.0, 4097.0])
        return explained_variance(clipped_value_loss(v, v, returns, mask, value_clip=None)[1])

    assert of(4096, 4097) == 1 and of(0, 0) == 0
    assert of(8192, 8195) == -3
    assert of(0.125, 2.125) == 0.0


@pytest.mark.parametrize(
    ("spread", "varies"), [(0.0, False), (0.7e-12, False), (1.5e-12, True), (1e-6, True)]
)
def test_variation_below_rounding_counts_as_none(spread: float, varies: bool) -> None:
    """Returns 1 - d and 1 + d have variance d^2 and mean square 1 + d^2; the bound is 1e-12 of it.
    Returns of 0 do not vary either, and tiny ones that do count."""
    mask = torch.ones(2, dtype=torch.bool)

    def of(returns: Tensor) -> float:
        stats = clipped_value_loss(returns, returns, returns, mask, value_clip=None)[1]
        return explained_variance(stats)

    d = math.sqrt(spread)
    found = of(torch.tensor([1 - d, 1 + d], dtype=torch.float64))
    assert found == 1 if varies else math.isnan(found)
    assert math.isnan(of(torch.zeros(2)))
    assert of(torch.tensor([0.0, 1e-8], dtype=torch.float64)) == 1
