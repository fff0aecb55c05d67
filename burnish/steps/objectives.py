"""Losses in the form that engines call: (outputs, batch) -> (scalar, stats), built once from the
recipe.

The mathematics is in ``algorithms``. This module combines it with the recipe's options and the
batch's global denominators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from burnish.algorithms import KL_ESTIMATORS, POLICY_LOSSES, PREFERENCE_LOSSES, reduce
from burnish.algorithms.correction import (
    age_stats,
    correction_weights,
    mismatch_stats,
    off_policy_mask,
    sampler_ratio,
    weight_moments,
)
from burnish.algorithms.experts import expert_loads, load_balancing_loss
from burnish.algorithms.policy_losses import BY_ROW, token_ratio
from burnish.algorithms.preference import centering
from burnish.algorithms.process import step_cross_entropy
from burnish.algorithms.reduce import Aggregation
from burnish.algorithms.supervised import SUPERVISED_LOSSES
from burnish.algorithms.value_losses import clipped_value_loss
from burnish.config.algorithm import AlgorithmConfig, CorrectionConfig
from burnish.tensors import masked_sum, upload
from burnish.train.base import Loss, Outputs
from burnish.types import Batch, Stats


def policy_objective(
    config: AlgorithmConfig, *, max_len: int, kl_coef: Callable[[], float], max_staleness: int = 0
) -> Loss:
    """Return the RL loss: policy loss, minus the entropy bonus, plus the KL term if it is placed in
    the loss. With a correction the policy loss is that of decoupled PPO: ``old_logprobs`` are the
    proximal policy, ``sampler_logprobs`` the behavior policy.

    If the batch has no ``old_logprobs`` (one update per rollout), the detached log-probs of the
    current pass replace them. The policy has not changed since the start of the update. If it has
    ``ages``, statistics are also reported by age up to ``max_staleness``.
    """
    options = config.policy_loss.model_dump(exclude={"kind"})
    per_token_loss = POLICY_LOSSES[config.policy_loss.kind]
    estimator = KL_ESTIMATORS[config.kl.estimator]
    kl_in_loss = config.kl.placement == "loss"

    def objective(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
        assert outputs.logprobs is not None and batch.advantages is not None
        mask = batch.action_mask

        def total(per_token: Tensor) -> Tensor:
            return _reduce(per_token, batch, config.aggregation, max_len)

        old = outputs.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        rows = {"row_ids": _entire_samples(batch)} if config.policy_loss.kind in BY_ROW else {}
        per_token, stats = per_token_loss(
            outputs.logprobs, old, batch.advantages, mask, **options, **rows
        )
        weights: Tensor | None = None
        if config.correction is not None:
            weights, correction_stats = _correction(config.correction, old, batch)
            per_token, stats = weights * per_token, stats + correction_stats
        if config.off_policy_mask is not None:
            keep, correction_stats = _off_policy_mask(
                config.off_policy_mask, outputs.logprobs, old, batch
            )
            per_token, stats = torch.where(keep, per_token, 0.0), stats + correction_stats
        loss = total(per_token)
        stats += Stats(sums={"policy_loss": loss.detach()})
        if batch.sampler_logprobs is not None:
            by_sampler = config.old_policy == "sampler"
            trainer = outputs.logprobs if by_sampler else old
            stats += _sampler_stats(trainer, batch, by_sampler=by_sampler, max_age=max_staleness)
        if outputs.entropy is not None:
            stats += _mean("entropy", outputs.entropy, mask)
            if config.entropy_coef:
                loss = loss - config.entropy_coef * total(outputs.entropy)
        if batch.ref_logprobs is not None:
            kl = estimator(*(_inside(x, mask) for x in (outputs.logprobs, batch.ref_logprobs)))
            stats += _mean("kl", kl, mask)
            if kl_in_loss:
                if config.kl.bias_correction:
                    kl = kl * token_ratio(outputs.logprobs, old, mask)
                    kl = kl if weights is None else kl * weights
                loss = loss + kl_coef() * total(kl)
        return loss, stats + Stats(sums={"loss": loss.detach()})

    return objective


def _correction(config: CorrectionConfig, old: Tensor, batch: Batch) -> tuple[Tensor, Stats]:
    assert batch.sampler_logprobs is not None, "the correction requires sampler_logprobs"
    return correction_weights(
        old,
        batch.sampler_logprobs,
        batch.action_mask,
        row_ids=batch.row_ids if config.level == "token" else _entire_samples(batch),
        level=config.level,
        mode=config.mode.kind,
        low=config.mode.low,
        high=config.high,
    )


def _off_policy_mask(
    threshold: float, logprobs: Tensor, old: Tensor, batch: Batch
) -> tuple[Tensor, Stats]:
    """Compare with the sampler; with ``old`` if its log-probs are unknown."""
    assert batch.advantages is not None
    return off_policy_mask(
        logprobs,
        old if batch.sampler_logprobs is None else batch.sampler_logprobs,
        batch.advantages,
        batch.action_mask,
        threshold=threshold,
        row_ids=_entire_samples(batch),
    )


def _sampler_stats(trainer: Tensor, batch: Batch, *, by_sampler: bool, max_age: int) -> Stats:
    """Return the mismatch of ``trainer`` [M] and the sampler's log-probs, also by age."""
    mask, sampler = batch.action_mask, batch.sampler_logprobs
    assert sampler is not None
    stats = mismatch_stats(trainer, sampler, mask)
    if batch.ages is not None:
        stats += age_stats(trainer, sampler, mask, ages=batch.ages, max_age=max_age)
    if by_sampler:
        stats += weight_moments(sampler_ratio(trainer, sampler), mask)
    return stats


def _entire_samples(batch: Batch) -> Tensor:
    """Return [M]: sample of each token, for a reduction that needs all tokens of a sample."""
    assert batch.sample_ids is None or batch.samples_together, "a sample may have been split"
    return batch.token_samples


def value_objective(*, value_clip: float | None) -> Loss:
    """Return the critic's clipped squared error, as a mean over all action tokens of the step."""

    def objective(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
        assert outputs.values is not None and batch.values is not None and batch.returns is not None
        per_token, stats = clipped_value_loss(
            outputs.values, batch.values, batch.returns, batch.action_mask, value_clip=value_clip
        )
        loss = _reduce(per_token, batch, "token_mean", None)
        return loss, stats + Stats(sums={"value_loss": loss.detach()})

    return objective


def sft_objective(kind: str = "nll") -> Loss:
    """Return a loss of ``SUPERVISED_LOSSES`` as a mean over all action tokens of the step."""
    per_token_loss = SUPERVISED_LOSSES[kind]

    def objective(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
        assert outputs.logprobs is not None
        loss = _reduce(
            per_token_loss(_inside(outputs.logprobs, batch.action_mask)), batch, "token_mean", None
        )
        stats = _mean("nll", -outputs.logprobs, batch.action_mask)
        return loss, stats + Stats(sums={"loss": loss.detach()})

    return objective


def ptx_objective(ptx_coef: float) -> Loss:
    """Return ``ptx_coef`` x the mean negative log-likelihood per token of the rows (arXiv
    2203.02155, equation 2, with the opposite sign, because the paper maximizes its objective)."""
    mean_nll = sft_objective()

    def objective(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
        loss, stats = mean_nll(outputs, batch)
        scaled = ptx_coef * loss
        ptx_stats = Stats(means={"ptx_nll": stats.means["nll"]}, sums={"ptx_loss": scaled.detach()})
        return scaled, ptx_stats

    return objective


def reward_model_objective(loss_name: str = "bradley_terry", *, center_coef: float = 0.0) -> Loss:
    """Return a loss on pairs (row 2i chosen, 2i + 1 rejected), as a mean over all pairs of the
    step."""

    def objective(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
        chosen, rejected = pair_scores(outputs, batch)
        margins = {} if batch.margins is None else {"margins": batch.margins[0::2]}
        losses = PREFERENCE_LOSSES[loss_name](chosen, rejected, **margins)
        stats = Stats(means={"nll": (losses.detach().sum(), losses.numel())})
        if center_coef:
            losses = losses + center_coef * centering(chosen, rejected)
        loss = losses.sum() / (batch.num_sequences / batch.rows_per_unit)
        gap, count = (chosen - rejected).detach(), chosen.numel()
        stats += Stats(
            means={
                "accuracy": ((gap > 0).float().sum(), count),
                "score_margin": (gap.sum(), count),
                "score_chosen": (chosen.detach().sum(), count),
                "score_rejected": (rejected.detach().sum(), count),
            },
            sums={"loss": loss.detach()},
        )
        return loss, stats

    return objective


def process_objective() -> Loss:
    """Return the cross-entropy of every reasoning step's label, as a mean over all labeled steps of
    the optimizer step."""

    def objective(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
        assert outputs.values is not None and batch.step_labels is not None
        mask, labels = batch.action_mask, batch.step_labels.to(outputs.values.device)
        losses = step_cross_entropy(_inside(outputs.values, mask), _inside(labels, mask))
        loss = _reduce(losses, batch, "token_mean", None)
        stats = step_stats(outputs.values.detach(), batch)
        return loss, stats + Stats(sums={"loss": loss.detach()})

    return objective


def step_stats(scores: Tensor, batch: Batch) -> Stats:
    """Return the statistics of scores [M] of the labeled steps of a batch. A step is correct if
    score and label are on the same side of one half (a label of one half counts as good).

    step_accuracy: of all steps; good_/bad_step_accuracy: of those with a good/bad label; row_exact:
    rows with every step correct; step_score: mean probability assigned to a step; good_steps: share
    of good labels.
    """
    assert batch.step_labels is not None
    mask, good = batch.action_mask, batch.step_labels >= 0.5
    mask, good = mask.to(scores.device), good.to(scores.device)
    right = ((scores > 0) == good) & mask
    rows = batch.row_ids.to(scores.device)
    wrong = torch.zeros(batch.num_rows, device=scores.device)
    wrong = wrong.index_add(0, rows, (mask & ~right).float())
    return Stats(
        means={
            "step_accuracy": (right.sum(), mask.sum()),
            "good_step_accuracy": ((right & good).sum(), (mask & good).sum()),
            "bad_step_accuracy": ((right & ~good).sum(), (mask & ~good).sum()),
            "row_exact": ((wrong == 0).sum(), wrong.numel()),
            "step_score": (masked_sum(scores.sigmoid(), mask), mask.sum()),
            "good_steps": ((good & mask).sum(), mask.sum()),
        }
    )


def with_expert_balance(loss: Loss, coef: float) -> Loss:
    """Return ``loss`` + ``coef`` x the load-balancing loss of a mixture of experts; ``loss`` if
    ``coef`` is 0.

    A micro-batch of m of the step's M tokens (prompts included) has weight m / M. The mean
    probabilities in the loss are then those of the entire step, but the loads are those of the
    micro-batch.
    """
    if not coef:
        return loss

    def objective(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
        value, stats = loss(outputs, batch)
        logits, chosen = outputs.router_logits, outputs.chosen_experts
        assert logits is not None and chosen is not None, "the load-balancing loss requires both"
        balance = load_balancing_loss(logits, chosen[: len(logits)])
        loads, count = expert_loads(chosen, logits.shape[-1]), batch.tokens.numel()
        balance_stats = Stats(
            means={
                "moe_aux_loss": (balance.detach() * count, count),
                "moe_idle_experts": ((loads == 0).sum(), loads.numel()),
            },
            maxima={"moe_max_load": loads.max()},
        )
        return value + coef * count / batch.num_read_tokens * balance, stats + balance_stats

    return objective


def pair_scores(outputs: Outputs, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the (chosen [N/2], rejected [N/2]) scores of a batch of pairs."""
    assert outputs.values is not None
    last = upload(batch.last_tokens, outputs.values.device)
    scores = outputs.values[last]
    return scores[0::2], scores[1::2]


def _reduce(
    per_token: Tensor, batch: Batch, aggregation: Aggregation, max_len: int | None
) -> Tensor:
    options: dict[str, Any] = {"max_len": max_len} if aggregation == "sequence_sum_constant" else {}
    if aggregation == "sequence_mean" and batch.sample_tokens is not None:
        options["sequence_tokens"] = batch.sample_tokens[batch.row_ids]
    return reduce(
        per_token,
        batch.action_mask,
        aggregation=aggregation,
        num_tokens=batch.num_tokens,
        num_sequences=batch.num_sequences,
        row_ids=batch.row_ids,
        **options,
    )


def _inside(values: Tensor, mask: Tensor) -> Tensor:
    """Return ``values`` with 0 outside the mask. Use it before a function whose gradient outside
    the mask would be multiplied by 0: if that gradient is not finite, the product is NaN."""
    return torch.where(mask, values, 0.0)


def _mean(name: str, values: Tensor, mask: Tensor) -> Stats:
    return Stats(means={name: (masked_sum(values.detach(), mask), mask.sum())})
