"""Credit assignment: compute the advantage of every action token of a rollout batch from its
rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from burnish.algorithms import ADVANTAGES
from burnish.algorithms.advantages import (
    gae,
    gdpo,
    on_policy_distill,
    return_to_go,
    time_order,
    token_rewards,
)
from burnish.algorithms.kl import KL_ESTIMATORS
from burnish.config.algorithm import (
    AlgorithmConfig,
    GaeAdvantage,
    GroupAdvantage,
    OnPolicyDistillAdvantage,
    ReinforceAdvantage,
)
from burnish.config.rl import WITHOUT_TURN_REWARDS, turn_rewards_refused
from burnish.rewards.base import RewardError
from burnish.tensors import pad_rows, unpad_rows, whiten
from burnish.types import Batch, Group

MAX_REWARD = 1e15
"""Largest allowed absolute reward. A critic's squared error of such returns is 1e30, and a policy
loss with the largest ratio is 5e23. Both leave fp32 (maximum 3.4e38) room for sums over tokens."""

OF_TOTALS = frozenset({"grpo", "dr_grpo", "opo"})
"""Advantages of a sample's total reward. Every action token gets it, minus the KL in the reward
from that token on."""

ScalarAdvantage = GroupAdvantage | GaeAdvantage | ReinforceAdvantage
"""Advantage configs that start from one reward per sample."""


@dataclass(frozen=True)
class RewardParts:
    """Scores of single rewards, for advantages that normalize each."""

    scores: Tensor
    """[S, K] fp32, of samples in the order of ``Batch.row_samples``"""
    weights: Tensor
    """[K] fp32"""

    @classmethod
    def of(cls, groups: Sequence[Group], weights: Mapping[str, float]) -> RewardParts:
        """Return the parts of the groups' samples. ``weights``: of every reward, by its name."""
        samples = [sample for group in groups for sample in group.samples]
        scores = [[sample.reward_parts[name] for name in weights] for sample in samples]
        return cls(torch.tensor(scores), torch.tensor(list(weights.values())))


def assign_advantages(
    batch: Batch, config: AlgorithmConfig, *, kl_coef: float, parts: RewardParts | None = None
) -> Batch:
    """Return the batch with ``advantages`` [M] (and ``returns`` [M] for a critic).

    Groups and baselines compare one reward per sample. Token advantages run over the action tokens
    of a sample in the order of time, across its rows. With ``turn_rewards``, they put each on the
    last action token of its turn and the rest of the sample's reward on its last action token;
    ``grpo``, ``dr_grpo`` and ``opo`` use the sample's total.

    The inputs are ``rewards`` [N] and the fields that the kind needs: ``values`` (gae);
    ``old_logprobs`` and ``ref_logprobs`` (KL in the reward); ``old_logprobs`` and
    ``teacher_logprobs`` (on_policy_distill, which ignores the rewards). ``parts`` are needed if
    each reward is normalized (``normalize_each``). Whitening uses all action
    tokens of the batch, which is the entire rollout. Raises RewardError if the losses of the
    rewards would overflow, or if the kind takes no turn rewards.
    """
    assert batch.rewards is not None
    advantage = config.advantage
    if isinstance(advantage, OnPolicyDistillAdvantage):
        assert batch.old_logprobs is not None and batch.teacher_logprobs is not None
        found = on_policy_distill(batch.old_logprobs, batch.teacher_logprobs, batch.action_mask)
        return replace(batch, advantages=found)
    if batch.turn_rewards is not None and advantage.kind in WITHOUT_TURN_REWARDS:
        raise RewardError(turn_rewards_refused(advantage.kind))
    shaped = _shaped(batch, advantage, parts)
    if advantage.kind in OF_TOTALS and _kl_in_reward(batch, config) is None:
        of_row = shaped[batch.row_samples()[0]]
        advantages = torch.where(batch.action_mask, of_row[batch.row_ids], 0.0)
        return _check_size(replace(batch, advantages=advantages), batch.rewards)
    return _check_size(_along_time(batch, shaped, config, kl_coef=kl_coef), batch.rewards)


def _along_time(batch: Batch, shaped: Tensor, config: AlgorithmConfig, *, kl_coef: float) -> Batch:
    """Return the batch with advantages (and returns) from rewards on tokens, in the order of
    time."""
    advantage, time = config.advantage, _Timeline.of(batch)
    assert not isinstance(advantage, OnPolicyDistillAdvantage)
    mask = time.rectangle(batch.action_mask.float()).bool()
    turns: Tensor | None = None
    if not isinstance(advantage, GroupAdvantage) and advantage.discount == "turn":
        one_turn = torch.zeros_like(batch.tokens)
        turns = time.rectangle(one_turn if batch.turn_ids is None else batch.turn_ids)
    by_turn = None if advantage.kind in OF_TOTALS else batch.turn_rewards
    of_turns = None if by_turn is None else time.rectangle(by_turn)
    kl = _kl_in_reward(batch, config)
    kl = None if kl is None else time.rectangle(kl)
    rewards = token_rewards(shaped, mask, kl, kl_coef, turn_rewards=of_turns)
    returns = None
    if isinstance(advantage, GaeAdvantage):
        assert batch.values is not None
        values = time.rectangle(batch.values)
        advantages, padded = gae(
            rewards, values, mask, gamma=advantage.gamma, lam=advantage.lam, turns=turns
        )
        returns = time.flat(padded)
    else:
        advantages = return_to_go(rewards, mask, gamma=advantage.gamma, turns=turns)
    if not isinstance(advantage, GroupAdvantage) and advantage.whiten:
        advantages = whiten(advantages, mask)
    return replace(batch, advantages=time.flat(advantages), returns=returns)


@dataclass(frozen=True)
class _Timeline:
    """Conversion between tokens [M] of a batch and a rectangle [S, T] of one row per sample."""

    num_tokens: int
    offsets: Tensor
    """[S + 1]: begin of each sample in ``order``"""
    order: Tensor | None
    """[A] action tokens by sample and time. None: the rows of the batch, with all their tokens"""

    @classmethod
    def of(cls, batch: Batch) -> _Timeline:
        if batch.turn_ids is None:
            return cls(batch.tokens.numel(), batch.offsets, None)
        index, first = batch.row_samples()
        order = time_order(batch.token_samples, batch.turn_ids, batch.action_mask)
        of_token = index[batch.row_ids[order]]
        counts = torch.bincount(of_token, minlength=first.numel())
        return cls(batch.tokens.numel(), pad(counts.cumsum(0), (1, 0)), order)

    def rectangle(self, flat: Tensor) -> Tensor:
        """Return [S, T] from [M]."""
        return pad_rows(flat if self.order is None else flat[self.order], self.offsets)

    def flat(self, rectangle: Tensor) -> Tensor:
        """Return [M] from [S, T], 0 for tokens that are not in the rectangle."""
        found = unpad_rows(rectangle, self.offsets)
        if self.order is None:
            return found
        return found.new_zeros(self.num_tokens).index_copy(0, self.order, found)


def _check_size(batch: Batch, rewards: Tensor) -> Batch:
    """Return the batch. Raises RewardError if rewards are so large that losses would not be
    finite."""
    largest = _largest(rewards)
    found = max(_largest(x) for x in (batch.advantages, batch.returns) if x is not None)
    if largest == math.inf or (largest > MAX_REWARD and found > MAX_REWARD):
        raise RewardError(
            f"the largest absolute reward of this rollout is {largest:.3g}; above "
            f"{MAX_REWARD:.0e} losses and gradients overflow (the largest fp32 value is 3.4e38); "
            "divide the reward by a constant, or set its running_norm"
        )
    return batch


def _largest(values: Tensor) -> float:
    """Return the largest absolute value, ignoring NaN; 0 if there is none."""
    sizes = values.abs()[~values.isnan()]
    return float(sizes.max()) if sizes.numel() else 0.0


def _shaped(batch: Batch, advantage: ScalarAdvantage, parts: RewardParts | None) -> Tensor:
    """Return the reward of every sample, minus the baseline of its group: [S]."""
    assert batch.rewards is not None
    first = batch.row_samples()[1]
    rewards = batch.rewards[first]
    if isinstance(advantage, GaeAdvantage):
        return rewards
    options: dict[str, Any] = {}
    if isinstance(advantage, GroupAdvantage) and advantage.normalize_each:
        assert parts is not None, "normalize_each requires the parts of the rewards"
        ids = batch.group_ids[first]
        return gdpo(parts.scores, parts.weights, ids, eps=advantage.eps)
    if isinstance(advantage, GroupAdvantage):
        options = {"eps": advantage.eps, "lengths": _action_counts(batch)[first]}
    shaped: Tensor = ADVANTAGES[advantage.kind](rewards, batch.group_ids[first], **options)
    return shaped


def _kl_in_reward(batch: Batch, config: AlgorithmConfig) -> Tensor | None:
    if config.kl.placement != "reward" or batch.ref_logprobs is None:
        return None
    assert batch.old_logprobs is not None
    return KL_ESTIMATORS[config.kl.estimator](batch.old_logprobs, batch.ref_logprobs)


def _action_counts(batch: Batch) -> Tensor:
    """Return the number of action tokens of each row's sample: [N]."""
    if batch.sample_tokens is not None:
        return batch.sample_tokens.float()
    counts = torch.zeros(batch.num_rows, device=batch.tokens.device)
    return counts.index_add_(0, batch.row_ids, batch.action_mask.float())
