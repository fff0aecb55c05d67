"""Mistakes in the data and in rewards are found before a model is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fork_server
import pytest
from typer.testing import CliRunner

import burnish
from burnish.cli import app
from burnish.config import load_config
from burnish.config.model import ModelConfig
from burnish.data.config import DataConfig
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.preferences.config import PairsDataConfig, PreferenceDataConfig
from burnish.data.prompts.config import GenerationDataConfig, PromptDataConfig
from burnish.data.rated.config import ClassesDataConfig, ScoresDataConfig
from burnish.data.responses.config import ResponseDataConfig
from burnish.data.sources import DataError
from burnish.data.steps.config import StepsDataConfig
from burnish.preflight import launch as validate
from burnish.preflight.row_scan import DataSection
from burnish.preflight.scored_prompts import scorers_of

GOOD = {"prompt": "1+1=", "response": "2", "label": "2"}
BROKEN = {"prompt": "1+1="}


def recipe(job: str, path: str, **more: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {"job": job, "model": {"scratch": {}}, "data": {"sources": [path]}}
    tree["train"] = {"train_batch_size": 4}
    if job == "rl":
        tree |= {"max_steps": 1, "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2}}
    return tree | more


def rows_file(folder: Path, *rows: Any, name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def check(tree: dict[str, Any]) -> list[str]:
    said: list[str] = []
    validate.check_launch(load_config(tree), say=said.append)
    return said


def rl(path: str, reward: str | None, **data: Any) -> dict[str, Any]:
    tree = recipe("rl", path)
    tree["data"] |= data
    return tree | {"rewards": [{"kind": "function", "function": reward}]}


def test_a_bad_row_in_the_middle_is_found_by_line_and_all_are_listed(tmp_path: Path) -> None:
    rows = [GOOD] * 50
    path = rows_file(tmp_path, *rows, BROKEN, *rows, {"prompt": "1=", "response": 3})
    with pytest.raises(DataError) as caught:
        check(recipe("sft", path))
    message = str(caught.value)
    assert "data: 2 of 102 rows cannot be used (2 unusable)" in message
    assert f"{path}:51: " in message
    assert f"{path}:102: " in message


def test_a_refused_run_leaves_a_folder_that_can_be_used_again(tmp_path: Path) -> None:
    path = rows_file(tmp_path, *[GOOD] * 5, BROKEN)
    tree = recipe("sft", path, run_dir=str(tmp_path / "run"))
    for _ in range(2):
        with pytest.raises(DataError, match=r"rows.jsonl:6: "):
            burnish.run(load_config(tree))
        (tmp_path / "run" / ".plan.txt.7.tmp").touch()  # left by a process that was killed
    names = {file.name for file in (tmp_path / "run").iterdir()}
    assert names == {"plan.txt", "date.txt", "end.json", ".plan.txt.7.tmp"}


def test_a_changed_file_or_setting_is_checked_again(tmp_path: Path) -> None:
    path = Path(rows_file(tmp_path, *[GOOD] * 5))
    tree = recipe("sft", str(path))
    assert check(tree) == ["data: 5 rows checked, no problems"]
    assert check(tree) == ["data: 5 rows checked, no problems (cached result)"]
    tree["data"]["max_len"] = 2
    with pytest.raises(DataError, match="5 too long"):
        check(tree)
    del tree["data"]["max_len"]
    text = path.read_text()
    path.write_text(text.replace('"2"', "null", 1))
    with pytest.raises(DataError, match=r"rows.jsonl:1: .*or set data.on_bad_row=skip"):
        check(tree)
    path.write_text(text)
    assert check(tree) == ["data: 5 rows checked, no problems (cached result)"]
    tree["data"]["sources"] = [str(tmp_path / "*.jsonl")]
    for cached in ("", " (cached result)"):
        assert check(tree) == [f"data: 5 rows checked, no problems{cached}"]
    rows_file(tmp_path, GOOD, BROKEN, name="more.jsonl")
    with pytest.raises(DataError, match=r"more.jsonl:2: "):
        check(tree)


def test_prompts_that_leave_no_room_for_the_response_are_found(tmp_path: Path) -> None:
    """The model has 64 positions and the response up to 16 tokens, which leaves 48 for a prompt.
    The tokenizer of scratch models has one token per character, and the prompt has 60."""
    path = rows_file(tmp_path, GOOD, GOOD | {"prompt": "1" * 60})
    tree = rl(path, None) | {"model": {"scratch": {"max_position_embeddings": 64}}}
    tree["rewards"] = [{"kind": "math"}]
    tree["rollout"] |= {"generate_max_len": 16}
    with pytest.raises(DataError, match=r"rows.jsonl:2: .* prompt_max_len is 48"):
        check(tree)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(answer):\n    return 1.0\n", "unknown parameter 'answer'"),
        ("def f(response):\n    return response.nothing\n", "raised AttributeError"),
        ("def f(response):\n    return 'good'\n", "returned 'good' instead of a finite number"),
    ],
)
def test_a_reward_that_fails_on_one_row_is_found(tmp_path: Path, source: str, message: str) -> None:
    path = rows_file(tmp_path, GOOD)
    (tmp_path / "own.py").write_text(source)
    with pytest.raises(DataError, match=message):
        check(rl(path, f"{tmp_path}/own.py:f"))


def test_rewards_with_a_server_are_skipped_and_named(tmp_path: Path) -> None:
    path = rows_file(tmp_path, GOOD)
    tree = rl(path, None) | {"rewards": [{"kind": "remote", "urls": ["http://127.0.0.1:9"]}]}
    assert any("not called, because kind=remote" in line for line in check(tree))


def test_skipped_rows_are_counted_and_the_run_continues(tmp_path: Path) -> None:
    """One epoch of five rows is one step of three. The draws are 0, 1 (bad), 2 (bad), 3, 4."""
    path = rows_file(tmp_path, GOOD, BROKEN, "a string is no row", GOOD, GOOD)
    tree = recipe("sft", path, run_dir=str(tmp_path / "run"))
    tree["data"] |= {"on_bad_row": "skip", "shuffle": False}
    tree["train"]["train_batch_size"] = 3
    assert check(tree) == ["data: 5 rows checked, 2 skipped"]
    result = burnish.run(load_config(tree))
    assert result.metrics["data/rows_skipped"] == 2.0
    assert result.metrics["data/rows_seen"] == 3.0


def test_several_processes_find_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans of 3, 3 and 2 rows: one process has the first span, the other one the rest."""
    rows = [GOOD] * 3
    path = rows_file(tmp_path, *rows, BROKEN, *rows, BROKEN)
    tree = recipe("sft", path)
    with pytest.raises(DataError) as alone:
        check(tree)
    monkeypatch.setattr(sys, "executable", fork_server.interpreter())
    monkeypatch.setattr(validate, "PARALLEL_ROWS", 2)
    monkeypatch.setattr(validate, "_SPAN_ROWS", 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    said: list[str] = []
    with pytest.raises(DataError) as together:
        validate.check_launch(load_config(tree), say=said.append)
    assert str(together.value) == str(alone.value)
    assert "data: checked 8 of 8 rows (2 processes)" in said


def test_a_new_process_reads_a_section_of_each_kind() -> None:
    """Sections are sent to processes that import nothing but the scan of rows."""
    kinds: list[DataConfig] = [
        kind(sources=("rows.jsonl",))
        for kind in (
            *(PromptDataConfig, GenerationDataConfig, ResponseDataConfig, SFTDataConfig),
            *(PreferenceDataConfig, PairsDataConfig),
        )
    ]
    kinds.append(StepsDataConfig(sources=("rows.jsonl",), kind="steps"))
    kinds.append(ScoresDataConfig(sources=("rows.jsonl",), kind="scores", score_keys=("s",)))
    kinds.append(ClassesDataConfig(sources=("rows.jsonl",), kind="classes", classes=("a", "b")))
    model = ModelConfig.model_validate({"scratch": {}})
    lines = [json.dumps(DataSection("data", data, model).to_json()) for data in kinds]
    code = (
        "import json, sys; from burnish.preflight.row_scan import DataSection as Section\n"
        "for line in sys.stdin: print(json.dumps(Section.from_json(json.loads(line)).to_json()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input="\n".join(lines), capture_output=True, text=True
    )
    assert done.stdout.splitlines() == lines, done.stderr


def test_the_command_prints_its_results_and_exits_with_2(tmp_path: Path) -> None:
    path = rows_file(tmp_path, *[GOOD] * 4)
    recipe_file = tmp_path / "recipe.yaml"
    recipe_file.write_text(json.dumps(recipe("sft", path)))
    done = CliRunner().invoke(app, ["check", str(recipe_file)])
    assert done.exit_code == 0
    assert "ready: no problems found" in done.output
    bad = rows_file(tmp_path, *[GOOD] * 4, BROKEN, name="bad.jsonl")
    done = CliRunner().invoke(app, ["check", str(recipe_file), f"data.sources=[{bad}]"])
    assert done.exit_code == 2
    assert f"{bad}:5: " in done.output


def test_rows_are_grouped_by_reason_with_all_counts(tmp_path: Path) -> None:
    """70 rows with a picture, 30 without a response, one with a number: each reason has its count,
    and its first row in full."""
    picture = [{"type": "image", "image": "x.png"}]
    rows = [
        *([{**GOOD, "prompt": [{"role": "user", "content": picture}]}] * 70),
        *([BROKEN] * 30),
        GOOD,
        {"prompt": "1=", "response": 3},
    ]
    path = rows_file(tmp_path, GOOD, *rows)
    with pytest.raises(DataError) as caught:
        check(recipe("sft", path))
    listed = [line for line in str(caught.value).split("\n") if line.startswith("  - ")]
    assert "101 of 103 rows" in str(caught.value) and len(listed) == 3
    assert listed[0].startswith(f"  - 70 rows: {path}:2: ") and "'image'" in listed[0]
    assert listed[1].startswith("  - 30 rows: ") and len(str(caught.value)) < 2500


TESTS = json.dumps(["assert f(1) == 2"])


@pytest.mark.parametrize(
    ("job", "kind", "label", "bad"),
    [
        ("rl", "math", "2", {"a": 1}),
        ("rl", "python_code", TESTS, [1]),
        ("evaluate", "math", "2", ""),
        ("evaluate", "python_code", TESTS, None),
        ("generate", "math", "2", None),
        ("score", "python_code", TESTS, [1]),
    ],
)
def test_labels_that_the_rewards_cannot_use_are_found_in_every_row(
    job: str, kind: str, label: str, bad: Any, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{i}+1=", "response": "2", "label": label} for i in range(4)]
    good = rows_file(tmp_path, *rows, name="good.jsonl")
    bad_rows = [*rows[:2], {**rows[2], "label": bad}, *rows[3:]]
    path = rows_file(tmp_path, *bad_rows, name="bad.jsonl")
    rewards = [{"kind": kind}]
    if kind == "python_code":
        rewards = [{"kind": kind, "sandbox": "unsafe_subprocess"}]

    def tree(file: str) -> dict[str, Any]:
        common = {**recipe(job, file), "rewards": rewards}
        if job != "rl":
            del common["train"]
        if job == "evaluate":
            common["eval"] = {"data": common.pop("data"), "generate_max_len": 4}
        return common | {"run_dir": str(tmp_path / f"run-{Path(file).stem}")}

    check(tree(good))
    with pytest.raises(DataError, match=r"bad\.jsonl:3") as caught:
        check(tree(path))
    assert "1 of 4" in str(caught.value) or f"the reward {kind}" in str(caught.value)
    with pytest.raises(DataError, match=r"bad\.jsonl:3"):
        burnish.run(load_config(tree(path)))
    check({**tree(path), "on_reward_failure": {"then": "drop_group"}})


ROLES = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A chat template without system messages, as Gemma's."""


def test_prompts_that_a_reward_model_cannot_read_are_found_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy's template takes them. Each row with such roles is named, in processes as well."""
    question = {"role": "user", "content": "1+1="}
    system = {"role": "system", "content": "Add."}
    path = rows_file(tmp_path, *({"prompt": p} for p in ([question], [system, question]) * 2))
    reward = {"kind": "model", "name": "taste", "model": {"scratch": {}, "chat_template": ROLES}}
    tree = recipe("rl", path, rewards=[reward])
    with pytest.raises(DataError) as caught:
        check(tree)
    message = str(caught.value)
    assert "2 of 4 rows cannot be used (2 not scored)" in message
    assert f"{path}:2: " in message and "'taste'" in message and "no system" in message
    check(tree | {"on_reward_failure": {"then": "drop_group"}})
    episodes = "rollout.episodes={tools: [json:loads], max_tokens: 9999}"
    assert scorers_of(load_config(tree)) and not scorers_of(load_config(tree, [episodes]))
    rewards = [reward | {"model": {"scratch": {}}}]
    check(tree | {"rewards": rewards})
    monkeypatch.setattr(sys, "executable", fork_server.interpreter())
    monkeypatch.setattr(validate, "PARALLEL_ROWS", 2)
    monkeypatch.setattr(validate, "_SPAN_ROWS", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    with pytest.raises(DataError) as together:
        check(tree)
    assert str(together.value) == message
