"""Masked statistics, whitening, and ragged rows to rectangles and back."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from burnish.tensors import (
    at_least_fp32,
    masked_max,
    masked_sum,
    pad_rows,
    unpad_rows,
    whiten,
)

quick = settings(max_examples=30)
seeds = st.integers(0, 2**31 - 1)
row_lengths = st.lists(st.integers(0, 6), min_size=1, max_size=6)

X = torch.tensor([[1.0, 2.0, math.nan], [3.0, 6.0, math.inf]])
MASK = torch.tensor([[True, True, False], [True, True, False]])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def offsets_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def test_masked_sum_is_that_of_the_unmasked_entries() -> None:
    """1 + 2 + 3 + 6 = 12."""
    assert masked_sum(X, MASK).item() == 12


def test_a_mask_of_rows_is_broadcast() -> None:
    """Only row 0 counts: 1 + 3 = 4."""
    x = torch.tensor([[1.0, 3.0], [7.0, 9.0]])
    mask = torch.tensor([[True], [False]])
    assert masked_sum(x, mask).item() == 4


def test_statistics_over_nothing_are_zero() -> None:
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    for f in (masked_sum, masked_max):
        assert f(X, nothing).item() == 0
    assert whiten(X, nothing).tolist() == [[0, 0, 0], [0, 0, 0]]
    assert masked_max(torch.zeros(0), torch.zeros(0, dtype=torch.bool)).item() == 0
    assert whiten(torch.zeros(0), torch.zeros(0, dtype=torch.bool)).shape == (0,)


def test_masked_max_looks_inside_the_mask_only() -> None:
    assert masked_max(X, MASK).item() == 6


def test_narrow_types_are_summed_in_fp32() -> None:
    """4096 ones: a bf16 running sum would stop at 256, where 256 + 1 rounds back to 256."""
    x = torch.ones(4096, dtype=torch.bfloat16)
    total = masked_sum(x, x > 0)
    assert total.dtype == torch.float32 and total.item() == 4096
    assert at_least_fp32(torch.ones(1, dtype=torch.float64)).dtype == torch.float64
    assert at_least_fp32(torch.ones(1, dtype=torch.int64)).dtype == torch.float32


def test_whitening_of_four_numbers_by_hand() -> None:
    """mean 3, var 3.5: (-2, -1, 0, 3) / sqrt(3.5) = (-1.06904, -0.53452, 0, 1.60357)."""
    expected = torch.tensor([[-1.06904, -0.53452, 0.0], [0.0, 1.60357, 0.0]])
    # 1e-5: the expected values are written with five decimals
    torch.testing.assert_close(whiten(X, MASK), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("value", [0.1, -7.3, 1e6])
def test_whitening_of_equal_entries_is_exactly_zero(value: float) -> None:
    x = torch.full((3, 7), value)
    assert whiten(x, torch.ones_like(x, dtype=torch.bool)).abs().max().item() == 0


@quick
@given(seed=seeds, scale=st.floats(0.01, 100), shift=st.floats(-10, 10))
def test_whitening_gives_mean_0_and_variance_1_and_ignores_shift_and_scale(
    seed: int, scale: float, shift: float
) -> None:
    g = generator(seed)
    x = torch.randn(4, 9, generator=g, dtype=torch.float64)
    mask = torch.rand(4, 9, generator=g) < 0.7
    mask[0, :2] = True
    out = whiten(x, mask)
    # 1e-9: fp64 rounding, enlarged at most by (shift / scale) = 1e3
    assert out[mask].mean().item() == pytest.approx(0, abs=1e-9)
    assert out[mask].var(correction=0).item() == pytest.approx(1, abs=1e-9)
    torch.testing.assert_close(whiten(scale * x + shift, mask), out, atol=1e-9, rtol=0)
    padded = torch.nn.functional.pad(x, (0, 3), value=math.nan)
    wider = torch.nn.functional.pad(mask, (0, 3))
    torch.testing.assert_close(whiten(padded, wider)[:, :9], out, atol=1e-12, rtol=0)


def test_padding_two_rows_by_hand() -> None:
    flat = torch.tensor([1, 2, 3, 4])
    offsets = torch.tensor([0, 3, 3, 4])
    assert pad_rows(flat, offsets).tolist() == [[1, 2, 3], [0, 0, 0], [4, 0, 0]]
    assert pad_rows(flat, offsets, value=-1).tolist() == [[1, 2, 3], [-1, -1, -1], [4, -1, -1]]


def test_padding_keeps_the_type() -> None:
    assert pad_rows(torch.tensor([True, True]), torch.tensor([0, 2])).dtype == torch.bool
    assert pad_rows(torch.ones(2, dtype=torch.bfloat16), torch.tensor([0, 2])).dtype == (
        torch.bfloat16
    )


@pytest.mark.parametrize("offsets", [[0], [0, 0], [0, 0, 0]])
def test_no_tokens_pad_to_nothing(offsets: list[int]) -> None:
    padded = pad_rows(torch.zeros(0), torch.tensor(offsets))
    assert padded.shape == (len(offsets) - 1, 0)
    assert unpad_rows(padded, torch.tensor(offsets)).shape == (0,)


@quick
@given(seed=seeds, lengths=row_lengths, extra=st.integers(0, 4))
def test_unpadding_undoes_padding_whatever_the_width(
    seed: int, lengths: list[int], extra: int
) -> None:
    offsets = offsets_of(lengths)
    flat = torch.randn(sum(lengths), generator=generator(seed))
    padded = torch.nn.functional.pad(pad_rows(flat, offsets), (0, extra), value=math.nan)
    assert torch.equal(unpad_rows(padded, offsets), flat)
    for i, n in enumerate(lengths):
        assert torch.equal(padded[i, :n], flat[offsets[i] : offsets[i + 1]])


@pytest.mark.parametrize("offsets", [[0, 2], [1, 3], [0, 4]])
def test_offsets_that_do_not_cover_the_tokens_are_rejected(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="the rows have 3 tokens"):
        pad_rows(torch.zeros(3), torch.tensor(offsets))


@pytest.mark.parametrize("offsets", [[0, 4], [0, 1, 2]])
def test_offsets_of_another_shape_are_rejected(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="1 x 3"):
        unpad_rows(torch.zeros(1, 3), torch.tensor(offsets))


def test_gradients_agree_with_finite_differences() -> None:
    x = torch.randn(3, 4, generator=generator(0), dtype=torch.float64, requires_grad=True)
    flat = torch.randn(5, generator=generator(1), dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 1]]).bool()
    offsets = torch.tensor([0, 2, 2, 5])
    for f in (masked_sum, whiten):
        assert gradcheck(lambda t, f=f: f(t, mask), (x,))
    assert gradcheck(lambda t: pad_rows(t, offsets), (flat,))
    assert gradcheck(lambda t: unpad_rows(t, torch.tensor([0, 2, 2, 5])), (x,))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_outside_the_mask_changes_no_statistic_and_no_gradient(garbage: float) -> None:
    clean = torch.randn(3, 4, generator=generator(2), dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 1]]).bool()
    for f in (masked_sum, whiten, masked_max):
        results = []
        for x in (clean, clean.masked_fill(~mask, garbage)):
            x.requires_grad_()
            out = f(x, mask)
            (grad,) = torch.autograd.grad((out * out).sum() + out.sum(), x)
            results.append((out.detach(), grad))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
