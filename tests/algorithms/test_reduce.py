"""Every denominator: by hand, split over micro-batches, packed and padded."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from burnish.algorithms import reduce
from burnish.algorithms.reduce import row_mean, row_sum, sum_by_row
from burnish.tensors import unpad_rows

quick = settings(max_examples=30, deadline=None)
seeds = st.integers(0, 2**31 - 1)
every_aggregation = pytest.mark.parametrize(
    "aggregation", ["token_mean", "sequence_mean", "sequence_sum_constant"]
)


def rows(seed: int, n: int = 7, t: int = 5) -> tuple[Tensor, Tensor, dict[str, int]]:
    """Losses (fp64), a ragged mask with an empty row, and the counts of all rows."""
    g = torch.Generator().manual_seed(seed)
    loss = torch.randn(n, t, generator=g, dtype=torch.float64)
    mask = torch.rand(n, t, generator=g) < 0.6
    mask[0], mask[1, 0] = False, True
    return loss, mask, {"num_tokens": int(mask.sum()), "num_sequences": n, "max_len": 11}


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token_mean", 3.0), ("sequence_mean", 4.0), ("sequence_sum_constant", 0.6)],
)
def test_two_rows_by_hand(aggregation: str, expected: float) -> None:
    """Rows (1, 2, 3) and (6): token mean 12 / 4 = 3; mean of means (2 + 6) / 2 = 4; constant length
    10: 12 / (2 x 10) = 0.6."""
    loss = torch.tensor([[1.0, 2.0, 3.0], [6.0, math.nan, math.inf]]).double()
    mask = torch.tensor([[True, True, True], [True, False, False]])
    packed = {"row_ids": torch.tensor([0, 0, 0, 1])}
    counts = {"aggregation": aggregation, "num_tokens": 4, "num_sequences": 2, "max_len": 10}
    assert reduce(loss, mask, **counts).item() == expected
    assert reduce(loss[mask], mask[mask], **counts, **packed).item() == expected


@every_aggregation
@quick
@given(seed=seeds, data=st.data())
def test_loss_and_gradient_of_micro_batches_add_up_to_those_of_the_step(
    aggregation: str, seed: int, data: st.DataObject
) -> None:
    loss, mask, counts = rows(seed)
    loss.requires_grad_()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(mask) - 1))))
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    parts = order.tensor_split(cuts)
    whole = reduce(loss, mask, aggregation=aggregation, **counts)
    pieces = sum(reduce(loss[p], mask[p], aggregation=aggregation, **counts) for p in parts)
    # 1e-12: fp64 sums in another order
    torch.testing.assert_close(pieces, whole, atol=1e-12, rtol=0)
    (grad,) = torch.autograd.grad(whole, loss)
    (grad_of_pieces,) = torch.autograd.grad(pieces, loss)
    assert torch.equal(grad_of_pieces, grad)


@every_aggregation
@quick
@given(seed=seeds)
def test_packed_rows_with_any_ids_equal_padded_rows(aggregation: str, seed: int) -> None:
    loss, mask, counts = rows(seed)
    whole = reduce(loss, mask, aggregation=aggregation, **counts)
    g = torch.Generator().manual_seed(seed)
    names = torch.randperm(100, generator=g)[: len(mask)] - 50
    offsets = torch.arange(len(mask) + 1) * mask.shape[1]
    ids = names[:, None].expand_as(mask).reshape(-1)
    flat = [unpad_rows(x, offsets) for x in (loss, mask)]
    shuffled = torch.randperm(mask.numel(), generator=g)
    for index in (slice(None), shuffled, flat[1]):
        out = reduce(
            flat[0][index], flat[1][index], aggregation=aggregation, row_ids=ids[index], **counts
        )
        # 1e-12: fp64 sums in another order
        torch.testing.assert_close(out, whole, atol=1e-12, rtol=0)


@every_aggregation
@quick
@given(seed=seeds, left=st.integers(0, 3), right=st.integers(0, 5))
def test_the_loss_is_invariant_to_padding_and_row_order(
    aggregation: str, seed: int, left: int, right: int
) -> None:
    loss, mask, counts = rows(seed)
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    wide = torch.nn.functional.pad(loss[order], (left, right), value=math.nan)
    wide_mask = torch.nn.functional.pad(mask[order], (left, right))
    # 1e-12: fp64 sums in another order
    torch.testing.assert_close(
        reduce(wide, wide_mask, aggregation=aggregation, **counts),
        reduce(loss, mask, aggregation=aggregation, **counts),
        atol=1e-12,
        rtol=0,
    )


@every_aggregation
@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_garbage_outside_the_mask_changes_neither_loss_nor_gradient(
    aggregation: str, garbage: float
) -> None:
    loss, mask, counts = rows(1)
    results = []
    for x in (loss, loss.masked_fill(~mask, garbage)):
        x = x.clone().requires_grad_()
        out = reduce(x, mask, aggregation=aggregation, **counts)
        results.append((out.item(), torch.autograd.grad(out, x)[0]))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


@every_aggregation
def test_gradients_agree_with_finite_differences(aggregation: str) -> None:
    loss, mask, counts = rows(2)
    ids = torch.arange(len(mask)).repeat_interleave(mask.shape[1])
    packed = loss.reshape(-1).clone().requires_grad_()
    loss.requires_grad_()
    assert gradcheck(lambda x: reduce(x, mask, aggregation=aggregation, **counts), (loss,))
    assert gradcheck(
        lambda x: reduce(x, mask.reshape(-1), aggregation=aggregation, row_ids=ids, **counts),
        (packed,),
    )


def test_narrow_losses_are_summed_in_fp32() -> None:
    """4096 ones: a bf16 running sum would stop at 256."""
    x = torch.ones(1, 4096, dtype=torch.bfloat16)
    out = reduce(x, x > 0, aggregation="token_mean", num_tokens=4096, num_sequences=1)
    assert out.dtype == torch.float32 and out.item() == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"aggregation": "mean"}, "use token_mean, sequence_mean or sequence_sum_constant"),
        ({"aggregation": "sequence_sum_constant"}, "pass max_len"),
        ({"aggregation": "sequence_mean"}, r"pass row_ids \[M\]"),
        ({"num_tokens": 0}, "num_tokens=0"),
        ({"num_sequences": 0}, "num_sequences=0"),
    ],
)
def test_invalid_denominators_are_refused(changed: dict, message: str) -> None:
    packed = torch.ones(3)
    counts = {"aggregation": "token_mean", "num_tokens": 3, "num_sequences": 1} | changed
    with pytest.raises(ValueError, match=message):
        reduce(packed, packed > 0, **counts)


def test_counts_of_one_are_enough() -> None:
    one = torch.ones(1, 1)
    for aggregation in ("token_mean", "sequence_mean", "sequence_sum_constant"):
        counts = {"num_tokens": 1, "num_sequences": 1, "max_len": 1}
        assert reduce(one, one > 0, aggregation=aggregation, **counts).item() == 1


def test_sums_by_row_of_half_precision_input_are_taken_in_fp32() -> None:
    """300 ones in each of two rows: a bf16 sum would stop at 256. Row 2 is empty."""
    x, mask = torch.ones(600).bfloat16(), torch.ones(600).bool()
    ids = torch.arange(600) // 300
    mask[0] = False
    assert sum_by_row(x, mask, row_ids=ids, num_rows=3).tolist() == [299, 300, 0]
    assert row_sum(x, mask, ids)[[0, 599]].tolist() == [299, 300]
    assert row_sum(x.view(2, 300), mask.view(2, 300))[:, 0].tolist() == [299, 300]
    # 1e-7: 299 / 299 in fp32
    assert row_mean(x, mask, ids)[[0, 599]].tolist() == pytest.approx([1, 1], abs=1e-7)


def test_sums_by_row_have_gradients_and_see_no_garbage() -> None:
    x, mask = torch.tensor([1.0, 2.0, 3.0, 4.0]).double(), torch.tensor([True, True, False, True])
    ids = torch.tensor([0, 1, 1, 1])
    assert sum_by_row(x.masked_fill(~mask, math.nan), mask, row_ids=ids, num_rows=2).tolist() == [
        *(1, 6)
    ]
    x.requires_grad_()
    assert gradcheck(lambda v: sum_by_row(v, mask, row_ids=ids, num_rows=2), (x,))
    assert gradcheck(lambda v: row_mean(v, mask, ids), (x,))
    assert gradcheck(lambda v: row_sum(v.view(2, 2), mask.view(2, 2)), (x,))


def test_rows_of_one_sequence_are_divided_by_all_of_its_tokens() -> None:
    """Rows (1, 2, 3) and (6) of one sequence, 4 tokens: 12 / 4 = 3, in one pass or in two. Another
    sequence of one token, 5: (3 + 5) / 2 = 4."""
    loss = torch.tensor([1.0, 2.0, 3.0, 6.0, 5.0, math.nan])
    mask = torch.tensor([True] * 5 + [False])
    counts = {"aggregation": "sequence_mean", "num_tokens": 5, "num_sequences": 2}
    tokens = torch.tensor([4, 4, 4, 4, 1, 0])
    rows_of = torch.tensor([0, 0, 0, 1, 2, 3])
    whole = reduce(loss, mask, sequence_tokens=tokens, row_ids=rows_of, **counts)
    assert whole.item() == 4.0
    parts = [slice(0, 3), slice(3, 6)]
    assert sum(reduce(loss[p], mask[p], sequence_tokens=tokens[p], **counts) for p in parts) == 4.0
