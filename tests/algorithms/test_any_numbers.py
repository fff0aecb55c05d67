"""Non-finite and very large values: losses ignore values outside their mask, and give finite
numbers, or a defined result, for values inside."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.algorithms import ADVANTAGES, POLICY_LOSSES
from burnish.algorithms.advantages import gae, return_to_go
from burnish.algorithms.correction import correction_weights
from burnish.algorithms.distill import DIVERGENCES, SLOPES
from burnish.algorithms.kl import MAX_GAP, k3
from burnish.algorithms.policy_losses import MAX_LOG_RATIO, gspo, ppo
from burnish.algorithms.running import MAX_VALUE, RunningMoments
from burnish.config.algorithm import AlgorithmConfig
from burnish.config.preference_losses import (
    DiscopopLoss,
    DpoLoss,
    ExoLoss,
    IpoLoss,
    KtoLoss,
    OrpoLoss,
    SimpoLoss,
)
from burnish.jobs.distill import distill_objective
from burnish.jobs.preference import preference_objective
from burnish.models.logprobs import Head, token_logprobs
from burnish.rewards.base import RewardError
from burnish.steps.credit import MAX_REWARD, assign_advantages
from burnish.steps.objectives import (
    policy_objective,
    process_objective,
    reward_model_objective,
    sft_objective,
    value_objective,
)
from burnish.tensors import whiten
from burnish.train.base import Loss, Outputs
from burnish.types import Batch, rows_to_batch

LENGTHS = [(3, 4), (3, 2), (2, 6), (4, 1)]
"""Prompt and response tokens of four rows, which are two pairs."""
CLIPS = {
    "ppo": {"clip_low": 0.2, "clip_high": 0.2},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"clip_low": 1.0, "clip_high": 2.0},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "vespo": {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
    "reinforce": {},
}


def _policy(kind: str, **more: Any) -> Loss:
    config = AlgorithmConfig(policy_loss=kind, entropy_coef=0.01, **more)
    return policy_objective(config, max_len=8, kl_coef=lambda: 0.1)


def _corrected(level: str, mode: str) -> Loss:
    return _policy("ppo", correction={"level": level, "mode": mode})


EXO = ExoLoss(kind="exo_pair")
LOSSES: dict[str, Loss] = {
    **{f"{kind}, {k}": _policy(kind, kl={"init_kl_coef": 0.1, "estimator": k})
       for kind in POLICY_LOSSES for k in ("k1", "k2", "k3")},
    "ppo, dual clip": _policy({"kind": "ppo", "dual_clip": 3.0}),  # type: ignore[arg-type]
    "gspo, dual clip": _policy({"kind": "gspo", "dual_clip": 3.0}),  # type: ignore[arg-type]
    **{f"{level} {mode}": _corrected(level, mode)
       for level in ("token", "sequence", "geometric") for mode in ("truncate", "clip", "mask")},
    "critic": value_objective(value_clip=0.2),
    "critic, no clip": value_objective(value_clip=None),
    "sft": sft_objective(),
    "dft": sft_objective("dft"),
    "masked off-policy, KL by the ratio": _policy(
        "cispo", off_policy_mask=0.1, kl={"init_kl_coef": 0.1, "bias_correction": True}
    ),
    "process": process_objective(),
    "reward model": reward_model_objective("bradley_terry", center_coef=0.1),
    "distill": distill_objective(temperature=2.0, nll_weight=0.5),
    "dpo": preference_objective(DpoLoss(), nll_coef=0.1),
    "ipo": preference_objective(IpoLoss(kind="ipo")),
    "discopop": preference_objective(
        DiscopopLoss(kind="discopop"), divergence="forward_kl", ld_alpha=0.5, added=[(EXO, 0.5)]
    ),
    "simpo": preference_objective(SimpoLoss(kind="simpo")),
    "orpo": preference_objective(OrpoLoss(kind="orpo")),
    "kto": preference_objective(KtoLoss(kind="kto")),
}  # fmt: skip
OUTPUTS = ("logprobs", "entropy", "values", "divergence", "teacher_kl", "agreement")
COLUMNS = ("sampler_logprobs", "old_logprobs", "ref_logprobs", "advantages", "values", "returns")


def made(name: str, seed: int, scale: float = 1.0) -> tuple[dict[str, Tensor], Batch]:
    """Outputs of a model and a batch with all columns; log-probs are negative and ``scale`` in
    size, advantages, values and returns up to 1e15."""
    g = torch.Generator().manual_seed(seed)
    rows = [[7] * (p + n) for p, n in LENGTHS]
    masks = [[i >= p and i != p + 2 for i in range(p + n)] for p, n in LENGTHS]  # with a gap
    batch = rows_to_batch(rows, masks, prompt_lens=[p for p, _ in LENGTHS])
    count = batch.tokens.numel()
    size = min(scale, 1e15)
    sizes = {"advantages": size, "values": size, "returns": size}
    columns: dict[str, Any] = {
        column: torch.randn(count, generator=g) * sizes[column]
        if column in sizes
        else -torch.rand(count, generator=g) * scale
        for column in COLUMNS
    }
    if name == "process":
        columns["step_labels"] = torch.rand(count, generator=g)
    batch = replace(
        batch,
        **columns,
        labels=torch.tensor([True, False, True, False]),
        rows_per_unit=1 if name == "kto" else 2,
        num_sequences=4,
        kl_estimate=0.1,
    )
    outputs = {column: -torch.rand(count, generator=g) * scale for column in OUTPUTS}
    outputs["values"] = outputs["values"].clamp(min=-1e15)
    return outputs, batch


def computed(name: str, tensors: dict[str, Tensor], batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """The loss, and its gradient at the mask (at the last tokens of rows, for scores)."""
    leaves = {n: t.clone().requires_grad_() for n, t in tensors.items()}
    loss, _ = LOSSES[name](Outputs(**leaves), batch)
    given = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return loss.detach(), [g for g in given if g is not None]


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=15)
@given(seed=st.integers(0, 999), bad=st.sampled_from([math.nan, math.inf, -math.inf, 3e38]))
def test_values_outside_the_mask_change_neither_loss_nor_gradient(
    name: str, seed: int, bad: float
) -> None:
    outputs, batch = made(name, seed)
    outside = ~batch.action_mask
    if name == "reward model":  # reads the last token of each row
        outside = torch.ones_like(outside)
        outside[batch.offsets[1:] - 1] = False
    expected, gradient = computed(name, outputs, batch)
    assert any(bool(g.any()) for g in gradient)
    changed = {n: t.masked_fill(outside, bad) for n, t in outputs.items()}
    columns = {n: vars(batch)[n] for n in (*COLUMNS, "step_labels")}
    filled = {n: t.masked_fill(outside, bad) for n, t in columns.items() if t is not None}
    found, own = computed(name, changed, replace(batch, **filled))
    assert torch.equal(found, expected)
    for ours, theirs in zip(own, gradient, strict=True):
        assert torch.equal(ours, theirs), "and 0 outside, not 0 x NaN"


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=15)
@given(seed=st.integers(0, 999), power=st.integers(-30, 15))
def test_finite_numbers_of_any_size_give_a_finite_loss_and_gradient(
    name: str, seed: int, power: int
) -> None:
    """Log-probs, values, advantages and returns up to 1e15."""
    outputs, batch = made(name, seed, 10.0**power)
    loss, gradient = computed(name, outputs, batch)
    assert bool(loss.isfinite())
    assert all(bool(g.isfinite().all()) for g in gradient)


# ---- advantages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [18, 19, 20, 30, 38])
def test_advantages_of_very_large_rewards_are_those_of_small_ones(power: int) -> None:
    """Rewards 1, 0, 0, 1 times 10^power: grpo divides by the spread, so the advantages do not
    change. (The square of 1.8e19 overflows fp32, and a division by inf gave 0.)"""
    groups = torch.zeros(4, dtype=torch.int64)
    rewards = torch.tensor([1.0, 0, 0, 1]) * 10.0**power
    small = ADVANTAGES["grpo"](torch.tensor([1.0, 0, 0, 1]), groups, eps=1e-12)
    # 1e-6: 10^power is rounded to fp32
    torch.testing.assert_close(ADVANTAGES["grpo"](rewards, groups), small, atol=1e-6, rtol=0)
    white = whiten(rewards, torch.ones(4, dtype=torch.bool))
    torch.testing.assert_close(white, torch.tensor([1.0, -1, -1, 1]), atol=1e-6, rtol=0)
    assert white.dtype == torch.float32
    for name in ("dr_grpo", "rloo", "opo", "reinforce_pp_baseline"):
        found = ADVANTAGES[name](rewards, groups, lengths=torch.tensor([1, 2, 3, 4]))
        assert bool(found.isfinite().all()) and found.dtype == torch.float32, name


def test_differences_of_rewards_at_both_ends_of_fp32_are_finite() -> None:
    """3e38 - -3e38 overflows fp32; deviation 3e38, std of two 3e38 sqrt(2): 1 / sqrt(2)."""
    found = ADVANTAGES["grpo"](torch.tensor([3e38, -3e38]), torch.zeros(2, dtype=torch.int64))
    # 1e-6: fp32 result
    torch.testing.assert_close(
        found, torch.tensor([0.5, -0.5]).mul(math.sqrt(2)), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("kind", ["dr_grpo", "rloo", "opo", "reinforce_pp", "gae"])
def test_rewards_whose_losses_would_overflow_are_refused_with_their_size(kind: str) -> None:
    _, batch = made("ppo", 0)
    white = {"whiten": False} if kind in ("reinforce_pp", "gae") else {}
    config = AlgorithmConfig(advantage={"kind": kind, **white})  # type: ignore[arg-type]
    batch = replace(batch, group_ids=torch.tensor([0, 0, 1, 1]))
    large = replace(batch, rewards=torch.tensor([1e20, 0.0, 1.0, 0.0]))
    with pytest.raises(RewardError, match=r"is 1e\+20; above 1e\+15"):
        assign_advantages(large, config, kl_coef=0.0)
    within = replace(batch, rewards=torch.tensor([MAX_REWARD, 0.0, 1.0, 0.0]) / 4)
    found = assign_advantages(within, config, kl_coef=0.0).advantages
    assert found is not None and bool(found.isfinite().all())


def test_group_advantages_take_rewards_of_any_size_but_not_infinite_ones() -> None:
    _, batch = made("ppo", 0)
    batch = replace(batch, group_ids=torch.tensor([0, 0, 1, 1]))
    large = replace(batch, rewards=torch.tensor([1e30, 0.0, 1.0, 0.0]))
    found = assign_advantages(large, AlgorithmConfig(), kl_coef=0.0).advantages
    assert found is not None
    # deviations of +-1/2 over a standard deviation of sqrt(1/2), in both groups
    assert found[batch.action_mask].abs().tolist() == pytest.approx([math.sqrt(0.5)] * 11, abs=2e-6)
    endless = replace(batch, rewards=torch.tensor([math.inf, 0.0, 1.0, 0.0]))
    with pytest.raises(RewardError, match="rollout is inf"):
        assign_advantages(endless, AlgorithmConfig(), kl_coef=0.0)


def test_running_moments_take_large_numbers_and_refuse_larger_ones() -> None:
    moments = RunningMoments()
    moments.update([1e149, -1e149])
    assert moments.std == pytest.approx(1e149) and moments.mean == 0
    RunningMoments().update([MAX_VALUE, -MAX_VALUE])
    for bad in (1.01e150, -1e200, math.inf, math.nan):
        with pytest.raises(ValueError, match="cannot be normalized"):
            moments.update([0.0, bad])
    assert moments.count == 2, "unchanged"


@settings(max_examples=30)
@given(
    seed=st.integers(0, 999),
    length=st.sampled_from([1, 5, 32, 33, 70, 1100]),
    bad=st.sampled_from([math.nan, math.inf, -math.inf]),
    gamma=st.sampled_from([1.0, 0.9, 0.0]),
)
def test_a_reward_that_is_not_finite_reaches_no_later_token(
    seed: int, length: int, bad: float, gamma: float
) -> None:
    """In blocks of 32 a product with a triangle of zeros would: 0 x NaN is NaN."""
    g = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 2, length, generator=g)
    mask = torch.rand(2, length, generator=g) < 0.8
    mask[0, 0] = True
    places = mask[0].nonzero()[:, 0]
    at = int(places[int(torch.randint(len(places), (1,), generator=g))])
    broken = rewards.clone()
    broken[0, at] = bad
    clean, found = (return_to_go(r, mask, gamma=gamma) for r in (rewards, broken))
    later = mask.clone()
    later[0, : at + 1] = False
    assert torch.equal(found[later], clean[later]) and bool(found[~mask].eq(0).all())
    reached = slice(0 if gamma else at, at + 1)  # nothing is added up with a discount of 0
    assert not bool(found[0, reached][mask[0, reached]].isfinite().any())
    assert torch.equal(found[0, : reached.start], clean[0, : reached.start])
    plain = gae(rewards, values, mask, gamma=gamma, lam=0.9)
    broken_values = values.clone()
    broken_values[0, at] = bad
    for ours, theirs in zip(
        gae(rewards, broken_values, mask, gamma=gamma, lam=0.9), plain, strict=True
    ):
        assert torch.equal(ours[later], theirs[later])
        assert not bool(ours[0, at].isfinite())


# ---- policy losses -------------------------------------------------------------------------------


def test_k3_is_linear_above_ten_nats() -> None:
    """At d = -10: e^10 - 1 - 10 = 22015.466, slope -(e^10 - 1) = -22025.466; at -10.5, -25 and
    -100: 0.5, 15 and 90 slopes more. Above, it is the estimator."""
    d = torch.tensor([-100.0, -25, -10.5, -10, -3, 0, 3], requires_grad=True)
    value = k3(d, torch.zeros(7))
    (slope,) = torch.autograd.grad(value.sum(), d)
    edge, steep = math.exp(MAX_GAP) - 1 - MAX_GAP, math.exp(MAX_GAP) - 1
    beyond = [edge + nats * steep for nats in (90, 15, 0.5)]
    expected = [*beyond, edge, math.exp(3) - 4, 0, math.exp(-3) + 2]
    assert value.tolist() == pytest.approx(expected, rel=1e-6)  # fp32
    slopes = [*[-steep] * 4, 1 - math.exp(3), 0, 1 - math.exp(-3)]
    assert slope.tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_above_the_largest_ratio_the_ratio_has_no_gradient(kind: str, advantage: float) -> None:
    """One-token responses, log-ratio 21 and 500. (cispo and reinforce have the gradient of the
    log-prob itself, at a weight of at most 3.)"""
    x = torch.tensor([[-1.0], [-0.5]], requires_grad=True)
    old = torch.tensor([[-22.0], [-500.5]])
    mask = torch.ones(2, 1, dtype=torch.bool)
    loss, _ = POLICY_LOSSES[kind](x, old, torch.full((2, 1), advantage), mask, **CLIPS[kind])
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    largest = {"cispo": 3.0, "reinforce": 1.0}.get(kind, 0.0)
    assert gradient.abs().tolist() == [[largest], [largest]]
    assert float(loss.detach().abs().max()) <= math.exp(MAX_LOG_RATIO) * 1.001


def test_dual_clip_bounds_gspo_as_it_bounds_ppo() -> None:
    """Rows of two tokens, log-ratios ln 5 each, A = -1: s = 5, L = 5; with c = 3: L = 3, no
    gradient. A = 1: clipped at 1.2 as before. One row of two has the bound."""
    x = torch.full((2, 2), math.log(5.0), requires_grad=True)
    advantages = torch.tensor([[-1.0], [1.0]]).expand(2, 2)
    mask = torch.ones(2, 2, dtype=torch.bool)
    clips = {"clip_low": 0.2, "clip_high": 0.2}
    loss, stats = gspo(x, torch.zeros(2, 2), advantages, mask, dual_clip=3.0, **clips)
    assert loss.flatten().tolist() == pytest.approx([3, 3, -1.2, -1.2])
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    assert not bool(gradient.any())
    assert stats.floats()["dual_clip_frac"] == 0.5
    single, same = ppo(x, torch.zeros(2, 2), advantages, mask, dual_clip=3.0, **clips)
    assert single.tolist() == loss.tolist()
    assert same.floats()["dual_clip_frac"] == 0.5
    unbound, stats = gspo(x, torch.zeros(2, 2), advantages, mask, **clips)
    assert unbound[0].tolist() == pytest.approx([5, 5])
    assert "dual_clip_frac" not in stats.means


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_log_probs_that_are_not_finite_have_the_limit_or_nan_at_their_token(kind: str) -> None:
    """Rows of one token. A policy with log-prob -inf: ratio 0. A sampler with log-prob -inf: the
    largest ratio. NaN: NaN, at this token only. A = 0: 0, except for NaN."""
    x = torch.tensor([[-math.inf], [-1.0], [math.nan], [-1.0], [-math.inf]], requires_grad=True)
    old = torch.tensor([[-1.0], [-math.inf], [-1.0], [-1.0], [-1.0]])
    advantages = torch.tensor([[1.0], [1.0], [1.0], [1.0], [0.0]])
    mask = torch.ones(5, 1, dtype=torch.bool)
    loss, _ = POLICY_LOSSES[kind](x, old, advantages, mask, **CLIPS[kind])
    found = loss.detach()[:, 0].tolist()
    assert math.isnan(found[2]) and math.isfinite(found[1]) and math.isfinite(found[3])
    assert found[4] == 0
    # cispo's weight is 0 there; reinforce has no ratio: an infinite loss, whose step is skipped
    limits = {"reinforce": math.inf, "sapo": -4 / (1 + math.e)}
    assert found[0] == pytest.approx(limits.get(kind, 0))
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    assert bool(gradient[[0, 1, 3, 4]].isfinite().all())


# ---- corrections, distillation, entropies --------------------------------------------------------


@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_nan_sampler_logprob_excludes_its_token_or_row(level: Any, mode: Any) -> None:
    """Two rows of two tokens and a masked one; the first token of row 0 is NaN. It counts as
    changed: 1 of 4 tokens, or 2 of 4."""
    old = torch.full((2, 3), -1.0)
    sampler = torch.tensor([[math.nan, -1.0, math.nan], [-1.0, -1.0, math.nan]])
    mask = torch.tensor([[True, True, False]] * 2)
    weights, stats = correction_weights(
        old, sampler, mask, level=level, mode=mode, low=0.5, high=2.0
    )
    first = [0.0, 1.0, 1.0] if level == "token" else [0.0, 0.0, 1.0]
    assert weights.tolist() == [first, [1.0, 1.0, 1.0]]
    found = stats.floats()
    assert found["correction_frac"] == (0.25 if level == "token" else 0.5)
    assert found["correction_max"] == 1.0 and math.isfinite(found["correction_weight"])
    nobody = correction_weights(
        old[:1], sampler[:1, :1].expand(1, 3), mask[:1], level=level, mode=mode, low=0.5, high=2.0
    )
    assert nobody[0].tolist() == [[0.0, 0.0, 1.0]]
    assert nobody[1].floats() == {
        "correction_weight": 0.0, "correction_frac": 1.0, "correction_max": 0.0,
        "weight": 0.0, "weight_square": 0.0,
    }  # fmt: skip
    lost = correction_weights(sampler, old, mask, level=level, mode=mode, low=0.5, high=2.0)[0]
    if mode != "mask":  # which leaves out whatever is not inside its bounds
        assert bool(lost[0, 0].isnan()), "a trainer's NaN is no sampler's: the step is skipped"


@pytest.mark.parametrize("name", DIVERGENCES)
def test_tokens_excluded_by_both_do_not_change_the_divergence(name: str) -> None:
    """Logits with two entries of -inf (padding of a vocabulary): the divergence and its slope are
    those without them, and 0 there."""
    options = {"beta": 0.3} if name == "jsd" else {}
    p, q = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0)).double()
    pad = torch.full((4, 2), -math.inf).double()
    wide = [torch.cat([x, pad], 1).log_softmax(-1) for x in (p, q)]
    plain = [x.log_softmax(-1) for x in (p, q)]
    torch.testing.assert_close(
        DIVERGENCES[name](*wide, **options), DIVERGENCES[name](*plain, **options)
    )
    slope = SLOPES[name](*wide, **options)
    torch.testing.assert_close(slope[:, :6], SLOPES[name](*plain, **options))
    assert not bool(slope[:, 6:].any())


def test_a_token_excluded_by_one_has_the_divergence_of_the_definition() -> None:
    """p = (1, 0), q = (1/2, 1/2): KL(q || p) is infinite, KL(p || q) = ln 2; the Jensen-Shannon
    divergence of one half: m = (3/4, 1/4); (ln(2/3) + ln 2) / 4 + ln(4/3) / 2 = 0.215762."""
    p = torch.tensor([[0.0, -math.inf]]).double()
    q = torch.tensor([[0.5, 0.5]]).double().log()
    assert float(DIVERGENCES["forward_kl"](p, q)) == math.inf
    assert float(DIVERGENCES["reverse_kl"](p, q)) == pytest.approx(math.log(2))
    assert float(DIVERGENCES["jsd"](p, q, beta=0.5)) == pytest.approx(0.215762, abs=1e-6)
    for name in DIVERGENCES:
        options = {"beta": 0.5} if name == "jsd" else {}
        assert bool(SLOPES[name](p, q, **options).isfinite().all())


@pytest.mark.parametrize("chunk", [2, 8])
def test_entropies_and_gradients_ignore_logits_of_minus_infinity(chunk: int) -> None:
    """A bias of -inf excludes two tokens: log-probs, entropies and gradients are those of the
    others."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(4, 3, generator=g), torch.randn(6, 3, generator=g)
    bias = torch.tensor([0.0, 0, 0, 0, -math.inf, -math.inf])
    results = []
    for rows in (6, 4):
        x = hidden.clone().requires_grad_()
        head = Head(weight[:rows], bias[:rows], chunk_tokens=chunk)
        logprobs, entropy = token_logprobs(x, torch.tensor([0, 1, 2, 3]), head, with_entropy=True)
        assert entropy is not None
        (gradient,) = torch.autograd.grad((logprobs + 0.5 * entropy).sum(), x)
        results.append((logprobs.detach(), entropy.detach(), gradient))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)  # sums of 6 terms, not 4
