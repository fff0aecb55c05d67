"""Agent programs that fail in every way: each episode ends once with its status, nothing is left
behind, and the others are not disturbed."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from agent_session import play_tasks
from scripted_engine import ScriptedEngine

from burnish.agents.commands import CommandAgents
from burnish.agents.episodes import Agents
from burnish.agents.functions import FunctionAgents
from burnish.environments.base import EnvironmentSetupError
from burnish.environments.pool import EnvironmentSpec
from burnish.episodes.play import Limits, Played
from burnish.episodes.rows import episode_rows

FILE = Path(__file__).with_name("hostile_agents.py")
LIMITS = Limits(max_turns=6, max_tokens=2000, step_timeout_s=5, timeout_s=4)

STATUSES = {
    "good": "done",
    "never_calls": "env_error",
    "raises": "env_error",
    "leaves": "env_error",
    "returns_garbage": "env_error",
    "hangs": "timeout",
    "ignores_signals": "timeout",
    "kills_itself": "infra_error",
    "prints_without_end": "done",
    "calls_on_and_on": "max_turns",
}


def play(agents: Agents, names: list[str]) -> tuple[Mapping[str, list[Played]], ScriptedEngine]:
    """Play an episode with each agent, all at once."""
    found, engine = play_tasks(agents, [{"agent": name} for name in names], LIMITS)
    played: dict[str, list[Played]] = {}
    for name, one in zip(names, found, strict=True):
        played.setdefault(name, []).append(one)
    return played, engine


def check(played: Mapping[str, list[Played]], engine: ScriptedEngine, but: str = "") -> None:
    for name, expected in STATUSES.items():
        for one in played.get(name, ()):
            assert one.record.status == expected or name == but, (name, one.record)
            sampled = sum(sum(row.action_mask) for row in episode_rows(one.calls))
            assert sampled == sum(len(call.completion.token_ids) for call in one.calls)
    for one in played.get("good", ()):
        assert len(one.calls) == 2 and len(episode_rows(one.calls)) == 1
        assert one.record.turns[-1].rewards == {"reward": 1.0}
    assert not engine.busy


def test_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setenv("HOSTILE_PIDS", str(pids))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    more = ["leaves_a_process_behind", "writes_a_strange_reward", "good", "good"]
    played, engine = play(CommandAgents([sys.executable, str(FILE)]), [*STATUSES, *more])
    check(played, engine)
    assert "agent bug" in str(played["raises"][0].error)
    assert "SIGKILL" in str(played["kills_itself"][0].error)
    assert "regular file" in str(played["writes_a_strange_reward"][0].error)
    for pid in pids.read_text().split():
        assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()
    assert os.listdir(tmp_path) == ["pids"]  # no folder of an episode is left


def test_functions() -> None:
    """All share two workers. A worker that dies takes the others in it along (infra_error)."""
    spec = EnvironmentSpec(f"{FILE}:any_of_them", {}, role="agent")
    more = ["chats_on_after_the_end", "good", "good"]
    names = [name for name in STATUSES if name != "kills_itself"]
    played, engine = play(FunctionAgents(spec, workers=2), [*names, *more])
    check(played, engine)
    assert "agent bug" in str(played["raises"][0].error)
    assert 'hostile_agents.py"' in str(played["raises"][0].error)  # a traceback
    assert "SystemExit" in str(played["leaves"][0].error)
    assert played["chats_on_after_the_end"][0].record.status == "done"
    played, engine = play(FunctionAgents(spec, workers=2), ["kills_itself", "good", "kills_itself"])
    assert {one.record.status for one in played["kills_itself"]} == {"infra_error"}


def test_wrong_agents_are_refused_before_a_model_is_loaded() -> None:
    def start(agents: Any) -> None:
        async def inside() -> None:
            try:
                await agents.start()
            finally:
                await agents.close()

        asyncio.run(inside())

    def function(name: str, **options: Any) -> FunctionAgents:
        spec = EnvironmentSpec(f"{FILE}:{name}", options, role="agent")
        return FunctionAgents(spec, workers=1)

    for agents, message in (
        (function("missing"), "has no 'missing'"),
        (function("STATUS"), "has no 'STATUS'"),
        (function("json"), "an agent is a function"),
        (function("good", speed=3), "cannot be called with"),
        (CommandAgents(["no-such-program-here"]), "there is no program"),
    ):
        with pytest.raises(EnvironmentSetupError, match=message):
            start(agents)
