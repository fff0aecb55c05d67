"""Advantages of episodes: the order of time, rewards of turns, discounts between turns."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.algorithms.advantages import (
    _discounted_sum,
    gae,
    return_to_go,
    time_order,
    token_rewards,
)


def test_the_order_of_time_is_by_sample_then_turn_then_place() -> None:
    """Tokens 0 and 1: sample 7, turn 2; 2: an observation; 3: sample 5, turn 11; 4 and 5: sample 5,
    turn 9; 6: sample 7, turn 0."""
    sample_ids = torch.tensor([7, 7, 7, 5, 5, 5, 7])
    turns = torch.tensor([2, 2, -1, 11, 9, 9, 0])
    assert time_order(sample_ids, turns, turns >= 0).tolist() == [4, 5, 3, 6, 0, 1]


def test_the_tokens_of_long_turns_keep_their_places() -> None:
    """Two samples of 1000 tokens, turns of 250: an unstable sort would mix the tokens of a turn."""
    sample_ids = torch.arange(2000) // 1000
    turns = 3 - torch.arange(2000) % 1000 // 250
    found = time_order(sample_ids, turns, turns >= 0)
    blocks = [range(begin, begin + 250) for begin in (750, 500, 250, 0)]
    wanted = [1000 * sample + t for sample in (0, 1) for block in blocks for t in block]
    assert found.tolist() == wanted


def test_rewards_of_turns_are_on_their_tokens_and_the_rest_is_on_the_last() -> None:
    """Row 0: 3 - 0.5 - 0.25 = 2.25 for the last token, which has 0.25 of its turn. Row 1: nothing
    is taken off 1. KL 1 with weight 0.1 on every action token."""
    mask = torch.tensor([[True, True, False, True], [False, True, False, False]])
    of_turns = torch.tensor([[0, 0.5, math.nan, 0.25], [9.0, 0, 9.0, math.inf]])
    rewards = torch.tensor([3.0, 1.0])
    found = token_rewards(rewards, mask, turn_rewards=of_turns)
    assert found.tolist() == [[0, 0.5, 0, 2.5], [0, 1.0, 0, 0]] and found.dtype == torch.float32
    with_kl = token_rewards(rewards, mask, mask.float(), 0.1, turn_rewards=of_turns)
    torch.testing.assert_close(with_kl, found - 0.1 * mask)


def test_the_rest_is_computed_in_fp64_and_is_as_wide_as_the_rewards() -> None:
    """1 - (1 + 1e8 - 1e8) = 0; an fp32 sum loses the 1, and would leave 1."""
    of_turns = torch.tensor([[1.0, 1e8, -1e8, 0.0]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    assert token_rewards(torch.ones(1), mask, turn_rewards=of_turns)[0, 3] == 0.0
    for narrow in (torch.bfloat16, torch.float16):
        found = token_rewards(torch.ones(1, dtype=narrow), mask, turn_rewards=of_turns.to(narrow))
        assert found.dtype == torch.float32


def test_a_discount_of_turns_applies_where_the_turn_changes() -> None:
    """gamma 1/2, turns 0 0 1 2 with an observation before turn 1: G = 4 at the end, 2 + 4/2 = 4,
    then 0 + 4/2 = 2, and 1 + 2 = 3 within turn 0. A token discount: 4, 4, 2, 2."""
    rewards = torch.tensor([[1.0, 0.0, 9.0, 2.0, 4.0]])
    mask = torch.tensor([[True, True, False, True, True]])
    turns = torch.tensor([[0, 0, -1, 1, 2]])
    assert return_to_go(rewards, mask, gamma=0.5, turns=turns).tolist() == [[3, 2, 0, 4, 4]]
    assert return_to_go(rewards, mask, gamma=0.5).tolist() == [[2, 2, 0, 4, 4]]


def test_the_end_of_a_turn_is_a_change_from_the_token_before() -> None:
    """gamma 1/2, turns 0 1 1: G = 4, then 2 + 4 = 6 within turn 1, and 1 + 6/2 = 4."""
    rewards, turns = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0, 1, 1]])
    found = return_to_go(rewards, turns >= 0, gamma=0.5, turns=turns)
    assert found.tolist() == [[4, 6, 4]]


def test_a_gap_within_a_turn_is_no_end_of_it() -> None:
    rewards, turns = torch.tensor([[1.0, 9.0, 2.0]]), torch.tensor([[4, -1, 4]])
    found = return_to_go(rewards, turns >= 0, gamma=0.5, turns=turns)
    assert found.tolist() == [[3, 0, 2]]


def test_gae_with_a_discount_of_turns_by_hand() -> None:
    """gamma 1/2, lambda 1/4, rewards 0 1 4, values 1 2 3, turns 0 0 1, an observation before turn
    1. delta: 0 + 2 - 1 = 1 (the next token is of the same turn), 1 + 3/2 - 2 = 1/2, 4 - 3 = 1. A:
    1, 1/2 + 1/8 = 5/8, 1 + 5/8 = 13/8."""
    rewards, values = torch.tensor([[0.0, 1.0, 7.0, 4.0]]), torch.tensor([[1.0, 2.0, 7.0, 3.0]])
    turns = torch.tensor([[0, 0, -1, 1]])
    mask = turns >= 0
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.25, turns=turns)
    assert advantages.tolist() == [[1.625, 0.625, 0, 1.0]]
    assert returns.tolist() == [[2.625, 2.625, 0, 4.0]]
    one_turn = gae(rewards, values, mask, gamma=0.5, lam=0.25, turns=torch.zeros_like(turns))
    assert one_turn[1].tolist() == [[5.0, 5.0, 0, 4.0]], "of one turn, nothing is discounted"


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), length=st.integers(0, 100))
def test_sums_with_a_discount_per_token_are_the_naive_ones(seed: int, length: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x, discounts = torch.rand(2, 3, length, generator=g, dtype=torch.float64)
    found = _discounted_sum(x, discounts)
    wanted = torch.zeros(3, length + 1, dtype=torch.float64)
    for t in reversed(range(length)):
        wanted[:, t] = x[:, t] + discounts[:, t] * wanted[:, t + 1]
    # 1e-12: fp64 sums of at most 100 numbers below 1 in another order
    torch.testing.assert_close(found, wanted[:, :-1], atol=1e-12, rtol=0)


def test_what_is_not_finite_reaches_back_to_a_discount_of_zero() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, math.inf, 5.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
    discounts = torch.tensor([[1.0, 0.0, 0.5, 1.0, 1.0]]).expand(2, 5)
    found = _discounted_sum(x, discounts)
    assert found[0, [0, 1, 4]].tolist() == [3, 2, 5] and found[0, 2:4].isnan().all()
    assert found[1].tolist() == [3, 2, 3 + 0.5 * 9, 9, 5]
