"""From rewards to advantages on tokens, worked by hand for every kind.

Four rows, one prompt token each (P), in two groups. Rewards stand behind the rows::

    group 0:  P a a      1        group 1:  P a        2
              P a        0                  P a a a    5
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.config.algorithm import AlgorithmConfig
from burnish.rewards.base import RewardError
from burnish.rewards.reward_set import NoRewards
from burnish.steps.credit import assign_advantages
from burnish.steps.no_signal import reward_signal
from burnish.types import Batch, Group, Prompt, Sample, rows_to_batch

LENGTHS = [2, 1, 1, 3]


@pytest.fixture
def batch() -> Batch:
    made = rows_to_batch(
        [[9] + [8] * n for n in LENGTHS],
        [[False] + [True] * n for n in LENGTHS],
        prompt_lens=[1] * 4,
        group_ids=[0, 0, 1, 1],
    )
    return replace(made, rewards=torch.tensor([1.0, 0.0, 2.0, 5.0]))


def _advantage(kind: str, **options: Any) -> AlgorithmConfig:
    return AlgorithmConfig(advantage={"kind": kind, **options})  # type: ignore[arg-type]


def _rows(values: Tensor | None, batch: Batch) -> list[list[float]]:
    """The action tokens of each row; all other entries must be 0."""
    assert values is not None
    assert not values[~batch.action_mask].any()
    return [part[1:].tolist() for part in values.split(batch.lengths.tolist())]


# Group 0: mean 1/2, group 1: mean 7/2. Sample standard deviations: sqrt(1/2), sqrt(9/2).
# rloo: reward minus the other's. opo: means weighted by length, (2 x 1 + 1 x 0) / 3 = 2/3 and
# (1 x 2 + 3 x 5) / 4 = 17/4.
BY_ROW = {
    "dr_grpo": [0.5, -0.5, -1.5, 1.5],
    "grpo": [0.5**0.5, -(0.5**0.5), -(0.5**0.5), 0.5**0.5],
    "rloo": [1.0, -1.0, -3.0, 3.0],
    "opo": [1 / 3, -2 / 3, -9 / 4, 3 / 4],
}


@pytest.mark.parametrize("kind", BY_ROW)
def test_group_advantages_are_on_every_action_token_of_their_row(kind: str, batch: Batch) -> None:
    found = _rows(assign_advantages(batch, _advantage(kind), kl_coef=0.0).advantages, batch)
    expected = [[value] * n for value, n in zip(BY_ROW[kind], LENGTHS, strict=True)]
    for row, wanted in zip(found, expected, strict=True):
        # 2e-6: grpo adds eps = 1e-6 to the standard deviation.
        assert row == pytest.approx(wanted, rel=2e-6)


def test_reinforce_pp_discounts_the_reward_from_the_last_token_back(batch: Batch) -> None:
    """gamma 1/2: the reward R on the last token is R/2 on the one before and R/4 before that."""
    config = _advantage("reinforce_pp", gamma=0.5, whiten=False)
    found = _rows(assign_advantages(batch, config, kl_coef=0.0).advantages, batch)
    assert found == [[0.5, 1.0], [0.0], [2.0], [1.25, 2.5, 5.0]]


def test_reinforce_pp_baseline_subtracts_the_group_mean_first(batch: Batch) -> None:
    config = _advantage("reinforce_pp_baseline", whiten=False)
    found = _rows(assign_advantages(batch, config, kl_coef=0.0).advantages, batch)
    assert found == [[0.5, 0.5], [-0.5], [-1.5], [1.5, 1.5, 1.5]]


@pytest.mark.parametrize("kind", ["reinforce_pp", "reinforce_pp_baseline", "gae"])
def test_whitening_is_over_all_action_tokens_of_the_rollout(kind: str, batch: Batch) -> None:
    if kind == "gae":
        batch = replace(batch, values=torch.zeros(batch.tokens.numel()))
    found = assign_advantages(batch, _advantage(kind), kl_coef=0.0).advantages
    assert found is not None
    tokens = found[batch.action_mask].double()
    # 1e-5: fp32 statistics of seven numbers.
    assert tokens.mean() == pytest.approx(0.0, abs=1e-5)
    assert tokens.var(unbiased=False) == pytest.approx(1.0, rel=1e-5)
    assert not found[~batch.action_mask].any()


def _with_values(batch: Batch) -> Batch:
    """Values 0.2 0.4 | 0.5 | 1 | 3 3 3 on the action tokens, 99 on the prompts, which none sees."""
    values = [99, 0.2, 0.4, 99, 0.5, 99, 1.0, 99, 3.0, 3.0, 3.0]
    return replace(batch, values=torch.tensor(values))


def test_gae_with_lambda_1_is_the_return_minus_the_value(batch: Batch) -> None:
    config = _advantage("gae", gamma=1.0, lam=1.0, whiten=False)
    found = assign_advantages(_with_values(batch), config, kl_coef=0.0)
    wanted = [[0.8, 0.6], [-0.5], [1.0], [2.0, 2.0, 2.0]]
    # 1e-6: a few fp32 additions.
    for row, expected in zip(_rows(found.advantages, batch), wanted, strict=True):
        assert row == pytest.approx(expected, abs=1e-6)
    returns = [[1.0, 1.0], [0.0], [2.0], [5.0, 5.0, 5.0]]
    for row, expected in zip(_rows(found.returns, batch), returns, strict=True):
        assert row == pytest.approx(expected, abs=1e-6)


def test_gae_with_lambda_0_is_the_one_step_error(batch: Batch) -> None:
    """Row 0: 0 + 0.4 - 0.2 = 0.2, then 1 + 0 - 0.4 = 0.6. Row 3: 0, 0, 5 - 3 = 2."""
    config = _advantage("gae", gamma=1.0, lam=0.0, whiten=False)
    found = assign_advantages(_with_values(batch), config, kl_coef=0.0)
    wanted = [[0.2, 0.6], [-0.5], [1.0], [0.0, 0.0, 2.0]]
    for row, expected in zip(_rows(found.advantages, batch), wanted, strict=True):
        assert row == pytest.approx(expected, abs=1e-6)  # as above


def _with_kl(batch: Batch) -> Batch:
    """log-ratios to the reference 0.5 -0.2 | 0.1 | 0 | 1 1 1 on the action tokens."""
    gaps = torch.tensor([0, 0.5, -0.2, 0, 0.1, 0, 0.0, 0, 1.0, 1.0, 1.0])
    reference = torch.where(batch.action_mask, -2.0, 0.0)
    return replace(batch, ref_logprobs=reference, old_logprobs=reference + gaps)


def _kl_in_reward(kind: str, *, kl: str = "k1", **options: Any) -> AlgorithmConfig:
    return AlgorithmConfig(
        advantage={"kind": kind, **options},  # type: ignore[arg-type]
        kl={"init_kl_coef": 7.0, "placement": "reward", "estimator": kl},  # type: ignore[arg-type]
    )


def test_kl_in_the_reward_is_subtracted_per_token_with_the_controllers_weight(
    batch: Batch,
) -> None:
    """Weight 0.1 (not the recipe's 7). Row 0: rewards -0.05 and 1 + 0.02, so returns 0.97, 1.02.
    Row 1: 0 - 0.01. Row 2: 2. Row 3: -0.1, -0.1, 4.9, so returns 4.7, 4.8, 4.9."""
    config = _kl_in_reward("reinforce_pp", whiten=False)
    found = assign_advantages(_with_kl(batch), config, kl_coef=0.1)
    wanted = [[0.97, 1.02], [-0.01], [2.0], [4.7, 4.8, 4.9]]
    for row, expected in zip(_rows(found.advantages, batch), wanted, strict=True):
        assert row == pytest.approx(expected, abs=1e-6)  # fp32 additions of numbers below 5


def test_rloo_with_kl_in_the_reward_pays_for_it_from_each_token_on(batch: Batch) -> None:
    """Weight 0.1; advantages without KL 1, -1, -3, 3 (above). Row 0: token rewards -0.05 and 1 +
    0.02, so 0.97, 1.02. Row 1: -1 - 0.01. Row 2: -3. Row 3: -0.1, -0.1, 2.9, so 2.7, 2.8, 2.9. The
    mean of the other's rewards has no KL in it: row 1 is not penalized for row 0's."""
    found = assign_advantages(_with_kl(batch), _kl_in_reward("rloo"), kl_coef=0.1)
    wanted = [[0.97, 1.02], [-1.01], [-3.0], [2.7, 2.8, 2.9]]
    for row, expected in zip(_rows(found.advantages, batch), wanted, strict=True):
        assert row == pytest.approx(expected, abs=1e-6)  # fp32 additions of numbers below 5


KL_BY_HAND: dict[str, Callable[[float], float]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
}


@pytest.mark.parametrize("estimator", KL_BY_HAND)
@pytest.mark.parametrize("kind", BY_ROW)
def test_a_group_advantage_minus_the_kl_from_each_token_on(
    kind: str, estimator: str, batch: Batch
) -> None:
    """In float64, against a loop: A - 0.1 x the sum of the estimates from the token to the end."""
    batch = _with_kl(replace(batch, rewards=torch.tensor([1.0, 0.0, 2.0, 5.0]).double()))
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None
    policy, reference = batch.old_logprobs.double(), batch.ref_logprobs.double()
    batch = replace(batch, old_logprobs=policy, ref_logprobs=reference)
    gaps = _rows(policy - reference, batch)
    found = assign_advantages(batch, _kl_in_reward(kind, kl=estimator), kl_coef=0.1).advantages
    assert found is not None and found.dtype == torch.float64
    plain = assign_advantages(batch, _advantage(kind), kl_coef=0.0).advantages
    for row, before, row_gaps in zip(_rows(found, batch), _rows(plain, batch), gaps, strict=True):
        kl = [KL_BY_HAND[estimator](d) for d in row_gaps]
        wanted = [a - 0.1 * sum(kl[t:]) for t, a in enumerate(before)]
        assert row == pytest.approx(wanted, abs=1e-14)  # float64 sums of numbers below 10


def test_the_critic_learns_the_return_with_kl_in_it(batch: Batch) -> None:
    """The same returns as above for any values, because lambda is 1."""
    config = _kl_in_reward("gae", lam=1.0, whiten=False)
    found = assign_advantages(_with_values(_with_kl(batch)), config, kl_coef=0.1)
    wanted = [[0.97, 1.02], [-0.01], [2.0], [4.7, 4.8, 4.9]]
    for row, expected in zip(_rows(found.returns, batch), wanted, strict=True):
        assert row == pytest.approx(expected, abs=1e-6)  # as above


@pytest.mark.parametrize("options", [{"kind": "reinforce_pp", "whiten": False}, {"kind": "rloo"}])
def test_kl_in_the_loss_does_not_change_advantages(options: dict[str, Any], batch: Batch) -> None:
    config = _advantage(**options)
    plain = assign_advantages(batch, config, kl_coef=0.0).advantages
    with_kl = assign_advantages(_with_kl(batch), config, kl_coef=0.1).advantages
    assert plain is not None and with_kl is not None and torch.equal(plain, with_kl)


# ---- episodes: sample A has two rows, B one; both are of one group
#
#     A, reward 3:  P  a1 a1         (turn 1, an earlier call's branch)
#                   P  a0 o  a2      (turns 0 and 2, an observation between)
#     B, reward 1:  P  a0


@pytest.fixture
def episodes() -> Batch:
    turns = [[-1, 1, 1], [-1, 0, -1, 2], [-1, 0]]
    masks = [[turn >= 0 for turn in row] for row in turns]
    made = rows_to_batch([[9] * len(row) for row in turns], masks, prompt_lens=[1] * 3)
    return replace(
        made,
        group_ids=torch.zeros(3, dtype=torch.int64),
        rewards=torch.tensor([3.0, 3.0, 1.0]),
        sample_ids=torch.tensor([0, 0, 1]),
        sample_tokens=torch.tensor([4, 4, 1]),
        turn_ids=torch.tensor([turn for row in turns for turn in row]),
    )


def _in_time(values: Tensor | None, batch: Batch) -> list[list[float]]:
    """The numbers of A's tokens in the order of time, and those of B's."""
    assert values is not None
    assert not values[~batch.action_mask].any()
    a1, a1_end, a0, a2, b0 = values[batch.action_mask].tolist()
    return [[a0, a1, a1_end, a2], [b0]]


@pytest.mark.parametrize(
    ("kind", "a", "b"),
    [
        ("grpo", 0.5**0.5, -(0.5**0.5)),  # mean 2, standard deviation sqrt(2)
        ("dr_grpo", 1.0, -1.0),
        ("opo", 0.4, -1.6),  # 4 tokens of 3 and 1 token of 1: baseline 13 / 5
        ("rloo", 2.0, -2.0),
    ],
)
def test_a_group_compares_episodes_and_each_row_gets_their_advantage(
    kind: str, a: float, b: float, episodes: Batch
) -> None:
    """Counted by row, the mean would be 7 / 3. With turn rewards the total is the same."""
    found = assign_advantages(episodes, _advantage(kind), kl_coef=0.0).advantages
    wanted = [[a] * 4, [b]]
    for row, expected in zip(_in_time(found, episodes), wanted, strict=True):
        assert row == pytest.approx(expected, rel=2e-6)  # eps of grpo
    if kind != "rloo":
        by_turn = replace(episodes, turn_rewards=torch.ones(9))
        again = assign_advantages(by_turn, _advantage(kind), kl_coef=0.0).advantages
        assert found is not None and again is not None and torch.equal(again, found)


@pytest.mark.parametrize(
    ("discount", "wanted"), [("token", [0.375, 0.75, 1.5, 3.0]), ("turn", [0.75, 1.5, 1.5, 3.0])]
)
def test_returns_run_through_the_rows_in_the_order_of_time(
    discount: str, wanted: list[float], episodes: Batch
) -> None:
    """gamma 1/2 from token to token, or from turn 0 to 1 and from 1 to 2."""
    config = _advantage("reinforce_pp", gamma=0.5, discount=discount, whiten=False)
    found = assign_advantages(episodes, config, kl_coef=0.0).advantages
    assert _in_time(found, episodes) == [wanted, [1.0]]


def _with_turn_rewards(batch: Batch) -> Batch:
    """0.5, 1.5 and 0.25 for turns 0 to 2 of A, on their last tokens."""
    return replace(batch, turn_rewards=torch.tensor([0, 0, 1.5, 0, 0.5, 0, 0.25, 0, 0]))


def test_a_turns_reward_counts_for_the_tokens_up_to_its_end(episodes: Batch) -> None:
    """A's rest, 3 - 2.25 = 0.75, is on its last token: rewards 0.5, 0, 1.5, 1 in time."""
    config = _advantage("reinforce_pp", whiten=False)
    found = assign_advantages(_with_turn_rewards(episodes), config, kl_coef=0.0).advantages
    assert _in_time(found, episodes) == [[3.0, 2.5, 2.5, 1.0], [1.0]]


def test_gae_follows_the_order_of_time_with_turn_rewards_and_kl(episodes: Batch) -> None:
    """lambda 0, values 1 2 3 4 in A's time and 5 of B. KL 1 with weight 0.25 on every token:
    rewards 0.25, -0.25, 1.25, 0.75 and 0.75. Deltas: 0.25 + 2 - 1, -0.25 + 3 - 2, 1.25 + 4 - 3,
    0.75 - 4, and 0.75 - 5."""
    zeros = torch.zeros(9)
    batch = replace(
        _with_turn_rewards(episodes),
        values=torch.tensor([9, 2, 3, 9, 1, 9, 4, 9, 5.0]),
        ref_logprobs=zeros,
        old_logprobs=torch.where(episodes.action_mask, 1.0, 0.0),
    )
    config = _kl_in_reward("gae", lam=0.0, whiten=False)
    found = assign_advantages(batch, config, kl_coef=0.25)
    assert _in_time(found.advantages, batch) == [[1.25, 0.75, 2.25, -3.25], [-4.25]]
    assert _in_time(found.returns, batch) == [[2.25, 2.75, 5.25, 0.75], [0.75]]


def test_kl_in_the_reward_of_a_group_follows_the_order_of_time(episodes: Batch) -> None:
    """dr_grpo: 1 for A, -1 for B. KL in A's time 1, 2, 3, 4, and 5 of B, weight 0.25: A pays 10,
    9, 7 and 4 quarters. Turn rewards are only parts of the total, and change nothing."""
    kl = torch.tensor([0, 2, 3, 0, 1, 0, 4, 0, 5.0])
    batch = replace(episodes, ref_logprobs=torch.zeros(9), old_logprobs=kl)
    for given in (batch, _with_turn_rewards(batch)):
        found = assign_advantages(given, _kl_in_reward("dr_grpo"), kl_coef=0.25).advantages
        assert _in_time(found, episodes) == [[-1.5, -1.25, -0.75, 0.0], [-2.25]]


@pytest.mark.parametrize("kind", ["rloo", "reinforce_pp_baseline"])
def test_a_baseline_of_totals_is_refused_with_rewards_of_turns(kind: str, episodes: Batch) -> None:
    with pytest.raises(
        RewardError, match=f"algorithm.advantage={kind} with rewards of single turn"
    ):
        assign_advantages(_with_turn_rewards(episodes), _advantage(kind), kl_coef=0.0)


def test_a_discount_of_turns_does_nothing_in_single_turns(batch: Batch) -> None:
    config = _advantage("reinforce_pp", gamma=0.5, discount="turn", whiten=False)
    found = _rows(assign_advantages(batch, config, kl_coef=0.0).advantages, batch)
    assert found == [[1.0, 1.0], [0.0], [2.0], [5.0, 5.0, 5.0]]


def test_a_group_of_equal_sums_has_a_signal_if_each_reward_is_normalized() -> None:
    """Rewards a and b swap in the first group: their sum is 1 in both samples. The second group has
    equal parts."""
    samples = tuple(
        Sample(
            *(f"p/{i}", "p", 0, (5,), (6,), (-1.0,), (True,), (0,), "x", "stop"),
            reward=1.0,
            reward_parts={"a": float(i), "b": 1.0 - i},
        )
        for i in range(2)
    )
    group = Group(0, Prompt(id="p", token_ids=(5,), text="?"), samples)
    even = replace(
        group, samples=tuple(replace(s, reward_parts={"a": 1.0, "b": 0.0}) for s in samples)
    )
    rewards = type("Named", (NoRewards,), {"weighted_names": ("a", "b")})()
    for each, expected in ((True, 0.5), (False, 1.0)):
        config = AlgorithmConfig.model_validate(
            {"advantage": {"kind": "grpo", "normalize_each": each}}
        )
        found = reward_signal([group, even], config, rewards)
        assert found is not None and found.frac == expected
