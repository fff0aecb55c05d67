"""What the README shows is true: its tree, its recipe, its example, the functions it names."""

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from burnish.config import load_config
from burnish.config.yaml_text import RecipeLoader

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(kind: str) -> str:
    """The text of the one code block whose fence says ``kind``."""
    (text,) = re.findall(rf"```{re.escape(kind)}\n(.*?)```", README, flags=re.DOTALL)
    return text


def test_the_tree_is_up_to_date():
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "tree.py"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_the_recipe_is_valid():
    config = load_config(yaml.load(block("yaml recipe"), Loader=RecipeLoader))
    assert config.train.lr == 1e-6 and config.rewards[0].kind == "math"


def test_the_remote_reward_is_valid():
    recipe = yaml.load(block("yaml recipe"), Loader=RecipeLoader)
    config = load_config(recipe | yaml.load(block("yaml remote"), Loader=RecipeLoader))
    assert config.rewards[0].kind == "remote" and len(config.rewards[0].urls) == 2


@pytest.mark.slow
def test_the_python_example_runs(tmp_path):
    code = block("python example")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1].startswith("runs/api ")
    assert (tmp_path / "runs" / "api" / "metrics.jsonl").is_file()


def test_every_function_in_the_table_exists():
    rows = re.findall(r"`(burnish\.algorithms\.\w+)\.(\w+)`((?:, `\w+`)*)", README)
    assert len(rows) >= 11
    for module, first, more in rows:
        for name in [first, *re.findall(r"\w+", more)]:
            assert callable(vars(importlib.import_module(module))[name])


def test_every_algorithm_a_recipe_can_name_is_in_the_table():
    from burnish.algorithms import ADVANTAGES, POLICY_LOSSES

    for name in ADVANTAGES:
        assert f"`advantage: {name}`" in README
    for name in POLICY_LOSSES:
        assert f"`policy_loss: {name}`" in README


def test_every_command_is_in_the_table():
    from burnish.cli import app

    commands = {c.name or c.callback.__name__ for c in app.registered_commands}
    assert {m for m in re.findall(r"^\| `burnish ([\w-]+)", README, flags=re.MULTILINE)} == commands
