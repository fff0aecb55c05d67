"""The search for keys that do nothing finds one, and accepts those that are refused or have an
effect."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import dead_keys

CASES = yaml.safe_load(dead_keys.CASES.read_text(encoding="utf-8"))


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    monkeypatch.chdir(tmp_path)
    dead_keys.write_data(CASES["data"])
    base = CASES["bases"]["sft/plain"]
    return {"recipe": {**base["recipe"], "max_steps": 1, "eval": None, "checkpoint": {}}}


def verdicts(base: dict, keys: list[str]) -> dict[str, str]:
    examined = dead_keys.examine("sft/plain", {**base, "keys": keys}, CASES["values"])
    return {verdict.path: verdict.word for verdict in examined}


def test_keys_with_an_effect_and_refused_keys_are_told_apart(base: dict) -> None:
    words = verdicts(base, ["train.lr", "precision.rollout_dtype", "train.engine.sharding"])
    assert words == {
        "train.lr": "effect",
        "precision.rollout_dtype": "refused",
        "train.engine.sharding": "untried",
    }


def test_a_key_that_is_not_read_is_found_and_needs_a_reason(
    base: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = dead_keys.burnish.run

    def without_seed(config, **options):
        return run(config.model_copy(update={"seed": 0}), **options)

    monkeypatch.setattr(dead_keys.burnish, "run", without_seed)
    assert verdicts(base, ["seed"]) == {"seed": "dead"}
    dead = dead_keys.Verdict("sft/plain", "seed", "dead")
    effect = dead_keys.Verdict("sft/plain", "train.lr", "effect")
    assert len(list(dead_keys.contradictions([dead], {}))) == 1
    assert list(dead_keys.contradictions([dead, effect], {"sft/plain:seed": "..."})) == []
    assert len(list(dead_keys.contradictions([effect], {"train.*": "..."}))) == 1
