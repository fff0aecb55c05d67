"""Credit assignment: compute the advantage of every action token of a rollout batch from its
rewards."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from burnish.algorithms import ADVANTAGES
from burnish.algorithms.advantages import (
    gae,
    on_policy_distill,
    return_to_go,
    token_rewards,
)
from burnish.algorithms.kl import k1
from burnish.config.algorithm import (
    AlgorithmConfig,
    GaeAdvantage,
    GroupAdvantage,
    OnPolicyDistillAdvantage,
    ReinforceAdvantage,
)
from burnish.config.rl import BROADCAST
from burnish.rewards.base import RewardError
from burnish.tensors import pad_rows, unpad_rows, whiten
from burnish.types import Batch

MAX_REWARD = 1e15
"""Largest allowed absolute reward. A critic's squared error of such returns is 1e30, and a policy
loss with the largest ratio is 5e23. Both leave fp32 (maximum 3.4e38) room for sums over tokens."""

ScalarAdvantage = GroupAdvantage | GaeAdvantage | ReinforceAdvantage
"""Advantage configs that start from one reward per sample."""


def assign_advantages(batch: Batch, config: AlgorithmConfig, *, kl_coef: float) -> Batch:
    """Return the batch with ``advantages`` [M] (and ``returns`` [M] for a critic).

    The inputs are ``rewards`` [N] and the fields that the kind needs: ``values`` (gae);
    ``old_logprobs`` and ``ref_logprobs`` (KL in the reward); ``old_logprobs`` and
    ``teacher_logprobs`` (on_policy_distill, which ignores the rewards). Whitening uses all action
    tokens of the batch, which is the entire rollout. Raises RewardError if the losses of the
    rewards would overflow.
    """
    assert batch.rewards is not None
    advantage = config.advantage
    if isinstance(advantage, OnPolicyDistillAdvantage):
        assert batch.old_logprobs is not None and batch.teacher_logprobs is not None
        found = on_policy_distill(batch.old_logprobs, batch.teacher_logprobs, batch.action_mask)
        return replace(batch, advantages=found)
    shaped = _shaped(batch, advantage)
    if advantage.kind in BROADCAST:
        advantages = torch.where(batch.action_mask, shaped[batch.row_ids], 0.0)
        return _check_size(replace(batch, advantages=advantages), batch.rewards)
    mask = pad_rows(batch.action_mask.float(), batch.offsets).bool()
    rewards = token_rewards(shaped, mask, *_kl_in_reward(batch, config, kl_coef))
    returns = None
    if isinstance(advantage, GaeAdvantage):
        assert batch.values is not None
        values = pad_rows(batch.values, batch.offsets)
        advantages, padded = gae(rewards, values, mask, gamma=advantage.gamma, lam=advantage.lam)
        returns = unpad_rows(padded, batch.offsets)
    else:
        advantages = return_to_go(rewards, mask, gamma=advantage.gamma)
    if not isinstance(advantage, GroupAdvantage) and advantage.whiten:
        advantages = whiten(advantages, mask)
    credited = replace(batch, advantages=unpad_rows(advantages, batch.offsets), returns=returns)
    return _check_size(credited, batch.rewards)


def _check_size(batch: Batch, rewards: Tensor) -> Batch:
    """Return the batch. Raises RewardError if rewards are so large that losses would not be
    finite."""
    largest = _largest(rewards)
    found = max(_largest(x) for x in (batch.advantages, batch.returns) if x is not None)
    if largest == math.inf or (largest > MAX_REWARD and found > MAX_REWARD):
        raise RewardError(
            f"the rewards of this rollout reach {largest:.3g} in size; beyond {MAX_REWARD:.0e} "
            "losses and gradients overflow (fp32 ends at 3.4e38); divide the reward by a constant, "
            "or set running_norm for it"
        )
    return batch


def _largest(values: Tensor) -> float:
    """Return the largest absolute value, ignoring NaN; 0 if there is none."""
    sizes = values.abs()[~values.isnan()]
    return float(sizes.max()) if sizes.numel() else 0.0


def _shaped(batch: Batch, advantage: ScalarAdvantage) -> Tensor:
    """Return the reward of every sample, minus the baseline of its group: [N]."""
    assert batch.rewards is not None
    if isinstance(advantage, GaeAdvantage):
        return batch.rewards
    options: dict[str, Any] = {}
    if isinstance(advantage, GroupAdvantage):
        options = {"eps": advantage.eps, "lengths": _action_counts(batch)}
    shaped: Tensor = ADVANTAGES[advantage.kind](batch.rewards, batch.group_ids, **options)
    return shaped


def _kl_in_reward(
    batch: Batch, config: AlgorithmConfig, kl_coef: float
) -> tuple[Tensor | None, float]:
    if config.kl.placement != "reward" or batch.ref_logprobs is None:
        return None, 0.0
    assert batch.old_logprobs is not None
    return pad_rows(k1(batch.old_logprobs, batch.ref_logprobs), batch.offsets), kl_coef


def _action_counts(batch: Batch) -> Tensor:
    """Return the number of action tokens per row: [N]."""
    counts = torch.zeros(batch.num_rows, device=batch.tokens.device)
    return counts.index_add_(0, batch.row_ids, batch.action_mask.float())
