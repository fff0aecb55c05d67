"""The launch table of a recipe with episodes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from burnish.cli import app
from burnish.config import load_config
from burnish.config.yaml_text import RecipeLoader

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny_multi_turn.yaml"


def table(*overrides: str) -> dict[str, tuple[str, str]]:
    lines = load_config(RECIPE, overrides).launch_table()
    return {name: (value, how) for name, value, how in lines}


def test_the_launch_table_has_the_limits_of_episodes() -> None:
    """16 prompts x 8 samples are 128 episodes at once."""
    found = table()
    assert found["turns of an episode"] == ("3", "at most; at most 4 tokens each")
    assert found["tokens of a conversation"][0] == "32"
    value, how = found["concurrent episodes"]
    assert value == "128" and "60 s per call of the environment, 600 s per episode" in how
    value, how = found["environment workers"]
    assert value == "1" and how.endswith("recipes/environments/guess_number.py:GuessNumber")


def test_tools_and_an_interpreter_are_in_the_launch_table() -> None:
    changes = (
        "rollout.episodes.environment=null",
        "rollout.episodes.tools=[tools.py:search]",
        "rollout.episodes.python=/opt/env/bin/python",
        "rollout.episodes.max_concurrent=10",
        "rewards=[{kind: math}]",
    )
    found = table(*changes)
    value, how = found["concurrent episodes"]
    assert value == "10" and "time limits: 10 s per call of a tool, 60 s" in how
    assert found["environment workers"][1] == (
        "processes with tools tools.py:search in /opt/env/bin/python"
    )


@pytest.mark.parametrize("job", ["evaluate", "generate"])
def test_dry_runs_without_training_show_episodes_too(job: str, tmp_path: Path) -> None:
    episodes = "{environment: recipes/environments/guess_number.py:GuessNumber, max_tokens: 40}"
    data = "{sources: [{kind: seeds, size: 6}], prompt_max_len: 8}"
    lines: dict[str, Any] = {
        "evaluate": [
            f"episodes: {episodes}", f"eval: {{data: {data}, generate_max_len: 4, num_prompts: 6}}",
        ],
        "generate": [f"data: {data}", f"rollout: {{episodes: {episodes}, rollout_batch_size: 6}}"],
    }  # fmt: skip
    recipe = tmp_path / "recipe.yaml"
    text = [f"job: {job}", "model: {scratch: {}}", "rewards: [{kind: episode}]", *lines[job]]
    recipe.write_text("\n".join(text))
    done = CliRunner().invoke(app, [job, str(recipe), "--dry-run"])
    assert done.exit_code == 0, done.output
    assert "# tokens of a conversation" in done.output and "# concurrent episodes" in done.output
    assert "       6  time limits" in done.output


def test_the_sandbox_blocks_of_the_page_are_accepted() -> None:
    page = (Path(__file__).parents[2] / "docs/agents.md").read_text(encoding="utf-8")
    blocks = [b for b in re.findall(r"```yaml[^\n]*\n(.*?)```", page, re.S) if "sandbox:" in b]
    assert len(blocks) == 2
    for block in blocks:
        tree = yaml.load(block, Loader=RecipeLoader)
        rest = {"job": "rl", "run_dir": "r", "max_steps": 1, "model": {"path": "m"}}
        rest |= {"rewards": [{"kind": "episode"}], "train": {"train_batch_size": 64}}
        config = load_config(rest | tree)
        assert config.rollout.episodes.sandbox is not None
