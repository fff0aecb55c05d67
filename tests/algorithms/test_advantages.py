"""Advantages: hand-worked groups, naive float64 references, and invariances."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn.functional import pad

from burnish.algorithms import ADVANTAGES
from burnish.algorithms.advantages import (
    _closed,
    _discounted_sum,
    dr_grpo,
    gae,
    gdpo,
    group_mean_baseline,
    grpo,
    opo,
    reinforce_pp,
    return_to_go,
    rloo,
    token_rewards,
    top_entropy,
)

quick = settings(max_examples=30, deadline=None)
seeds = st.integers(0, 2**31 - 1)
fractions = st.sampled_from([0.0, 0.3, 0.95, 1.0])
CENTERED = [grpo, dr_grpo, rloo, opo, group_mean_baseline]
ONE_GROUP = torch.zeros(4, dtype=torch.int64)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def samples(seed: int, n: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards (fp64), group ids with groups of any size, lengths."""
    g = generator(seed)
    rewards = torch.randn(n, generator=g, dtype=torch.float64)
    group_ids = torch.randint(0, 5, (n,), generator=g) * 1000 - 7
    return rewards, group_ids, torch.randint(1, 20, (n,), generator=g)


def rectangle(seed: int, n: int = 4, t: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """Token rewards and values (fp64), and a mask with gaps, ragged ends and an empty row."""
    g = generator(seed)
    rewards, values = torch.randn(2, n, t, generator=g, dtype=torch.float64)
    mask = torch.rand(n, t, generator=g) < 0.6
    mask[0] = False
    return rewards, values, mask


def naive_gae(
    rewards: list[float], values: list[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """One row without gaps, straight from the definition."""
    advantages = [0.0] * len(rewards)
    following, next_value = 0.0, 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_value - values[t]
        following = delta + gamma * lam * following
        next_value = values[t]
        advantages[t] = following
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def test_the_registry_has_exactly_the_documented_names() -> None:
    names = "grpo dr_grpo rloo opo gae reinforce_pp reinforce_pp_baseline on_policy_distill"
    assert sorted(ADVANTAGES) == sorted(names.split())


@pytest.mark.parametrize(
    ("name", "expected"),
    [("grpo", 0.86603), ("dr_grpo", 0.5), ("rloo", 0.66667), ("reinforce_pp_baseline", 0.5)],
)
def test_one_right_and_one_wrong_pair_by_hand(name: str, expected: float) -> None:
    """Rewards 1, 0, 0, 1: mean 1/2, deviations +-1/2.

    grpo: std = sqrt(4 (1/4) / 3) = 0.57735, 0.5 / 0.57735 = 0.86603. rloo: the others of a 1 have
    mean 1/3, 1 - 1/3 = 0.66667; the others of a 0 have mean 2/3.
    """
    out = ADVANTAGES[name](torch.tensor([1, 0, 0, 1]), ONE_GROUP)
    want = torch.tensor([expected, -expected, -expected, expected])
    # 1e-5: five written decimals, and eps = 1e-6 beside a std of 0.577 moves grpo by 1.5e-6
    torch.testing.assert_close(out, want, atol=1e-5, rtol=0)


def test_opo_weighs_the_baseline_by_length() -> None:
    """Rewards 1, 0, 0, 1. Lengths 1, 2, 3, 4: baseline (1 + 4) / 10 = 0.5. Lengths 6, 1, 1, 2:
    baseline (6 + 2) / 10 = 0.8, so 0.2, -0.8, -0.8, 0.2."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    even = opo(rewards, ONE_GROUP, lengths=torch.tensor([1, 2, 3, 4]))
    uneven = opo(rewards, ONE_GROUP, lengths=torch.tensor([6, 1, 1, 2]))
    assert even.tolist() == [0.5, -0.5, -0.5, 0.5]
    # 1e-6: 0.8 is not an fp32 number
    torch.testing.assert_close(uneven, torch.tensor([0.2, -0.8, -0.8, 0.2]), atol=1e-6, rtol=0)


def test_opo_without_lengths_names_the_missing_argument() -> None:
    with pytest.raises(ValueError, match=r"pass lengths \[N\]"):
        opo(torch.ones(4), ONE_GROUP)


def test_reinforce_pp_is_the_reward_itself() -> None:
    rewards = torch.tensor([1.0, -2.0, 0.5, 3.0])
    assert torch.equal(reinforce_pp(rewards, ONE_GROUP), rewards)


def test_groups_are_by_id_and_may_be_interleaved_and_uneven() -> None:
    """Group 9: rewards 1, 4, 1, mean 2. Group -3: rewards 0, 10, mean 5. Group 5: alone, so 0."""
    rewards = torch.tensor([1.0, 0.0, 4.0, 7.0, 10.0, 1.0])
    group_ids = torch.tensor([9, -3, 9, 5, -3, 9])
    assert dr_grpo(rewards, group_ids).tolist() == [-1, -5, 2, 0, 5, -1]


@pytest.mark.parametrize("f", CENTERED)
@pytest.mark.parametrize("value", [0.1, 0.7, -1 / 3, 1e-4, 12345.678])
@pytest.mark.parametrize("size", [1, 3, 7, 10])
def test_equal_rewards_give_exactly_zero(f, value: float, size: int) -> None:
    """A plain mean misses 0.1 by 7e-9 for seven fp32 rewards, and by 1e-17 for three in fp64."""
    group_ids, lengths = torch.zeros(size, dtype=torch.int64), torch.arange(1, size + 1)
    for dtype in (torch.float32, torch.float64):
        out = f(torch.full((size,), value, dtype=dtype), group_ids, lengths=lengths)
        assert out.tolist() == [0.0] * size


@pytest.mark.parametrize("f", CENTERED)
def test_degenerate_input_gives_no_nan(f) -> None:
    lengths = torch.zeros(2, dtype=torch.int64)
    assert f(torch.tensor([5.0, 5.0]), torch.tensor([0, 1]), lengths=lengths).tolist() == [0, 0]
    nothing = torch.zeros(0, dtype=torch.int64)
    assert f(torch.zeros(0), nothing, lengths=nothing).shape == (0,)


def test_a_nan_reward_stays_within_its_group() -> None:
    out = grpo(torch.tensor([math.nan, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1]))
    assert out[:2].isnan().all() and out[2:].isfinite().all()


@pytest.mark.parametrize("f", [*CENTERED, reinforce_pp])
def test_half_precision_rewards_are_computed_in_fp32(f) -> None:
    rewards = torch.tensor([1.0, 0.25, 0.0, 1.0], dtype=torch.bfloat16)
    lengths = torch.tensor([1, 2, 3, 4])
    out = f(rewards, ONE_GROUP, lengths=lengths)
    assert out.dtype == torch.float32
    assert torch.equal(out, f(rewards.float(), ONE_GROUP, lengths=lengths))


@pytest.mark.parametrize("f", CENTERED)
@quick
@given(seed=seeds)
def test_outcome_advantages_agree_with_a_loop_over_groups(f, seed: int) -> None:
    rewards, group_ids, lengths = samples(seed)
    expected = torch.zeros_like(rewards)
    for i in range(len(rewards)):
        same = group_ids == group_ids[i]
        group, n = rewards[same], int(same.sum())
        if n == 1:
            continue
        others = (group.sum() - rewards[i]) / (n - 1)
        weights = lengths[same].double() / lengths[same].sum()
        baseline = {rloo: others, opo: (weights * group).sum()}.get(f, group.mean())
        scale = group.std() + 1e-6 if f is grpo else 1.0
        expected[i] = (rewards[i] - baseline) / scale
    # 1e-9: fp64 rounding; a grpo std as small as 1e-6 would enlarge 1e-16 by 1e6
    torch.testing.assert_close(
        f(rewards, group_ids, lengths=lengths), expected, atol=1e-9, rtol=1e-9
    )


@pytest.mark.parametrize("f", CENTERED)
@quick
@given(seed=seeds, shift=st.floats(-100, 100))
def test_advantages_are_invariant_to_a_reward_shift(f, seed: int, shift: float) -> None:
    rewards, group_ids, lengths = samples(seed)
    out = f(rewards, group_ids, lengths=lengths)
    shifted = f(rewards + shift, group_ids, lengths=lengths)
    # 1e-7: a shift of 100 costs 1e-14 of each fp64 reward, a small grpo std enlarges it
    torch.testing.assert_close(shifted, out, atol=1e-7, rtol=1e-7)


@quick
@given(seed=seeds, scale=st.floats(0.01, 100))
def test_scaling_rewards_scales_all_advantages_but_grpos(seed: int, scale: float) -> None:
    rewards, group_ids, lengths = samples(seed)
    for f in (dr_grpo, rloo, opo, group_mean_baseline):
        out = f(rewards, group_ids, lengths=lengths)
        scaled = f(scale * rewards, group_ids, lengths=lengths)
        # 1e-12: fp64 rounding of numbers up to a few hundred
        torch.testing.assert_close(scaled, scale * out, atol=1e-12, rtol=1e-10)
    # eps far below any std, so that only rounding is left
    out = grpo(rewards, group_ids, eps=1e-15)
    scaled = grpo(scale * rewards, group_ids, eps=1e-15)
    # 1e-7: eps / std with std down to 1e-8, which random groups do not reach
    torch.testing.assert_close(scaled, out, atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("f", [*CENTERED, reinforce_pp])
@quick
@given(seed=seeds)
def test_permuting_samples_and_renaming_groups_permutes_the_advantages(f, seed: int) -> None:
    rewards, group_ids, lengths = samples(seed)
    order = torch.randperm(len(rewards), generator=generator(seed))
    out = f(rewards, group_ids, lengths=lengths)
    moved = f(rewards[order], 3 - 2 * group_ids[order], lengths=lengths[order])
    # 1e-9: sums in another order, a small grpo std enlarges the difference
    torch.testing.assert_close(moved, out[order], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("f", [*CENTERED, reinforce_pp])
@quick
@given(seed=seeds)
def test_advantages_are_independent_of_other_groups(f, seed: int) -> None:
    rewards, group_ids, lengths = samples(seed)
    out = f(rewards, group_ids, lengths=lengths)
    only = group_ids == group_ids[0]
    alone = f(rewards[only], group_ids[only], lengths=lengths[only])
    # 1e-12: the same sums; vectorised kernels may add them in another order
    torch.testing.assert_close(alone, out[only], atol=1e-12, rtol=1e-12)


def test_token_rewards_by_hand() -> None:
    """Row 0: actions at 0, 1, 3; reward 2 on token 3; minus 0.5 x kl (1, 2, 4): -0.5, -1, 2 - 2.
    Row 1: one action at 1, reward -1, kl 3: -1 - 1.5 = -2.5. Row 2: no action, no reward."""
    rewards = torch.tensor([2.0, -1.0, 9.0])
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]]).bool()
    kl = torch.tensor([[1.0, 2.0, math.nan, 4.0], [8.0, 3.0, 8.0, math.inf], [math.nan] * 4])
    plain = token_rewards(rewards, mask)
    with_kl = token_rewards(rewards, mask, kl, kl_coef=0.5)
    assert plain.tolist() == [[0, 0, 0, 2], [0, -1, 0, 0], [0, 0, 0, 0]]
    assert with_kl.tolist() == [[-0.5, -1, 0, 0], [0, -2.5, 0, 0], [0, 0, 0, 0]]


def test_return_to_go_by_hand() -> None:
    """gamma 1/2, rewards 1, 2, (gap), 4: last 4; before it 2 + 4/2 = 4; first 1 + 4/2 = 3."""
    rewards = torch.tensor([[1.0, 2.0, 100.0, 4.0]])
    mask = torch.tensor([[True, True, False, True]])
    assert return_to_go(rewards, mask, gamma=0.5).tolist() == [[3, 4, 0, 4]]


def test_gae_by_hand() -> None:
    """gamma 1/2, lambda 1/2, rewards 0, 0, 1, values 1, 2, 4.

    deltas: 0 + 2/2 - 1 = 0; 0 + 4/2 - 2 = 0; 1 - 4 = -3. A_2 = -3; A_1 = -3/4; A_0 = -3/16. Returns
    A + V: 13/16, 5/4, 1. A gap between tokens 1 and 2, with any value in it, has no effect.
    """
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    values = torch.tensor([[1.0, 2.0, 50.0, 4.0]])
    mask = torch.tensor([[True, True, False, True]])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[-0.1875, -0.75, 0, -3]]
    assert returns.tolist() == [[0.8125, 1.25, 0, 1]]


@quick
@given(seed=seeds, gamma=fractions, lam=fractions)
def test_gae_with_gaps_equals_naive_gae_of_the_row_without_gaps(
    seed: int, gamma: float, lam: float
) -> None:
    rewards, values, mask = rectangle(seed)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for i, row in enumerate(mask):
        want = naive_gae(rewards[i][row].tolist(), values[i][row].tolist(), gamma, lam)
        for out, expected in zip((advantages[i], returns[i]), want, strict=True):
            expected = torch.tensor(expected, dtype=torch.float64)
            # 1e-12: fp64 sums of 9 terms, added pairwise instead of one after another
            torch.testing.assert_close(out[row], expected, atol=1e-12, rtol=1e-12)
            assert out[~row].eq(0).all()


def test_gae_in_fp32_of_a_long_row_agrees_with_the_naive_fp64_reference() -> None:
    g = generator(3)
    rewards, values = torch.randn(2, 1, 3001, generator=g, dtype=torch.float64)
    mask = torch.ones(1, 3001, dtype=torch.bool)
    out, _ = gae(rewards.float(), values.float(), mask, gamma=0.999, lam=0.98)
    want, _ = naive_gae(rewards[0].tolist(), values[0].tolist(), 0.999, 0.98)
    # 2e-5: about 50 terms of size 1 count (1 / (1 - 0.979)), each rounded at 6e-8, and |A| < 30
    torch.testing.assert_close(out[0].double(), torch.tensor(want).double(), atol=2e-5, rtol=0)


@quick
@given(seed=seeds)
def test_gae_without_discounts_is_return_to_go_minus_value(seed: int) -> None:
    rewards, values, mask = rectangle(seed)
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    to_go = return_to_go(rewards, mask, gamma=1.0)
    # 1e-12: fp64 rounding; the values in between cancel
    torch.testing.assert_close(returns, to_go, atol=1e-12, rtol=0)
    expected = torch.where(mask, to_go - values, 0.0)
    torch.testing.assert_close(advantages, expected, atol=1e-12, rtol=0)


@quick
@given(seed=seeds, left=st.integers(0, 3), right=st.integers(0, 9), gamma=fractions)
def test_padding_and_permuting_rows_does_not_change_token_advantages(
    seed: int, left: int, right: int, gamma: float
) -> None:
    rewards, values, mask = rectangle(seed)
    order = torch.randperm(len(mask), generator=generator(seed))
    wide = [pad(x[order], (left, right), value=math.nan) for x in (rewards, values)]
    wide_mask = pad(mask[order], (left, right))
    inner = slice(left, left + mask.shape[1])
    pairs = zip(
        gae(*wide, wide_mask, gamma=gamma, lam=0.9),
        gae(rewards, values, mask, gamma=gamma, lam=0.9),
        strict=True,
    )
    for out, expected in pairs:
        # 1e-14: added zeros only
        torch.testing.assert_close(out[:, inner], expected[order], atol=1e-14, rtol=0)
    to_go = return_to_go(wide[0], wide_mask, gamma=gamma)[:, inner]
    expected = return_to_go(rewards, mask, gamma=gamma)[order]
    torch.testing.assert_close(to_go, expected, atol=1e-14, rtol=0)
    scalar = token_rewards(rewards[order, 0], wide_mask, wide[1], 0.1)[:, inner]
    assert torch.equal(scalar, token_rewards(rewards[:, 0], mask, values, 0.1)[order])


@quick
@given(seed=seeds)
def test_gae_with_an_exact_critic_has_no_advantage(seed: int) -> None:
    """If V_t is the return itself, every delta is 0."""
    rewards, _, mask = rectangle(seed)
    exact = return_to_go(rewards, mask, gamma=0.9)
    advantages, _ = gae(rewards, exact, mask, gamma=0.9, lam=0.7)
    # 1e-12: fp64 rounding
    assert advantages.abs().max().item() < 1e-12


def test_token_advantages_of_no_tokens_are_empty() -> None:
    x = torch.zeros(2, 0)
    advantages, returns = gae(x, x, x.bool(), gamma=1.0, lam=1.0)
    assert advantages.shape == returns.shape == (2, 0)
    assert return_to_go(x, x.bool(), gamma=1.0).shape == (2, 0)
    assert token_rewards(torch.ones(2), x.bool()).shape == (2, 0)


def test_gradients_agree_with_finite_differences() -> None:
    rewards, values, mask = rectangle(5)
    r, v = rewards.requires_grad_(), values.requires_grad_()
    assert gradcheck(lambda a, b: gae(a, b, mask, gamma=0.9, lam=0.8), (r, v))
    assert gradcheck(lambda a: return_to_go(a, mask, gamma=0.9), (r,))
    assert gradcheck(lambda a, b: token_rewards(a[:, 0], mask, b, 0.3), (r, v))


@pytest.mark.parametrize("length", [5, 32, 33, 40, 64, 65, 1100])
def test_blocked_sums_over_time_equal_naive_sums(length: int) -> None:
    """Blocks of 32: one, two, three, and more than 32 of them."""
    x = torch.randn(length, generator=generator(length), dtype=torch.float64)
    following, expected = 0.0, []
    for value in reversed(x.tolist()):
        following = value + 0.97 * following
        expected.append(following)
    want = torch.tensor(expected[::-1], dtype=torch.float64)
    # 1e-12: fp64 sums of about 33 terms that count (1 / (1 - 0.97)), in another order
    torch.testing.assert_close(_discounted_sum(x, 0.97), want, atol=1e-12, rtol=1e-12)
    assert _discounted_sum(x, 0.0).tolist() == x.tolist()


def test_rows_without_gaps_keep_their_positions_and_need_no_second_mask() -> None:
    """The quick way: prompts on the left, padding on the right, an empty row, a full one."""
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]]).bool()
    assert _closed(mask) is mask
    gap = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 1], [0, 1, 1, 0]]).bool()
    expected = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]).bool()
    assert torch.equal(_closed(gap), expected)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_garbage_around_rows_without_gaps_is_ignored(garbage: float) -> None:
    """Row 0, gamma lambda 1: rewards 1, 2 and values 3, 4: deltas 1 + 4 - 3 = 2 and 2 - 4 = -2, so
    A = 0, -2 and returns 3, 2. Row 1: one action, reward 5, value 1: A = 4."""
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1]]).bool()
    rewards, values = torch.full((2, 2, 4), garbage)
    rewards[0, 1:3], values[0, 1:3] = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    rewards[1, 3], values[1, 3] = 5.0, 1.0
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    assert advantages.tolist() == [[0, 0, -2, 0], [0, 0, 0, 4]]
    assert returns.tolist() == [[0, 3, 2, 0], [0, 0, 0, 5]]
    assert return_to_go(rewards, mask, gamma=1.0).tolist() == [[0, 3, 2, 0], [0, 0, 0, 5]]


def test_a_kl_of_weight_zero_adds_no_penalty() -> None:
    rewards, mask = torch.tensor([1.0, 2.0]), torch.ones(2, 3).bool()
    assert torch.equal(token_rewards(rewards, mask, torch.ones(2, 3)), token_rewards(rewards, mask))


def test_token_advantages_of_half_precision_input_are_computed_in_fp32() -> None:
    """0.1 x 1.0078125 and sums of 1/3 are no bf16 numbers."""
    x = (torch.arange(1, 41).reshape(2, 20) / 3).bfloat16()
    kl, mask = torch.full((2, 20), 1.0078125).bfloat16(), torch.ones(2, 20).bool()
    narrow = token_rewards(x[:, 0], mask), token_rewards(x[:, 0].float(), mask, kl, 0.1)
    wide = (
        token_rewards(x[:, 0].float(), mask),
        token_rewards(x[:, 0].float(), mask, kl.float(), 0.1),
    )
    narrow += return_to_go(x, mask, gamma=0.9), *gae(x, x.flip(0), mask, gamma=0.9, lam=0.9)
    y = x.float()
    wide += return_to_go(y, mask, gamma=0.9), *gae(y, y.flip(0), mask, gamma=0.9, lam=0.9)
    for found, expected in zip(narrow, wide, strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(found, expected)


def test_each_reward_is_normalized_in_its_group_and_their_sum_over_the_batch() -> None:
    """Scores (1, 0), (0, 1), (0, 0) and (5, 7), (5, 9), (5, 8); weights 2 and 1, against a loop in
    Python floats. The first reward has no spread in the second group: 0 of it. Ties are 0."""
    parts = torch.tensor([[1, 0], [0, 1], [0, 0], [5, 7], [5, 9], [5, 8]], dtype=torch.float64)
    groups = torch.tensor([4, 4, 4, 1, 1, 1])
    summed = []
    for i in range(6):
        own = [0.0, 0.0]
        for k in range(2):
            column = parts[groups == groups[i], k].tolist()
            spread = statistics.stdev(column)
            own[k] = (float(parts[i, k]) - statistics.mean(column)) / spread if spread else 0.0
        summed.append(2 * own[0] + own[1])
    expected = [s / statistics.stdev(summed) for s in summed]  # the mean is 0
    found = gdpo(parts, torch.tensor([2.0, 1.0]), groups, eps=1e-14)
    # 1e-12: fp64
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    tied = gdpo(torch.ones(4, 2), torch.ones(2), torch.zeros(4).long(), eps=1e-6)
    assert tied.tolist() == [0, 0, 0, 0]


def test_the_tokens_of_the_highest_entropy_are_those_above_numpys_quantile() -> None:
    """0.4 of 5 tokens: places 0 to 4, the limit is at 2.4. 0.5: at 2. Ties at the limit are kept,
    tokens outside the mask never, and all of them with equal entropies."""
    mask = torch.tensor([[True, True, False], [True, True, True]])
    entropies = torch.tensor([[0.3, 0.1, 9.0], [0.5, 0.2, 0.4]])
    assert top_entropy(entropies, mask, quantile=0.4)[mask].tolist() == [0, 0, 1, 0, 1]
    assert top_entropy(entropies, mask, quantile=0.5)[mask].tolist() == [1, 0, 1, 0, 1]
    assert top_entropy(torch.ones(2, 3), mask, quantile=0.4).equal(mask)
    assert not top_entropy(entropies, torch.zeros_like(mask), quantile=0.4).any()
    eleven = torch.arange(11.0)  # the limit is at exactly 3, which is kept
    assert top_entropy(eleven, torch.ones(11).bool(), quantile=0.7).sum() == 8
    values = torch.randn(1000, generator=generator(0), dtype=torch.float64)
    for quantile in (0.01, 0.2, 0.777, 1.0):
        limit = float(np.quantile(values.numpy(), 1 - quantile))
        found = top_entropy(values, torch.ones(1000).bool(), quantile=quantile)
        assert found.equal(values >= limit)
