"""Recipes that cannot sample while the policy is trained are refused, each with a way out."""

import pytest

from burnish.config import ConfigError, load_config
from burnish.rollout.local.config import LocalEngine

RECIPE = {
    "job": "rl",
    "max_steps": 1,
    "model": {"scratch": {}},
    "data": {"sources": ["prompts.jsonl"], "prompt_max_len": 16},
    "rollout": {
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "generate_max_len": 8,
        "max_staleness": 1,
    },
    "algorithm": {"correction": {"mode": "truncate"}},
    "train": {"train_batch_size": 16},
}
SYNCHRONOUS = {name: v for name, v in RECIPE["rollout"].items() if name != "max_staleness"}
RAY, GPUS = "cluster.runtime=ray", "cluster.gpus_per_worker=1"
COPY, PARTIAL = "rollout.engine.own_weights=true", "rollout.asynchronous.partial=true"


def test_an_engine_that_drops_its_cache_at_an_update_cannot_continue_with_it(monkeypatch):
    overrides = [RAY, "rollout.asynchronous.in_flight=continue"]
    load_config(RECIPE, overrides)
    monkeypatch.setattr(LocalEngine, "keeps_cache_on_update", False)
    with pytest.raises(ConfigError, match="the engine local cannot; use in_flight=recompute"):
        load_config(RECIPE, overrides)
    load_config(RECIPE, [RAY, "rollout.asynchronous.in_flight=finish"])


def test_settings_without_the_benefit_of_overlap_are_advised_against():
    """No group ahead; CPUs of a policy rank; a key of asynchronous runs in a synchronous one."""
    held_out = {"data": {"sources": ["held_out.jsonl"]}, "training_groups": "wait"}
    found = load_config(
        RECIPE | {"eval": held_out}, [RAY, "rollout.asynchronous.run_ahead=0"]
    ).warnings()
    assert [text for text in found if "use run_ahead=1" in text]
    assert [text for text in found if "uses the CPUs of a policy rank" in text]
    assert not [text for text in found if "training_groups" in text]
    agent = RECIPE["rollout"] | {"episodes": {"agent": "agent.py:solve", "max_tokens": 2048}}
    found = load_config(RECIPE | {"eval": held_out, "rollout": agent}, [RAY]).warnings()
    assert [text for text in found if "episodes.timeout_s counts that time" in text]
    paused = load_config(RECIPE | {"eval": held_out}, [RAY, PARTIAL]).warnings()
    assert not [text for text in paused if "training_groups" in text or "CPUs of a" in text]
    synchronous = RECIPE | {"eval": held_out, "rollout": SYNCHRONOUS}
    found = load_config(synchronous, []).warnings()
    assert [text for text in found if "eval.training_groups=wait has no effect" in text]
