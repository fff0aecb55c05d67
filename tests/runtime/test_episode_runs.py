"""Runs of multi-turn episodes: training, resume, dynamic sampling, evaluation, and on Ray."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import burnish
from burnish.config import load_config
from burnish.config.load import ConfigError
from burnish.environments.base import EnvironmentSetupError
from burnish.environments.pool import EnvironmentPool, EnvironmentSpec, EpisodeFailedError
from burnish.jobs.errors import RunError
from burnish.observe.samples import read_samples
from burnish.rollout.vllm import INSTALL
from burnish.runtime.remote_workers import start_remote_worker

ENVIRONMENT = str(Path(__file__).parents[2] / "recipes/environments/guess_number.py:GuessNumber")
HOSTILE = str(Path(__file__).parents[1] / "environments/hostile.py")
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
    """Two rollout workers and two environment actors play the same episodes. Policy, critic and
    reference, each sharded over two ranks, train on them in two updates per step."""
    ppo = ["algorithm.advantage=gae", "algorithm.kl.init_kl_coef=0.1", "train.lr=1e-2"]
    ppo += ["algorithm.kl.placement=reward", "algorithm.kl.estimator=k1"]
    ppo += ["train.train_batch_size=8", "max_steps=2"]
    burnish.run(recipe(tmp_path, *ppo, name="inline"))
    on_ray = ["cluster.runtime=ray", "cluster.layout=separate", "cluster.rollout_workers=2"]
    on_ray += ["cluster.policy_ranks=2", "train.engine.sharding=full"]
    on_ray += ["rollout.episodes.workers=2"]
    burnish.run(recipe(tmp_path, *ppo, *on_ray, name="ray"))
    inline, ray = metrics(tmp_path / "inline"), metrics(tmp_path / "ray")
    trained = ["train/loss", "train/grad_norm"]
    for step in (1, 2):
        # fp32: log-probs of up to 3 by other batches. Wrong tokens or stale weights: 1e-2 and more.
        assert ray[step]["train/mismatch_max"] < 1e-5
        for name in ("reward/mean", "episodes/turns", "episodes/done", *trained):
            assert ray[step][name] == pytest.approx(inline[step][name], rel=1e-5, abs=1e-7)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_on_ray_that_die_or_hang_are_replaced(ray_cluster: Any) -> None:
    """A process that exits, a step that takes too long, and a killed actor: each failure has its
    status, and the next episode works."""

    async def play() -> list[str]:
        start = partial(start_remote_worker, ray_cluster)
        pool = EnvironmentPool(EnvironmentSpec(f"{HOSTILE}:Odd", {}), workers=1, start_worker=start)
        await pool.start()
        found = []
        try:
            for kind in ("exits", "works", "is_slow", "works", "kill actor", "works"):
                found.append(await step(pool, kind))
        finally:
            await pool.close()
        return found

    async def step(pool: EnvironmentPool, kind: str) -> str:
        kill = kind == "kill actor"
        episode = await pool.open({"kind": "parent" if kill else kind}, 0, timeout_s=60)
        try:
            found = await episode.step({}, timeout_s=0.1 if kind == "is_slow" else 60)
            if kill:
                psutil.Process(int(str(found.messages[0]["content"]))).kill()
                await episode.step({}, timeout_s=60)
            return str(found.messages[0]["content"])
        except EpisodeFailedError as error:
            return error.status
        finally:
            await episode.close()

    async def refused() -> None:
        spec = EnvironmentSpec(f"{HOSTILE}:Missing", {})
        pool = EnvironmentPool(
            spec, workers=1, start_worker=partial(start_remote_worker, ray_cluster)
        )
        await pool.start()

    found = asyncio.run(play())
    assert found == ["infra_error", "works", "timeout", "works", "infra_error", "works"]
    with pytest.raises(EnvironmentSetupError, match="has no 'Missing'"):
        asyncio.run(refused())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("quick_vllm_starts")
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason=INSTALL)
def test_vllm_plays_episodes_with_the_weights_that_are_trained(tmp_path: Path) -> None:
    """Turns of up to 150 tokens, longer than a block of vLLM's cache: the prompts of later turns
    come in part from the cache, which is dropped when the weights change."""
    one_head = ["model.scratch.num_heads=1", "model.scratch.num_kv_heads=1"]  # heads of 32
    sizes = ["rollout.generate_max_len=150", "rollout.episodes.max_tokens=500"]
    sizes += ["model.scratch.max_position_embeddings=512", "rollout.stop=[]"]
    vllm = ["rollout.engine.kind=vllm", "train.lr=1e-2", "max_steps=3"]
    burnish.run(recipe(tmp_path, *vllm, *one_head, *sizes))
    for step, found in metrics(tmp_path / "run").items():
        # fp32: log-probs of up to 3 by other kernels. Stale weights: 1e-2 and more.
        assert found["train/mismatch_max"] < 1e-5, step
        assert found["episodes/turns"] > 1
        assert 0 < found["episodes/cached_prefix_frac"] < 1


def test_an_unusable_environment_stops_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> None:
        pytest.fail("the model was loaded first")

    monkeypatch.setattr("burnish.runtime.inline.load_causal_lm", load)
    missing = f"rollout.episodes.environment={ENVIRONMENT}s"
    with pytest.raises(EnvironmentSetupError, match="has no 'GuessNumbers'"):
        burnish.run(recipe(tmp_path, missing))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"environment": f"{HOSTILE}:Odd", "max_tokens": 32},  # needs task["kind"]
            r"(?s)3 prompts has no result: 6 of 6 episodes failed \(env_error 6\). The first: "
            r".*KeyError.*max_failed_frac=0\.5 .*; correct the environment",
        ),
        (
            {"environment": f"{HOSTILE}:Async", "max_tokens": 6},
            r"no result: none of 3 groups has 2 of its 2 episodes left: 6 of 6 episodes have no "
            r"result \(prompt_too_long 6\); raise episodes.max_tokens, or shorten",
        ),
    ],
)
def test_an_evaluation_without_any_episode_left_says_why(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}" * 4}) + "\n" for i in (1, 2, 3)))
    tree = {
        "job": "evaluate",
        "run_dir": str(tmp_path / "run"),
        "model": {"scratch": {"alphabet": ALPHABET, "hidden_size": 32}},
        "eval": {
            "data": {"sources": [str(prompts)], "prompt_max_len": 5},
            "n_samples_per_prompt": 2,
            "temperature": 1.0,
            "generate_max_len": 2,
        },
        "episodes": settings,
        "rewards": [{"kind": "function"}],
    }
    with pytest.raises(RunError, match=message):
        burnish.run(load_config(tree), rewards=lambda response: 1.0)


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
