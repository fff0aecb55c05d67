"""From rewards to advantages on tokens, worked by hand for every kind.

Four rows, one prompt token each (P), in two groups. Rewards stand behind the rows::

    group 0:  P a a      1        group 1:  P a        2
              P a        0                  P a a a    5
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.config.algorithm import AlgorithmConfig
from burnish.jobs.credit import assign_advantages
from burnish.types import Batch, rows_to_batch

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
    """The action tokens of each row; what stands outside must be 0."""
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
def test_group_advantages_stand_on_every_action_token_of_their_row(kind: str, batch: Batch) -> None:
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


def test_reinforce_pp_baseline_takes_the_group_mean_off_first(batch: Batch) -> None:
    config = _advantage("reinforce_pp_baseline", whiten=False)
    found = _rows(assign_advantages(batch, config, kl_coef=0.0).advantages, batch)
    assert found == [[0.5, 0.5], [-0.5], [-1.5], [1.5, 1.5, 1.5]]


@pytest.mark.parametrize("kind", ["reinforce_pp", "reinforce_pp_baseline", "gae"])
def test_whitening_is_over_the_action_tokens_of_the_whole_rollout(kind: str, batch: Batch) -> None:
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


def _kl_in_reward(kind: str, **options: Any) -> AlgorithmConfig:
    kl = {"init_kl_coef": 7.0, "placement": "reward", "estimator": "k1"}
    return AlgorithmConfig(
        advantage={"kind": kind, **options},  # type: ignore[arg-type]
        kl=kl,  # type: ignore[arg-type]
    )


def test_kl_in_the_reward_is_taken_off_every_token_with_the_weight_of_the_controller(
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
    """Weight 0.1; advantages without KL 1, -1, -3, 3 (above). Row 0: token rewards -0.05 and
    1 + 0.02, so 0.97, 1.02. Row 1: -1 - 0.01. Row 2: -3. Row 3: -0.1, -0.1, 2.9, so 2.7, 2.8,
    2.9. The mean of the other's rewards has no KL in it: row 1 pays nothing for row 0's."""
    found = assign_advantages(_with_kl(batch), _kl_in_reward("rloo"), kl_coef=0.1)
    wanted = [[0.97, 1.02], [-1.01], [-3.0], [2.7, 2.8, 2.9]]
    for row, expected in zip(_rows(found.advantages, batch), wanted, strict=True):
        assert row == pytest.approx(expected, abs=1e-6)  # fp32 additions of numbers below 5


def test_the_critic_learns_the_return_with_kl_in_it(batch: Batch) -> None:
    """The same returns as above, whatever the values: lambda is 1."""
    config = _kl_in_reward("gae", lam=1.0, whiten=False)
    found = assign_advantages(_with_values(_with_kl(batch)), config, kl_coef=0.1)
    wanted = [[0.97, 1.02], [-0.01], [2.0], [4.7, 4.8, 4.9]]
    for row, expected in zip(_rows(found.returns, batch), wanted, strict=True):
        assert row == pytest.approx(expected, abs=1e-6)  # as above


@pytest.mark.parametrize("options", [{"kind": "reinforce_pp", "whiten": False}, {"kind": "rloo"}])
def test_kl_in_the_loss_leaves_advantages_alone(options: dict[str, Any], batch: Batch) -> None:
    config = _advantage(**options)
    plain = assign_advantages(batch, config, kl_coef=0.0).advantages
    with_kl = assign_advantages(_with_kl(batch), config, kl_coef=0.1).advantages
    assert plain is not None and with_kl is not None and torch.equal(plain, with_kl)
