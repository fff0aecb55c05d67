"""From rewards to advantages: how much better a sample, or a token, was than expected.

*Outcome advantages* only use one reward per sample and the groups. All have the signature
``f(rewards [N], group_ids [N], *, eps, lengths [N]) -> [N]``. Each name is combined with:

====================== ============================================================================
grpo, dr_grpo, opo,    ``token_rewards`` (KL in the reward), ``return_to_go`` at gamma = 1: without
rloo                   KL in the reward the sample's value on every action token
reinforce_pp           ``token_rewards`` (KL in the reward), ``return_to_go``, ``tensors.whiten``
reinforce_pp_baseline  the same, but the group's mean is subtracted from the shaped reward
gae                    ``token_rewards``, values of a critic, :func:`gae`, ``tensors.whiten``
on_policy_distill      log-probs of policy and teacher, no rewards
====================== ============================================================================

Groups are defined by id, of any size and in any order. The advantage is exactly 0 for a group of
one and for equal rewards.

*Token advantages* (:func:`gae`, :func:`return_to_go`, :func:`on_policy_distill`) work on rectangles
[N, T] with a mask of action tokens. Tokens outside of it (padding, or tool output between two
turns) are skipped, as if they were not in the row. A row of the rectangle is one sample: the action
tokens of an episode are brought into it in the order of time (:func:`time_order`), whichever rows
they are trained in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from burnish.tensors import at_least_fp32


def grpo(
    rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-6, lengths: Tensor | None = None
) -> Tensor:
    """Group-relative advantage [N]: A_i = (R_i - mean) / (std + eps), std with n - 1.

    ``rewards`` [N], ``group_ids`` [N] int; ``lengths`` is not used. Source: arXiv 2402.03300,
    section 4.1.2.
    """
    deviation, groups = _deviation(rewards, group_ids)
    count = groups.total(torch.ones_like(deviation))
    std = (groups.total(deviation.square()) / (count - 1).clamp(min=1)).sqrt()
    return _narrow(deviation / (std + eps), rewards)


def gdpo(parts: Tensor, weights: Tensor, group_ids: Tensor, *, eps: float) -> Tensor:
    """Group-decoupled advantage of several rewards [N]: each is normalized in its group, and their
    weighted sum over the batch.

    S_i = sum_k weights_k (R_ik - mean_k) / (std_k + eps);  A_i = (S_i - mean S) / (std S + eps),
    std with n - 1. ``parts`` [N, K], ``weights`` [K], ``group_ids`` [N] int. A sum of rewards that
    is normalized afterwards gives equal advantages to samples with equal sums; here they differ.
    Source: GDPO, arXiv 2601.05242.
    """
    columns = [grpo(parts[:, k], group_ids, eps=eps) for k in range(parts.shape[1])]
    total = torch.stack(columns, 1) @ weights.to(parts)
    return grpo(total, torch.zeros_like(group_ids), eps=eps)


def dr_grpo(
    rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-6, lengths: Tensor | None = None
) -> Tensor:
    """GRPO without its difficulty bias [N]: A_i = R_i - mean. ``eps`` and ``lengths`` are not used.

    ``rewards`` [N], ``group_ids`` [N] int. The other half of Dr. GRPO, the constant length in the
    denominator, is the aggregation ``sequence_sum_constant``. Source: arXiv 2503.20783.
    """
    return _narrow(_deviation(rewards, group_ids)[0], rewards)


def rloo(
    rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-6, lengths: Tensor | None = None
) -> Tensor:
    """Leave-one-out [N]: A_i = R_i - mean of the others = (R_i - mean) n / (n - 1).

    ``rewards`` [N], ``group_ids`` [N] int; ``eps`` and ``lengths`` are not used. With KL in the
    reward, the baseline only contains the rewards, and each token is charged for the KL from there
    on. In the paper, the single action of a response, and the baseline, are charged for all of the
    KL. Both are unbiased. Source: arXiv 2402.14740.
    """
    deviation, groups = _deviation(rewards, group_ids)
    count = groups.total(torch.ones_like(deviation))
    return _narrow(deviation * count / (count - 1).clamp(min=1), rewards)


def opo(
    rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-6, lengths: Tensor | None = None
) -> Tensor:
    """Optimal baseline [N]: A_i = R_i - sum_j(l_j R_j) / sum_j(l_j), l = response tokens.

    ``rewards`` [N], ``group_ids`` [N] int, ``lengths`` [N] int; ``eps`` is not used. Raises
    ValueError without lengths. Source: arXiv 2505.23585.
    """
    if lengths is None:
        raise ValueError(
            "opo got lengths=None: its baseline is a mean weighted by response lengths; pass "
            "lengths [N], the number of response tokens of each sample"
        )
    return _narrow(_deviation(rewards, group_ids, lengths)[0], rewards)


def reinforce_pp(
    rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-6, lengths: Tensor | None = None
) -> Tensor:
    """The shaped reward of REINFORCE++ [N]: the reward itself, at least in fp32.

    ``rewards`` [N]; the other arguments are not used. The baseline is the whitening over the whole
    batch that follows ``return_to_go``. Source: arXiv 2501.03262.
    """
    return at_least_fp32(rewards)


def group_mean_baseline(
    rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-6, lengths: Tensor | None = None
) -> Tensor:
    """The shaped reward of REINFORCE++-baseline [N]: R_i - mean of the group.

    The same number as :func:`dr_grpo`, used differently: as a reward, before return-to-go and
    whitening. ``rewards`` [N], ``group_ids`` [N] int; ``eps`` and ``lengths`` are not used. Source:
    arXiv 2501.03262.
    """
    return dr_grpo(rewards, group_ids)


def time_order(sample_ids: Tensor, turn_ids: Tensor, mask: Tensor) -> Tensor:
    """Indices [A] of the action tokens, by sample, then turn, then position in the batch.

    ``sample_ids``, ``turn_ids`` [M] int, ``mask`` [M] bool. The tokens of one turn are in one row,
    so the result is the order of time within each sample, whatever the order of its rows.
    """
    tokens = mask.nonzero()[:, 0]
    for ids in (turn_ids, sample_ids):
        tokens = tokens[ids[tokens].argsort(stable=True)]
    return tokens


def token_rewards(
    rewards: Tensor,
    mask: Tensor,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    *,
    turn_rewards: Tensor | None = None,
) -> Tensor:
    """Rewards per token [N, T]: the scalar on the last action token, minus kl_coef kl_t on each.

    ``rewards`` [N], ``mask`` [N, T] bool, ``kl`` [N, T] (the sum of k1 is an unbiased
    penalty). ``turn_rewards`` [N, T]: rewards of turns on their last action tokens; they are parts
    of ``rewards``, and the last action token gets the rest. Rows without action tokens are 0.
    Source: arXiv 1909.08593, equation 2.
    """
    actions_so_far = mask.cumsum(1)
    last = mask & (actions_so_far == actions_so_far[:, -1:])
    rest = at_least_fp32(rewards)
    if turn_rewards is not None:
        turn_rewards = torch.where(mask, turn_rewards, 0.0)
        rest = (rest - turn_rewards.double().sum(1)).to(rest)
    out = torch.where(last, rest.unsqueeze(1), 0.0)
    out = out if turn_rewards is None else out + turn_rewards
    return out if kl is None else out - kl_coef * torch.where(mask, at_least_fp32(kl), 0.0)


def return_to_go(
    rewards: Tensor, mask: Tensor, *, gamma: float, turns: Tensor | None = None
) -> Tensor:
    """Discounted returns [N, T]: G_t = r_t + gamma G_(t+1) over action tokens, 0 elsewhere.

    ``rewards`` [N, T], ``mask`` [N, T] bool. Rewards outside the mask are ignored. ``turns``
    [N, T] int, the turn of each action token: gamma is 1 if token t + 1 is of the same turn. None:
    gamma applies to every token.
    """
    without_gaps = _closed(mask)
    actions = _move(at_least_fp32(rewards), mask, without_gaps)
    discount = gamma if turns is None else _at_turn_ends(gamma, _move(turns, mask, without_gaps))
    return _move(_discounted_sum(actions, discount), without_gaps, mask)


def gae(  # house: ok the terms of the equation
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float,
    turns: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation: (advantages, returns) [N, T], both 0 outside the mask.

    delta_t = r_t + gamma V_(t+1) - V_t;  A_t = delta_t + gamma lam A_(t+1);  return_t = A_t + V_t,
    where t + 1 is the row's next *action* token: value and advantage are carried across a gap in
    the mask without a discount. After the last action token the value is 0. ``rewards``,
    ``values`` [N, T], ``mask`` [N, T] bool. ``turns`` [N, T] int, the turn of each action token:
    gamma and lam are 1 if token t + 1 is of the same turn. None: they apply to every token. Source:
    arXiv 1506.02438, equation 16.
    """
    without_gaps = _closed(mask)
    r, v = (_move(at_least_fp32(x), mask, without_gaps) for x in (rewards, values))
    discount: float | Tensor = gamma
    trace: float | Tensor = gamma * lam
    if turns is not None:
        moved = _move(turns, mask, without_gaps)
        discount, trace = (_at_turn_ends(x, moved) for x in (gamma, gamma * lam))
    delta = r + discount * pad(v[:, 1:], (0, 1)) - v
    advantages = _move(_discounted_sum(delta, trace), without_gaps, mask)
    return advantages, torch.where(mask, advantages + values, 0.0)


def top_entropy(entropies: Tensor, mask: Tensor, *, quantile: float) -> Tensor:
    """Return which tokens (bool) have one of the highest entropies: at least the (1 -
    ``quantile``)-quantile of all tokens in the mask.

    ``entropies`` [N, T] or [M] in nats, ``mask`` bool. Of equal entropies at the limit all are
    kept. Source: arXiv 2506.01939 (quantile 0.2).
    """
    inside = entropies[mask].sort().values
    if not inside.numel():
        return mask
    # round: (1 - 0.7) * 10 is 3 + 4e-16 in floating point, whose ceiling would be 4
    place = math.ceil(round((1 - quantile) * (inside.numel() - 1), 6))
    return mask & (entropies >= inside[place])


def on_policy_distill(old_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    """A_t = -(log p(token) - log q(token)), p the policy at the start of the update and q the
    teacher; 0 outside the mask.

    Over tokens sampled by the policy, the mean of -A is KL(policy || teacher), and the policy
    gradient with A is its gradient, token by token. With a discount of 0, no token is charged for
    the divergence of later ones. ``old_logprobs``, ``teacher_logprobs``, ``mask`` of one shape.
    Sources: arXiv 2306.13649 (students on their own samples);
    https://thinkingmachines.ai/blog/on-policy-distillation/.
    """
    gap = at_least_fp32(teacher_logprobs) - at_least_fp32(old_logprobs)
    return torch.where(mask, gap, 0.0)


ADVANTAGES: dict[str, Callable[..., Any]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "gae": gae,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": group_mean_baseline,
    "on_policy_distill": on_policy_distill,
}
"""Advantage functions by the name in ``algorithm.advantage``. All have the outcome signature,
except for ``gae`` and ``on_policy_distill``, which work on tokens and have their own signatures."""


class _Groups:
    """Sums over the samples that share an id."""

    def __init__(self, group_ids: Tensor, device: torch.device) -> None:
        self.index = torch.unique(group_ids, return_inverse=True)[1].to(device)

    def total(self, x: Tensor) -> Tensor:
        """[N]: the sum of ``x`` [N] over each sample's group, itself included."""
        return torch.zeros_like(x).index_add(0, self.index, x)[self.index]

    def lowest(self, x: Tensor) -> Tensor:
        """[N]: the smallest ``x`` [N] in each sample's group."""
        start = torch.full_like(x, torch.inf)
        return start.scatter_reduce(0, self.index, x, "amin")[self.index]


def _deviation(
    rewards: Tensor, group_ids: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, _Groups]:
    """Return R - (weighted) mean of the group [N], and the groups.

    The group's minimum is subtracted first. The mean of equal numbers may differ from the number
    (seven times 0.1 in fp32), but the mean of zeros is exactly 0. Computed in fp64: squares of a
    spread of 1.8e19 overflow fp32, a difference of two fp32 numbers may too, and a standard
    deviation of inf would make every advantage 0.
    """
    rewards = rewards.double()
    groups = _Groups(group_ids, rewards.device)
    weights = torch.ones_like(rewards) if weights is None else weights.to(rewards)
    above = rewards - groups.lowest(rewards)
    total_weight = groups.total(weights).clamp(min=torch.finfo(rewards.dtype).tiny)
    return above - groups.total(weights * above) / total_weight, groups


def _narrow(advantages: Tensor, rewards: Tensor) -> Tensor:
    """Return advantages in the dtype of the rewards, at least fp32."""
    return advantages.to(at_least_fp32(rewards).dtype)


def _closed(mask: Tensor) -> Tensor:
    """Return the mask [N, T] of action tokens after removing gaps.

    If no row has a gap (the common and fast case), it is ``mask`` itself; otherwise the tokens of
    each row are moved to the left.
    """
    starts = mask & ~pad(mask[:, :-1], (1, 0))
    if not (starts.sum(1) > 1).any():
        return mask
    return torch.arange(mask.shape[1], device=mask.device) < mask.sum(1, keepdim=True)


def _move(x: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Move the entries of ``x`` [N, T] selected by ``source`` to the positions in ``target``, in
    order; zero elsewhere. Both masks have the same count in each row."""
    if source is target:
        return torch.where(target, x, 0.0)
    return torch.zeros_like(x).masked_scatter(target, x[source])


def _at_turn_ends(discount: float, turns: Tensor) -> Tensor:
    """Return [N, T]: ``discount`` at the last token of each turn, 1 at the others. ``turns``
    [N, T], without gaps."""
    ends = pad(turns[:, 1:] != turns[:, :-1], (0, 1))
    return torch.where(ends, discount, 1.0)


def _discounted_sum(x: Tensor, discount: float | Tensor) -> Tensor:
    """Return y_t = x_t + discount_t y_(t+1) along the last dimension [..., T].

    ``discount``: one number, or one per entry. If x_t is not finite, y is NaN at t and before, back
    to a discount of 0. Other entries are not affected.
    """
    bad = ~x.isfinite()
    if not bool(bad.any()):
        return _sum_ahead(x, discount)
    passes = (discount != 0).to(x) if isinstance(discount, Tensor) else float(discount != 0)
    reached = _sum_ahead(bad.to(x), passes) > 0
    return torch.where(reached, torch.nan, _sum_ahead(torch.where(bad, 0.0, x), discount))


def _sum_ahead_each(x: Tensor, discounts: Tensor) -> Tensor:
    """Compute :func:`_discounted_sum` of finite numbers with one discount per entry [..., T].

    After the round with step k, entry t contains the sum of the 2 k entries from t on, and its
    factor is the product of their discounts. This takes log2(T) rounds.
    """
    step, length = 1, x.shape[-1]
    while step < length:
        ahead = [pad(y[..., step:], (0, step)) for y in (x, discounts)]
        x, discounts = x + discounts * ahead[0], discounts * ahead[1]
        step *= 2
    return x


def _sum_ahead(x: Tensor, discount: float | Tensor) -> Tensor:
    """Compute :func:`_discounted_sum` of finite numbers.

    With one discount, within a block of 32 it is a matmul with the triangle of discount^(j - i).
    The contribution of the following blocks is then added; it is computed recursively from the
    blocks' first entries. This takes log32(T) rounds.
    """
    if isinstance(discount, Tensor):
        return _sum_ahead_each(x, discount)
    length = x.shape[-1]
    num_blocks = -(-length // _BLOCK)
    wide = x.double() if x.is_cuda else x  # a GPU may be set to round fp32 products to TF32
    padded = pad(wide, (0, num_blocks * _BLOCK - length))
    blocks = padded.view(*x.shape[:-1], num_blocks, _BLOCK)
    powers = (discount ** torch.arange(_BLOCK + 1, dtype=torch.float64)).to(wide)
    place = torch.arange(_BLOCK, device=x.device)
    ahead = place - place[:, None]
    triangle = powers[ahead].triu()
    found = blocks @ triangle.T
    if num_blocks > 1:
        following = pad(_sum_ahead(found[..., 0], discount**_BLOCK)[..., 1:], (0, 1))
        found = torch.addcmul(found, following.unsqueeze(-1), powers[1:].flip(0))
    return found.flatten(-2)[..., :length].to(x.dtype)


_BLOCK = 32
