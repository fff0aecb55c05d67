"""Missing files and unusable rows are reported before torch is imported, by every job and by dry
runs, with the messages of the code that reads them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import burnish
from burnish.cli import app
from burnish.config import JobConfig, load_config
from burnish.config.model import ModelConfig
from burnish.config.sources import FileSource
from burnish.data.sources import DataError, first_rows, open_source
from burnish.driver.errors import RunError
from burnish.environments.importing import LoadError, check_file
from burnish.models.load import load_tokenizer
from burnish.models.paths import ModelError
from burnish.preflight.inputs import check_inputs, recorded_run
from burnish.preflight.launch import check_launch

SHORT = {"generate_max_len": 2}
PAIR = {"prompt": "1+1=", "response": "2", "chosen": "2", "rejected": "3", "label": "2"}


def recipe(job: str, path: str, **more: Any) -> dict[str, Any]:
    data = {"sources": [path]}
    tree: dict[str, Any] = {"job": job, "model": {"scratch": {}}, "data": data}
    if job == "evaluate":
        del tree["data"]
        tree["eval"] = {"data": data, "generate_max_len": 4}
    elif job != "generate":
        tree["train"] = {"train_batch_size": 4}
    if job == "rl":
        tree |= {"max_steps": 1, "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2}}
    if job == "distill":
        tree["teacher"] = {"model": {"scratch": {"seed": 1}}}
    return tree | more


def rows_file(folder: Path, *rows: Any, name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


JOBS = ["sft", "rm", "preference", "distill", "rl", "evaluate", "generate"]


@pytest.mark.parametrize("job", JOBS)
def test_a_missing_file_has_the_error_of_its_reader(job: str, tmp_path: Path) -> None:
    here = rows_file(tmp_path, PAIR)
    check_inputs(load_config(recipe(job, here)))
    missing = here.replace("rows", "row")
    with pytest.raises(DataError) as caught:
        check_inputs(load_config(recipe(job, missing)))
    with pytest.raises(DataError) as opened:
        open_source(FileSource(path=missing))
    assert str(caught.value) == str(opened.value) and "nearest: rows.jsonl" in str(caught.value)


@pytest.mark.parametrize("command", [["rl"], ["rl", "--dry-run"], ["sft"]])
def test_no_torch_is_imported_on_the_way_to_the_message(command: list[str], tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recipe(command[0], str(tmp_path / "none.jsonl"))))
    script = (
        "import sys\nfrom burnish.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n"
        "    heavy = {'torch', 'transformers', 'datasets'} & set(sys.modules)\n"
        "    sys.exit(f'imported {heavy}' if heavy else end.code)\n"
    )
    words = [command[0], str(path), *command[1:]]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, env=env
    )
    assert done.returncode == 2 and "none.jsonl does not exist" in done.stderr, done.stderr
    assert ("rows_per" not in done.stdout) and ("--dry-run" in command) == bool(done.stdout)


def test_a_missing_model_has_the_error_of_its_loader(tmp_path: Path) -> None:
    rows = rows_file(tmp_path, PAIR)
    for key in ("path", "tokenizer_path"):
        model = {"path": None, "scratch": {}} | {key: str(tmp_path / "nowhere")}
        model |= {"scratch": None} if key == "path" else {}
        with pytest.raises(ModelError, match=rf"model\.{key}: .*nowhere does not ex") as caught:
            check_inputs(load_config(recipe("sft", rows, model=model)))
        with pytest.raises(ModelError) as loaded:
            load_tokenizer(ModelConfig(**model))
        assert str(loaded.value) == f"{str(caught.value).partition(': ')[2]}; check model.{key}"
    hub = load_config(recipe("sft", rows, model={"path": "owner/name"}))
    check_inputs(hub)


def test_models_of_other_roles_are_checked_too(tmp_path: Path) -> None:
    teacher = {"model": {"path": "./no-teacher"}}
    with pytest.raises(ModelError, match="no-teacher does not exist"):
        check_inputs(load_config(recipe("distill", rows_file(tmp_path, PAIR), teacher=teacher)))


@pytest.mark.parametrize(
    ("key", "override"),
    [
        ("rewards[0].function", "rewards=[{kind: function, name: mine, function: CODE}]"),
        ("data.sources[0].environment", "data.sources=[{kind: environment, environment: CODE}]"),
        ("rollout.episodes.environment", "rollout.episodes={environment: CODE, max_tokens: 4096}"),
    ],
)
def test_a_missing_file_of_the_users_code_is_one_error_with_its_key(
    key: str, override: str, tmp_path: Path
) -> None:
    override = override.replace("CODE", f"'{tmp_path}/code.py:f'")
    config = load_config(recipe("rl", rows_file(tmp_path, PAIR)), [override])
    with pytest.raises(LoadError, match=rf"^{re.escape(key)}: .* there is no file"):
        check_inputs(config)


@pytest.mark.parametrize(
    ("job", "row", "says"),
    [
        ("sft", {"conversations": [{"from": "me", "value": "x"}]}, r"from` 'me'; known are"),
        ("sft", {"messages": [{"text": "x"}]}, r"a chat message must be an object"),
        ("sft", {"prmpt": "x"}, r"nothing to learn from"),
        ("rl", {"prompt": None}, r"column 'prompt' \(prompt_key\) is empty here"),
        ("rl", {"prompt": '[{"role": "user", "content": 1'}, r"is not JSON"),
        ("generate", {"prompt": []}, r"non-empty list of chat messages"),
        ("preference", PAIR | {"chosen": None}, r"'chosen' \(chosen_key\) is empty"),
        (
            "rm",
            PAIR | {"rejected": 3},
            r"expected a string or a non-empty list of chat messages.*int 3",
        ),
    ],
)
def test_an_unusable_first_row_is_refused_with_its_location(
    tmp_path: Path, job: str, row: dict[str, Any], says: str
) -> None:
    rows = [row] if job in ("rl", "generate") else [PAIR, row]
    path = rows_file(tmp_path, *rows)
    unchecked = ["data.validate=off"] if job != "generate" else []
    with pytest.raises(DataError, match=rf"rows\.jsonl:{len(rows)}: .*{says}"):
        check_inputs(load_config(recipe(job, path), unchecked))


def test_bad_rows_among_the_first_are_left_to_the_check_of_all_rows(tmp_path: Path) -> None:
    """Unless all of them are bad, as with a misspelled column."""
    bad = {"prompt": "1", "response": None}
    path = rows_file(tmp_path, PAIR | {"response": "2"}, bad, *[PAIR | {"response": "2"}] * 3, bad)
    config = load_config(recipe("sft", path))
    check_inputs(config)
    with pytest.raises(DataError) as caught:
        check_launch(config, say=print)
    assert "rows cannot" in str(caught.value)
    assert "rows.jsonl:2" in str(caught.value) and "rows.jsonl:6" in str(caught.value)
    rows_file(tmp_path, *[bad] * 5)
    with pytest.raises(DataError, match=r"rows\.jsonl:1"):
        check_inputs(config)


def write_parquet(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([{"prompt": str(i)} for i in range(9)]), path)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", lambda p: p.write_text('\n{"prompt": "0"}\n' * 9)),
        ("a.json", lambda p: p.write_text(json.dumps([{"prompt": "0"}] * 9))),
        ("a.csv", lambda p: p.write_text("prompt\n" + "0\n" * 9)),
        ("a.parquet", write_parquet),
    ],
)
def test_the_first_rows_are_those_of_the_open_source(
    tmp_path: Path, name: str, write: Callable[[Path], None]
) -> None:
    path = tmp_path / name
    write(path)
    config = FileSource(path=str(path))
    whole = open_source(config)
    assert first_rows(config) == [whole[i] for i in range(3)]
    for content in (b"", b"\xff\xfe{"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=name):
            first_rows(config)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"run": 5}', '{"run": ""}', '{"run": "a\\u0000"}', "\udcff", "[" * 100_000],
)
def test_a_replay_without_the_name_of_its_run_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "replay.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(RunError, match=r"replay\.json does not name the recorded run"):
        recorded_run(tmp_path)


def test_a_finished_generate_run_needs_no_input(tmp_path: Path) -> None:
    config = load_config(recipe("generate", str(tmp_path / "gone.jsonl")))
    check_inputs(config, resumed=True)
    with pytest.raises(DataError):
        check_inputs(config)


@pytest.mark.parametrize("by", ["command", "API"])
@pytest.mark.parametrize("job", ["sft", "rl"])
def test_a_run_checks_its_inputs_once(
    by: str, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a run whose number of steps follows from the rows."""
    checked: list[JobConfig] = []
    monkeypatch.setattr(
        "burnish.preflight.inputs.check_inputs", lambda config, *, resumed: checked.append(config)
    )
    lengths = {"rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2, **SHORT}}
    more = {"max_steps": None, "max_epochs": 1, "rewards": [{"kind": "math"}], **lengths}
    tree = recipe(job, rows_file(tmp_path, PAIR, PAIR), **(more if job == "rl" else {}))
    tree |= {"train": {"train_batch_size": 2, "lr": 1e-3}, "run_dir": str(tmp_path / "run")}
    if job == "rl":
        tree["train"]["train_batch_size"] = 4
    if by == "API":
        burnish.run(load_config(tree), force=True)
    else:
        (tmp_path / "recipe.yaml").write_text(json.dumps(tree))
        done = CliRunner().invoke(app, [job, str(tmp_path / "recipe.yaml"), "--force"])
        assert done.exit_code == 0, done.output
    assert len(checked) == 1 and (tmp_path / "run" / "checkpoints").is_dir()


@pytest.mark.parametrize("command", [["check"], ["rl"], ["rl", "--dry-run"]])
@pytest.mark.parametrize(
    ("steps", "function", "lines"),
    [
        ("max_steps", "reward.py:skore", ["no 'skore' (nearest: score)"]),
        ("max_steps", "reward.py", ["write reward.py:NAME"]),
        ("max_steps", "none.py:score", ["there is no file"]),
        ("max_stepz", "reward.py:skore", ["(nearest: max_steps)", "no 'skore' (nearest: score)"]),
        ("max_stepz", "reward.py", ["(nearest: max_steps)", "write reward.py:NAME"]),
        ("max_stepz", "reward.py:score", ["(nearest: max_steps)"]),
    ],
)
def test_keys_files_models_and_functions_are_reported_together(
    command: list[str],
    steps: str,
    function: str,
    lines: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("def score(prompt, response, label):\n    return 1.0\n")
    tree = recipe("rl", "none.jsonl", model={"path": "./none"})
    tree[steps] = tree.pop("max_steps")
    tree["rewards"] = [{"kind": "function", "function": function}]
    (tmp_path / "recipe.yaml").write_text(json.dumps(tree))
    result = CliRunner().invoke(app, [command[0], "recipe.yaml", *command[1:]])
    problems = [line for line in result.stderr.splitlines() if line.startswith("  - ")]
    expected = [*lines, "none.jsonl does not exist", "model.path"]
    assert result.exit_code == 2 and len(problems) == len(expected), result.stderr
    assert all(any(text in line for line in problems) for text in expected), result.stderr


@pytest.mark.parametrize(
    ("source", "defined"),
    [
        ("def f(): ...", True),
        ("async def f(): ...", True),
        ("class f: ...", True),
        ("f = g = lambda: 1", True),
        ("from other import g as f", True),
        ("import f.g", True),
        ("from other import *", True),
        ("if True:\n    def f(): ...", True),
        ("try:\n    from a import f\nexcept ImportError:\n    f = None", True),
        ("globals()['f'] = 1", True),
        ("f: int = 1", True),
        ("def g():\n    f = 1", False),
        ("class g:\n    def f(self): ...", False),
        ("print(f)", False),
        ("def f(:", False),
    ],
)
def test_a_name_is_found_in_a_file_without_running_it(
    source: str, defined: bool, tmp_path: Path
) -> None:
    file = tmp_path / "code.py"
    file.write_text("raise RuntimeError('executed')\n" + source)
    with nullcontext() if defined else pytest.raises(LoadError):
        check_file(f"{file}:f")
