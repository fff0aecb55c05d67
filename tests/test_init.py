"""``burnish init`` writes folders that are checked, trained and learn, and refuses what would not
run."""

import doctest
import fcntl
import importlib.util
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from typer.testing import CliRunner

import burnish
from burnish.cli import app
from burnish.observe.metrics import read_metrics
from burnish.starter.jobs import STARTERS, sample_rows

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*words: str):
    return CliRunner().invoke(app, [*words])


def written(*words: str) -> str:
    """The recipe in the folder ``new``."""
    result = call("init", "new", *words)
    assert result.exit_code == 0, result.stderr
    return Path("new/recipe.yaml").read_text()


MEASURES = {
    "sft": ("eval/loss", -1, 32),
    "preference": ("eval/loss", -1, 24),
    "rm": ("eval/accuracy", 1, 48),
    "rl": ("reward/mean", 1, 12),
    "environment": ("reward/mean", 1, 6),
}
"""Metric, the direction in which it goes, and the steps of the test: fewer than the recipe has."""


@pytest.mark.slow
@pytest.mark.parametrize("choice", STARTERS)
def test_a_folder_is_checked_tested_and_learns(choice, monkeypatch):
    """With the commands that init prints, in fewer steps. RL: the mean of the last 4 steps against
    that of the first 2."""
    result = call("init", "--job", choice)
    assert result.exit_code == 0
    start, *commands = result.stdout[result.stdout.index("cd ") :].splitlines()
    assert start == f"cd my-{choice}"
    monkeypatch.chdir(f"my-{choice}")
    starter = STARTERS[choice]
    assert [c.split("  ")[0] for c in commands] == [
        *([f"python -m doctest {starter.code}"] if starter.code else []),
        *("burnish check recipe.yaml", f"burnish {starter.job} recipe.yaml", "burnish runs"),
    ]
    if starter.code:
        spec = importlib.util.spec_from_file_location("user_code", starter.code)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        tested = doctest.testmod(module)
        assert tested.attempted and not tested.failed
    check = call("check", "recipe.yaml")
    assert check.exit_code == 0 and "ready: no problems found" in check.stdout, check.output

    metric, direction, steps = MEASURES[choice]
    config = burnish.load_config("recipe.yaml", [f"max_steps={steps}"])
    values = [m[metric] for m in read_metrics(burnish.run(config).run_dir) if metric in m]
    before, after = values[0], values[-1]
    if metric == "reward/mean":
        before, after = sum(values[:2]) / 2, sum(values[-4:]) / 4
    assert direction * (after - before) > 0.1, values


def test_rows_of_a_sample_are_different_and_right():
    """Held-out rows are none of the trained ones. In "largest of 6, 9, 0?", 9 is."""
    rows = sample_rows(("prompt", "chosen", "rejected"))
    assert len({row["prompt"] for row in rows}) == len(rows) == 200
    for row in rows:
        digits = [c for c in row["prompt"] if c.isdigit()]
        assert row["chosen"] == max(digits) != row["rejected"] and row["rejected"] in digits


def rows(name: str, *lines: dict) -> str:
    Path(name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return name


CHAT = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
SHAREGPT = [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]
FORMS = {
    "pairs": ({"prompt": "1+1?", "chosen": "2", "rejected": "3"}, "preference", True, {}),
    "chat": ({"messages": CHAT}, "sft", False, {}),
    "sharegpt": ({"conversations": SHAREGPT}, "sft", False, {}),
    "text": ({"text": "once upon a time"}, "sft", False, {}),
    "answers": ({"question": "1+1?", "answer": "2"}, "sft", True,
                {"prompt_key": "question", "response_key": "answer"}),
    "capitals": ({"Question": "1+1?", "Answer": "2"}, "sft", True,
                 {"prompt_key": "Question", "response_key": "Answer"}),
    "labels": ({"prompt": "1+1?", "label": 2}, "rl", True, {}),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_the_job_and_the_columns_follow_from_the_rows(form):
    row, job, is_templated, keys = FORMS[form]
    data = rows("rows.jsonl", *[row] * 4)
    text = written("--data", data)
    config = burnish.load_config(Path("new/recipe.yaml"))
    assert config.job == job and config.data.sources[0].path == str(Path(data).resolve())
    assert ("apply_chat_template: true" in text) == is_templated
    assert {key: value for key, value in dict(config.data).items() if key in keys} == keys
    assert not Path("new/data.jsonl").exists()
    check = call(
        "check", "new/recipe.yaml", *(["rewards.0.function=new/rewards.py:score"] * (job == "rl"))
    )
    assert check.exit_code == 0, check.output


def test_a_path_is_written_as_it_is():
    Path("a  # b").mkdir()
    data = rows("a  # b/rows.jsonl", *[{"prompt": "a", "label": "b"}] * 4)
    written("--data", data)
    config = burnish.load_config(Path("new/recipe.yaml"))
    assert config.data.sources[0].path == str(Path(data).resolve())


def test_a_label_of_another_name_is_read_by_rl():
    written("--job", "rl", "--data", rows("rows.jsonl", *[{"prompt": "a", "answer": "b"}] * 4))
    assert burnish.load_config(Path("new/recipe.yaml")).data.label_key == "answer"


def test_a_model_of_the_user_gets_settings_of_a_large_model():
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    text = written("--job", "sft", "--model", "model")
    config = burnish.load_config(Path("new/recipe.yaml"))
    assert config.model.path == str(Path("model").resolve()) and config.train.lr == 1e-5
    assert "apply_chat_template: false" in text  # it has none
    assert 'path: "owner/name"' in call_text("--model", "owner/name")


def call_text(*words: str) -> str:
    return written(*words, "--force")


def test_what_would_not_run_is_refused_before_anything_is_written():
    Path("empty.jsonl").touch()
    Path("binary.jsonl").write_bytes(bytes(range(256)))
    Path("file").touch()
    odd = rows("odd.jsonl", *[{"foo": 1}] * 4)
    for words, said in {
        ("new", "--data", "empty.jsonl"): "is empty",
        ("new", "--data", "binary.jsonl"): "binary.jsonl:1",
        ("new", "--data", "none.jsonl"): "none.jsonl does not exist",
        ("new", "--data", odd): "foo",
        ("new", "--data", rows("one.jsonl", {"prompt": "a", "label": "b"})): "has 1 row",
        ("new", "--data", odd, "--job", "rl"): "prompt_key",
        ("new", "--data", odd, "--job", "environment"): "--data has no effect",
        ("new", "--model", "./none"): "./none does not exist",
        ("new", "--job", "rll"): "nearest: rl",
        ("file",): "is a file",
        ("/proc/new",): "cannot be written",
    }.items():
        result = call("init", *words)
        assert result.exit_code == 2 and said in result.stderr, (words, result.output)
        assert result.stderr.startswith("error: ") and not Path("new").exists()


def test_files_are_overwritten_only_with_force_which_names_them():
    call("init", "new")
    Path("new/recipe.yaml").write_text("mine")
    result = call("init", "new")
    assert result.exit_code == 2 and "recipe.yaml, rewards.py, data.jsonl" in result.stderr
    assert Path("new/recipe.yaml").read_text() == "mine"
    Path("new/rewards.py").unlink()
    said = call("init", "new", "--force").stdout.splitlines()
    assert said[:3] == [
        "overwrote new/recipe.yaml",
        "wrote new/rewards.py",
        "overwrote new/data.jsonl",
    ]


def test_list_names_every_recipe_of_the_package():
    listed = call("init", "--list").stdout
    for path in (ROOT / "recipes").glob("*.yaml"):
        assert f"recipes/{path.name}\n" in listed


@pytest.mark.slow
def test_questions_on_a_terminal_explain_wrong_answers_and_ctrl_c_writes_nothing(folder):
    """On a pseudo-terminal of 40 columns."""
    rows("pairs.jsonl", *[{"prompt": "1+1?", "chosen": "2", "rejected": "3"}] * 20)
    answers = "9\npreference\n./none\ntiny\nnone.jsonl\npairs.jsonl\n"
    code, text = on_terminal(answers, folder)
    assert code == 0 and "neither a number from 1 to 5" in text
    assert "./none does not exist" in text and "none.jsonl does not exist" in text
    assert burnish.load_config(Path("my-preference/recipe.yaml")).job == "preference"
    code, text = on_terminal("3\n\x03", folder)
    assert code == 130 and "nothing was written" in text and not Path("my-rl").exists()


def _own_terminal() -> None:
    """Make standard input the terminal of this process, which Ctrl-C interrupts, also if the tests
    run in the background, where shells ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def on_terminal(typed: str, folder: Path) -> tuple[int, str]:
    """Exit code and output of ``burnish init``, to which ``typed`` is typed."""
    terminal, other = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "burnish", "init"], stdin=other, stdout=other, stderr=other,
        cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "40"},
        preexec_fn=_own_terminal,
    )  # fmt: skip
    os.close(other)
    text = b""
    for line in typed.splitlines(keepends=True):
        while not text.endswith(b"]: "):
            text += os.read(terminal, 4096)
        os.write(terminal, line.encode())
        text += b"\n"
    try:
        while chunk := os.read(terminal, 4096):
            text += chunk
    except OSError:  # closed
        pass
    os.close(terminal)
    return process.wait(timeout=60), text.decode()
