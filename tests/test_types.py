"""Batches keep rows, columns and global counts together; Stats add up."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish.batches import groups_to_batch
from burnish.types import Batch, Group, Prompt, Sample, Stats, rows_to_batch

PER_TOKEN = ("sampler_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values", "returns")


def example() -> Batch:
    """[5 9 2 | 7 1], [5 9 2 | 8], [4 | 6 6 6], every column numbered so that rows can be told
    apart."""
    batch = rows_to_batch(
        [[5, 9, 2, 7, 1], [5, 9, 2, 8], [4, 6, 6, 6]],
        [[False] * 3 + [True] * 2, [False] * 3 + [True], [False, True, False, True]],
        prompt_lens=[3, 3, 1],
        group_ids=[4, 4, 9],
    )
    columns = {name: torch.arange(13.0) + 100 * i for i, name in enumerate(PER_TOKEN)}
    return replace(
        batch,
        **columns,
        rewards=torch.tensor([1.0, 2.0, 3.0]),
        margins=torch.tensor([7.0, 8.0, 9.0]),
    )


def test_rows_become_flat_arrays_with_offsets_and_counts() -> None:
    batch = example()
    assert batch.tokens.tolist() == [5, 9, 2, 7, 1, 5, 9, 2, 8, 4, 6, 6, 6]
    assert batch.offsets.tolist() == [0, 5, 9, 13] and batch.lengths.tolist() == [5, 4, 4]
    assert batch.row_ids.tolist() == [0] * 5 + [1] * 4 + [2] * 4
    assert (batch.num_rows, batch.num_tokens, batch.num_sequences) == (3, 5, 3)
    assert rows_to_batch([[1], [2]], [[True], [True]], prompt_lens=[0, 0]).group_ids.tolist() == [
        0,
        1,
    ]


def test_a_mask_of_another_length_than_its_row_is_rejected() -> None:
    with pytest.raises(ValueError, match="row 1 has 2 tokens and a mask of 1"):
        rows_to_batch([[1], [2, 3]], [[True], [True]], prompt_lens=[0, 0])


def test_selected_rows_bring_all_their_columns_and_keep_the_global_counts() -> None:
    chosen = example().select([2, 0])
    assert chosen.tokens.tolist() == [4, 6, 6, 6, 5, 9, 2, 7, 1]
    assert chosen.offsets.tolist() == [0, 4, 9] and chosen.prompt_lens.tolist() == [1, 3]
    assert chosen.group_ids.tolist() == [9, 4]
    assert chosen.action_mask.tolist() == [False, True, False, True] + [False] * 3 + [True] * 2
    for i, name in enumerate(PER_TOKEN):
        assert vars(chosen)[name].tolist() == [
            100 * i + x for x in [9, 10, 11, 12, 0, 1, 2, 3, 4]
        ], name
    assert chosen.rewards is not None and chosen.rewards.tolist() == [3.0, 1.0]
    assert chosen.margins is not None and chosen.margins.tolist() == [9.0, 7.0]
    assert (chosen.num_tokens, chosen.num_sequences) == (5, 3)


def test_a_row_may_be_selected_twice_and_a_batch_may_be_empty() -> None:
    assert example().select([1, 1]).tokens.tolist() == [5, 9, 2, 8] * 2
    empty = example().select([])
    assert empty.num_rows == 0 and empty.tokens.numel() == 0 and empty.offsets.tolist() == [0]


def test_global_counts_of_a_part_used_as_a_full_step() -> None:
    part = example().select([1, 2]).with_global_counts()
    assert (part.num_tokens, part.num_sequences) == (3, 2)


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    order=st.randoms(use_true_random=False),
)
def test_selecting_a_permutation_and_back_changes_nothing(lengths: list[int], order) -> None:
    rows = [[10 * i + k for k in range(n)] for i, n in enumerate(lengths)]
    batch = rows_to_batch(rows, [[True] * n for n in lengths], prompt_lens=[0] * len(rows))
    permutation = list(range(len(rows)))
    order.shuffle(permutation)
    inverse = [permutation.index(i) for i in range(len(rows))]
    back = batch.select(permutation).select(inverse)
    assert torch.equal(back.tokens, batch.tokens) and torch.equal(back.offsets, batch.offsets)


def test_every_tensor_field_follows_a_selection() -> None:
    """A field added to Batch must be one entry per row or per token; select tells them apart by
    name."""
    batch, chosen = example(), example().select([1])
    per_row = {"prompt_lens", "group_ids", "rewards", "margins"}
    for f in fields(batch):
        value = vars(chosen)[f.name]
        if isinstance(value, torch.Tensor) and f.name != "offsets":
            assert value.shape[0] == (1 if f.name in per_row else 4), f.name


# ---- groups
# ----------------------------------------------------------------------------------------


def sample(group: int, prompt: tuple[int, ...], response: tuple[int, ...], reward: float) -> Sample:
    count = len(response)
    return Sample(
        sample_id=f"{group}/{reward}",
        prompt_id=str(group),
        group_id=group,
        prompt_ids=prompt,
        response_ids=response,
        sampler_logprobs=tuple(-0.5 - i for i in range(count)),
        action_mask=tuple(i != 1 for i in range(count)),
        versions=(0,) * count,
        text="",
        finish_reason="stop",
        reward=reward,
    )


def group_of(number: int, *samples: Sample) -> Group:
    return Group(number, Prompt(str(number), samples[0].prompt_ids, ""), samples)


def test_groups_become_one_batch_in_order() -> None:
    """Two groups, prompts of 2 and 1; the second response token of each sample is not the
    policy's."""
    batch = groups_to_batch(
        [
            group_of(7, sample(7, (5, 6), (8, 9, 10), 1.0), sample(7, (5, 6), (11,), 0.0)),
            group_of(3, sample(3, (4,), (12, 13), 0.5)),
        ]
    )
    assert batch.tokens.tolist() == [5, 6, 8, 9, 10, 5, 6, 11, 4, 12, 13]
    assert batch.action_mask.int().tolist() == [0, 0, 1, 0, 1, 0, 0, 1, 0, 1, 0]
    assert batch.group_ids.tolist() == [7, 7, 3] and batch.prompt_lens.tolist() == [2, 2, 1]
    assert batch.sampler_logprobs is not None and batch.rewards is not None
    assert batch.sampler_logprobs.tolist() == [0, 0, -0.5, -1.5, -2.5, 0, 0, -0.5, 0, -0.5, -1.5]
    assert batch.rewards.tolist() == [1.0, 0.0, 0.5]
    assert (batch.num_tokens, batch.num_sequences) == (4, 3)


# ---- stats
# -----------------------------------------------------------------------------------------


def test_stats_of_parts_add_up_to_the_stats_of_the_whole() -> None:
    """clip_frac 3/40 and 1/10 are 4/50; maxima 2 and 5; sums 1 and 2; what one part lacks stays."""
    first = Stats({"clip_frac": (3, 40), "only": (1, 2)}, {"ratio": 2.0}, {"loss": 1.0})
    second = Stats(
        {"clip_frac": (torch.tensor(1), 10)},
        {"ratio": torch.tensor(5.0), "new": -3.0},
        {"loss": 2.0},
    )
    both = (first + second).floats("a/")
    assert both == {
        "a/clip_frac": 0.08,
        "a/only": 0.5,
        "a/ratio": 5.0,
        "a/new": -3.0,
        "a/loss": 3.0,
    }
    assert (second + first).floats("a/") == both
    assert (Stats() + first).floats() == first.floats()


def test_a_mean_over_nothing_is_nan() -> None:
    assert math.isnan(Stats({"x": (0.0, 0)}).floats()["x"])


def test_adding_does_not_change_the_parts() -> None:
    first = Stats({"x": (1, 2)}, {"m": 1.0}, {"s": 1.0})
    _ = first + first
    assert first == Stats({"x": (1, 2)}, {"m": 1.0}, {"s": 1.0})


def test_a_maximum_with_a_nan_anywhere_is_nan() -> None:
    one, nan = Stats(maxima={"m": 1.0}), Stats(maxima={"m": float("nan")})
    for total in (one + nan, nan + one, one + nan + one):
        assert total.floats()["m"] != total.floats()["m"]
