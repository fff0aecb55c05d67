"""A program of openai-agents with a function tool, over the Responses API, plain and streamed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from agent_session import check_rows, run_tasks, script, tool_call

from burnish.agents.commands import CommandAgents
from burnish.episodes.loop import EpisodeLimits
from burnish.episodes.rows import episode_rows

PROGRAM = Path(__file__).parents[1] / "clients/programs/openai_agents_responses.py"


def test_a_tool_loop_of_openai_agents_is_one_row() -> None:
    """Two questions with a call each; the policy's reasoning is sent back or dropped."""
    pytest.importorskip("agents")
    answers = script(
        "<think>\nI add.\n</think>\n\n" + tool_call("add", a=2, b=3),
        "5",
        tool_call("add", a=5, b=10),
        "<think>\nDone.\n</think>\n\n15",
    )
    limits = EpisodeLimits(max_turns=6, max_tokens=4000, step_timeout_s=60, timeout_s=60)
    agents = CommandAgents([sys.executable, str(PROGRAM)])
    (result,), engine = run_tasks(agents, [{}], limits, answers, turn_tokens=300)
    assert result.record.status == "done", result.error
    assert result.record.turns[-1].rewards == {"reward": 1.0}
    assert len(episode_rows(result.calls)) == 1
    check_rows(result, engine)
