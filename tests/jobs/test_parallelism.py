"""Models that do not support the recipe's parallel sizes are refused before anything is loaded or
written: by the job, and by its dry run if the model's config is on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig
from typer.testing import CliRunner

import burnish
from burnish.cli import app
from burnish.config import dump_yaml, load_config
from burnish.models import load
from burnish.models.load import ModelError
from burnish.models.tensor_parallel import check_head_counts
from burnish.preflight.families import parallel_degrees

HEADS: dict[str, Any] = {"scratch": {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2}}
SPLIT = {"kind": "vllm", "tensor_parallel_size": 4}
GAE = {"advantage": "gae"}
TEAM = {"runtime": "ray", "policy_ranks": 4}


def recipe(folder: Path, model: dict[str, Any], **more: Any) -> Any:
    (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n' * 4, encoding="utf-8")
    tree: dict[str, Any] = {
        "job": "rl",
        "run_dir": str(folder / "run"),
        "max_steps": 1,
        "model": model,
        "data": {"sources": [str(folder / "rows.jsonl")]},
        "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 4},
        "train": {"train_batch_size": 16},
    }
    return load_config({**tree, **{k: {**tree.get(k, {}), **v} for k, v in more.items()}})


def dry_run(config: Any, folder: Path) -> Any:
    path = folder / "recipe.yaml"
    path.write_text(dump_yaml(config), encoding="utf-8")
    return CliRunner().invoke(app, ["rl", str(path), "--dry-run"])


def test_most_jobs_have_no_parallel_degrees(tmp_path: Path) -> None:
    assert parallel_degrees(recipe(tmp_path, HEADS).roles()) == []


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "vllm": (
        HEADS,
        {"rollout": {"engine": SPLIT}},
        "rollout.engine.tensor_parallel_size=4 does not divide the model's 2 key/value heads",
    ),
    "vllm, a model of the table": (
        {"path": "meta-llama/Meta-Llama-3-70B-Instruct"},
        {"rollout": {"engine": {**SPLIT, "tensor_parallel_size": 3}}},
        "70B-Instruct: rollout.engine.tensor_parallel_size=3 does not divide the model's 64 att",
    ),
    "layers": (
        HEADS,
        {"train": {"engine": {"tensor_parallel_size": 4}}, "cluster": TEAM},
        "train.engine.tensor_parallel_size=4 does not divide the 2 heads (num_key_value_heads)",
    ),
    "tokens, of the critic's own model": (
        HEADS,
        {
            "train": {"engine": {"sequence_parallel_size": 4}},
            "cluster": TEAM,
            "algorithm": GAE,
            "critic": {"model": {"scratch": {"hidden_size": 60, "num_heads": 6}}},
        },
        "train.engine.sequence_parallel_size=4 does not divide the 6 attention heads",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_indivisible_heads_are_refused_before_anything_is_loaded(case: str, tmp_path: Path) -> None:
    model, more, message = CASES[case]
    config = recipe(tmp_path, model, **more)
    with pytest.raises(ModelError) as caught:
        burnish.run(config)
    assert message in str(caught.value) and not (tmp_path / "run").exists()
    done = dry_run(config, tmp_path)
    assert done.exit_code == 2 and message in done.stderr


def test_a_local_config_is_read_and_an_unknown_model_is_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2 has 12 heads and no number of key/value heads."""
    monkeypatch.setattr(load, "hf_config", lambda model: pytest.fail("the hub was asked"))
    AutoConfig.for_model("gpt2").save_pretrained(tmp_path / "gpt2")
    rollout = {"rollout": {"engine": SPLIT}}
    folder = {"path": str(tmp_path / "gpt2")}
    assert dry_run(recipe(tmp_path, folder, **rollout), tmp_path).exit_code == 0
    rollout["rollout"]["engine"] = {**SPLIT, "tensor_parallel_size": 8}
    done = dry_run(recipe(tmp_path, folder, **rollout), tmp_path)
    assert done.exit_code == 2 and "does not divide the model's 12 attention heads" in done.stderr
    unknown = recipe(tmp_path, {"path": "nobody/nothing-1"}, **rollout)
    assert dry_run(unknown, tmp_path).exit_code == 0


@pytest.mark.parametrize("model_type", ["mamba2", "falcon_mamba"])
def test_layers_without_heads_are_refused_with_the_reason(model_type: str) -> None:
    with pytest.raises(ModelError, match=rf"size=2: this {model_type} model has no number of att"):
        check_head_counts(CONFIG_MAPPING[model_type](), 2)
