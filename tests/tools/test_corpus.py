"""tools/corpus.py records every load of a recipe, and finds what differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from burnish.config import ConfigError, load_config

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import corpus

RECIPE: dict[str, Any] = {
    "job": "sft",
    "model": {"scratch": {}},
    "data": {"sources": ["rows.jsonl"], "max_len": 32},
    "max_steps": 1,
    "train": {"train_batch_size": 4},
}


def records(folder: Path) -> list[Any]:
    return [json.loads(line) for path in folder.iterdir() for line in path.open()]


def test_each_load_is_recorded_with_its_result(tmp_path: Path) -> None:
    """As the resolved recipe or the lines of its error, and equal in another folder."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        loading = corpus.record_calls(load_config, tmp_path / name)
        run_dir = f"run_dir={tmp_path / name / 'run'}"
        assert loading(RECIPE, ["train.lr=0.5", run_dir]) == load_config(
            RECIPE, ["train.lr=0.5", run_dir]
        )
        with pytest.raises(ConfigError):
            loading(RECIPE, ["train.lr=-1", "train.momentum=1"])
    first, second = records(tmp_path / "a"), records(tmp_path / "b")
    assert len(first) == 2 and first[1] == second[1]
    assert "lr: 0.5" in first[0][1] and str(tmp_path) not in json.dumps(first)
    assert [line.partition(":")[0] for line in first[1][1]] == ["train.lr", "train.momentum"]


def test_the_plugin_records_what_tests_load(tmp_path: Path) -> None:
    """Tests import load_config from the package or from its module; both are recorded."""
    root = Path(__file__).parents[2]
    test = "from burnish.config import load_config\ndef test_x():\n    load_config({recipe!r})\n"
    (tmp_path / "test_recipe.py").write_text(test.format(recipe=RECIPE))
    (tmp_path / "calls").mkdir()
    environment = {
        **os.environ,
        "BURNISH_CORPUS_CALLS": str(tmp_path / "calls"),
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "tools")]),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "corpus", "-p", "no:cacheprovider"]
    subprocess.run([*command, tmp_path], env=environment, cwd=tmp_path, check=True)
    ((case, outcome),) = records(tmp_path / "calls")
    assert "train_batch_size" in case and "max_len: 32" in outcome


def test_differences_name_the_leaf() -> None:
    before = {"a": [1, {"b": 2}], "c": 1.0}
    assert not list(corpus.differences(before, json.loads(json.dumps(before)), "case"))
    after = {"a": [1, {"b": 3}], "d": 1.0}
    assert list(corpus.differences(before, after, "case")) == [
        "case: a.1: b: 2 -> 3",
        "case: c: 1.0 -> null",
        "case: d: null -> 1.0",
    ]


def test_a_part_names_what_a_changed_checkout_does_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 for a changed result. A case that only one side has is counted."""
    results = {"x": {"seconds": 1.5, "fits": True}, "y": ["error"]}
    monkeypatch.setattr(corpus, "PARTS", {"plans": lambda folder, before: results})
    command = [str(tmp_path), "--parts", "plans"]
    assert corpus.main(["record", *command]) == 0
    assert corpus.main(["compare", *command]) == 0
    results = {"x": {"seconds": 1.5, "fits": False}, "z": []}
    capsys.readouterr()
    assert corpus.main(["compare", *command]) == 1
    assert "1 cases compared, 1 missing, 1 new, 1 differences" in capsys.readouterr().out
