"""Several named evaluation sets: the first keeps its metrics, those of others have their name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish.checkpoint import read_manifest
from burnish.config import load_config
from burnish.observe.metrics import read_metrics
from burnish.observe.samples import read_samples
from burnish.report.catalog import arrange

MODEL = {"scratch": {"alphabet": "0123456789+=", "hidden_size": 32, "num_layers": 1}}


def rows_file(folder: Path, name: str, numbers: range) -> str:
    path = folder / f"{name}.jsonl"
    rows = [
        {"prompt": f"{i}=", "response": str(i), "chosen": str(i), "rejected": "7", "label": str(i)}
        for i in numbers
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def section(folder: Path, name: str, numbers: range) -> dict[str, Any]:
    return {"sources": [rows_file(folder, name, numbers)]}


def recipe(job: str, folder: Path) -> dict[str, Any]:
    """A run of one or two steps with the sets ``eval.data``, ``same`` (equal rows) and ``long``."""
    data, first = section(folder, "train", range(8)), section(folder, "first", range(4))
    sets = {"same": first, "long": section(folder, "long", range(100, 103))}
    tree: dict[str, Any] = {"job": job, "model": MODEL, "run_dir": str(folder / "run")}
    if job == "evaluate":
        return tree | {"eval": {"data": first, "sets": sets, "generate_max_len": 4}}
    tree |= {"data": data, "train": {"train_batch_size": 4, "lr": 0.01}, "max_steps": 2}
    tree |= {"eval": {"data": first, "sets": sets}}
    if job == "rl":
        rollout = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "generate_max_len": 4}
        return tree | {"rollout": rollout}
    if job == "kto":
        tree |= {"job": "preference", "loss": "kto", "reference": {"precompute": True}}
    return tree


def check_sets(line: dict[str, Any], names: frozenset[str]) -> None:
    """The set ``same`` has the values of the first set, bit by bit."""
    found = {n.removeprefix("eval/"): v for n, v in line.items() if n.startswith("eval/")}
    assert set(found) == names
    once = {name for name in names if not name.startswith(("same/", "long/"))}
    assert len(names) == 3 * len(once)
    assert all(found[name] == found[f"same/{name}"] for name in once)
    if line["step"]:  # at step 0, kto measures the policy against itself
        assert any(found[name] != found[f"long/{name}"] for name in once)


@pytest.mark.parametrize("job", ["sft", "kto"])
def test_every_set_is_measured_at_every_evaluation(tmp_path: Path, job: str) -> None:
    tree = recipe(job, tmp_path)
    config: Any = load_config(tree, ["checkpoint.best_metric=eval/long/loss"])
    run_dir = burnish.run(config).run_dir
    lines = [line for line in read_metrics(run_dir) if "eval/loss" in line]
    assert [line["step"] for line in lines] == [0, 2 if job != "kto" else lines[-1]["step"]]
    for line in lines:
        check_sets(line, config.eval_metrics)
    best = read_manifest(next((run_dir / "checkpoints").glob("step_*"))).extra["metric"]
    assert best == lines[-1]["eval/long/loss"]
    report = (run_dir / "report.html").read_text(encoding="utf-8")
    assert "eval/long/loss" in report


def test_sets_of_prompts_are_measured_with_the_weights_of_one_step(tmp_path: Path) -> None:
    staleness = ("rollout.asynchronous.max_staleness=1", "rollout.engine.own_weights=true")
    config: Any = load_config(recipe("rl", tmp_path), [*staleness, "algorithm.old_policy=sampler"])
    run_dir = burnish.run(config, rewards=lambda response: len(response) % 3).run_dir
    lines = [line for line in read_metrics(run_dir) if "eval/pass@1" in line]
    assert [line["step"] for line in lines] == [0, 2]
    for line in lines:
        found = {n.removeprefix("eval/"): v for n, v in line.items() if n.startswith("eval/")}
        assert set(found) == config.eval_metrics
        assert [found[f"{name}prompts"] for name in ("", "same/", "long/")] == [4, 4, 3]
        assert found["reward"] == found["same/reward"]
    versions: dict[tuple[str, int], set[int]] = {}
    for row in read_samples(run_dir):
        versions.setdefault((row["split"], row["step"]), set()).add(row["version"])
    assert all(
        versions[split, step] == {step}
        for split in ("eval", "eval_same", "eval_long")
        for step in (0, 2)
    )


def test_the_job_evaluate_measures_all_sets(tmp_path: Path) -> None:
    config = load_config(recipe("evaluate", tmp_path))
    metrics = burnish.run(config, rewards=lambda response: len(response) % 3).metrics
    assert metrics["eval/same/reward"] == metrics["eval/reward"]
    assert (metrics["eval/prompts"], metrics["eval/long/prompts"]) == (4, 3)


def test_metrics_of_sets_share_the_chart_of_the_first() -> None:
    names = ["eval/loss", "eval/a/loss", "eval/pass@1", "eval/a/pass@1", "eval/reward/x"]
    assert [chart.names for chart in arrange([*names, "eval/a/reward/x"])] == [
        ("eval/pass@1", "eval/a/pass@1"),
        ("eval/loss", "eval/a/loss"),
        ("eval/reward/x", "eval/a/reward/x"),
    ]


def test_held_out_rows_may_be_the_first_of_several_sets(tmp_path: Path) -> None:
    tree = recipe("sft", tmp_path)
    del tree["eval"]["data"]
    tree["data"]["held_out"] = 2
    config: Any = load_config(tree)
    assert config.eval.data.part == "held_out" and set(config.eval.sets) == {"same", "long"}


@pytest.mark.parametrize(
    ("save_every", "eval_every", "warned"),
    [(7, 5, True), (8, 4, True), (0, 5, True), (5, 5, False), (2, 4, False), (7, 0, False)],
)
@pytest.mark.parametrize("job", ["sft", "rl"])
def test_evaluations_whose_weights_are_not_saved_are_a_warning(
    job: str, save_every: int, eval_every: int, warned: bool, tmp_path: Path
) -> None:
    tree = recipe(job, tmp_path)
    metric = "eval/loss" if job == "sft" else "eval/pass@1"
    tree["checkpoint"] = {"every_n_steps": save_every, "best_metric": metric}
    tree["eval"]["every_n_steps"] = eval_every
    said = [text for text in load_config(tree).warnings() if "checkpoint.best_metric" in text]
    assert len(said) == warned
