"""docs/environments.md: its environment, tools and recipes work; its tables are complete."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

import burnish
from burnish.config import load_config
from burnish.config.episodes import ToolEpisodes
from burnish.config.yaml_text import RecipeLoader
from burnish.environments.pool import EnvironmentPool
from burnish.episodes.runner import FAILED, episode_stats
from burnish.jobs.episodes import environment_spec
from burnish.rewards.function.reward import FunctionScorer
from burnish.transcript import Episode, EpisodeStatus, Turn

PAGE = (Path(__file__).parents[1] / "docs" / "environments.md").read_text(encoding="utf-8")


def block(kind: str) -> str:
    """The code block of the page whose fence is ``kind``."""
    (text,) = re.findall(rf"^ *```{re.escape(kind)}\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)
    return str(text)


def recipe(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.load(block(f"yaml {kind}"), Loader=RecipeLoader)
    return found


def step_in_worker(episodes: Any, message: Mapping[str, Any]) -> Any:
    async def play() -> Any:
        pool = EnvironmentPool(environment_spec(episodes), workers=1)
        try:
            await pool.start()
            episode = await pool.open({"prompt": "3 x 4?"}, 1, timeout_s=30)
            step = await episode.step(message, timeout_s=30)
            await episode.close()
            return step
        finally:
            await pool.close()

    return asyncio.run(play())


def test_the_environment_and_its_recipes_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("echo.py").write_text(block("python environment"))
    config = load_config(recipe("environment"), ["max_steps=1"])
    result = burnish.run(config)
    assert 0 <= result.metrics["reward/mean"] <= 2 and 1 <= result.metrics["episodes/turns"] <= 2
    burnish.export(result.run_dir, "echo-model")
    rows = burnish.run(load_config(recipe("generate"), ["mode=all", "num_prompts=4"]))
    assert Path("runs/echo-rows/generated.jsonl").read_text().count("tokens_mask") == 16
    assert rows.metrics["generate/rows"] == 16
    trained = burnish.run(load_config(recipe("sft")))
    assert trained.metrics["train/loss"] > 0


def test_the_recipe_with_mcp_servers_is_valid() -> None:
    more = {"job": "rl", "max_steps": 1, "model": {"scratch": {}}}
    config = load_config(recipe("mcp") | more | {"train": {"train_batch_size": 64}})
    assert config.rollout.episodes.kind == "tools"
    changed = load_config(
        recipe("mcp") | more | {"train": {"train_batch_size": 64}},
        ["rollout.episodes.mcp.search.prefix=web_", "rollout.episodes.mcp.new.url=http://a/mcp"],
    )
    servers = changed.rollout.episodes.mcp
    assert servers["search"].prefix == "web_" and servers["new"].per_episode


def test_the_tool_and_its_recipe_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_tools.py").write_text(block("python tools"))
    more = {
        "job": "rl",
        "max_steps": 1,
        "model": {"scratch": {}},
        "train": {"train_batch_size": 64},
    }
    config = load_config(recipe("tools") | more)
    call = {"id": "1", "function": {"name": "multiply", "arguments": {"a": 3, "b": 4}}}
    step = step_in_worker(config.rollout.episodes, {"content": "", "tool_calls": [call]})
    assert step.messages[0]["content"] == "12"


def test_the_reward_takes_the_conversation() -> None:
    found: dict[str, Any] = {}
    exec(re.sub(r"(?m)^  ", "", block("python reward")), found)
    messages = [{"role": "user"}, {"role": "assistant"}, {"role": "assistant"}]
    assert found["short"]("x", messages) == -2
    FunctionScorer(found["short"], name="short").close()


def test_every_status_is_in_the_table() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| (yes|no) \|$", PAGE, re.MULTILINE))
    assert set(rows) == set(get_args(EpisodeStatus))
    unscored = {status for status, scored in rows.items() if scored == "no"}
    assert unscored == {*FAILED, "prompt_too_long"}


def test_every_metric_is_in_the_table() -> None:
    turn = Turn(message={}, answer=(), counts={"tool_calls": 1.0})
    found = episode_stats([Episode("done", (), turns=(turn,))]).floats()
    statuses = get_args(EpisodeStatus)
    names = {re.sub(r"/counts/.*", "/counts/<name>", name) for name in found}
    names = {re.sub(rf"/({'|'.join(statuses)})(_frac)?$", r"/<status>\2", name) for name in names}
    listed = set(re.findall(r"`(episodes/[^`]+)`", PAGE.partition("## Metrics")[2]))
    of_groups = {"episodes/groups_dropped", "episodes/groups_with_unseen_tools"}
    assert names <= listed and listed - names <= of_groups


def test_the_recipe_of_the_code_tool_is_valid() -> None:
    episodes = ToolEpisodes(**recipe("code")["rollout"]["episodes"], max_tokens=100)
    assert not episodes.broken_rules()
    options = environment_spec(episodes).options
    assert options["tools"] == ["python"] and options["sandbox"]["max_concurrent"] == 8
