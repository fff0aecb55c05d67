"""Recipes whose loss would be wrong for samples of another policy are refused; those that are
biased are warned of."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from burnish.config import load_config

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
BY_SAMPLER, CORRECTED = "algorithm.old_policy=sampler", "algorithm.correction={}"
REINFORCE, GSPO = "algorithm.policy_loss=reinforce", "algorithm.policy_loss=gspo"
DISTILL = ("teacher.model.path=x", "algorithm.advantage=on_policy_distill")
IN_REWARD = (
    "algorithm.advantage=rloo",
    "algorithm.kl={init_kl_coef: 0.1, placement: reward, estimator: k1}",
)


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
