"""Runs of multi-turn episodes: training, resume, dynamic sampling, evaluation, and on Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish.config import load_config
from burnish.config.load import ConfigError
from burnish.environments.base import EnvironmentSetupError
from burnish.observe.samples import read_samples

ENVIRONMENT = str(Path(__file__).parents[2] / "recipes/environments/guess_number.py:GuessNumber")
ALPHABET = "1234567?<>"


def recipe(tmp_path: Path, *overrides: str, name: str = "run") -> Any:
    tree = {
        "job": "rl",
        "run_dir": str(tmp_path / name),
        "max_steps": 3,
        "model": {"scratch": {"alphabet": ALPHABET, "hidden_size": 32}},
        "data": {"sources": [{"kind": "seeds", "size": 50}], "prompt_max_len": 4},
        "rollout": {
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 4,
            "generate_max_len": 3,
            "stop": list("1234567"),
            "episodes": {"environment": ENVIRONMENT, "max_turns": 3, "max_tokens": 32},
        },
        "rewards": [{"kind": "episode", "name": "found", "reward": "found"}],
        "train": {"train_batch_size": 16, "lr": 1e-3},
        "checkpoint": {"every_n_steps": 1},
    }
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(tree))
    return load_config(path.rename(path.with_suffix(".yaml")), list(overrides))


def metrics(run_dir: Path) -> dict[int, dict[str, float]]:
    """Metrics without times, by step."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    return {
        row["step"]: {
            k: v
            for k, v in row.items()
            if k.startswith(("reward/", "train/", "episodes/", "eval/"))
            and not k.endswith(("_s", "/seconds", "/environment_frac"))
        }
        for row in rows
    }


def test_a_resumed_run_plays_the_same_episodes(tmp_path: Path) -> None:
    """Two steps, then resumed for the third: metrics and samples equal those of one run."""
    evaluation = ["eval.data.sources=[{kind: seeds, size: 6, seed: 1}]", "eval.every_n_steps=1"]
    evaluation += ["eval.data.prompt_max_len=4", "rollout.dynamic_sampling={}"]
    burnish.run(recipe(tmp_path, *evaluation, name="one"))
    two = tmp_path / "two"
    burnish.run(recipe(tmp_path, *evaluation, "max_steps=2", name="two"))
    burnish.run(load_config(two / "config.yaml", ["max_steps=3"]), resume=two)
    found = metrics(tmp_path / "one")[3]
    assert found == metrics(two)[3]
    assert found["episodes/turns"] > 1
    assert "eval/pass@1" in found
    samples = [
        [(s["sample_id"], json.loads(s["episode"])["rows"], s["reward"]) for s in found]
        for found in (read_samples(tmp_path / "one"), read_samples(two))
    ]
    assert samples[0] == samples[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_episodes_on_ray_equal_those_in_one_process(tmp_path: Path, ray_cluster: Any) -> None:
    """Two rollout workers and two environment actors play the same episodes."""
    burnish.run(recipe(tmp_path, "max_steps=2", name="inline"))
    cluster = ["cluster.runtime=ray", "cluster.layout=separate", "cluster.rollout_workers=2"]
    on_ray = ["max_steps=2", "rollout.episodes.workers=2", *cluster]
    burnish.run(recipe(tmp_path, *on_ray, name="ray"))
    inline, ray = metrics(tmp_path / "inline"), metrics(tmp_path / "ray")
    for step in (1, 2):
        for name in ("reward/mean", "episodes/turns", "episodes/done", "train/loss"):
            assert ray[step][name] == pytest.approx(inline[step][name], rel=1e-5, abs=1e-7)


def test_an_unusable_environment_stops_before_the_model_is_loaded(tmp_path: Path) -> None:
    missing = f"rollout.episodes.environment={ENVIRONMENT}s"
    config = recipe(tmp_path, missing, "model.scratch=null", "model.path=gpt2-that-is-not-there")
    with pytest.raises(Exception, match="gpt2-that-is-not-there"):
        burnish.run(config)  # the tokenizer comes first
    with pytest.raises(EnvironmentSetupError, match="has no 'GuessNumbers'"):
        burnish.run(recipe(tmp_path, missing, name="other"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.episodes.max_turns=0"], "must be at least 1"),
        (["rollout.episodes.max_tokens=4"], "must exceed data.prompt_max_len"),
        (["rollout.episodes.environment=null"], "one of environment and tools"),
        (["rollout.episodes.environment=guess"], "not of the form"),
        (["rollout.episodes=null"], "set episodes"),
        (["rewards=[{kind: environment}]"], "use kind episode"),
        (["rollout.episodes.tools=[a.py:b]", "rollout.episodes.environment=null"], "no rewards"),
        (
            ["rewards=[{kind: episode, per_turn: true}]", "algorithm.advantage=rloo"],
            "rewards of single turns",
        ),
    ],
)
def test_senseless_settings_are_refused_at_load(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(tmp_path, *overrides)
