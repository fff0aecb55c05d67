"""The built-in tool ``python``: results for the policy, limits, and failures of the machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

import pytest

from burnish.config.episodes import ToolEpisodes
from burnish.config.sandbox import BubblewrapSandbox
from burnish.environments.base import EnvironmentSetupError
from burnish.environments.code_tool import shown
from burnish.environments.multi_turn import Step
from burnish.environments.pool import EnvironmentPool
from burnish.environments.tools import ToolEnvironment
from burnish.jobs.episodes import environment_spec
from burnish.sandbox import bubblewrap
from burnish.sandbox.base import Result, SandboxError
from burnish.sandbox.make import check_sandbox


@pytest.fixture(scope="module", autouse=True)
def sandbox() -> None:
    try:
        check_sandbox(BubblewrapSandbox())
    except SandboxError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


def message(*codes: str) -> Mapping[str, Any]:
    calls = [
        {"id": f"call{i}", "function": {"name": "python", "arguments": {"code": code}}}
        for i, code in enumerate(codes)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def config_of(**more: Any) -> ToolEpisodes:
    return ToolEpisodes(**{"tools": ("python",), "max_tokens": 100, **more})


def played(*messages: Mapping[str, Any], **more: Any) -> list[Step]:
    """Steps of an episode in a worker process, as a recipe starts it."""

    async def play() -> list[Step]:
        config = config_of(**more)
        pool = EnvironmentPool(environment_spec(config), workers=1)
        await pool.start()
        try:
            episode = await pool.open({"prompt": "?"}, 0, timeout_s=30)
            (tool,) = episode.start.tools
            assert tool["function"]["name"] == "python"
            assert list(tool["function"]["parameters"]["properties"]) == ["code"]
            steps = [await episode.step(message, timeout_s=30) for message in messages]
            await episode.close()
            return steps
        finally:
            await pool.close()

    return asyncio.run(play())


def test_code_of_the_policy_runs_and_a_mistake_is_an_answer() -> None:
    """Calls share nothing; endless code, output and errors are answers."""
    steps = played(
        message("x = 6\nprint(x * 7)", "print(x)"),
        message("import sys; sys.exit(3)", "pass", "print('ä' * 1000)"),
        message("while True: print('x' * 1000)",
                "import socket; socket.create_connection(('1.1.1.1', 1))"),
        message("print('begun', flush=True)\nwhile True: pass"),
        {"role": "assistant", "content": "42"},
        tool_timeout_s=1.5,
        tool_result_chars=300,
        sandbox=BubblewrapSandbox(output_bytes=10_000),
    )  # fmt: skip
    texts = [[m["content"] for m in step.messages] for step in steps]
    assert texts[0][0] == "42"
    assert texts[0][1].startswith("[stderr]\nTraceback") and "NameError" in texts[0][1]
    assert texts[0][1].endswith("[exit code 1]")
    assert texts[1][:2] == ["[exit code 3]", "(no output)"]
    assert texts[1][2].count("ä") == 140 and "(... 860 characters ...)" in texts[1][2]
    assert "[ended: too much output]" in texts[2][0] and "unreachable" in texts[2][1]
    assert texts[3] == ["error: TimeoutError: the code ran longer than 1.5 s\nbegun"]
    assert steps[3].counts == {"tool_calls": 1, "tool_errors": 1, "tool_timeouts": 1}
    assert steps[0].counts["tool_errors"] == 0 and steps[4].done


def test_many_slow_calls_in_one_turn_do_not_use_up_the_step() -> None:
    """0.9 x 2 s: two calls take 0.8 s each; the third is ended, the others are refused."""
    slow = "while True: pass"
    (step,) = played(message(*[slow] * 9), tool_timeout_s=0.8, step_timeout_s=2)
    texts = [m["content"] for m in step.messages]
    assert sum("ran longer than 0.8 s" in text for text in texts) == 2
    assert sum("took longer than 1.8 s together" in text for text in texts) == 7


def test_without_a_sandbox_no_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: None)
    with pytest.raises(EnvironmentSetupError, match="tool python: bubblewrap is not installed"):
        ToolEnvironment.check_options(tools=["python"])


def test_a_sandbox_that_fails_is_not_told_to_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = ToolEnvironment(tools=["python"], timeout_s=7.25)
    monkeypatch.setattr(bubblewrap.subprocess, "Popen", _raise)
    with pytest.raises(SandboxError, match="cannot be started: no memory"):
        asyncio.run(environment.step(message("print(1)")))


def _raise(*arguments: Any, **named: Any) -> None:
    raise OSError("no memory")


def test_a_method_of_the_same_name_is_the_users_own() -> None:
    class Own(ToolEnvironment):
        tools = ("python",)

        def python(self, code: str) -> str:
            """Return the code."""
            return code

    step = asyncio.run(Own().step(message("x")))
    assert step.messages[0]["content"] == "x"


def test_text_of_results() -> None:
    both = Result(b"a" * 50, b"b" * 50, 1, "exit", 0.1)
    assert shown(both, 200) == (
        f"{'a' * 10}\n(... 30 characters ...)\n{'a' * 10}\n[stderr]\n"
        f"{'b' * 10}\n(... 30 characters ...)\n{'b' * 10}\n[exit code 1]"
    )
    assert shown(Result(b"\xff\n", b"", 0, "exit", 0.1), 100) == "\ufffd"
    assert shown(Result(b"", b"", None, "wall_time", 0.1), 100) == ""


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"tools": ("phyton",)}, "the built-in tool is python"),
        ({"tools": ("a.py:f",), "sandbox": BubblewrapSandbox()}, "sandbox is for the tool python"),
    ],
)
def test_recipes_that_make_no_sense(more: dict[str, Any], says: str) -> None:
    assert any(says in problem for problem in config_of(**more).broken_rules())
    assert not config_of(sandbox={"kind": "unsafe_subprocess"}).broken_rules()
