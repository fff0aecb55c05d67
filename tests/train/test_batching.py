"""Micro-batches of rows, and the model inputs that are built from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from burnish.train.batching import (
    Layout,
    arrange,
    read_and_target,
    row_units,
    split_over_ranks,
    split_rows,
)
from burnish.types import Batch, rows_to_batch


def batch_of(lengths: list[tuple[int, int]], groups: list[int]) -> Batch:
    """Rows of (prompt, response) tokens; prompts of a group are equal."""
    rows = [[10 + g] * p + [40] * r for (p, r), g in zip(lengths, groups, strict=True)]
    masks = [[False] * p + [True] * r for p, r in lengths]
    return rows_to_batch(rows, masks, prompt_lens=[p for p, _ in lengths], group_ids=groups)


def split(
    batch: Batch, *, micro: int | None = None, budget: int | None = None, layout: Layout
) -> list:
    return list(split_rows(batch, micro_batch_size=micro, max_tokens=budget, layout=layout))


FOUR = batch_of([(4, 1), (4, 2), (4, 3), (2, 9)], [0, 0, 0, 1])  # 5, 6, 7 and 11 tokens


@pytest.mark.parametrize(
    ("layout", "budget", "expected"),
    [
        # packed: 5 + 6 = 11, + 7 = 18; 7 + 11 = 18
        ("packed", 11, [[0, 1], [2], [3]]),
        ("packed", 17, [[0, 1], [2], [3]]),
        ("packed", 18, [[0, 1, 2], [3]]),
        ("packed", 28, [[0, 1, 2], [3]]),
        ("packed", 29, [[0, 1, 2, 3]]),
        # padded: 2 x 6 = 12, 3 x 7 = 21, 4 x 11 = 44
        ("padded", 11, [[0], [1], [2], [3]]),
        ("padded", 12, [[0, 1], [2], [3]]),
        ("padded", 21, [[0, 1, 2], [3]]),
        ("padded", 44, [[0, 1, 2, 3]]),
        # shared: 4 + 1 + 2 = 7, + 3 = 10, + 11 = 21
        ("shared_prefix", 7, [[0, 1], [2], [3]]),
        ("shared_prefix", 10, [[0, 1, 2], [3]]),
        ("shared_prefix", 20, [[0, 1, 2], [3]]),
        ("shared_prefix", 21, [[0, 1, 2, 3]]),
        # a row larger than the budget goes alone
        ("packed", 1, [[0], [1], [2], [3]]),
    ],
)
def test_a_token_budget_counts_what_the_layout_computes(
    layout: Layout, budget: int, expected: list[list[int]]
) -> None:
    assert split(FOUR, budget=budget, layout=layout) == expected


@pytest.mark.parametrize("layout", ["packed", "padded", "shared_prefix"])
def test_the_budget_equals_the_tokens_that_the_model_reads(
    layout: Layout, ragged_batch: Batch
) -> None:
    for budget in (20, 33, 50, 200):
        for rows in split(ragged_batch, budget=budget, layout=layout):
            read = arrange(ragged_batch.select(rows), layout).input_ids.numel()
            assert read <= budget or len(rows) == 1


def test_units_of_two_rows_are_never_split() -> None:
    pairs = replace(FOUR, rows_per_unit=2)
    assert split(pairs, micro=1, layout="packed") == [[0, 1], [2, 3]]
    assert split(pairs, micro=2, layout="packed") == [[0, 1, 2, 3]]
    assert split(pairs, budget=1, layout="packed") == [[0, 1], [2, 3]]
    assert split(pairs, budget=28, layout="packed") == [[0, 1], [2, 3]]
    assert split(pairs, budget=29, layout="packed") == [[0, 1, 2, 3]]


def test_micro_batches_take_rows_in_order_and_the_rest_is_smaller() -> None:
    assert split(FOUR, micro=3, layout="padded") == [[0, 1, 2], [3]]
    assert split(FOUR, layout="padded") == [[0, 1, 2, 3]]


def test_each_layout_has_the_expected_tokens_and_positions() -> None:
    """FOUR has 29 tokens; padded 4 x 11 = 44; shared 29 - 2 x 4 = 21."""
    for layout, count in (("packed", 29), ("padded", 44), ("shared_prefix", 21)):
        arranged = arrange(FOUR, layout)
        assert arranged.input_ids.numel() == count, layout
        assert torch.equal(arranged.input_ids.flatten()[arranged.flat_index], FOUR.tokens), layout
        position = torch.cat([torch.arange(n) for n in FOUR.lengths.tolist()])
        assert torch.equal(arranged.position_ids.flatten()[arranged.flat_index], position), layout


def test_a_token_is_predicted_by_the_token_before_it() -> None:
    """Rows [p p a], [p a a]: actions at 2, 4, 5 are read at 1, 3, 4."""
    batch = rows_to_batch(
        [[7, 8, 9], [7, 8, 9]], [[False, False, True], [False, True, True]], prompt_lens=[2, 1]
    )
    read, target = read_and_target(batch)
    assert target.tolist() == [2, 4, 5] and read.tolist() == [1, 3, 4]


def test_the_rows_of_a_sample_stay_together_if_the_loss_needs_them() -> None:
    """Rows 0 and 2 are one sample, 1 and 3 others. Packed: 5 + 7 = 12, 6 and 11 tokens."""
    episodes = replace(FOUR, sample_ids=torch.tensor([5, 0, 5, 3]))
    assert split(episodes, micro=1, layout="packed") == [[0], [1], [2], [3]]
    together = replace(episodes, samples_together=True)
    assert split(together, micro=1, layout="packed") == [[0, 2], [1], [3]]
    assert split(together, micro=2, layout="packed") == [[0, 2, 1], [3]]
    assert split(together, budget=1, layout="packed") == [[0, 2], [1], [3]]
    assert split(together, budget=18, layout="packed") == [[0, 2, 1], [3]]
    assert split(together, budget=17, layout="packed") == [[0, 2], [1, 3]]
    assert row_units(together, [3, 2, 0]) == [[3], [2, 0]]
    single = replace(FOUR, samples_together=True)
    assert split(single, micro=1, layout="packed") == [[0], [1], [2], [3]]


@pytest.mark.parametrize("budget", [None, 1, 12, 100])
@pytest.mark.parametrize("ranks", [2, 3])
def test_no_rank_gets_a_part_of_a_sample(ranks: int, budget: int | None) -> None:
    samples = torch.tensor([0, 1, 0, 2, 1, 0, 3, 3])
    rows = batch_of([(2, 1 + i) for i in range(8)], [0] * 8)
    parts = split_over_ranks(
        replace(rows, sample_ids=samples, samples_together=True),
        ranks=ranks,
        micro_batch_size=1,
        max_tokens=budget,
        layout="packed",
    )
    micros = [micro for part in parts for micro in part if micro]
    assert sorted(row for micro in micros for row in micro) == list(range(8))
    of_micro = [set(samples[micro].tolist()) for micro in micros]
    assert sum(map(len, of_micro)) == 4, "each sample is in one micro-batch"
