"""The inputs of launched ranks: equal contents in other folders are equal, and each difference is
named with both values and its fix."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from burnish.config import JobConfig, load_config
from burnish.runtime.spmd import inputs as rank_inputs
from burnish.runtime.spmd.inputs import different_inputs, inputs_of

ROWS = '{"prompt": "1=", "response": "1"}\n'


def node(folder: Path) -> Path:
    """Make a node's disk with a model and data files."""
    (folder / "model").mkdir(parents=True)
    (folder / "data").mkdir()
    (folder / "model/config.json").write_text('{"model_type": "llama"}')
    (folder / "model/model.safetensors").write_bytes(b"\0" * 64)
    (folder / "model/README.md").write_text(str(folder))  # not read by a run
    for name in ("a", "b"):
        (folder / f"data/{name}.jsonl").write_text(ROWS)
    return folder


def recipe(disk: Path, *overrides: str) -> JobConfig:
    tree: dict[str, Any] = {
        "job": "sft",
        "model": {"path": str(disk / "model"), "lora": {}},
        "data": {"sources": [str(disk / "data")]},
        "train": {"train_batch_size": 4},
    }
    return load_config(tree, overrides)


def compared(first: JobConfig, other: JobConfig, *, reads: bool = True) -> str | None:
    """The message of two ranks on hosts n1 and n2."""
    inputs = [
        inputs_of(first, resumed=False, device="cpu"),
        inputs_of(other, resumed=False, device="cpu", reads_contents=reads),
    ]
    return different_inputs(inputs, ["n1", "n2"])


def edit(name: str, text: str) -> Callable[[Path], None]:
    return lambda disk: disk.joinpath(name).write_text(text) and None


CHANGES: dict[str, tuple[Callable[[Path], None], list[str], str]] = {
    "an override": (
        edit("data/c", ""),
        ["train.lr=0.5"],
        r"rank 1 \(host n2\): train.lr is 0.5, but 1e-06 on rank 0\nStart all ranks with the same",
    ),
    "a row of the same length": (
        edit("data/b.jsonl", ROWS.replace("1", "2")),
        [],
        r"data.sources.0.path, file b.jsonl, content is sha256 \w{12}, but sha256 \w{12} on rank 0"
        r"\nCopy the files",
    ),
    "a missing file": (
        lambda disk: disk.joinpath("data/b.jsonl").unlink(),
        [],
        "data.sources.0.path, file b.jsonl, bytes is missing, but 34 on rank 0",
    ),
    "a model config": (
        edit("model/config.json", '{"model_type": "qwen2"}'),
        [],
        "model.path, file config.json, content is sha256 ",
    ),
    "other weights of the same size": (
        lambda disk: disk.joinpath("model/model.safetensors").write_bytes(b"\1" * 64) and None,
        [],
        "model.path, file model.safetensors, content is sha256 ",
    ),
}


@pytest.mark.parametrize(("change", "overrides", "message"), CHANGES.values(), ids=list(CHANGES))
def test_a_difference_is_named_with_both_values_and_its_fix(
    change: Callable[[Path], None], overrides: list[str], message: str, tmp_path: Path
) -> None:
    first = node(tmp_path / "n1")
    other = node(tmp_path / "n2")
    assert compared(recipe(first), recipe(other)) is None, "equal files at other paths"
    change(other)
    found = compared(recipe(first), recipe(other, *overrides))
    assert found is not None
    assert found.startswith("the ranks have different inputs, so they would train different")
    assert re.search(message, found), found


def test_only_one_rank_of_a_node_reads_contents(tmp_path: Path) -> None:
    """And none reads those of data with ``validate: off``; sizes are compared in any case."""
    first, other = node(tmp_path / "n1"), node(tmp_path / "n2")
    edit("data/b.jsonl", ROWS.replace("1", "2"))(other)
    assert compared(recipe(first), recipe(other), reads=False) is None
    off = "data.validate=off"
    assert compared(recipe(first, off), recipe(other, off)) is None
    edit("data/b.jsonl", ROWS * 2)(other)
    found = compared(recipe(first, off), recipe(other, off), reads=False)
    assert found is not None and "file b.jsonl, bytes is 68, but 34 on rank 0" in found


def test_versions_are_compared_first_and_ranks_of_a_host_share_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks on two nodes. The second has another torch, peft and code, and runs a resume."""
    config = recipe(node(tmp_path / "n1"))
    first = inputs_of(config, resumed=False, device="cpu")
    assert "peft" in first["versions"] and "deepspeed" not in first["versions"]
    monkeypatch.setattr(rank_inputs, "version", lambda name: "1.0")
    part = Path(rank_inputs.__file__).parent
    shutil.copytree(part, tmp_path / "burnish/runtime")
    monkeypatch.setattr(rank_inputs, "__file__", str(tmp_path / "burnish/runtime/spmd/inputs.py"))
    other = inputs_of(config, resumed=True, device="cuda")
    found = different_inputs([first, first, other, other], ["n1", "n1", "n2", "n2"])
    assert found is not None
    _, line, fixes = found.split("\n")
    assert line.startswith("  - ranks 2, 3 (host n2): burnish is '1.0', but ")
    assert re.search("; burnish, content is sha256 .*; peft is '1.0', but '", line)
    assert line.endswith("; and 5 more")
    assert fixes.startswith("Install the same versions on every node")
    assert "Start all ranks on nodes with the same devices" in fixes


@pytest.mark.parametrize(
    ("key", "override"),
    [
        ("rewards.0.function", "rewards=[{kind: function, function: 'CODE:f'}]"),
        ("rewards.0.function", "rewards=[{kind: function, function: 'openrlhf:CODE'}]"),
        (
            "eval.data.sources.0.environment",
            "eval.data.sources=[{kind: environment, environment: 'CODE:f'}]",
        ),
        ("episodes.environment", "episodes={environment: 'CODE:f', max_tokens: 4096}"),
    ],
)
def test_the_users_code_of_every_kind_is_compared(key: str, override: str, tmp_path: Path) -> None:
    disk, code = node(tmp_path / "n"), tmp_path / "code.py"
    tree: dict[str, Any] = {
        "job": "evaluate",
        "model": {"path": str(disk / "model")},
        "eval": {"data": {"sources": [str(disk / "data")]}, "generate_max_len": 4},
    }
    config = load_config(tree, [override.replace("CODE", str(code))])
    inputs = []
    for number in (1, 2):
        code.write_text(f"f = {number}\n")
        inputs.append(inputs_of(config, resumed=False, device="cpu"))
    message = different_inputs(inputs, ["n1", "n2"])
    assert message is not None and f"{key}, file code.py, content is sha256 " in message
