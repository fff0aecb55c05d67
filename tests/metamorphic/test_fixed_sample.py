"""Every relation on a fixed sample of draws; ``make hunt`` draws others."""

from __future__ import annotations

import pytest
from metamorphic import (
    relations_cluster,
    relations_columns,
    relations_data,
    relations_episodes,
    relations_folders,
    relations_heads,
    relations_messages,
    relations_models,
    relations_numerics,
    relations_plan,
    relations_requests,
    relations_rewards,
    relations_rows,
    relations_rules,
    relations_runs,
    relations_serving,
    relations_templates,
    relations_tools,
    relations_turns,
)
from metamorphic.base import RELATIONS, check

MODELS = {
    "engine_is_transformers": (3, 5, 9, 8, 17, 51),
    "engine_settings": (4, 7, 11, 21, 27),
    "garbage_rows": (2, 5, 7, 8),
    "sampler_is_trainer": (0, 3, 13, 19, 38),
    "requests_apart": (7, 8, 13, 17, 28),
    "exported_model": (4, 9, 14, 21, 34),
    "exported_reward_model": (0, 1, 2, 3, 4, 5),
}
"""Seeds that draw each of the usual families at least once."""
OTHERS = {
    "math_surroundings": (*range(8), 13, 21),
    "rl_prompt_ids": (*range(20), 27, 47, 58, 72),
    "ends_are_not_doubled": (*range(20), 34, 39, 51, 125),
    "override_is_file": tuple(range(60)),
    "peft_setting": tuple(range(12)),
    "counted_experts": tuple(range(12)),
    "half_precision": tuple(range(8)),
    "odd_config": tuple(range(8)),
    "planned_parameters": (*range(24), 255, 392, 560, 591),
    "plan_of_a_family": (1, 6, 9, 21, 35, 41, 44, 56, 101),
    "death_ends_the_wait": tuple(range(16)),
    "code_surroundings": tuple(range(10)),
    "damaged_folder": tuple(range(20)),
    "secrets_stay_in_the_recipe": tuple(range(12)),
    "limits_change_no_rendering": tuple(range(150)),
    "schemas_mean_what_their_draft_says": tuple(range(60)),
    "docstrings_lose_no_word": tuple(range(200)),
    "model_rewards_read_trained_rows": (*range(24), 3000143),
}
"""Seeds of the others; without an entry: the first 24."""
ALL = (
    relations_cluster,
    relations_columns,
    relations_data,
    relations_episodes,
    relations_folders,
    relations_heads,
    relations_messages,
    relations_models,
    relations_rewards,
    relations_rows,
    relations_numerics,
    relations_plan,
    relations_requests,
    relations_rules,
    relations_runs,
    relations_serving,
    relations_templates,
    relations_tools,
    relations_turns,
)


def test_every_relation_says_why_its_tolerance_is_what_it_is() -> None:
    assert len(RELATIONS) >= 20 and set(MODELS) <= set(RELATIONS)
    for name, relation in RELATIONS.items():
        text = relation.__doc__ or ""
        assert "xact" in text or "1e-" in text, name


@pytest.mark.parametrize("name", [name for name in RELATIONS if name not in MODELS])
def test_a_relation_holds_on_the_fixed_sample(name: str) -> None:
    results = [check(name, seed) for seed in OTHERS.get(name, range(24))]
    assert results.count("holds") >= 3, results


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_relation_of_models_holds_on_the_fixed_sample(name: str) -> None:
    assert [check(name, seed) for seed in MODELS[name]] == ["holds"] * len(MODELS[name])
