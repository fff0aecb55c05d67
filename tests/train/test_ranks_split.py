"""How the rows of one optimizer step are split over ranks and micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.train.batching import Layout, arrange, split_over_ranks, split_rows
from burnish.types import Batch, rows_to_batch

LAYOUTS: tuple[Layout, ...] = ("padded", "packed", "shared_prefix")


def batch_of(groups: list[tuple[int, list[int]]], *, unit: int = 1) -> Batch:
    """Groups of (prompt tokens, response tokens of each row); rows are padded to complete units by
    repeating the last group's prompt."""
    rows, prompts, ids = [], [], []
    for group, (prompt, responses) in enumerate(groups):
        for response in responses:
            rows.append([10 + group] * prompt + [40] * response)
            prompts.append(prompt)
            ids.append(group)
    while len(rows) % unit:
        rows.append([10 + ids[-1]] * prompts[-1])
        prompts.append(prompts[-1])
        ids.append(ids[-1])
    masks = [[False] * p + [True] * (len(r) - p) for r, p in zip(rows, prompts, strict=True)]
    batch = rows_to_batch(rows, masks, prompt_lens=prompts, group_ids=ids)
    return replace(batch, rows_per_unit=unit)


def computed(batch: Batch, rows: list[int], layout: Layout) -> int:
    """Tokens that the model would really read."""
    return arrange(batch.select(rows), layout).input_ids.numel() if rows else 0


def flat(parts: list[list[list[int]]]) -> list[int]:
    return [row for part in parts for micro in part for row in micro]


GROUPS = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(0, 30), min_size=1, max_size=6)),
    min_size=1,
    max_size=6,
)
CASES = st.fixed_dictionaries(
    {
        "groups": GROUPS,
        "unit": st.sampled_from([1, 2]),
        "ranks": st.integers(1, 5),
        "layout": st.sampled_from(LAYOUTS),
        "micro": st.none() | st.integers(1, 5),
        "budget": st.none() | st.integers(1, 80),
    }
)


def split(case: dict[str, Any]) -> tuple[Batch, list[list[list[int]]]]:
    batch = batch_of(case["groups"], unit=case["unit"])
    parts = split_over_ranks(
        batch,
        ranks=case["ranks"],
        micro_batch_size=case["micro"],
        max_tokens=case["budget"],
        layout=case["layout"],
    )
    return batch, parts


@settings(max_examples=150, deadline=None)
@given(case=CASES)
def test_every_row_is_in_one_micro_batch_and_units_are_not_split(case: dict[str, Any]) -> None:
    batch, parts = split(case)
    assert len(parts) == case["ranks"]
    assert sorted(flat(parts)) == list(range(batch.num_rows))
    unit = case["unit"]
    for micro in (micro for part in parts for micro in part):
        for i in range(0, len(micro), unit):
            assert micro[i : i + unit] == list(range(micro[i], micro[i] + unit))
            assert micro[i] % unit == 0


@settings(max_examples=150, deadline=None)
@given(case=CASES)
def test_all_ranks_make_the_same_number_of_passes(case: dict[str, Any]) -> None:
    """And an empty one only if the rank has no two units left to split."""
    _, parts = split(case)
    assert len({len(part) for part in parts}) == 1
    for part in parts:
        if [] in part:
            assert all(len(micro) <= case["unit"] for micro in part)


@settings(max_examples=150, deadline=None)
@given(case=CASES)
def test_no_micro_batch_is_over_its_limit(case: dict[str, Any]) -> None:
    batch, parts = split(case)
    for micro in (micro for part in parts for micro in part):
        alone = len(micro) <= case["unit"]
        if case["budget"] is not None:
            assert alone or computed(batch, micro, case["layout"]) <= case["budget"]
        elif case["micro"] is not None:
            assert len(micro) <= case["micro"] * case["unit"]


@settings(max_examples=150, deadline=None)
@given(case=CASES)
def test_one_rank_has_the_split_of_one_rank(case: dict[str, Any]) -> None:
    batch, (only,) = split({**case, "ranks": 1})
    plain = split_rows(
        batch,
        micro_batch_size=case["micro"],
        max_tokens=case["budget"],
        layout=case["layout"],
    )
    assert only == list(plain)


@settings(max_examples=200, deadline=None)
@given(case=CASES, budget=st.integers(1, 200))
def test_no_rank_has_much_more_work_than_its_fair_share(case: dict[str, Any], budget: int) -> None:
    """Largest first to the least loaded: when a rank was given its last piece it had at most the
    fair share of what was given out before, so it ends at most one piece above the fair share,
    and a piece is one unit or at most a quarter of the fair share. (Padding left out.)"""
    batch, parts = split({**case, "budget": budget})
    layout: Layout = "packed" if case["layout"] == "padded" else case["layout"]
    unit, lengths = case["unit"], batch.lengths.tolist()
    units = [list(range(i, i + unit)) for i in range(0, batch.num_rows, unit)]
    if case["layout"] == "padded":  # a unit's rectangle is what it costs
        costs = [max(lengths[row] for row in rows) * unit for rows in units]
    else:
        costs = [computed(batch, rows, layout) for rows in units]
    fair = sum(costs) / case["ranks"]
    for part in parts:
        load = sum(costs[row // unit] for row in flat([part])[::unit])
        if case["layout"] == "shared_prefix":
            load = computed(batch, sorted(flat([part])), layout)
        assert load <= fair + max(*costs, fair / 4)


@settings(max_examples=100, deadline=None)
@given(case=CASES)
def test_without_a_budget_ranks_take_equal_neighbouring_shares(case: dict[str, Any]) -> None:
    batch, parts = split({**case, "budget": None})
    assert flat(parts) == list(range(batch.num_rows))
    counts = [len(flat([part])) // case["unit"] for part in parts]
    assert max(counts) - min(counts) <= 1


FOUR = batch_of([(4, [1, 2, 3]), (2, [9])])  # 5, 6, 7 and 11 tokens


def two_ranks(batch: Batch, **options: Any) -> list[list[list[int]]]:
    return split_over_ranks(
        batch, ranks=2, **{"micro_batch_size": None, "max_tokens": None, **options}
    )


def test_a_batch_that_divides_evenly_is_b_rows_a_pass_on_every_rank() -> None:
    """8 rows / (2 ranks x b = 2) = 2 passes."""
    batch = batch_of([(2, [1] * 8)])
    assert two_ranks(batch, micro_batch_size=2, layout="packed") == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
    ]


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        # Largest first: 11 to rank 0, 7 to rank 1, 6 to rank 1 (13), 5 to rank 0 (16).
        (16, [[[0, 3]], [[1, 2]]]),
        # 16 > 13, so rank 0 takes two passes; 6 + 7 = 13 would fit and is parted to be two.
        (13, [[[0], [3]], [[1], [2]]]),
    ],
)
def test_a_budget_balances_tokens_and_then_passes(
    budget: int, expected: list[list[list[int]]]
) -> None:
    assert two_ranks(FOUR, max_tokens=budget, layout="packed") == expected


def test_one_long_row_against_many_short_ones() -> None:
    """20 tokens on rank 0, 6 x 3 = 18 on rank 1 in passes of 9: rank 0 waits with an empty one."""
    batch = batch_of([(1, [19]), *[(1, [2])] * 6])
    assert two_ranks(batch, max_tokens=9, layout="packed") == [
        [[0], []],
        [[1, 2, 3], [4, 5, 6]],
    ]


def test_rows_that_share_a_prompt_go_to_one_rank() -> None:
    """8 groups of 4 rows: 20 + 4 tokens each, 192 in all, 96 a rank. A quarter of the units' own
    tokens is (32 x 21 / 2) / 4 = 84, so a group is one piece."""
    batch = batch_of([(20, [1] * 4)] * 8)
    first, second = two_ranks(batch, max_tokens=96, layout="shared_prefix")
    assert [len(first), len(second)] == [1, 1]
    for (rows,) in (first, second):
        assert computed(batch, rows, "shared_prefix") == 96


def test_a_group_is_split_if_ranks_would_be_idle() -> None:
    """One prompt of 4 tokens with 16 responses of 12: each rank takes 8, and its own prompt."""
    batch = batch_of([(4, [12] * 16)])
    first, second = two_ranks(batch, max_tokens=1000, layout="shared_prefix")
    assert len(flat([first])) == len(flat([second])) == 8


def test_ranks_without_rows_have_empty_micro_batches() -> None:
    batch = batch_of([(2, [1, 1])])
    for options in ({"micro_batch_size": 1}, {"max_tokens": 3}, {}):
        parts = split_over_ranks(
            batch,
            ranks=4,
            **{"micro_batch_size": None, "max_tokens": None, **options},
            layout="packed",
        )
        assert sorted(parts) == [[[]], [[]], [[0]], [[1]]]
