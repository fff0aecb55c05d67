"""Reward models from their recipe to the reward of another run."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import burnish
from burnish.config import JobConfig, load_config
from burnish.config.model import ModelConfig
from burnish.config.reward_model import RewardModelConfig
from burnish.data.batches import load_batch
from burnish.models.load import ModelError, load_tokenizer
from burnish.models.value_head import load_scalar_model
from burnish.observe.metrics import read_metrics
from burnish.rewards.model.config import ModelReward
from burnish.rewards.model.reward import load_model_reward, load_reward_engine, score_rows
from burnish.train.spec import EngineSpec
from burnish.train.torch.engine import TorchTrainEngine

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
            "eval": {"data": data},
            "train": {"train_batch_size": 4, "lr": 1e-2},
        }
        return load_config(tree, overrides)

    return make


def engine_of(spec: EngineSpec) -> TorchTrainEngine:
    return TorchTrainEngine(load_scalar_model(spec.role.model), spec)


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
    assert config["scores_at"] == "end_token"
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
    run_dir = burnish.run(rm("eval=null")).run_dir
    out = burnish.export(run_dir, tmp_path / "out", model="reward")
    assert "had not evaluated any held-out rows by then" in caplog.text
    assert "train it with eval.data" in caplog.text
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
    options = ("model.scratch=null", "eval=null", f"run_dir={tmp_path / 'run-2'}")
    again = rm(f"model.path={first}", *options)
    second = burnish.export(burnish.run(again).run_dir, tmp_path / "second", model="reward")
    assert "reward_mean" not in json.loads((second / "config.json").read_text())


KINDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "attributes": (
        {"kind": "scores", "score_keys": ["correctness", "verbosity"]},
        ["reward_weights={correctness: 1, verbosity: -0.5}"],
    ),
    "huber": ({"kind": "scores", "score_keys": ["correctness"]}, ["loss=huber"]),
    "pass": ({"kind": "classes", "label_key": "passed"}, []),
    "classes": (
        {"kind": "classes", "label_key": "grade", "classes": ["bad", "ok", "good"]},
        ["reward_weights={good: 1, bad: -1}"],
    ),
    "lora": (
        {"kind": "scores", "score_keys": ["correctness", "verbosity"]},
        ["model.lora={lora_rank: 4}"],
    ),
}


@pytest.fixture
def rated(tmp_path: Path, write_rows: Callable[..., str]) -> MakeConfig:
    """16 sums, every second one wrong, with two scores, pass or fail and one of three classes."""
    grades = ("good", "bad", "ok", "bad")
    rows = [
        {
            "prompt": f"{a}+{b}=",
            "response": f"{(a + b + 3 * (b % 2)) % 10}",
            "correctness": float(4 * (b % 2 == 0)),
            "verbosity": b / 2,
            "passed": b % 2 == 0,
            "grade": grades[b],
        }
        for a in range(4)
        for b in range(4)
    ]
    file = write_rows("rated", rows)

    def make(data: dict[str, Any], *overrides: str) -> JobConfig:
        section = {"sources": [file], "max_len": 16, **data}
        tree: dict[str, Any] = {
            "job": "rm",
            "run_dir": str(tmp_path / "run"),
            "max_epochs": 15,
            "model": {"scratch": SCRATCH},
            "data": section,
            "eval": {"data": section},
            "train": {"train_batch_size": 8, "lr": 1e-2},
        }
        return load_config(tree, overrides)

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_a_regression_or_classification_learns_and_its_export_gives_the_same_numbers(
    kind: str, rated: MakeConfig, tmp_path: Path
) -> None:
    """From the recipe to transformers' classifier and to the reward, which is the weighted sum of
    the classifier's outputs."""
    data, options = KINDS[kind]
    config = rated(data, *options)
    assert isinstance(config, RewardModelConfig)
    lines = read_metrics(burnish.run(config).run_dir)
    first, last = ([x for x in lines if "eval/loss" in x][i] for i in (0, -1))
    assert {f"eval/{name}" for name in config.eval_metrics} == {
        name for name in last if name.startswith("eval/")
    }
    assert last["eval/loss"] < 0.7 * first["eval/loss"]
    assert last.get("eval/accuracy", 1.0) >= first.get("eval/accuracy", 0.0)
    out = burnish.export(tmp_path / "run", tmp_path / "out", model="reward")
    model = AutoModelForSequenceClassification.from_pretrained(out)
    tokenizer = load_tokenizer(ModelConfig(path=str(out)))
    held_out = load_batch(config.data, tokenizer)
    bounds = held_out.offsets.tolist()
    rows = [held_out.tokens[a:b] for a, b in pairwise(bounds)]
    with torch.no_grad():
        logits = torch.cat([model(input_ids=row[None]).logits for row in rows])
    names = list(config.data.names)
    assert [model.config.id2label[i] for i in range(len(names))] == names
    labels = held_out.labels
    assert labels is not None
    binary = kind == "pass"
    loss = model.loss_function(
        labels=labels[:, None].float() if binary else labels,
        pooled_logits=logits,
        config=model.config,
    )
    name = "loss" if data["kind"] == "classes" else "mse"
    # 1e-4: sums of fp32 in another order, after 30 steps
    assert float(loss) == pytest.approx(last[f"eval/{name}"], rel=1e-4)
    weights = config.weight_of_outputs
    assert weights is not None
    expected = (logits @ torch.tensor(weights)).tolist()
    engine = load_reward_engine(ModelConfig(path=str(out)), dtype="fp32", device="cpu")
    assert score_rows(engine, [row.tolist() for row in rows]) == pytest.approx(
        expected, rel=1e-4, abs=1e-5
    )
    assert last["eval/score_mean"] == pytest.approx(
        sum(expected) / len(expected), rel=1e-3, abs=1e-4
    )


def test_a_classifier_without_weights_is_a_reward_only_with_output_weights(
    rated: MakeConfig, tmp_path: Path
) -> None:
    data, _ = KINDS["classes"]
    config = rated(data, "eval=null", "max_epochs=1")
    assert any("reward_weights is not set" in line for line in config.warnings())
    burnish.run(config)
    out = burnish.export(tmp_path / "run", tmp_path / "out", model="reward")
    model = ModelConfig(path=str(out))
    with pytest.raises(ModelError, match="output_weights"):
        load_scalar_model(model)
    with pytest.raises(ModelError, match="output 'god'"):
        load_scalar_model(model, output_weights={"god": 1.0})
    with pytest.raises(ModelError, match="recipe trains"):
        load_scalar_model(model, new_head="random")
    classifier = AutoModelForSequenceClassification.from_pretrained(out)
    head = load_scalar_model(model, output_weights={"good": 1.0, "bad": -1.0}).score.weight
    expected = classifier.score.weight[2] - classifier.score.weight[0]
    torch.testing.assert_close(head[0], expected)


@pytest.mark.parametrize(("kind", "key"), [("classes", "classes"), ("attributes", "score_keys")])
def test_outputs_are_continued_by_name(
    kind: str, key: str, rated: MakeConfig, tmp_path: Path
) -> None:
    """In another order, the first evaluation is the last one of the run before. Other names are
    refused, unless the model's outputs have none."""
    data, options = KINDS[kind]
    before = read_metrics(burnish.run(rated(data, *options, "max_epochs=4")).run_dir)[-1]
    out = burnish.export(tmp_path / "run", tmp_path / "out", model="reward")
    more = (f"model={{path: {out}}}", f"run_dir={tmp_path / 'again'}", "max_steps=1")
    names = data[key]
    turned = {**data, key: names[::-1]}
    after = read_metrics(burnish.run(rated(turned, *options, *more)).run_dir)[0]
    measured = [name for name in before if name.startswith("eval/")]
    # 1e-5: fp32 sums over the outputs in another order
    assert {n: after[n] for n in measured} == pytest.approx({n: before[n] for n in measured}, 1e-5)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    for labels in (["other", *names[1:]], [f"LABEL_{i}" for i in range(len(names))]):
        config["id2label"] = dict(enumerate(labels))
        (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
        with nullcontext() if "LABEL_0" in labels else pytest.raises(ModelError, match="other"):
            head = load_scalar_model(
                ModelConfig(path=str(out)),
                new_head="random",
                num_outputs=len(names),
                output_names=names,
            )
    classifier = AutoModelForSequenceClassification.from_pretrained(out)
    torch.testing.assert_close(head.score.weight, classifier.score.weight)


def test_a_resumed_regression_is_bit_equal_to_one_that_went_through(
    rated: MakeConfig, tmp_path: Path
) -> None:
    data, options = KINDS["attributes"]

    def config(folder: str, steps: int) -> JobConfig:
        more = (f"run_dir={tmp_path / folder}", f"max_steps={steps}")
        return rated(data, *options, *more, "train.lr_scheduler=constant")

    entire = read_metrics(burnish.run(config("a", 4)).run_dir)[-1]
    burnish.run(config("b", 2))
    burnish.run(config("b", 4), resume=tmp_path / "b")
    resumed = read_metrics(tmp_path / "b")[-1]
    measured = [name for name in entire if name.startswith(("eval/", "train/loss", "train/mse"))]
    assert measured and all(entire[name] == resumed[name] for name in measured)
