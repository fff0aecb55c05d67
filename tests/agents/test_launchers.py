"""Launchers of coding agents, with a program in place of each: what it gets, its test, and errors.
tests/harnesses plays the programs themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from burnish.agents.commands import variables
from burnish.agents.episodes import Endpoint

FOLDER = Path(__file__).parents[2] / "recipes/harnesses"
LAUNCHERS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "task_folder")
PROGRAMS = {"claude_code": "claude", "qwen_code": "qwen", "mini_swe_agent": "mini"}
PROGRAM = """#!{python}
import json, os, sys
from pathlib import Path
home = Path(os.environ["HOME"])
files = {{str(p.relative_to(home)): p.read_text() for p in home.rglob("*") if p.is_file()}}
seen = {{"arguments": sys.argv[1:], "files": files, "environment": dict(os.environ)}}
Path("{seen}").write_text(json.dumps(seen))
assert Path(os.environ["PWD"]) == Path.cwd() and Path("a/b.txt").read_text() == "seven"
Path("out.txt").write_text("hello")
sys.exit(int(Path("code.txt").read_text()))
"""
ENDPOINT = Endpoint("http://127.0.0.1:9/s/x", "key", max_tokens=4321)
TASK = {"prompt": "Do it, please.", "files": {"a/b.txt": "seven", "code.txt": "0"}}


def launch(name: str, folder: Path, task: Any, *words: str, **changed: str) -> Any:
    """Run a launcher with a program that records what it gets."""
    programs, work = folder / "programs", folder / "work"
    for made in (programs, work):
        made.mkdir(parents=True)
    program = programs / PROGRAMS.get(name, name)
    program.write_text(PROGRAM.format(python=sys.executable, seen=folder / "seen.json"))
    program.chmod(0o755)
    environment = {**variables(ENDPOINT, work), "PATH": f"{programs}:/usr/bin:/bin", **changed}
    Path(environment["BURNISH_TASK"]).write_text(json.dumps(task))
    command = [sys.executable, str(FOLDER / f"{name}.py"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    reward = work / "reward.json"
    return done, json.loads(reward.read_text()) if reward.exists() else None


def test_there_is_a_launcher_for_each_program() -> None:
    assert LAUNCHERS == ["claude_code", "codex", "mini_swe_agent", "opencode", "pi", "qwen_code"]


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_program_gets_the_prompt_the_address_and_an_empty_home(name: str, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": TASK["prompt"]}]
    task = {**TASK, "prompt": messages, "test": "grep -q hello out.txt"}
    done, reward = launch(name, tmp_path, task, "--more", "x")
    assert done.returncode == 0, done.stderr
    assert reward == 1.0
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["arguments"].count("Do it, please.") == 1
    at = seen["arguments"].index("--more")
    assert seen["arguments"][at + 1] == "x"
    given = json.dumps([seen["files"], seen["environment"]])
    assert ENDPOINT.root_url in given
    assert Path(seen["environment"]["HOME"]) == tmp_path / "work/home"
    assert len(seen["files"]) <= 1


@pytest.mark.parametrize(
    ("files", "test", "code", "reward"),
    [
        ({"code.txt": "3"}, "grep -q hello out.txt", 3, 1.0),
        ({}, "false", 0, 0.0),
        ({}, None, 0, None),
        ({"code.txt": "-9 and more"}, "true", 1, 1.0),
    ],
)
def test_the_test_is_run_whatever_the_program_does(
    files: Any, test: str | None, code: int, reward: float | None, tmp_path: Path
) -> None:
    task = {**TASK, "files": {**TASK["files"], **files}, "test": test}  # type: ignore[dict-item]
    done, found = launch("codex", tmp_path, task)
    assert (done.returncode, found) == (code, reward), done.stderr


def test_errors_name_the_launcher(tmp_path: Path) -> None:
    done, _ = launch("pi", tmp_path / "a", TASK, PATH="/usr/bin:/bin")
    assert "pi.py: there is no program 'pi' in PATH; npm install" in done.stderr
    done, _ = launch("codex", tmp_path / "b", TASK, BURNISH_BASE_URL="")
    assert "codex.py: BURNISH_BASE_URL is not set" in done.stderr
    outside = {**TASK, "files": {"../../x": "y"}}
    done, _ = launch("codex", tmp_path / "c", outside)
    assert "'../../x' is outside" in done.stderr and not (tmp_path / "c/x").exists()
    assert done.returncode == 1 and "Traceback" not in done.stderr
