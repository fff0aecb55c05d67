"""A run whose rewards come from a reward server: the same numbers as with the model in the run."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import burnish
from burnish.config import load_config
from burnish.config.model import ModelConfig
from burnish.jobs.rl import build_rl
from burnish.models.load import load_tokenizer
from burnish.observe.metrics import read_metrics
from burnish.rewards.base import RewardError

Serving = Callable[..., Any]


@pytest.fixture
def recipe(tmp_path: Path, scratch: ModelConfig) -> Callable[..., Any]:
    """``recipe(reward, name="a")``: two GRPO steps of 4 x 4 short samples."""
    rows = [{"prompt": f"{a}+{b}=", "label": a + b} for a in range(4) for b in range(2)]
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(reward: dict[str, Any], *, name: str, **more: Any) -> Any:
        tree = {
            "job": "rl",
            "run_dir": str(tmp_path / name),
            "max_steps": 2,
            "model": scratch.model_dump(),
            "data": {"sources": [str(data)]},
            "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "generate_max_len": 4},
            "rewards": [{"name": "rm", **reward}],
            "train": {"train_batch_size": 16, "lr": 1e-3},
        }
        return load_config(tree | more)

    return make


def test_a_run_with_a_remote_reward_is_the_run_with_the_model_itself(
    recipe: Callable[..., Any], serving: Serving, reward_model: Path
) -> None:
    """Requests of 3: 16 samples make 6 a step."""
    here = recipe({"kind": "model", "model": {"path": str(reward_model)}}, name="here")
    wanted = read_metrics(burnish.run(here).run_dir)
    with serving() as server:
        urls = [f"{server.url}/get_reward"]
        there = recipe({"kind": "remote", "urls": urls, "batch_size": 3}, name="there")
        found = read_metrics(burnish.run(there).run_dir)
        assert sum(len(rows) for rows in server.gate.passes) == 32
    assert len(found) == 2
    for one, other in zip(found, wanted, strict=True):
        # fp32 sums in another order, through advantages that divide by a group's deviation and
        # one AdamW step; rewards differ by tenths.
        for metric in ("reward/mean", "reward/rm", "train/grad_norm", "rollout/response_len"):
            assert one[metric] == pytest.approx(other[metric], rel=1e-3, abs=1e-5)
        assert (one["reward/rm/requests"], one["reward/rm/retries"]) == (6, 0)
        assert 2 < one["reward/rm/num_tokens"] < 12 and one["reward/rm/truncated"] == 0
        assert one["reward/rm/scores"] == pytest.approx(one["reward/rm"], rel=1e-6)


def test_an_evaluation_with_a_remote_reward(
    recipe: Callable[..., Any], serving: Serving, tmp_path: Path, scratch: ModelConfig
) -> None:
    with serving() as server:
        remote = {"kind": "remote", "urls": [f"{server.url}/get_reward"]}
        rl = recipe(remote, name="unused")
        tree = {
            "job": "evaluate",
            "run_dir": str(tmp_path / "eval"),
            "model": scratch.model_dump(),
            "eval": {"data": {"sources": list(rl.data.sources)}, "generate_max_len": 4},
            "rewards": [remote],
        }
        metrics = burnish.run(load_config(tree)).metrics
        scores = [r for rows in server.gate.passes for r in rows]
    assert len(scores) == 8 and -100 < metrics["eval/reward"] < 100


@pytest.fixture
def score(tmp_path: Path, scratch: ModelConfig, reward_model: Path) -> Callable[..., Any]:
    """``score("a", "model")``: 10 rows in steps of 4, the last longer than the 64 positions of the
    reward model. Returns each row's rewards by name."""
    rows = [{"prompt": f"{i}+1=", "response": str(i + 1) * (i + 1)} for i in range(9)]
    rows.append({"prompt": "9+1=", "response": "10" * 30})  # 4 + 60 + the end token
    data = tmp_path / "answers.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(name: str, *rewards: dict[str, Any], **more: Any) -> list[dict[str, float] | None]:
        tree = {
            "job": "score",
            "run_dir": str(tmp_path / name),
            "model": scratch.model_dump(),
            "data": {"sources": [str(data)]},
            "batch_size": 4,
            "rewards": list(rewards),
            "on_reward_failure": {"then": "drop_group"},
        }
        path = burnish.run(load_config(tree | more)).run_dir / "scored.jsonl"
        return [json.loads(line)["rewards"] for line in path.read_text().splitlines()]

    return run


def assert_scores(found: list[Any], wanted: list[Any], name: str) -> None:
    """Equal but for fp32 scores computed beside other rows; null for the row that is too long."""
    assert len(found) == 10 and found[-1] is None and None not in found[:-1]
    for one, other in zip(found[:-1], wanted[:-1], strict=True):
        assert one[name] == pytest.approx(other["model"], abs=1e-5)


def test_a_model_and_a_remote_reward_score_given_responses_alike(
    score: Callable[..., Any], serving: Serving, reward_model: Path
) -> None:
    """As transformers scores the rows with an end token; requests of 1, so that the row that the
    server refuses is alone."""
    wanted = score("model", {"kind": "model", "model": {"path": str(reward_model)}})
    assert_scores(wanted, wanted, "model")
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    network = AutoModelForSequenceClassification.from_pretrained(reward_model)
    ids = tokenizer("2+1=333", return_tensors="pt", add_special_tokens=False).input_ids
    ids = torch.cat([ids, torch.tensor([[tokenizer.eos_token_id]])], 1)
    assert wanted[2]["model"] == pytest.approx(float(network(ids).logits.detach()), abs=1e-5)
    with serving() as server:
        remote = {"kind": "remote", "urls": [f"{server.url}/get_reward"], "batch_size": 1}
        assert_scores(score("remote", remote), wanted, "remote")


def test_a_row_longer_than_the_reward_model_reads_is_named(
    score: Callable[..., Any], reward_model: Path
) -> None:
    model = {"kind": "model", "model": {"path": str(reward_model)}}
    told = r"'model' got a row of 65 tokens, .* rows of up to 64\n.*'answers:9@0/0'"
    with pytest.raises(RewardError, match=told):
        score("stops", model, on_reward_failure={"then": "fail"})


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("ray_cluster")
def test_given_responses_are_scored_on_ray_as_in_one_process(
    score: Callable[..., Any], serving: Serving, reward_model: Path
) -> None:
    """A reward model on two ranks, and a server."""
    model = {"kind": "model", "model": {"path": str(reward_model)}}
    wanted = score("inline", model)
    with serving() as server:
        remote = {"kind": "remote", "urls": [f"{server.url}/get_reward"], "batch_size": 1}
        ranks = {"runtime": "ray", "policy_ranks": 2}
        found = score("ray", model, remote, cluster=ranks)
    for name in ("model", "remote"):
        assert_scores(found, wanted, name)


def test_a_run_without_its_server_names_the_url_before_any_model_is_loaded(
    recipe: Callable[..., Any], tmp_path: Path
) -> None:
    """For every runtime: no engine is created."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/get_reward"
    config = recipe({"kind": "remote", "urls": [url], "retries": 0}, name="alone")
    with pytest.raises(RewardError, match=f"no server accepts connections.*\n  {url}: "):
        burnish.run(config)
    runtime: Any = SimpleNamespace(tokenizer=load_tokenizer(config.model))  # and nothing else
    with pytest.raises(RewardError, match="no server accepts connections"):
        build_rl(config, runtime, {}, tmp_path)
