"""The check of model families, as jobs, dry runs, plans and the doctor tell it: from a config
alone, before anything is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from typer.testing import CliRunner

import burnish
from burnish.cli import app
from burnish.config import dump_yaml, load_config
from burnish.models.load import ModelError
from burnish.preflight.families import check_families


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for model_type in ("qwen3", "qwen3_5_text", "bert", "stablelm"):
        AutoConfig.for_model(model_type).save_pretrained(tmp_path / model_type)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n' * 4)
    return tmp_path


def recipe(folder: Path, model_type: str, **more: Any) -> Any:
    tree = {
        "job": "sft",
        "run_dir": str(folder / "run"),
        "max_steps": 1,
        "model": {"path": str(folder / model_type)},
        "data": {"sources": [str(folder / "rows.jsonl")], "max_len": 16},
        "train": {"train_batch_size": 2},
    }
    return load_config({**tree, **{k: {**tree.get(k, {}), **v} for k, v in more.items()}})


def test_a_dry_run_reports_how_the_model_runs_and_is_cached(folder: Path) -> None:
    file = folder / "recipe.yaml"
    file.write_text(dump_yaml(recipe(folder, "qwen3_5_text")), encoding="utf-8")
    first = CliRunner().invoke(app, ["sft", str(file), "--dry-run"])
    assert "# " in first.output and "one row changes another" in first.output
    assert "rows are padded" in first.output, first.output
    code = (
        "import sys; from burnish.config import load_config; "
        "from burnish.preflight.families import check_families; from pathlib import Path; "
        f"print(check_families(load_config(Path({str(file)!r})), download=False)); "
        "assert 'torch' not in sys.modules"
    )
    again = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "rows are padded" in again.stdout


def test_a_refused_model_ends_every_job_before_its_weights_are_read(folder: Path) -> None:
    """The folder contains only a config."""
    config = recipe(folder, "bert")
    with pytest.raises(ModelError, match="bert cannot be used: its logits"):
        check_families(config, download=False)
    with pytest.raises(ModelError, match="bert cannot be used"):
        burnish.run(config)
    assert not (folder / "run").exists()


@pytest.mark.parametrize("key", ["tensor_parallel_size", "sequence_parallel_size"])
def test_padded_families_are_not_shared_among_ranks(folder: Path, key: str) -> None:
    config = recipe(
        folder,
        "stablelm",
        train={"engine": {"kind": "torch", key: 2}},
        cluster={"runtime": "ray", "policy_ranks": 2},
    )
    with pytest.raises(ModelError, match=f"train.engine.{key}=2: stablelm: .* use 1"):
        burnish.run(config)


def test_doctor_reports_on_one_model(folder: Path) -> None:
    found = CliRunner().invoke(app, ["doctor", str(folder / "qwen3"), "--json"])
    tree = json.loads(found.output)
    assert tree["support"]["attention"] == "burnish"
    assert tree["decoding"]["decoding"] == "batched"
    assert CliRunner().invoke(app, ["doctor", str(folder / "bert")]).exit_code == 1
    missing = CliRunner().invoke(app, ["doctor", str(folder / "rows.jsonl")])
    assert missing.exit_code == 2 and "rows.jsonl" in missing.output


def test_plan_reports_how_the_model_runs(folder: Path) -> None:
    file = folder / "recipe.yaml"
    file.write_text(dump_yaml(recipe(folder, "qwen3")), encoding="utf-8")
    found = CliRunner().invoke(app, ["plan", str(file), "--cluster", "H100-80GB"])
    assert "packed rows are exact" in found.output, found.output
