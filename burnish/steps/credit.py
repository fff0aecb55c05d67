"""Credit assignment: compute the advantage of every action token of a rollout batch from its
rewards."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
from burnish.config.rl import turn_rewards_refused
from burnish.rewards.base import RewardError
from burnish.tensors import pad_rows, unpad_rows, whiten
from burnish.types import Batch, Group

MAX_REWARD = 1e15
"""Largest allowed absolute reward. A critic's squared error of such returns is 1e30, and a policy
loss with the largest ratio is 5e23. Both leave fp32 (maximum 3.4e38) room for sums over tokens."""

OF_TOTALS = frozenset({"grpo", "dr_grpo", "opo"})
"""Advantages of a sample's total reward. Every action token gets it, minus the KL in the reward
from that token on."""


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
    advantage = config.advantage
    if batch.turn_rewards is not None and not advantage.takes_turn_rewards:
        raise RewardError(turn_rewards_refused(advantage.kind))
    kl: Tensor | None = None
    if config.kl.placement == "reward" and batch.ref_logprobs is not None:
        assert batch.old_logprobs is not None
        kl = KL_ESTIMATORS[config.kl.estimator](batch.old_logprobs, batch.ref_logprobs)
    batch = CREDIT_RULES[advantage.kind](batch, advantage, CreditContext(kl, kl_coef, parts))
    if not advantage.uses_rewards:
        return batch
    assert batch.rewards is not None
    largest = _largest(batch.rewards)
    largest_target = max(_largest(x) for x in (batch.advantages, batch.returns) if x is not None)
    if largest == math.inf or (largest > MAX_REWARD and largest_target > MAX_REWARD):
        raise RewardError(
            f"the largest absolute reward of this rollout is {largest:.3g}; above "
            f"{MAX_REWARD:.0e} losses and gradients overflow (the largest fp32 value is 3.4e38); "
            "divide the reward by a constant, or set its running_norm"
        )
    return batch


class CreditContext(NamedTuple):
    """The inputs of a credit rule besides the batch and the config of its advantage."""

    kl: Tensor | None
    """KL of each token [M]. None: no KL in the reward."""
    kl_coef: float
    parts: RewardParts | None


# ---- credit rules: return the batch with advantages [M] (and returns [M]) ------------------------


def _distillation_credit(
    batch: Batch, advantage: OnPolicyDistillAdvantage, context: CreditContext
) -> Batch:
    assert batch.old_logprobs is not None and batch.teacher_logprobs is not None
    gap = on_policy_distill(batch.old_logprobs, batch.teacher_logprobs, batch.action_mask)
    return replace(batch, advantages=gap)


def _group_credit(batch: Batch, advantage: GroupAdvantage, context: CreditContext) -> Batch:
    sample_of_row, first = batch.row_samples()
    if advantage.normalize_each:
        assert context.parts is not None, "normalize_each requires the parts of the rewards"
        parts, ids = context.parts, batch.group_ids[first]
        shaped = gdpo(parts.scores, parts.weights, ids, eps=advantage.eps)
    else:
        lengths = _action_counts(batch)[first]
        shaped = _shaped(batch, advantage.kind, eps=advantage.eps, lengths=lengths)
    if advantage.kind in OF_TOTALS and context.kl is None:
        of_row = shaped[sample_of_row]
        advantages = torch.where(batch.action_mask, of_row[batch.row_ids], 0.0)
        return replace(batch, advantages=advantages)
    time = _Timeline.of(batch)
    rewards, mask = _on_tokens(batch, time, shaped, context, turn_rewards=None)
    advantages = return_to_go(rewards, mask, gamma=advantage.gamma)
    return replace(batch, advantages=time.flat(advantages))


def _reinforce_credit(batch: Batch, advantage: ReinforceAdvantage, context: CreditContext) -> Batch:
    time, shaped = _Timeline.of(batch), _shaped(batch, advantage.kind)
    rewards, mask = _on_tokens(batch, time, shaped, context, turn_rewards=batch.turn_rewards)
    turns = time.turns(batch) if advantage.discount == "turn" else None
    advantages = return_to_go(rewards, mask, gamma=advantage.gamma, turns=turns)
    advantages = whiten(advantages, mask) if advantage.whiten else advantages
    return replace(batch, advantages=time.flat(advantages))


def _gae_credit(batch: Batch, advantage: GaeAdvantage, context: CreditContext) -> Batch:
    assert batch.rewards is not None and batch.values is not None
    time, totals = _Timeline.of(batch), batch.rewards[batch.row_samples()[1]]
    rewards, mask = _on_tokens(batch, time, totals, context, turn_rewards=batch.turn_rewards)
    turns = time.turns(batch) if advantage.discount == "turn" else None
    values = time.rectangle(batch.values)
    advantages, returns = gae(
        rewards, values, mask, gamma=advantage.gamma, lam=advantage.lam, turns=turns
    )
    advantages = whiten(advantages, mask) if advantage.whiten else advantages
    return replace(batch, advantages=time.flat(advantages), returns=time.flat(returns))


CREDIT_RULES: Mapping[str, Callable[[Batch, Any, CreditContext], Batch]] = {
    "grpo": _group_credit,
    "dr_grpo": _group_credit,
    "rloo": _group_credit,
    "opo": _group_credit,
    "gae": _gae_credit,
    "reinforce_pp": _reinforce_credit,
    "reinforce_pp_baseline": _reinforce_credit,
    "on_policy_distill": _distillation_credit,
}
"""``algorithm.advantage.kind`` -> rule."""


# ---- parts of the rules --------------------------------------------------------------------------


def _shaped(batch: Batch, kind: str, **options: Any) -> Tensor:
    """Return the reward of every sample, minus the baseline of its group: [S]."""
    assert batch.rewards is not None
    first = batch.row_samples()[1]
    shaped: Tensor = ADVANTAGES[kind](batch.rewards[first], batch.group_ids[first], **options)
    return shaped


def _on_tokens(
    batch: Batch,
    time: _Timeline,
    totals: Tensor,
    context: CreditContext,
    *,
    turn_rewards: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the reward of every token [S, T], with the KL, and the mask of action tokens.
    ``totals`` [S]: reward of each sample."""
    mask = time.rectangle(batch.action_mask.float()).bool()
    of_turns = None if turn_rewards is None else time.rectangle(turn_rewards)
    kl = None if context.kl is None else time.rectangle(context.kl)
    return token_rewards(totals, mask, kl, context.kl_coef, turn_rewards=of_turns), mask


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

    def turns(self, batch: Batch) -> Tensor:
        """Return the turn of each token [S, T]."""
        one_turn = torch.zeros_like(batch.tokens)
        return self.rectangle(one_turn if batch.turn_ids is None else batch.turn_ids)

    def flat(self, rectangle: Tensor) -> Tensor:
        """Return [M] from [S, T], 0 for tokens that are not in the rectangle."""
        tokens = unpad_rows(rectangle, self.offsets)
        if self.order is None:
            return tokens
        return tokens.new_zeros(self.num_tokens).index_copy(0, self.order, tokens)


def _largest(values: Tensor) -> float:
    """Return the largest absolute value, ignoring NaN; 0 if there is none."""
    sizes = values.abs()[~values.isnan()]
    return float(sizes.max()) if sizes.numel() else 0.0


def _action_counts(batch: Batch) -> Tensor:
    """Return the number of action tokens of each row's sample: [N]."""
    if batch.sample_tokens is not None:
        return batch.sample_tokens.float()
    counts = torch.zeros(batch.num_rows, device=batch.tokens.device)
    return counts.index_add_(0, batch.row_ids, batch.action_mask.float())
