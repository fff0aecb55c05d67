"""Reward models from their recipe to the reward of another run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish.config import ConfigError, JobConfig, load_config
from burnish.config.model import ModelConfig
from burnish.config.rewards import ModelReward
from burnish.models.load import ModelError, load_tokenizer
from burnish.models.value_head import load_scalar_model
from burnish.observe.metrics import read_metrics
from burnish.rewards.model import load_model_reward
from burnish.train.spec import EngineSpec
from burnish.train.torch import TorchTrainEngine

SCRATCH = {
    "alphabet": "0123456789+=",
    "hidden_size": 32,
    "num_layers": 1,
    "max_position_embeddings": 64,
}
MakeConfig = Callable[..., JobConfig]


@pytest.fixture
def rm(tmp_path: Path, write_rows: Callable[..., str]) -> MakeConfig:
    """12 pairs: the right digit before a wrong one; 6 steps of 4."""
    rows = [
        {"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"{(a + b + 3) % 10}", "by": a}
        for a in range(4)
        for b in range(3)
    ]
    pairs = write_rows("pairs", rows)

    def make(*overrides: str) -> JobConfig:
        data = {"sources": [pairs], "max_len": 16}
        tree: dict[str, Any] = {
            "job": "rm",
            "run_dir": str(tmp_path / "run"),
            "max_epochs": 2,
            "model": {"scratch": SCRATCH},
            "data": data,
            "eval_data": data,
            "train": {"train_batch_size": 4, "lr": 1e-2},
        }
        return load_config(tree, overrides)

    return make


def engine_of(spec: EngineSpec) -> TorchTrainEngine:
    return TorchTrainEngine(load_scalar_model(spec.model), spec)


def test_log_exp_gives_the_numbers_of_bradley_terry(rm: MakeConfig, tmp_path: Path) -> None:
    first, second = (
        read_metrics(burnish.run(rm(f"loss={loss}", f"run_dir={tmp_path / loss}")).run_dir)
        for loss in ("bradley_terry", "log_exp")
    )
    losses = [
        [line["train/loss"] for line in lines if "train/loss" in line] for lines in (first, second)
    ]
    # softplus and log sigmoid round differently in fp32's last digits; Adam then divides gradients
    # of almost zero by their own size, so that the digits grow with every step
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-6)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_centering_keeps_scores_around_zero(rm: MakeConfig, tmp_path: Path) -> None:
    def last_mean(coef: float) -> float:
        folder = f"run_dir={tmp_path / f'run-{coef}'}"
        run = burnish.run(rm(folder, f"center_coef={coef}", "max_epochs=10"))
        return abs(read_metrics(run.run_dir)[-1]["eval/score_mean"])

    assert last_mean(1.0) < 0.5 * last_mean(0.0)


def test_mean_and_spread_of_the_scores_travel_with_the_export_and_normalise_rewards(
    rm: MakeConfig, tmp_path: Path
) -> None:
    run_dir = burnish.run(rm()).run_dir
    last = read_metrics(run_dir)[-1]
    out = burnish.export(run_dir, tmp_path / "out", model="reward")
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config["reward_mean"] == pytest.approx(last["eval/score_mean"])
    assert config["reward_std"] == pytest.approx(last["eval/score_std"])
    model = ModelConfig(path=str(out))
    tokenizer = load_tokenizer(model)
    plain, scaled = (
        load_model_reward(ModelReward(model=model, normalize=on), tokenizer, engine_of)
        for on in (False, True)
    )
    assert plain.scale == (0.0, 1.0)
    assert scaled.scale == (config["reward_mean"], config["reward_std"])


def test_a_model_without_the_two_numbers_cannot_normalise(
    rm: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = burnish.run(rm("eval_data=null")).run_dir
    out = burnish.export(run_dir, tmp_path / "out", model="reward")
    assert "had not evaluated any held-out rows by then" in caplog.text
    assert "train it with eval_data" in caplog.text
    model = ModelConfig(path=str(out))
    with pytest.raises(ModelError, match="has no reward_mean and reward_std"):
        entry = ModelReward(model=model, normalize=True)
        load_model_reward(entry, load_tokenizer(model), engine_of)


@pytest.fixture
def two_checkpoints(rm: MakeConfig) -> Path:
    """A run that measured held-out rows at step 0 and at its end, and saved between the two."""
    options = ("checkpoint.every_n_steps=3", "checkpoint.keep_last=2", "train.ema_decay=0.5")
    return burnish.run(rm(*options)).run_dir


@pytest.mark.parametrize(
    ("checkpoint", "model"), [("step_000003", "reward"), ("", "reward-ema")], ids=["early", "ema"]
)
def test_weights_that_were_not_measured_are_exported_without_the_two_numbers(
    two_checkpoints: Path,
    tmp_path: Path,
    checkpoint: str,
    model: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = two_checkpoints / "checkpoints" / checkpoint if checkpoint else two_checkpoints
    out = burnish.export(source, tmp_path / "out", model=model)
    config = json.loads((out / "config.json").read_text())
    assert "reward_mean" not in config
    assert "reward_std" not in config
    assert ("save at steps that are evaluated" in caplog.text) == bool(checkpoint)


def test_a_run_that_begins_with_a_measured_model_does_not_keep_its_numbers(
    two_checkpoints: Path, rm: MakeConfig, tmp_path: Path
) -> None:
    first = burnish.export(two_checkpoints, tmp_path / "first", model="reward")
    assert "reward_mean" in json.loads((first / "config.json").read_text())
    options = ("model.scratch=null", "eval_data=null", f"run_dir={tmp_path / 'run-2'}")
    again = rm(f"model.path={first}", *options)
    second = burnish.export(burnish.run(again).run_dir, tmp_path / "second", model="reward")
    assert "reward_mean" not in json.loads((second / "config.json").read_text())


def test_a_margin_column_with_log_exp_is_refused(rm: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="loss=log_exp, which has no margin"):
        rm("loss=log_exp", "data.margin_key=by")
    assert rm("data.margin_key=by") is not None
