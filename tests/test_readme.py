"""README.md and the pages it names are true: recipes, the example, functions, commands."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import fork_server
import pytest
import yaml
from typer.main import get_command

from burnish.cli import app
from burnish.config import load_config
from burnish.config.yaml_text import RecipeLoader

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
REWARDS, API, COMMANDS, ALGORITHMS = (
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("rewards", "api", "commands", "algorithms")
)


def block(page: str, kind: str) -> str:
    """The text of the one code block of ``page`` whose fence says ``kind``."""
    (text,) = re.findall(rf"```{re.escape(kind)}\n(.*?)```", page, flags=re.DOTALL)
    return text


def test_the_readme_can_be_read_in_five_minutes():
    assert len(README.encode()) < 11_000


def test_the_code_map_is_up_to_date():
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "code_map.py"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_the_recipe_is_valid():
    config = load_config(yaml.load(block(README, "yaml recipe"), Loader=RecipeLoader))
    assert config.train.lr == 1e-6 and config.rewards[0].kind == "math"


def test_the_remote_reward_is_valid():
    recipe = yaml.load(block(README, "yaml recipe"), Loader=RecipeLoader)
    config = load_config(recipe | yaml.load(block(REWARDS, "yaml remote"), Loader=RecipeLoader))
    assert config.rewards[0].kind == "remote" and len(config.rewards[0].urls) == 2


@pytest.mark.slow
def test_the_python_examples_run(tmp_path):
    recipe = """
import yaml
recipe = yaml.safe_load(Path("runs/api/config.yaml").read_text())
recipe |= {"run_dir": "runs/readme", "rewards": [{"kind": "math"}]}
Path("recipe.yaml").write_text(yaml.dump(recipe))
"""
    code = block(API, "python example") + recipe + block(README, "python example")
    kept = ("BURNISH_FORK_", "DS_", "OMP_")
    environment = {name: value for name, value in os.environ.items() if name.startswith(kept)}
    done = subprocess.run(
        [fork_server.interpreter(), "-c", code], cwd=tmp_path, capture_output=True, text=True,
        env=environment | {"PYTHONPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "runs/api " in done.stdout
    assert (tmp_path / "runs" / "readme" / "end.json").is_file()
    assert (tmp_path / "runs" / "api" / "metrics.jsonl").is_file()


def test_every_function_in_the_table_exists():
    rows = re.findall(r"`(burnish\.algorithms\.\w+)\.(\w+)`((?:, `\w+`)*)", ALGORITHMS)
    assert len(rows) >= 11
    for module, first, more in rows:
        for name in [first, *re.findall(r"\w+", more)]:
            assert callable(vars(importlib.import_module(module))[name])


def test_every_algorithm_a_recipe_can_name_is_in_the_table():
    from burnish.algorithms import ADVANTAGES, POLICY_LOSSES

    for name in ADVANTAGES:
        assert f"`advantage: {name}`" in ALGORITHMS
    for name in POLICY_LOSSES:
        assert f"`policy_loss: {name}`" in ALGORITHMS


def commands() -> dict[str, set[str]]:
    """The options of every command."""
    found = get_command(app).commands
    return {
        name: {o for param in command.params for o in [*param.opts, *param.secondary_opts]}
        for name, command in found.items()
    }


def test_every_command_is_in_the_table():
    for page in (README, COMMANDS):
        named = re.findall(r"^\| `burnish ([\w-]+)", page, flags=re.MULTILINE)
        assert sorted(named) == sorted(commands())


SHOWN = re.compile(r"(?:^|[`(]|&& |: |#   )burnish (--debug )?([a-z][\w-]*)([^`\n]*)", re.MULTILINE)
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = [
    path for kind in ("yaml", "sh") for path in sorted((ROOT / "recipes").rglob(f"*.{kind}"))
]


@pytest.mark.parametrize("path", [*DOCUMENTS, *SCRIPTS], ids=lambda p: str(p.relative_to(ROOT)))
def test_documented_commands_and_options_exist(path):
    """Also those continued by a backslash at the end of the line."""
    text = re.sub(r"\\\n(#\s*)?\s*", " ", path.read_text(encoding="utf-8"))
    options = commands()
    for _, command, rest in SHOWN.findall(text):
        assert command in options or command == "COMMAND", f"burnish {command}"
        shown = re.split(r" #|; | && ", rest)[0]
        unknown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", shown)) - options.get(command, set())
        assert not unknown - {"--help"}, f"burnish {command}{shown}"


def test_the_exit_codes_are_those_of_the_command_line():
    codes = re.findall(r"^\| (\d+(?: \+ n)?) \|", COMMANDS, flags=re.MULTILINE)
    said = vars(importlib.import_module("burnish.cli_errors"))["__doc__"]
    assert codes == re.findall(r"(?:: |; )(\d+(?: \+ n)?) ", said.replace("\n", " "))
