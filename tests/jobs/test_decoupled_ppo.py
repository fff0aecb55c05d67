"""Stale samples: the losses against a loop in Python floats, and their mean against the gradient of
the policy.

The behavior policy sampled the tokens (with several versions), the proximal policy is the trainer's
at the start of the update, and the current policy gets the gradient.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from burnish.batches import groups_to_batch
from burnish.config.algorithm import AlgorithmConfig
from burnish.steps.objectives import policy_objective
from burnish.steps.rl import RL, age_metrics, with_old_policy
from burnish.steps.updates import Updates
from burnish.train.base import Loss, Outputs, StepStats
from burnish.types import Batch, Group, Prompt, Sample, Stats, TokenRow, rows_to_batch

AGES = {3: 9, 5: 8, 11: 1, 12: 0}
"""Policy versions and their ages: two optimizer steps in some RL steps, and one age not in use."""


def row(prompt: int, turns: Sequence[int], versions: Sequence[int], seed: int) -> TokenRow:
    """Response tokens of ``turns`` (-1: an observation) with random log-probs of the sampler."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = (-2.5 + torch.rand(len(turns), generator=generator)).tolist()
    return TokenRow(
        prompt_ids=(7,) * prompt,
        response_ids=tuple(range(10, 10 + len(turns))),
        sampler_logprobs=tuple(
            x if turn >= 0 else 0.0 for x, turn in zip(logprobs, turns, strict=True)
        ),
        action_mask=tuple(turn >= 0 for turn in turns),
        versions=tuple(versions),
        turns=tuple(turns),
    )


def sample(name: str, group: int, *rows: TokenRow) -> Sample:
    *earlier, last = rows
    data: dict[str, Any] = dict(vars(last))
    more: dict[str, Any] = {"text": "", "finish_reason": "stop", "reward": 1.0}
    return Sample(name, "p", group, **data, **more, earlier_rows=tuple(earlier))


def groups() -> list[Group]:
    """Group 0: an episode of three rows, whose rows and turns mix versions, and a single response
    of one version. Group 1: two responses that an update interrupted. An observation has a version
    without an age."""
    episode = sample(
        "a",
        0,
        row(2, (1, 1), (11, 11), 1),
        row(3, (0, 0, -1, 2, 2), (3, 3, 99, 5, 11), 2),
        row(1, (3, -1, 4), (11, 99, 12), 3),
    )
    own = [
        [episode, sample("b", 0, row(1, (0, 0, 0), (11, 11, 11), 4))],
        [sample(f"{i}", 1, row(2, (0,) * 5, (11, 11, 12, 12, 12), 5 + i)) for i in range(2)],
    ]
    return [Group(i, Prompt("p", (7,), ""), tuple(members)) for i, members in enumerate(own)]


def near(logprobs: Tensor, mask: Tensor, seed: int, size: float) -> Tensor:
    """fp64 log-probs that differ from ``logprobs`` by up to ``size``."""
    generator = torch.Generator().manual_seed(seed)
    noise = (2 * torch.rand(mask.numel(), generator=generator, dtype=torch.float64) - 1) * size
    return torch.where(mask, logprobs.double() + noise, 0.0)


def objective_of(config: AlgorithmConfig) -> Loss:
    return policy_objective(config, max_len=9, kl_coef=lambda: 0.0, max_staleness=9)


@dataclass
class Found:
    """Loss, gradient by token, and statistics, computed one token at a time in Python floats."""

    loss: float
    gradient: dict[int, float]
    stats: dict[str, float]


Columns = dict[str, list[float]]


def by_hand(batch: Batch, columns: Columns, loss: dict[str, Any], bounds: Any, level: str) -> Found:
    """L = -mean of w min(r A, clip(r) A), with the definitions of docs/algorithms.md.

    Nothing of the package is called, except to read the batch."""
    members: dict[int, list[int]] = defaultdict(list)
    sample_of = batch.token_samples.tolist()
    for t in batch.action_mask.nonzero()[:, 0].tolist():
        members[sample_of[t]].append(t)
    count = sum(map(len, members.values()))
    new, old, behavior, advantage = (columns[n] for n in ("new", "old", "behavior", "advantage"))
    low, high = 1 - loss["clip_low"], 1 + loss["clip_high"]
    total, gradient, weights, changed = 0.0, dict[int, float](), list[float](), 0
    for tokens in members.values():
        size = len(tokens)
        share = 1 / (len(members) * size) if loss["kind"] == "gspo" else 1 / count
        mean_ratio = math.exp(sum(new[t] - old[t] for t in tokens) / size)
        gaps = [old[t] - behavior[t] for t in tokens]
        joint = sum(gaps) / (size if level == "geometric" else 1)
        for t, gap in zip(tokens, gaps, strict=True):
            raw = math.exp(gap if level == "token" else joint)
            w = bounds(raw) if level != "none" else 1.0
            weights.append(w if level != "none" else math.exp(new[t] - behavior[t]))
            changed += w != raw
            ratio = mean_ratio if loss["kind"] == "gspo" else math.exp(new[t] - old[t])
            held = min(max(ratio, low), high)
            if loss["kind"] == "cispo":
                value, slope = held * advantage[t] * new[t], held * advantage[t]
            else:
                value = min(ratio * advantage[t], held * advantage[t])
                slope = ratio * advantage[t] if value == ratio * advantage[t] else 0.0
            total -= share * w * value
            gradient[t] = -share * w * slope
    squares = sum(w * w for w in weights)
    stats = {"correction_frac": changed / count, "weight": sum(weights) / count}
    stats["effective_sample_frac"] = sum(weights) ** 2 / (count * squares)
    return Found(total, gradient, stats)


def by_age(batch: Batch, columns: Columns, trainer: list[float]) -> dict[str, float]:
    """Ratio and KL of ``trainer`` to the sampler for each age of :data:`AGES` in use."""
    assert batch.ages is not None
    apart: dict[str, list[float]] = defaultdict(list)
    for t in batch.action_mask.nonzero()[:, 0].tolist():
        name = {0: "age_0", 1: "age_1", 8: "age_8_up", 9: "age_8_up"}[int(batch.ages[t])]
        apart[name].append(trainer[t] - columns["behavior"][t])
    out = {}
    for name, gaps in apart.items():
        out[f"{name}_behavior_ratio"] = sum(map(math.exp, gaps)) / len(gaps)
        out[f"{name}_behavior_kl"] = sum(math.exp(g) - 1 - g for g in gaps) / len(gaps)
    return out


LOSSES: dict[str, dict[str, Any]] = {
    "ppo": {"kind": "ppo", "clip_low": 0.1, "clip_high": 0.15},
    "gspo": {"kind": "gspo", "clip_low": 0.02, "clip_high": 0.03},
    "cispo": {"kind": "cispo", "clip_low": 0.1, "clip_high": 0.15},
}
WEIGHTS: dict[str, tuple[dict[str, Any] | None, Any]] = {
    "token, truncate": ({"level": "token", "mode": "truncate", "high": 1.1}, lambda w: min(w, 1.1)),
    "token, mask": (
        {"level": "token", "mode": "mask", "low": 0.8, "high": 1.2},
        lambda w: w if 0.8 <= w <= 1.2 else 0.0,
    ),
    "sequence, truncate": (
        {"level": "sequence", "mode": "truncate", "high": 1.05},
        lambda w: min(w, 1.05),
    ),
    "geometric, clip": (
        {"level": "geometric", "mode": "clip", "low": 0.95, "high": 1.05},
        lambda w: min(max(w, 0.95), 1.05),
    ),
    "none": (None, None),
}


@pytest.mark.parametrize("several_updates", [False, True])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kind", LOSSES)
def test_the_decoupled_loss_is_that_of_a_loop_over_tokens(
    kind: str, weights: str, several_updates: bool
) -> None:
    """Rows of episodes, several versions. "none": old_policy=sampler, whose old log-probs are those
    of the sampler and whose updates have no other weight. With one update, the proximal policy is
    the current one: r = 1, nothing is clipped, and only w acts."""
    correction, bounds = WEIGHTS[weights]
    by_sampler = correction is None
    made = groups_to_batch(groups(), AGES)
    mask, sampler = made.action_mask, made.sampler_logprobs
    assert sampler is not None
    old = sampler.double() if by_sampler else near(sampler, mask, 1, 0.4)
    new = near(old, mask, 2, 0.3) if several_updates else old.clone()
    advantages = near(torch.zeros(mask.numel()), mask, 3, 2.0)
    if kind == "gspo":  # one advantage per sequence, as in the paper
        advantages = torch.where(mask, torch.tensor([1.5, -0.5, 0.7, -1.0])[made.token_samples], 0)
    given = old if several_updates or by_sampler else None
    batch = replace(made, old_logprobs=given, advantages=advantages, samples_together=True)
    config = AlgorithmConfig.model_validate(
        {
            "policy_loss": LOSSES[kind],
            "correction": correction,
            "old_policy": "sampler" if by_sampler else "trainer",
        }
    )
    leaf = new.clone().requires_grad_()
    loss, stats = objective_of(config)(Outputs(leaf), batch)
    loss.backward()

    columns = {"new": new, "old": old, "behavior": sampler, "advantage": advantages}
    floats = {name: column.double().tolist() for name, column in columns.items()}
    level = "none" if correction is None else str(correction["level"])
    wanted = by_hand(batch, floats, LOSSES[kind], bounds, level)
    # 1e-12: fp64 on both sides
    assert float(loss.detach()) == pytest.approx(wanted.loss, abs=1e-12)
    assert leaf.grad is not None
    gradient = torch.zeros(mask.numel(), dtype=torch.float64)
    for token, slope in wanted.gradient.items():
        gradient[token] = slope
    torch.testing.assert_close(leaf.grad, gradient, atol=1e-12, rtol=0)

    updates = Updates()
    updates.add("train", stats)
    updates.steps["train"] = [StepStats(grad_norm=1.0, lr=0.1, skipped=False)]
    metrics = updates.metrics()
    expected = by_age(batch, floats, floats["new" if by_sampler else "old"])
    expected["effective_sample_frac"] = wanted.stats["effective_sample_frac"]
    if not by_sampler:
        expected["correction_frac"] = wanted.stats["correction_frac"]
        expected["correction_weight"] = wanted.stats["weight"]
        assert 0 < expected["correction_frac"] < 1, "bounded and unbounded weights are both tried"
    for name, value in expected.items():
        # 1e-6: counts and correction_frac are fp32
        assert metrics[f"train/{name}"] == pytest.approx(value, abs=1e-6), name
    assert not {"train/weight", "train/weight_square", "train/age_2_behavior_kl"} & metrics.keys()
    if several_updates:
        assert 0 < metrics["train/clip_frac"] < 1, "both sides of the clip are tried"
    else:
        assert metrics["train/ratio"] == metrics["train/ratio_max"] == 1.0
        assert metrics["train/clip_frac"] == 0.0


def test_the_mean_loss_over_old_samples_has_the_gradient_of_the_policy() -> None:
    """Responses of one token from {0 .. 4}, drawn from a behavior policy b; the objective is the
    mean reward of the current policy p. The mean over b is an exact sum: a row per token, with b(x)
    x 5 in its advantage. Unbounded weights (with one update) and a ratio to the sampler within its
    bounds give the gradient of sum p(x) R(x); the loss without a weight does not."""
    behavior = torch.tensor([0.3, 0.1, 0.25, 0.2, 0.15], dtype=torch.float64)
    rewards = torch.tensor([1.0, -0.5, 0.0, 2.0, 0.25], dtype=torch.float64)
    logits = torch.tensor([0.2, -0.3, 0.1, 0.4, -0.2], dtype=torch.float64)
    rows = rows_to_batch([[9, x] for x in range(5)], [[False, True]] * 5, prompt_lens=[1] * 5)

    def put(values: Tensor) -> Tensor:
        return torch.stack([torch.zeros(5, dtype=torch.float64), values], dim=1).flatten()

    batch = replace(
        rows, advantages=put(5 * behavior * rewards), sampler_logprobs=put(behavior.log())
    )

    def gradient(batch: Batch, **options: Any) -> Tensor:
        leaf = logits.clone().requires_grad_()
        config = AlgorithmConfig.model_validate(options)
        objective_of(config)(Outputs(put(leaf.log_softmax(0))), batch)[0].backward()
        assert leaf.grad is not None
        return leaf.grad

    exact = logits.clone().requires_grad_()
    (-(exact.softmax(0) * rewards).sum()).backward()
    assert exact.grad is not None
    unbounded = {"mode": "truncate", "high": 1e6}
    wide = {"kind": "ppo", "clip_low": 0.9, "clip_high": 9.0}
    by_sampler = replace(batch, old_logprobs=batch.sampler_logprobs)
    for found in (
        gradient(batch, correction=unbounded),
        gradient(batch, correction=unbounded, policy_loss="reinforce"),
        gradient(by_sampler, old_policy="sampler", policy_loss=wide),
    ):
        # 1e-7: the truncated weights' bound is far, and fp64 elsewhere
        torch.testing.assert_close(found, exact.grad, atol=1e-7, rtol=0)
    assert (gradient(batch) - exact.grad).abs().max() > 0.02


def test_the_samplers_own_log_probs_need_no_pass_of_the_trainer() -> None:
    batch = groups_to_batch(groups(), AGES)
    config = SimpleNamespace(
        algorithm=AlgorithmConfig(old_policy="sampler"), needs_old_logprobs=False
    )
    run = cast("RL", SimpleNamespace(config=config, critic=None, policy=None))
    assert with_old_policy(batch, run).old_logprobs is batch.sampler_logprobs


def test_ages_of_tokens_and_groups_by_hand() -> None:
    """The oldest token of group 0 has age 9, that of group 1 age 1: mean 5. Ages of the 21 action
    tokens: episode a 1 1, 9 9 8 1, 1 0; b 1 1 1; twice 1 1 0 0 0: sum 11 + 26 = 37. The trainer has
    version 12: versions 3, 5, 11, 12 are 9, 7, 1, 0 optimizer steps old; sum 9 + 9 + 7 + 11 =
    36."""
    made = groups_to_batch(groups(), AGES)
    assert made.ages is not None and made.ages.dtype == torch.int64
    assert made.ages.tolist() == [
        *[0, 0, 1, 1],
        *[0, 0, 0, 9, 9, 0, 8, 1],
        *[0, 1, 0, 0],
        *[0, 1, 1, 1],
        *[0, 0, 1, 1, 0, 0, 0] * 2,
    ]
    found = age_metrics(made.select([4, 1, 5, 3, 0, 2]), AGES, version=12, max_staleness=9)
    wanted = {f"rollout/age_{k}_frac": 0.0 for k in (0, 2, 3, 4, 5, 6, 7)} | {
        "rollout/age_1_frac": 0.5,
        "rollout/age_8_up_frac": 0.5,
        "rollout/age_mean": 5,
        "rollout/age_max": 9,
        "rollout/age_of_tokens_mean": 37 / 21,
        "rollout/age_optimizer_steps_mean": 36 / 21,
        "rollout/age_optimizer_steps_max": 9,
    }
    assert found == pytest.approx(wanted, abs=1e-12)
    plain = groups_to_batch(groups())
    assert plain.ages is None and age_metrics(plain, None, version=12, max_staleness=0) == {}
    with pytest.raises(ValueError, match="sampled by policy version 3, but ages has only"):
        groups_to_batch(groups(), {11: 1, 12: 0})


def test_micro_batches_of_other_ages_add_up() -> None:
    """Ages that only one micro-batch contains have their own counts. All micro-batches have the
    same names, which sums over ranks require."""
    made = groups_to_batch(groups(), AGES)
    assert made.sampler_logprobs is not None
    new = near(made.sampler_logprobs, made.action_mask, 1, 0.3)
    batch = replace(made, advantages=torch.ones(new.numel()).double())
    config = AlgorithmConfig.model_validate({"correction": {"mode": "truncate"}})
    objective = objective_of(config)
    entire = objective(Outputs(new), batch)[1].floats()
    ends, stats = batch.offsets.tolist(), Stats()
    for i in range(batch.num_rows):
        part = Outputs(new[ends[i] : ends[i + 1]])
        found = objective(part, batch.select([i]))[1]
        assert found.floats().keys() == entire.keys()
        stats += found
    # 1e-6: some counts are fp32; NaN: no tokens of that age
    assert stats.floats() == pytest.approx(entire, abs=1e-6, nan_ok=True)
    assert math.isnan(entire["age_2_behavior_kl"]) and entire["age_8_up_behavior_kl"] > 0
