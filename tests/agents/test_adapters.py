"""Agents and environments of other frameworks, unchanged: OpenRLHF's agent files, TRL's tools and
environments."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from agent_session import TOKENIZER, check_rows, run_tasks, says
from pydantic import TypeAdapter

from burnish.agents.functions import FunctionAgents
from burnish.config.episodes import AgentEpisodes, EnvironmentEpisodes, Episodes, ToolEpisodes
from burnish.config.model import ModelConfig
from burnish.config.sources import SeedSource
from burnish.data.episode_rows import conversation_columns
from burnish.data.sources import open_source
from burnish.environments.base import EnvironmentSetupError
from burnish.environments.tools import ToolEnvironment
from burnish.environments.trl import TrlEnvironment
from burnish.episodes.loop import EpisodeLimits
from burnish.episodes.rows import episode_rows
from burnish.jobs.episodes import agent_spec, environment_spec

EPISODES: TypeAdapter[Any] = TypeAdapter(Episodes)

FOLDER = Path(__file__).parent
LIMITS = EpisodeLimits(max_turns=6, max_tokens=2000, step_timeout_s=20, timeout_s=20)


def openrlhf(name: str, model: Path | None = None) -> FunctionAgents:
    config = AgentEpisodes(agent=f"openrlhf:{FOLDER / name}", max_tokens=2000)
    return FunctionAgents(agent_spec(config, ModelConfig(path=str(model or "none"))), workers=1)


@pytest.mark.parametrize("max_turns", [6, 1])
def test_an_agent_instance_of_openrlhf_plays_in_text(max_turns: int) -> None:
    limits = EpisodeLimits(max_turns=max_turns, max_tokens=2000, step_timeout_s=20, timeout_s=20)
    row = {"prompt": "2+2=", "label": "?"}
    (result, other), engine = run_tasks(openrlhf("openrlhf_agents.py"), [row, row], limits)
    assert other.record.status == result.record.status
    first, *rest = result.calls
    assert TOKENIZER.decode(first.prompt_ids) == "2+2=?"
    assert len(episode_rows(result.calls)) == len(result.calls)  # texts have no end token
    assert len(rest) == min(max_turns, 2) - 1
    reward = sum(turn.rewards.get("reward", 0.0) for turn in result.record.turns)
    assert reward == min(max_turns, 2)
    assert result.record.status == ("done" if max_turns > 1 else "max_turns")
    if rest:
        text = f"2+2=?{first.completion.text} wrong, again: "
        assert TOKENIZER.decode(rest[0].prompt_ids) == text
    assert len(engine.log) == 2 * len(result.calls)


def test_an_executor_of_openrlhf_works_on_token_ids(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    agents = openrlhf("openrlhf_executor.py", tmp_path)
    (result,), engine = run_tasks(agents, [{"prompt": "2+2=", "label": None}], LIMITS)
    assert result.record.status == "done", result.record.error
    check_rows(result, engine)
    assert len(episode_rows(result.calls)) == 1
    assert len(result.calls) == 2
    assert result.record.turns[-1].rewards == {"reward": 0.5}
    (row,) = episode_rows(result.calls)
    columns = conversation_columns(result.record, row)
    assert columns["plain_text"] and not any("train" in m for m in columns["messages"])
    text = "".join(message["content"] for message in columns["messages"])
    assert text + "<|im_end|>" == TOKENIZER.decode([*row.prompt_ids, *row.response_ids])


def test_an_executor_of_openrlhf_has_the_limits_of_the_run(tmp_path: Path) -> None:
    """An agent that passes its sampling parameters on gets the entire response."""
    TOKENIZER.save_pretrained(tmp_path)
    agent = tmp_path / "passes_on.py"
    own = FOLDER / "openrlhf_executor.py"
    agent.write_text(own.read_text().replace("sampling_params.max_tokens = 20", ""))
    agents, task = openrlhf(str(agent), tmp_path), {"prompt": "2+2=", "label": None}
    (result,), _ = run_tasks(agents, [task], LIMITS, says(lambda _: "x" * 1100), turn_tokens=1800)
    first = result.calls[0].completion
    assert (len(first.token_ids), first.finish_reason) == (1101, "stop")


def test_a_file_without_an_agent_is_refused_at_start() -> None:
    for name, message in (("hostile_agents.py", "neither a class"), ("none.py", "No such file")):
        with pytest.raises(EnvironmentSetupError, match=message):
            asyncio.run(openrlhf(name).start())


# ---- TRL ---------------------------------------------------------------------------------------


class Counter:
    """An environment in the form of TRL."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self, prompt: Any, start: int = 0, **_: Any) -> str:
        self.count = start
        return f" The count is {start}."

    def increment(self, step: int) -> int:
        """Increment the counter.

        Args:
            step: The value to add.
        """
        self.count += step
        return self.count

    def get_reward(self) -> float:
        return float(self.count)


class Judged(Counter):
    async def get_reward(self) -> float:  # type: ignore[override]
        return 0.25


class Slow(Counter):
    def reset(self, prompt: Any, **_: Any) -> Any:
        """Return parts of text, in a thread that is not the event loop's."""
        self.thread = threading.current_thread()
        return [{"type": "text", "text": " Go."}]

    def get_reward(self) -> float:
        assert threading.current_thread() is self.thread is not threading.main_thread()
        return 1.0


class Images(Counter):
    def reset(self, prompt: Any, **_: Any) -> Any:
        return [{"type": "image", "image": "x.png"}]


class NoReset:
    def act(self) -> str:
        """Act."""
        return ""


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first factor.
        b: The second factor.

    Returns:
        The product.
    """
    return a * b


def calls(*steps: int) -> dict[str, Any]:
    made = [
        {"id": str(i), "function": {"name": "increment", "arguments": {"step": step}}}
        for i, step in enumerate(steps)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


async def play(environment: ToolEnvironment, task: dict[str, Any], messages: Any) -> Any:
    start: Any = environment.reset(task, 0)
    start = await start if asyncio.iscoroutine(start) else start
    steps = [await environment.step(message) for message in messages]
    environment.close()
    return start, steps


def test_an_environment_of_trl_keeps_its_state_and_gives_the_reward() -> None:
    said = {"role": "assistant", "content": "done"}
    task = {"prompt": "Count to 7.", "label": None, "start": 2}
    made = TrlEnvironment(factory=f"{__file__}:Counter")
    start, steps = asyncio.run(play(made, task, [calls(1, 2), calls(10), said]))
    assert start.messages == [{"role": "user", "content": "Count to 7. The count is 2."}]
    assert [tool["function"]["name"] for tool in start.tools] == ["increment"]
    assert [m["content"] for m in steps[0].messages] == ["3", "5"]
    assert [step.rewards["reward"] for step in steps] == [5, 10, 0]  # the sum is the last reward
    judged = TrlEnvironment(factory=f"{__file__}:Judged")
    _, steps = asyncio.run(play(judged, task, [calls(1), said]))
    assert [step.rewards["reward"] for step in steps] == [0, 0.25]


def test_the_text_of_reset_replaces_the_number_of_a_task() -> None:
    source = open_source(SeedSource(size=2))
    made = TrlEnvironment(factory=f"{__file__}:Counter")
    start, _ = asyncio.run(play(made, {**source[1].values, "start": 2}, []))
    assert start.messages == [{"role": "user", "content": " The count is 2."}]


def test_sync_methods_of_trl_do_not_block_and_only_text_is_accepted() -> None:
    said = {"role": "assistant", "content": "done"}
    task = {"prompt": [{"role": "user", "content": [{"type": "text", "text": "Count."}]}]}
    made = TrlEnvironment(factory=f"{__file__}:Slow")
    start, steps = asyncio.run(play(made, task, [said]))
    assert start.messages == [{"role": "user", "content": "Count. Go."}]
    assert steps[0].rewards == {"reward": 1.0}
    with pytest.raises(ValueError, match="only text parts"):
        asyncio.run(play(TrlEnvironment(factory=f"{__file__}:Images"), task, [said]))


def test_workers_elsewhere_get_absolute_paths_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker on another node of a cluster has another working directory."""
    monkeypatch.chdir(tmp_path)
    for folder in ("model", "tools"):
        Path(folder).mkdir()
    for name in ("tools/server.py", "serve", "own.py"):
        Path(name).touch()
    agent = AgentEpisodes(agent="openrlhf:own.py", max_tokens=99)
    options = agent_spec(agent, ModelConfig(path="model")).options
    placed = {"path": f"{tmp_path}/own.py", "tokenizer": f"{tmp_path}/model"}
    assert options == placed | {"max_length": 99}
    hub = agent_spec(agent, ModelConfig(path="model", tokenizer_path="org/name")).options
    assert hub["tokenizer"] == "org/name"
    servers = {
        "a": {"command": ["python", "tools/server.py", "serve", "-m", "tools", "--to=x"]},
        "b": {"command": ["./serve", "own.py", "missing.py"]},
        "c": {"url": "http://127.0.0.1:1/mcp"},
    }
    sandbox = {"python": "env/bin/python", "read_only_paths": ["tools"]}
    tools = {"tools": ["python", "own.py:f"], "mcp": servers, "sandbox": sandbox, "max_tokens": 99}
    options = environment_spec(EPISODES.validate_python(tools)).options
    assert options["tools"] == ["python", f"{tmp_path}/own.py:f"]
    assert [server["command"] for server in options["mcp"].values()] == [
        ["python", f"{tmp_path}/tools/server.py", "serve", "-m", "tools", "--to=x"],
        [f"{tmp_path}/serve", f"{tmp_path}/own.py", "missing.py"],
        [],
    ]
    shown = options["sandbox"]["python"], options["sandbox"]["read_only_paths"]
    assert shown == (f"{tmp_path}/env/bin/python", [f"{tmp_path}/tools"])


def test_environments_and_tools_of_trl_in_a_recipe() -> None:
    config = EnvironmentEpisodes(environment=f"trl:{__file__}:Counter", max_tokens=99)
    spec = environment_spec(config)
    TrlEnvironment.check_options(**spec.options)
    tools = ToolEpisodes(tools=(f"{__file__}:multiply",), max_tokens=99)
    ToolEnvironment.check_options(**environment_spec(tools).options)
    for name, message in (("NoReset", "has no method reset"), ("Missing", "Missing")):
        with pytest.raises(EnvironmentSetupError, match=message):
            TrlEnvironment(factory=f"{__file__}:{name}")
