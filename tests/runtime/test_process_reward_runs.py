"""Process reward models from their recipe to the reward of another run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish.config import JobConfig, load_config
from burnish.config.model import ModelConfig
from burnish.models.load import ModelError, load_tokenizer
from burnish.models.value_head import load_scalar_model
from burnish.observe.metrics import read_metrics
from burnish.rewards.base import RewardInput
from burnish.rewards.model.config import ModelReward
from burnish.rewards.model.reward import ProcessScorer, load_model_reward, score_rows
from burnish.serve.base import ServeError, ServeOptions
from burnish.serve.scorer import load_text_scorer
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine
from burnish.types import Prompt, Sample

SCRATCH = {
    "alphabet": "0123456789+=;",
    "hidden_size": 32,
    "num_layers": 1,
    "max_position_embeddings": 64,
}
MakeConfig = Callable[..., JobConfig]


@pytest.fixture
def prm(tmp_path: Path, write_rows: Callable[..., str]) -> MakeConfig:
    """Steps that count up by one are right, others wrong; 30 steps of 12 solutions."""
    rows = [
        {
            "prompt": f"{a}=",
            "completions": [f"{a + 1}", f"{a + 2 + wrong}"],
            "labels": [True, not wrong],
        }
        for a in range(6)
        for wrong in (0, 1)
    ]
    steps = write_rows("steps", rows)

    def make(*overrides: str) -> JobConfig:
        data = {"kind": "steps", "sources": [steps], "max_len": 16, "step_separator": ";"}
        tree: dict[str, Any] = {
            "job": "rm",
            "run_dir": str(tmp_path / "run"),
            "max_epochs": 30,
            "model": {"scratch": SCRATCH},
            "data": data,
            "eval": {"data": data},
            "train": {"train_batch_size": 12, "lr": 1e-2},
        }
        return load_config(tree, overrides)

    return make


@pytest.fixture
def exported(prm: MakeConfig, tmp_path: Path) -> Path:
    run_dir = burnish.run(prm("max_epochs=2")).run_dir
    return burnish.export(run_dir, tmp_path / "prm", model="reward")


def engine_of(spec: EngineSpec) -> TorchTrainEngine:
    return TorchTrainEngine(load_scalar_model(spec.role.model), spec)


def an_item(tokenizer: Any, prompt: str, response: str) -> RewardInput:
    ids = tokenizer(response, add_special_tokens=False)["input_ids"]
    asked = Prompt("p", tuple(tokenizer(prompt, add_special_tokens=False)["input_ids"]), prompt)
    facts = ((-1.0,) * len(ids), (True,) * len(ids), (0,) * len(ids))
    sample = Sample("p/0", "p", 0, asked.token_ids, tuple(ids), *facts, response, "length")
    return RewardInput(asked, sample)


def test_it_learns_which_steps_are_right(prm: MakeConfig) -> None:
    first, *_, last = read_metrics(burnish.run(prm("max_epochs=60")).run_dir)
    assert last["eval/loss"] < 0.3 < first["eval/loss"]
    assert last["eval/step_accuracy"] > 0.9 and last["eval/row_exact"] > 0.9
    assert last["eval/good_steps"] == pytest.approx(0.75)  # 18 of 24 steps
    assert last["data/rows_seen"] == 720 and "train/step_accuracy" in last


def test_soft_labels_are_learned_as_probabilities(
    prm: MakeConfig, write_rows: Callable[..., str]
) -> None:
    """Every step has label 0.8: the least loss is the entropy of 0.8,
    -(0.8 ln 0.8 + 0.2 ln 0.2) = 0.5004, where every score is 0.8."""
    rows = [
        {"prompt": f"{a}=", "steps": [f"{a}", f"{a + 1}"], "labels": [0.8, 0.8]} for a in range(9)
    ]
    soft = write_rows("soft", rows)
    both = (f"data.sources=[{soft}]", f"eval.data.sources=[{soft}]")
    last = read_metrics(burnish.run(prm(*both, "max_steps=40", "max_epochs=99")).run_dir)[-1]
    assert last["eval/loss"] == pytest.approx(0.5004, abs=5e-3)  # 40 steps from a random head
    assert last["eval/step_score"] == pytest.approx(0.8, abs=0.05)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_micro_batches_and_layouts_do_not_change_the_loss(
    prm: MakeConfig, tmp_path: Path, layout: str
) -> None:
    """Steps of all rows count once, whatever pass they are in: fp32 sums in another order."""
    one, other = (
        read_metrics(burnish.run(prm("max_epochs=2", f"run_dir={tmp_path / n}", *more)).run_dir)
        for n, more in (
            ("whole", ()),
            ("cut", ("train.micro_train_batch_size=3", f"train.layout={layout}")),
        )
    )
    for a, b in zip(one, other, strict=True):
        if "train/loss" in a:
            assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-4)


def test_a_run_that_stopped_goes_on_with_the_same_numbers(prm: MakeConfig, tmp_path: Path) -> None:
    whole = read_metrics(burnish.run(prm("max_epochs=6")).run_dir)
    part = burnish.run(prm("max_epochs=3", f"run_dir={tmp_path / 'part'}")).run_dir
    burnish.run(prm("max_epochs=6", f"run_dir={part}"), resume=part)
    assert read_metrics(part)[-1]["train/loss"] == whole[-1]["train/loss"]


def test_the_export_says_what_it_is_and_how_its_scores_are_spread(
    prm: MakeConfig, tmp_path: Path
) -> None:
    run_dir = burnish.run(prm("max_epochs=2")).run_dir
    out = burnish.export(run_dir, tmp_path / "out", model="reward")
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    last = read_metrics(run_dir)[-1]
    assert config["process_reward"] is True and config["step_separator"] == ";"
    assert set(config["process_reward_stats"]) == {"min", "product", "last", "mean"}
    for how, (mean, std) in config["process_reward_stats"].items():
        assert mean == pytest.approx(last[f"eval/score_{how}_mean"])
        assert std == pytest.approx(last[f"eval/score_{how}_std"])
    assert "reward_mean" not in config


@pytest.mark.parametrize("how", ["min", "product", "last", "mean"])
def test_a_response_is_scored_at_the_end_of_each_step(exported: Path, how: Any) -> None:
    """By hand: the model of the export read at ``;`` and at the last token, one row at a time."""
    model = ModelConfig(path=str(exported))
    tokenizer = load_tokenizer(model)
    entry = ModelReward(model=model, step_aggregation=how)
    reward = load_model_reward(entry, tokenizer, engine_of)
    assert isinstance(reward, ProcessScorer)
    found = reward.score([an_item(tokenizer, "1=", "2;4"), an_item(tokenizer, "3=", "4")])
    engine = reward.inner.engine
    ids = [list(tokenizer(t, add_special_tokens=False)["input_ids"]) for t in ("1=2;", "1=2;4")]
    steps = [1 / (1 + math.exp(-score)) for score in score_rows(engine, ids)]
    by_hand = {
        "min": min(steps),
        "product": math.prod(steps),
        "last": steps[-1],
        "mean": sum(steps) / 2,
    }
    assert found[0] == pytest.approx(by_hand[how], rel=1e-5)  # fp32, one row or two in a pass
    assert reward.take_means() == {"steps": (3.0, 2.0)}
    assert reward.take_means() == {"steps": (0.0, 0.0)}


def test_min_is_the_default_and_scores_can_be_measured_in_their_spread(exported: Path) -> None:
    model = ModelConfig(path=str(exported))
    tokenizer = load_tokenizer(model)
    item = an_item(tokenizer, "1=", "2;4")
    plain, least, scaled = (
        load_model_reward(ModelReward(model=model, **more), tokenizer, engine_of)
        for more in ({}, {"step_aggregation": "min"}, {"normalize": True})
    )
    (value,) = plain.score([item])
    assert least.score([item]) == [value]
    stats = json.loads((exported / "config.json").read_text())["process_reward_stats"]["min"]
    assert scaled.score([item])[0] == pytest.approx((value - stats[0]) / stats[1])


def test_an_rl_run_is_rewarded_by_its_steps(
    exported: Path, tmp_path: Path, write_rows: Callable[..., str]
) -> None:
    prompts = write_rows("prompts", [{"prompt": f"{a}="} for a in range(8)])
    tree = {
        "job": "rl",
        "run_dir": str(tmp_path / "rl"),
        "max_steps": 2,
        "model": {"scratch": SCRATCH},
        "data": {"sources": [prompts], "prompt_max_len": 8},
        "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "generate_max_len": 6},
        "rewards": [{"kind": "model", "name": "prm", "model": {"path": str(exported)}}],
        "train": {"train_batch_size": 16},
    }
    last = read_metrics(burnish.run(load_config(tree)).run_dir)[-1]
    assert 0 < last["reward/prm"] < 1 and last["reward/prm"] == last["reward/mean"]
    assert 1 <= last["reward/prm/steps"] <= 6


def test_steps_are_asked_of_process_reward_models_only(
    prm: MakeConfig, exported: Path, tmp_path: Path, write_rows: Callable[..., str]
) -> None:
    pairs = write_rows("pairs", [{"prompt": "1=", "chosen": "2", "rejected": "3"}] * 4)
    tree = {
        "job": "rm",
        "run_dir": str(tmp_path / "pairs"),
        "model": {"scratch": SCRATCH},
        "data": {"sources": [pairs]},
        "train": {"train_batch_size": 4},
    }
    run_dir = burnish.run(load_config(tree)).run_dir
    plain = ModelConfig(path=str(burnish.export(run_dir, tmp_path / "plain", model="reward")))
    for option in ({"step_aggregation": "min"}, {"step_separator": ";"}):
        entry = ModelReward.model_validate({"model": plain, **option})
        with pytest.raises(ModelError, match="is not marked as one"):
            load_model_reward(entry, load_tokenizer(plain), engine_of)
    with pytest.raises(ServeError, match="is a process reward model"):
        load_text_scorer(ModelConfig(path=str(exported)), ServeOptions())


def test_a_model_without_a_head_is_no_process_reward_model(tmp_path: Path) -> None:
    entry = ModelReward(model=ModelConfig.model_validate({"scratch": SCRATCH}))
    with pytest.raises(ModelError, match="without a reward head"):
        load_model_reward(entry, load_tokenizer(entry.model), engine_of)
