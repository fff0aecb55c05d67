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
import torch

import burnish
from burnish.config import load_config
from burnish.config.model import ModelConfig, ScratchConfig
from burnish.driver.errors import RunError
from burnish.environments.base import EnvironmentSetupError
from burnish.environments.importing import LoadError
from burnish.environments.pool import EnvironmentPool, EnvironmentSpec, EpisodeFailedError
from burnish.models.load import load_causal_lm, load_tokenizer
from burnish.observe.samples import read_samples
from burnish.rollout.vllm.engine import INSTALL
from burnish.runtime.ray.environment_workers import start_remote_worker

ENVIRONMENT = str(Path(__file__).parents[2] / "recipes/environments/guess_number.py:GuessNumber")
HOSTILE = str(Path(__file__).parents[1] / "environments/hostile.py")
ALPHABET = "1234567?<>"
DROPS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}>"
    "{% if m.reasoning_content and loop.index0 > ns.last %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{{ eos_token }}"
    "{% else %}<{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}><think>{% endif %}"
)
"""Drops the reasoning of earlier turns; every response begins with reasoning."""


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


@pytest.fixture
def thinking(tmp_path: Path) -> list[str]:
    """Overrides for a model whose template drops reasoning, and for episodes of up to 3 turns with
    a reward each. They are several rows, because each turn renders the conversation again."""
    config = ModelConfig(scratch=ScratchConfig(alphabet="12345?<>", hidden_size=32, num_layers=1))
    tokenizer, model = load_tokenizer(config), load_causal_lm(config)
    tokenizer.add_tokens(["<think>", "</think>"])
    torch.manual_seed(0)  # the new embeddings are random
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    tokenizer.chat_template = DROPS
    model.save_pretrained(tmp_path / "thinking")
    tokenizer.save_pretrained(tmp_path / "thinking")
    per_turn = "{kind: episode, name: right, reward: right, per_turn: true, weight: 2.0}"
    return [
        f"model={{path: {tmp_path / 'thinking'}}}",
        f"rewards=[{per_turn}, {{kind: function, function: '{__file__}:turns_and_text'}}]",
        f"rollout.episodes.environment={HOSTILE}:Digits",
        "rollout.episodes.history=template",
        "rollout.generate_max_len=8",
        "rollout.episodes.max_tokens=60",
        "rollout.stop=['1','2']",
        "algorithm.advantage={kind: gae, discount: turn, gamma: 0.9}",
        "algorithm.kl={init_kl_coef: 0.1, placement: reward, estimator: k1}",
        "shaping={overlong: {buffer_len: 40}, length_penalty: 0.01, truncation_penalty: 0.2}",
        "train={train_batch_size: 8, micro_train_batch_size: 4, epochs_per_rollout: 2, lr: 1e-2}",
    ]


def turns_and_text(response: str, messages: list[dict[str, Any]]) -> float:
    """A reward that reads the conversation: it begins with the environment's message."""
    assert messages[0]["role"] == "user" and messages[0]["content"] in "1234"
    return sum(m["role"] == "assistant" for m in messages) + 0.1 * len(response)


def metrics(run_dir: Path) -> dict[int, dict[str, float]]:
    """Metrics without times, by step."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    return {
        row["step"]: {
            k: v
            for k, v in row.items()
            if k.startswith(("reward/", "train/", "critic/", "episodes/", "eval/", "rollout/"))
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


def test_each_turn_is_a_row_if_the_template_drops_reasoning(
    tmp_path: Path, thinking: list[str]
) -> None:
    """PPO with rewards of turns, four updates of a varying number of rows per rollout. Later
    prompts lack the reasoning that was sampled. A resumed run continues exactly."""
    burnish.run(recipe(tmp_path, *thinking, "max_steps=2", name="one"))
    burnish.run(recipe(tmp_path, *thinking, "max_steps=1", name="two"))
    two = tmp_path / "two"
    burnish.run(load_config(two / "config.yaml", ["max_steps=2"]), resume=two)
    found = metrics(tmp_path / "one")
    assert found == metrics(two)
    assert found[2]["train/mismatch_max"] < 1e-5  # fp32; stale weights or other tokens: 1e-2
    tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path / "thinking")))
    dropped = 0
    for sample in read_samples(tmp_path / "one"):
        episode = json.loads(sample["episode"])
        assert len(episode["rows"]) == len(episode["turns"])
        messages = episode["start"]
        for number, (row, turn) in enumerate(zip(episode["rows"], episode["turns"], strict=True)):
            assert row["spans"] == [[number, turn["tokens"]]]
            prompt = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
            ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            assert row["prompt_tokens"] == len(ids)
            dropped += number > 0 and "reasoning_content" in messages[-2]
            messages = [*messages, turn["message"], *turn["answer"]]
    assert dropped


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_episodes_on_ray_equal_those_in_one_process(
    tmp_path: Path, thinking: list[str], ray_cluster: Any
) -> None:
    """Two rollout workers and two environment actors play the same episodes. Groups whose tasks
    fail are replaced, and so are groups without signal. Policy, critic and reference, each sharded
    over two ranks, train on them in four updates per step."""
    fails = ["rollout.episodes.options={bad: 4}", "rollout.dynamic_sampling={}", "max_steps=2"]
    burnish.run(recipe(tmp_path, *thinking, *fails, name="inline"))
    on_ray = ["cluster.runtime=ray", "cluster.layout=separate", "cluster.rollout_workers=2"]
    on_ray += ["cluster.policy_ranks=2", "train.engine.sharding=full"]
    on_ray += ["rollout.episodes.workers=2"]
    burnish.run(recipe(tmp_path, *thinking, *fails, *on_ray, name="ray"))
    inline, ray = metrics(tmp_path / "inline"), metrics(tmp_path / "ray")
    same = ("reward/", "episodes/", "rollout/", "train/loss", "train/grad_norm", "critic/loss")
    for step in (1, 2):
        # fp32: log-probs of up to 3 by other batches. Wrong tokens or stale weights: 1e-2 and more.
        assert ray[step]["train/mismatch_max"] < 1e-5
        for name in inline[step]:
            if name.startswith(same) and name != "episodes/cached_prefix_frac":
                about = pytest.approx(inline[step][name], rel=1e-4, abs=1e-6)
                assert ray[step][name] == about, (step, name)
    lost = [inline[step]["episodes/groups_dropped"] for step in (1, 2)]
    assert sum(lost) > 0
    for step, found in inline.items():
        filtered = found["rollout/groups_filtered"]
        assert found["episodes/env_error"] == 4 * found["episodes/groups_dropped"]
        assert found["rollout/samples"] == 4 * (4 + filtered), step


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
def test_one_worker_on_ray_plays_all_episodes_of_a_rollout_at_once(ray_cluster: Any) -> None:
    """1,024 episodes, the default rollout, whose steps all wait for the last one."""
    size = 1024

    async def play() -> list[bool]:
        start = partial(start_remote_worker, ray_cluster)
        spec = EnvironmentSpec(f"{HOSTILE}:Together", {"size": size})
        pool = EnvironmentPool(spec, workers=1, start_worker=start)
        await pool.start()
        try:
            episodes = [await pool.open({}, seed, timeout_s=60) for seed in range(size)]
            steps = await asyncio.gather(*(e.step({}, timeout_s=60) for e in episodes))
            await asyncio.gather(*(e.close() for e in episodes))
        finally:
            await pool.close()
        return [step.done for step in steps]

    assert asyncio.run(play()) == [True] * size


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

    monkeypatch.setattr("burnish.train.engines.load_causal_lm", load)
    missing = f"rollout.episodes.environment={ENVIRONMENT}s"
    with pytest.raises(LoadError, match="has no 'GuessNumbers'"):
        burnish.run(recipe(tmp_path, missing))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"environment": f"{HOSTILE}:Odd", "max_tokens": 32},  # needs task["kind"]
            r"\(env_error 6\)",
        ),
        (
            {"environment": f"{HOSTILE}:Async", "max_tokens": 6},
            r"\(prompt_too_long 6\)",
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


def test_the_overlong_buffer_may_be_longer_than_a_turn(tmp_path: Path) -> None:
    """Turns have 3 tokens, and a conversation 28 after the prompt."""
    assert recipe(tmp_path, "shaping.overlong.buffer_len=27").shaping.overlong.buffer_len == 27
