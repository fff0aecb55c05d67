"""The losses as engines take them, on outputs made by hand: values, gradients, micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.algorithms.policy_losses import BY_ROW, POLICY_LOSSES
from burnish.algorithms.supervised import dft
from burnish.config.algorithm import AlgorithmConfig
from burnish.steps.objectives import (
    policy_objective,
    reward_model_objective,
    sft_objective,
    value_objective,
)
from burnish.train.base import Loss, Outputs
from burnish.types import Batch, Stats, rows_to_batch

LENGTHS = [2, 1, 3]


def _batch(**arrays: Tensor) -> Batch:
    rows = [[9] + [8] * n for n in LENGTHS]
    masks = [[False] + [True] * n for n in LENGTHS]
    return replace(rows_to_batch(rows, masks, prompt_lens=[1] * 3, group_ids=[0, 0, 1]), **arrays)


def _random(seed: int, low: float, high: float) -> Tensor:
    """[9] float64 on the action tokens, 0 elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    values = low + (high - low) * torch.rand(9, generator=generator, dtype=torch.float64)
    return torch.where(_batch().action_mask, values, 0.0)


def _objective(coef: float = 0.0, **options: Any) -> Loss:
    if coef:
        options["kl"] = {"init_kl_coef": 9.0} | options.get("kl", {})
    return policy_objective(AlgorithmConfig(**options), max_len=4, kl_coef=lambda: coef)


def _gradient_is_right(loss: Callable[..., Tensor], *inputs: Tensor) -> bool:
    leaves = [x.clone().requires_grad_() for x in inputs]
    # eps 1e-6 in float64: truncation 1e-12 and rounding 1e-10 are far below atol.
    return bool(torch.autograd.gradcheck(loss, leaves, eps=1e-6, atol=1e-7, rtol=1e-5))


AGGREGATIONS = ["token_mean", "sequence_mean", "sequence_sum_constant"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "token_mean"),
        ({"policy_loss": "cispo", "advantage": "rloo"}, "token_mean"),
        ({"policy_loss": "gspo"}, "sequence_mean"),
        ({"policy_loss": "sapo"}, "sequence_mean"),
        ({"policy_loss": "gspo", "advantage": "dr_grpo"}, "sequence_mean"),
        ({"advantage": "dr_grpo"}, "sequence_sum_constant"),
        ({"advantage": "dr_grpo", "loss_aggregation": "token_mean"}, "token_mean"),
        ({"policy_loss": "gspo", "loss_aggregation": "token_mean"}, "token_mean"),
    ],
)
def test_the_aggregation_defaults_to_that_of_the_algorithm(
    options: dict[str, Any], expected: str
) -> None:
    """GSPO is a mean over sequences and Dr. GRPO a sum over a constant length by name alone. Rows
    of different lengths: the three scalars differ."""
    batch = _batch(old_logprobs=_random(0, -2, -1), advantages=_random(2, 1, 2))
    outputs = Outputs(_random(3, -2, -1))
    by_name = {
        name: float(_objective(**(options | {"loss_aggregation": name}))(outputs, batch)[0])
        for name in AGGREGATIONS
    }
    assert len(set(by_name.values())) == 3
    assert float(_objective(**options)(outputs, batch)[0]) == by_name[expected]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("dual_clip", [None, 1.1])
def test_the_gradient_with_entropy_and_kl_is_that_of_finite_differences(
    aggregation: str, estimator: str, dual_clip: float | None
) -> None:
    """Log-ratios within +-0.5: some tokens are clipped on either side, none is on a bound."""
    old = _random(0, -2.0, -1.0)
    batch = _batch(old_logprobs=old, ref_logprobs=_random(1, -2, -1), advantages=_random(2, -2, 2))
    objective = _objective(
        0.3,
        loss_aggregation=aggregation,
        entropy_coef=0.1,
        kl={"estimator": estimator},
        policy_loss={"kind": "ppo", "clip_low": 0.1, "clip_high": 0.2, "dual_clip": dual_clip},
    )

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        return objective(Outputs(logprobs=logprobs, entropy=entropy), batch)[0]

    inputs = old + _random(3, -0.5, 0.5), _random(4, 0.1, 2.0)
    _, stats = objective(Outputs(logprobs=inputs[0], entropy=inputs[1]), batch)
    assert 0 < stats.floats()["clip_frac"] < 1, "both branches of the clip are tried"
    assert _gradient_is_right(loss, *inputs)


def test_reinforce_has_the_gradient_of_finite_differences() -> None:
    batch = _batch(old_logprobs=_random(0, -2, -1), advantages=_random(2, -2, 2))
    objective = _objective(policy_loss="reinforce", entropy_coef=0.1)

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        return objective(Outputs(logprobs=logprobs, entropy=entropy), batch)[0]

    assert _gradient_is_right(loss, _random(3, -2, -1), _random(4, 0.1, 2))


@pytest.mark.parametrize("value_clip", [None, 0.2])
def test_the_critics_gradient_is_that_of_finite_differences(value_clip: float | None) -> None:
    batch = _batch(values=_random(0, -1, 1), returns=_random(1, -1, 1))
    objective = value_objective(value_clip=value_clip)

    def loss(values: Tensor) -> Tensor:
        return objective(Outputs(values=values), batch)[0]

    assert _gradient_is_right(loss, _random(2, -1, 1))


def test_the_reward_models_gradient_is_that_of_finite_differences() -> None:
    batch = _pairs(margins=torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64))
    objective = reward_model_objective()

    def loss(values: Tensor) -> Tensor:
        return objective(Outputs(values=values), batch)[0]

    assert _gradient_is_right(loss, torch.linspace(-1, 2, 8, dtype=torch.float64))


def test_the_value_of_every_term_by_hand() -> None:
    """One row of two tokens, ratios 1, advantages 1 and -2: policy loss (-1 + 2) / 2 = 0.5.
    Entropy 0.3 and 0.5 with weight 0.1: -0.1 x 0.4 = -0.04. Log-ratio to the reference ln 2 and 0:
    k3 is exp(-ln 2) - 1 + ln 2 = ln 2 - 0.5 and 0, with weight 0.2: 0.2 x (ln 2 - 0.5) / 2."""
    rows = rows_to_batch([[9, 8, 8]], [[False, True, True]], prompt_lens=[1])
    logprobs = torch.tensor([0.0, -1.0, -2.0], dtype=torch.float64)
    batch = replace(
        rows,
        old_logprobs=logprobs,
        ref_logprobs=logprobs - torch.tensor([0.0, math.log(2), 0.0]),
        advantages=torch.tensor([0.0, 1.0, -2.0], dtype=torch.float64),
    )
    entropy = torch.tensor([0.0, 0.3, 0.5], dtype=torch.float64)
    loss, stats = _objective(0.2, entropy_coef=0.1)(Outputs(logprobs, entropy), batch)
    kl = (math.log(2) - 0.5) / 2
    # 1e-7: ln 2 went through fp32.
    assert float(loss) == pytest.approx(0.5 - 0.04 + 0.2 * kl, abs=1e-7)
    measured = stats.floats()
    assert measured["policy_loss"] == pytest.approx(0.5)
    assert measured["entropy"] == pytest.approx(0.4)
    assert measured["kl"] == pytest.approx(kl, abs=1e-7)
    assert measured["loss"] == float(loss)


def test_kl_that_is_in_the_reward_is_measured_and_not_in_the_loss() -> None:
    logprobs = _random(0, -2, -1)
    batch = _batch(old_logprobs=logprobs, ref_logprobs=_random(1, -2, -1), advantages=logprobs * 0)
    kl = {"placement": "reward", "estimator": "k1"}
    loss, stats = _objective(0.3, kl=kl)(Outputs(logprobs), batch)
    assert float(loss) == 0.0
    assert stats.floats()["kl"] != 0.0


def test_without_old_logprobs_the_policy_is_its_own_old_policy() -> None:
    """Value and gradient are those of old = current: d loss / d logprob = -A / 6 tokens."""
    logprobs, advantages = _random(0, -2, -1), _random(2, -2, 2)
    leaf = logprobs.clone().requires_grad_()
    loss, stats = _objective()(Outputs(leaf), _batch(advantages=advantages))
    loss.backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, -advantages / 6)
    assert stats.floats()["ratio"] == 1.0 and stats.floats()["clip_frac"] == 0.0


def test_a_correction_multiplies_each_tokens_loss_by_its_weight() -> None:
    """A row of two tokens, ratios 1, advantages 1 and -2; the sampler gave them 1/4 and 2 times the
    trainer's probability, so weights 4, cut to 2, and 1/2: (-1 x 2 + 2 x 0.5) / 2 = -0.5."""
    rows = rows_to_batch([[9, 8, 8]], [[False, True, True]], prompt_lens=[1])
    logprobs = torch.tensor([0.0, -1.0, -2.0], dtype=torch.float64)
    batch = replace(
        rows,
        old_logprobs=logprobs,
        sampler_logprobs=logprobs - torch.tensor([0.0, math.log(4), math.log(0.5)]),
        advantages=torch.tensor([0.0, 1.0, -2.0], dtype=torch.float64),
    )
    loss, stats = _objective(correction={"mode": "truncate", "high": 2.0})(Outputs(logprobs), batch)
    # 1e-7: ln 4 in fp32
    assert float(loss) == pytest.approx(-0.5, abs=1e-7)
    assert stats.floats()["correction_frac"] == 0.5


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("policy_loss", ["ppo", "gspo", "cispo", "vespo", "reinforce"])
@pytest.mark.parametrize("level", [None, "token", "sequence", "geometric"])
def test_losses_and_stats_of_micro_batches_add_up_to_those_of_the_step(
    aggregation: str, policy_loss: str, level: str | None
) -> None:
    old = _random(0, -2, -1)
    batch = _batch(
        old_logprobs=old,
        ref_logprobs=_random(1, -2, -1),
        sampler_logprobs=old + _random(5, -0.5, 0.5),
        advantages=_random(2, -2, 2),
    )
    logprobs, entropy = old + _random(3, -0.5, 0.5), _random(4, 0.1, 2.0)
    objective = _objective(
        0.3,
        loss_aggregation=aggregation,
        entropy_coef=0.1,
        policy_loss=policy_loss,
        correction=None if level is None else {"level": level, "mode": "clip"},
        off_policy_mask=0.05,
    )
    whole, whole_stats = objective(Outputs(logprobs, entropy), batch)
    total, stats = 0.0, Stats()
    for rows, tokens in (([0], slice(0, 3)), ([1, 2], slice(3, 9))):
        outputs = Outputs(logprobs[tokens], entropy[tokens])
        loss, part = objective(outputs, batch.select(rows))
        total, stats = total + float(loss), stats + part
    # 1e-12: float64 sums in another order; some stats are fp32 ratios of counts.
    assert total == pytest.approx(float(whole), rel=1e-12)
    for name, value in whole_stats.floats().items():
        assert stats.floats()[name] == pytest.approx(value, rel=1e-6), name


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_losses_by_row_need_all_rows_of_a_sample_together(kind: str) -> None:
    config = AlgorithmConfig(policy_loss={"kind": kind})  # type: ignore[arg-type]
    assert config.reduces_over_samples == (kind in BY_ROW)


def test_negative_samples_far_from_the_policy_leave_the_policy_loss_alone() -> None:
    """Rows of 2, 1 and 3 tokens; the sampler's log-prob minus the policy's has means 0.5, 0.9 and
    0.1, and the threshold is 0.4. A: -1, 2, -3. Only row 0 leaves: of -A x r = (1, 1), -2, (3, 3,
    3) rest -2 + 9 = 7, over 6 tokens. NaN of the sampler counts as no difference: row 0 has 0.1."""
    old = _random(3, -2, -1)
    gaps = torch.tensor([0, 0.2, 0.8, 0, 0.9, 0, 0.1, 0.1, 0.1], dtype=torch.float64)
    advantages = torch.tensor([0, -1.0, -1, 0, 2, 0, -3, -3, -3], dtype=torch.float64)
    batch = _batch(old_logprobs=old, sampler_logprobs=old + gaps, advantages=advantages)
    objective = _objective(off_policy_mask=0.4)
    loss, stats = objective(Outputs(old), batch)
    assert float(loss) == pytest.approx(7 / 6)
    assert stats.floats()["off_policy_mask_frac"] == pytest.approx(2 / 6)
    gaps[2] = math.nan
    kept, stats = objective(Outputs(old), replace(batch, sampler_logprobs=old + gaps))
    assert float(kept) == pytest.approx(9 / 6) and stats.floats()["off_policy_mask_frac"] == 0


def test_the_kl_by_the_ratio_has_the_gradient_of_the_kl() -> None:
    """A vocabulary of 3 tokens, each once in a batch, weighted by its probability when it was
    sampled: the mean of r x k3 is KL(policy, reference), and so is its gradient, also off the
    policy that sampled. The plain estimator's is another."""
    logits = torch.tensor([0.3, -0.8, 0.1], dtype=torch.float64, requires_grad=True)
    sampled = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.7, 0.1], dtype=torch.float64).log()
    policy = logits.log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum()
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    found = []
    for corrected in (True, False):
        objective = _objective(1.0, kl={"bias_correction": corrected})
        total = torch.zeros((), dtype=torch.float64)
        for token in range(3):
            rows = rows_to_batch([[9, token]], [[False, True]], prompt_lens=[1], group_ids=[0])
            columns = {"old_logprobs": sampled.log(), "ref_logprobs": reference}
            columns = {k: torch.stack([v[0] * 0, v[token]]) for k, v in columns.items()}
            batch = replace(rows, **columns, advantages=torch.zeros(2, dtype=torch.float64))
            both = torch.stack([policy[0] * 0, policy[token]])
            total = total + sampled[token] * objective(Outputs(both), batch)[0]
        found.append(
            (float(total.detach()), torch.autograd.grad(total, logits, retain_graph=True)[0])
        )
    # 1e-12: fp64
    assert found[0][0] == pytest.approx(float(exact.detach()), abs=1e-12)
    torch.testing.assert_close(found[0][1], expected, atol=1e-12, rtol=0)
    assert (found[1][1] - expected).abs().max() > 0.01


def test_the_sft_loss_is_the_mean_over_trained_tokens() -> None:
    """Log-probs -1, -2 | -3 | 0, 0, -6: 12 / 6 = 2."""
    logprobs = torch.tensor([0, -1, -2, 0, -3, 0, 0, 0, -6], dtype=torch.float64)
    loss, stats = sft_objective()(Outputs(logprobs), _batch())
    assert float(loss) == 2.0 and stats.floats()["nll"] == 2.0
    loss, stats = sft_objective("dft")(Outputs(logprobs), _batch())
    assert float(loss) == pytest.approx(float(dft(logprobs).sum()) / 6)
    assert stats.floats()["nll"] == 2.0


def _pairs(**arrays: Tensor) -> Batch:
    rows = [[9, 8] for _ in range(4)]
    made = rows_to_batch(rows, [[False, True]] * 4, prompt_lens=[1] * 4, group_ids=[0, 0, 1, 1])
    return replace(made, rows_per_unit=2, **arrays)


def test_the_reward_models_loss_is_the_mean_over_pairs() -> None:
    """Scores 2 over 0 and 1 over 1: (-ln sigmoid(2) + ln 2) / 2; one of two pairs is right."""
    values = torch.tensor([7, 2, 7, 0, 7, 1, 7, 1], dtype=torch.float64)
    loss, stats = reward_model_objective()(Outputs(values=values), _pairs())
    expected = (math.log(1 + math.exp(-2)) + math.log(2)) / 2
    assert float(loss) == pytest.approx(expected, rel=1e-12)
    measured = stats.floats()
    assert measured["accuracy"] == 0.5 and measured["score_margin"] == 1.0
