"""Agent programs of other packages, each in its own virtual environment, with a policy that really
calls their tools: what is recorded is the engine's log, token for token."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from agent_session import check_rows, run_tasks, says, script, tool_call
from client_venvs import cache, interpreter
from scripted_engine import Answer, ScriptedEngine

from burnish.agents.commands import CommandAgents
from burnish.agents.functions import FunctionAgents
from burnish.config.episodes import AgentEpisodes
from burnish.config.model import ModelConfig
from burnish.episodes.loop import EpisodeLimits, EpisodeResult
from burnish.episodes.rows import episode_rows
from burnish.jobs.episodes import agent_spec

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
LIMITS = EpisodeLimits(max_turns=10, max_tokens=60_000, step_timeout_s=60, timeout_s=240)
ADD = (
    "<think>\nI add.\n</think>\n\n" + tool_call("add", a=2, b=3),
    "5",
    tool_call("add", a=5, b=10),
    "<think>\nDone.\n</think>\n\n15",
)
PROGRAMS = {
    "openai_agents_chat": ("openai-agents", ADD, 1),
    "openai_agents_responses": ("openai-agents", ADD, 1),
    "smolagents_tools": (
        "smolagents",
        (
            tool_call("add", a=2, b=3),
            tool_call("add", a=5, b=10),
            tool_call("final_answer", answer="15"),
        ),
        3,
    ),
    "smolagents_code": (
        "smolagents",
        (
            "Thought: I add.\n<code>\nx = 2 + 3\nprint(x)\n</code>",
            "Thought: I have it.\n<code>\nfinal_answer(x + 10)\n</code>",
        ),
        2,
    ),
    "litellm_loop": (
        "litellm",
        (ADD[0], "5", tool_call("add", a=12, b=3), ADD[3]),
        2,
    ),
}
"""Program -> its virtual environment, the policy's answers, and the number of rows."""


@pytest.fixture(autouse=True)
def _no_network_and_no_leftovers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "LITELLM_LOCAL_MODEL_COST_MAP", "OPENAI_AGENTS_DISABLE_TRACING"):
        monkeypatch.setenv(name, "True" if name.startswith("LITELLM") else "1")
    monkeypatch.setenv("HOME", str(cache() / "home"))


def check(results: Sequence[EpisodeResult], engine: ScriptedEngine, rows: int) -> None:
    for one in results:
        assert one.record.status == "done", one.error
        assert len(episode_rows(one.calls)) == rows
    if len(results) == 1:
        check_rows(results[0], engine)
    recorded = [(c.prompt_ids, c.completion.token_ids) for one in results for c in one.calls]
    assert Counter(recorded) == Counter((r.prompt_ids, ids) for r, ids in engine.log)


@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program: str) -> None:
    environment, answers, rows = PROGRAMS[program]
    command = [str(interpreter(environment)), str(HERE / f"programs/{program}.py")]
    found = run_tasks(CommandAgents(command), [{}], LIMITS, script(*answers), turn_tokens=600)
    check(*found, rows)
    assert found[0][0].record.turns[-1].rewards == {"reward": 1.0}


# ---- verifiers -----------------------------------------------------------------------------------


def add(text: str) -> str:
    numbers = text.rsplit("What is ", 1)[1].split("?")[0].split(" + ")
    return str(sum(map(int, numbers)))


def look_up(text: str) -> str:
    if "<tool_response>" not in text:
        color = text.rsplit("number of ", 1)[1].split(".")[0]
        return tool_call("lookup_tools_look_up", color=color)
    number = int(text.split("<tool_response>\n")[1].split("\n")[0])
    return str(2 * number) if "double" in text else str(number)


def run_verifiers(
    monkeypatch: pytest.MonkeyPatch, name: str, answer: Answer, tasks: Sequence[Any], **options: Any
) -> tuple[list[EpisodeResult], ScriptedEngine]:
    python = interpreter("verifiers")
    monkeypatch.setenv("PYTHONPATH", str(HERE / "environments"))
    monkeypatch.setenv("PATH", f"{python.parent}{os.pathsep}{os.environ['PATH']}")  # has uv
    config = AgentEpisodes(
        agent=f"verifiers:{name}", python=str(python), options=options, max_tokens=4000
    )
    agents = FunctionAgents(agent_spec(config, ModelConfig(path="none")), workers=1)
    return run_tasks(agents, tasks, LIMITS, answer, turn_tokens=300)


def seeds(*numbers: int) -> list[dict[str, Any]]:
    return [{"prompt": None, "label": None, "seed": seed} for seed in numbers]


def test_verifiers_with_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks by seed, and from the columns of a row. Rewards are weighted."""
    row = {"prompt": "What is 20 + 30?", "label": "50", "seed": 1}
    results, engine = run_verifiers(monkeypatch, "burnish-sums", says(add), [*seeds(1, 6), row])
    check(results, engine, 1)
    first, same, own = ([m["content"] for m in one.record.messages] for one in results)
    assert first == same == ["What is 1 + 1?", "2"]
    assert own == ["What is 20 + 30?", "50"]
    for one in results:
        assert one.record.turns[-1].rewards == {"right": 1.0, "short": 0.25}


def test_verifiers_with_several_turns_and_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool server per episode, and two user turns: still one row."""
    results, engine = run_verifiers(monkeypatch, "burnish-lookup", says(look_up), seeds(0, 1))
    check(results, engine, 1)
    assert [len(one.calls) for one in results] == [3, 3]
    for one in results:
        assert one.record.turns[-1].rewards == {"found": 1.0, "doubled": 1.0}


def test_failures_of_verifiers_are_failures_of_the_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raises(text: str) -> str:
        return tool_call("lookup_tools_look_up", color="none")

    results, engine = run_verifiers(monkeypatch, "burnish-lookup", says(raises), seeds(0))
    assert results[0].record.status == "max_turns"
    check_rows(results[0], engine)
