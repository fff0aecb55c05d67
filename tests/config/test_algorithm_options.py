"""Options of an RL algorithm that contradict others are refused."""

from __future__ import annotations

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
IN_REWARD = "{init_kl_coef: 0.1, placement: reward, estimator: k1, bias_correction: true}"


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["algorithm.kl.bias_correction=true"],
            "algorithm.kl: bias_correction multiplies the KL in the loss by the ratio, "
            "but init_kl_coef is 0",
        ),
        (
            [f"algorithm.kl={IN_REWARD}"],
            "algorithm.kl: bias_correction multiplies the KL in the loss by the ratio, "
            "but placement is reward",
        ),
        (
            [
                "algorithm.advantage={kind: grpo, normalize_each: true}",
                "rewards=[{kind: math, running_norm: std}]",
                "checkpoint.best_metric=reward/math",
            ],
            "recipe: rewards[0].running_norm=std has no effect with algorithm.advantage.normalize_",
        ),
        (
            [
                "algorithm.advantage={kind: grpo, normalize_each: true}",
                "shaping.length_penalty=0.1",
            ],
            "recipe: shaping changes the sum of the rewards, but algorithm.advantage.normalize_ea",
        ),
        (
            ["algorithm.advantage={kind: rloo, normalize_each: true}"],
            "algorithm.advantage: normalize_each divides by standard deviations, but rloo does not",
        ),
        (["algorithm.off_policy_mask=-1"], "algorithm.off_policy_mask: must be at least 0, got -1"),
        (["algorithm.policy_loss={kind: sapo, tau_pos: 0}"], "must be greater than 0, got 0"),
        (["algorithm.policy_loss={kind: vespo, k_neg: 0}"], "must be greater than 0, got 0"),
    ],
)
def test_a_contradiction_is_refused_with_what_to_do(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(RECIPE, overrides)
    (line,) = str(caught.value).split("\n")[1:]
    assert problem in line
