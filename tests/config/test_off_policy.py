"""Recipes whose loss would be wrong for samples of another policy are refused; those that are
biased are warned of."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from burnish.config import ConfigError, load_config

RECIPE: dict[str, Any] = {
    "job": "rl",
    "max_steps": 1,
    "model": {"path": "x"},
    "data": {"sources": ["prompts.jsonl"]},
    "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "generate_max_len": 8},
    "train": {"train_batch_size": 16},
}
STALE = ("rollout.asynchronous.max_staleness=1", "rollout.asynchronous.partial=true")
"""Partial rollouts: an asynchronous run that shares the trainer's weights."""
FRESH = ("rollout.asynchronous.max_staleness=0", "rollout.asynchronous.partial=false")
BY_SAMPLER, CORRECTED = "algorithm.old_policy=sampler", "algorithm.correction={}"
BY_TRAINER, UNCORRECTED = "algorithm.old_policy=trainer", "algorithm.correction=null"
REINFORCE, GSPO = "algorithm.policy_loss=reinforce", "algorithm.policy_loss=gspo"
PPO = "algorithm.policy_loss=ppo"
DISTILL = ("teacher.model.path=x", "algorithm.advantage=on_policy_distill")
IN_REWARD = (
    "algorithm.advantage=rloo",
    "algorithm.kl={init_kl_coef: 0.1, placement: reward, estimator: k1}",
)


@pytest.mark.parametrize(
    ("overrides", "problem", "ways_out"),
    [
        (
            STALE,
            "rollout.asynchronous.max_staleness=1 trains on tokens of older policies, and nothing "
            "weights them "
            "by the probability with which they were sampled: old_policy=trainer compares the "
            "policy with itself at the start of the update; set algorithm.correction={mode: "
            "truncate} (decoupled PPO), or algorithm.old_policy=sampler",
            [["algorithm.correction={mode: truncate}"], [BY_SAMPLER], [*FRESH]],
        ),
        (
            [*STALE, REINFORCE],
            "set algorithm.correction={mode: truncate} (decoupled PPO)",
            [[CORRECTED]],
        ),
        (
            [BY_SAMPLER, CORRECTED],
            "algorithm.correction multiplies the loss by the trainer's probability over the",
            [[UNCORRECTED], [BY_TRAINER]],
        ),
        (
            ["algorithm.policy_loss=vespo", CORRECTED],
            "algorithm.correction with policy_loss=vespo: the loss has its own weight of the",
            [[UNCORRECTED], [UNCORRECTED, *STALE, BY_SAMPLER], [PPO]],
        ),
        (
            [*STALE, "algorithm.policy_loss=vespo"],
            "truncate} (decoupled PPO) with another loss, or algorithm.old_policy=sampler",
            [[BY_SAMPLER], [PPO, CORRECTED]],
        ),
        (
            [BY_SAMPLER, REINFORCE],
            "algorithm.old_policy=sampler is the denominator of a ratio",
            [[PPO], [BY_TRAINER, CORRECTED]],
        ),
        (
            [BY_SAMPLER, "rollout.top_p=0.9"],
            "rollout.top_p<1 records the tokens that it keeps for algorithm.old_policy=sampler",
            [["rollout.top_p=1"], ["rollout.top_k=512"], [BY_TRAINER]],
        ),
        (
            [CORRECTED, "rollout.min_p=0.1"],
            "rollout.min_p>0 records the tokens that it keeps for algorithm.correction",
            [["rollout.min_p=0"], ["rollout.top_k=512"], [UNCORRECTED]],
        ),
        (
            [*STALE, BY_SAMPLER, *DISTILL],
            "algorithm.advantage=on_policy_distill with rollout.asynchronous.max_staleness=1 and",
            [[BY_TRAINER, CORRECTED]],
        ),
    ],
)
def test_an_unsound_combination_is_refused_and_each_way_out_is_accepted(
    overrides: list[str], problem: str, ways_out: list[list[str]]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(RECIPE, overrides)
    (line,) = str(caught.value).split("\n")[1:]
    assert line.removeprefix("  - recipe: ").startswith(problem) or line.endswith(problem)
    for way_out in ways_out:
        load_config(RECIPE, [*overrides, *way_out])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([GSPO, CORRECTED], "algorithm.correction.level=token with policy_loss=gspo"),
        ([*STALE, GSPO, BY_SAMPLER], "algorithm.policy_loss.clip_low=0.0003 of gspo"),
        ([*STALE, BY_SAMPLER, *IN_REWARD], "algorithm.kl.placement=reward with old_policy=sampler"),
        (
            [*STALE, CORRECTED, "algorithm.advantage=gae"],
            "algorithm.advantage=gae with rollout.asynchronous.max_staleness=1",
        ),
    ],
)
def test_a_biased_combination_loads_with_one_warning(
    overrides: list[str], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "burnish"):
        load_config(RECIPE, overrides)
    (record,) = caplog.records
    assert record.message.startswith(f"recipe: warning: recipe: {said}")


@pytest.mark.parametrize(
    "overrides",
    [
        [*STALE, CORRECTED],
        [*STALE, BY_SAMPLER],
        [*STALE, CORRECTED, *DISTILL],
        [*STALE, CORRECTED, *IN_REWARD],
        [*STALE, GSPO, "algorithm.correction.level=geometric"],
        [BY_SAMPLER, *IN_REWARD],
        [BY_SAMPLER, *DISTILL],
    ],
)
def test_sound_combinations_load_without_a_warning(
    overrides: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "burnish"):
        load_config(RECIPE, overrides)
    assert not caplog.records
