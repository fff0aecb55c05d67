"""Agent programs that fail in every way: each episode ends once with its status, nothing is left
behind, and the others are not disturbed."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from agent_session import run_tasks
from scripted_engine import ScriptedEngine

from burnish.agents.commands import CommandAgents
from burnish.agents.episodes import Agents
from burnish.agents.functions import FunctionAgents
from burnish.agents.sandboxed import SandboxedCommands, SandboxedFunctions
from burnish.agents.server import EpisodeServer
from burnish.config.sandbox import BubblewrapSandbox
from burnish.environments.base import EnvironmentSetupError
from burnish.environments.pool import EnvironmentSpec
from burnish.environments.worker import without_proxy
from burnish.episodes.loop import EpisodeLimits, EpisodeResult
from burnish.episodes.rows import episode_rows
from burnish.sandbox.base import SandboxError
from burnish.sandbox.bubblewrap import DEFAULT_PYTHON
from burnish.sandbox.make import check_sandbox

FILE = Path(__file__).with_name("hostile_agents.py")
LIMITS = EpisodeLimits(max_turns=6, max_tokens=2000, step_timeout_s=5, timeout_s=4)

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


def run_agents(
    agents: Agents,
    names: list[str],
    *,
    server: EpisodeServer | None = None,
    limits: EpisodeLimits = LIMITS,
    more: Mapping[str, Any] | None = None,
) -> tuple[Mapping[str, list[EpisodeResult]], ScriptedEngine]:
    """Run an episode with each agent, all at once. ``more``: further fields of the tasks."""
    rows = [{"agent": name, **(more or {})} for name in names]
    found, engine = run_tasks(agents, rows, limits, server=server)
    results: dict[str, list[EpisodeResult]] = {}
    for name, one in zip(names, found, strict=True):
        results.setdefault(name, []).append(one)
    return results, engine


def check(
    results: Mapping[str, list[EpisodeResult]], engine: ScriptedEngine, but: str = ""
) -> None:
    for name, expected in STATUSES.items():
        for one in results.get(name, ()):
            assert one.record.status == expected or name == but, (name, one.record)
            sampled = sum(sum(row.action_mask) for row in episode_rows(one.calls))
            assert sampled == sum(len(call.completion.token_ids) for call in one.calls)
    for one in results.get("leaves_a_process_behind", ()):
        assert one.record.status == "done"  # although the process holds its output open
    for one in results.get("good", ()):
        assert len(one.calls) == 2 and len(episode_rows(one.calls)) == 1
        assert one.record.turns[-1].rewards == {"reward": 1.0}
    assert not engine.busy


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and "Z" not in stat.read_text()


def test_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = tmp_path / "pids"
    monkeypatch.setenv("HOSTILE_PIDS", str(pids))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    more = ["writes_a_strange_reward", "ends_by_a_signal_without_a_name", "good", "good"]
    more += ["leaves_a_process_behind"]
    results, engine = run_agents(CommandAgents([sys.executable, str(FILE)]), [*STATUSES, *more])
    check(results, engine)
    assert "agent bug" in str(results["raises"][0].error)
    assert "SIGKILL" in str(results["kills_itself"][0].error)
    assert "signal 40" in str(results["ends_by_a_signal_without_a_name"][0].error)
    assert "regular file" in str(results["writes_a_strange_reward"][0].error)
    assert not any(is_running(int(pid)) for pid in pids.read_text().split())
    assert os.listdir(tmp_path) == ["pids"]  # no folder of an episode is left


ESCAPES = (
    "writes_outside",
    "connects_elsewhere",
    "reads_secrets",
    "looks_for_other_episodes",
    "fills_the_disk",
)
"""Agents that return what they could do outside of their sandbox."""

SANDBOXED = {
    "good": "done",
    "never_calls": "env_error",
    "leaves": "env_error",
    "writes_a_strange_reward": "env_error",
    "allocates_without_end": "env_error",
    "forks_without_end": "timeout",
    "prints_forever": "timeout",
    "ignores_signals": "timeout",
    "kills_the_relay": "infra_error",
    "forges_a_result": "infra_error",
    "calls_on_and_on": "max_turns",
    **dict.fromkeys(ESCAPES, "done"),
}


@pytest.fixture
def shown() -> Iterator[str]:
    """A copy of the agents in a folder that every user can read."""
    with tempfile.TemporaryDirectory(prefix="hostile-", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        yield shutil.copy(FILE, folder)


def sandboxed(
    script: str, *, paths: Sequence[str] | None = None, program: str = "python"
) -> tuple[SandboxedCommands, EpisodeServer]:
    try:
        check_sandbox(BubblewrapSandbox())
    except SandboxError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    server = EpisodeServer("127.0.0.1", 0, unix_socket=True)
    folders = (os.path.dirname(script),) if paths is None else tuple(paths)
    config = BubblewrapSandbox(memory_bytes=256 << 20, processes=24, read_only_paths=folders)
    return SandboxedCommands([program, script], config, server), server


def test_programs_in_a_sandbox(shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They reach the policy and nothing else, and a good one plays as without a sandbox."""
    monkeypatch.setenv("HOSTILE_SECRET", "hostile-secret")
    places = ["/", "/etc", "/usr", "/usr/lib", "/dev", "/run", "/tmp", "/var/tmp", os.getcwd()]
    places += [os.path.dirname(shown), str(tmp_path)]
    (tmp_path / "secret").write_text("hostile-secret")
    agents, server = sandboxed(shown)
    with ExitStack() as stack:
        port = stack.enter_context(socket.create_server(("", 0))).getsockname()[1]
        for address in ("\0" + tmp_path.name, str(tmp_path / "socket")):
            listening = stack.enter_context(socket.socket(socket.AF_UNIX))
            listening.bind(address)
            listening.listen()
        more = {
            "outside": str(tmp_path),
            "places": places,
            "ports": [port],
            "address": socket.gethostbyname(socket.gethostname()),
            "abstract": tmp_path.name,
        }
        limits = replace(LIMITS, timeout_s=8)
        names = [*SANDBOXED, "good"]
        results, engine = run_agents(agents, names, server=server, limits=limits, more=more)
    assert {name: one[0].record.status for name, one in results.items()} == SANDBOXED
    for name in ESCAPES:
        assert results[name][0].record.turns[-1].rewards == {}, name
        assert len(results[name][0].calls) == 2
    assert "exited with code 3" in str(results["leaves"][0].error)
    assert "MemoryError" in str(results["allocates_without_end"][0].error)
    assert not [place for place in places if os.path.exists(f"{place}/hostile")]
    assert not engine.busy
    assert not [p for p in psutil.process_iter(["cmdline"]) if shown in (p.info["cmdline"] or [])]

    others, _ = run_agents(CommandAgents([sys.executable, shown]), list(SANDBOXED)[:1])
    (outside,) = others["good"]
    inside = results["good"][0]
    assert [(c.prompt_ids, c.completion.token_ids) for c in inside.calls] == [
        (c.prompt_ids, c.completion.token_ids) for c in outside.calls
    ]
    assert inside.record.turns[-1].rewards == outside.record.turns[-1].rewards == {"reward": 1.0}


FUNCTIONS = {
    "good": "done",
    "good_async": "done",
    "raises": "env_error",
    "leaves": "env_error",
    "returns_garbage": "env_error",
    "hangs": "timeout",
    "kills_itself": "infra_error",
    "forges_a_result": "infra_error",
    "writes_outside": "done",
    "connects_elsewhere": "done",
}


def test_functions_in_a_sandbox(shown: str, tmp_path: Path) -> None:
    """A process per episode: one that dies takes no other along."""
    spec = EnvironmentSpec(f"{shown}:any_of_them", {}, DEFAULT_PYTHON, role="agent")
    _, server = sandboxed(shown)
    agents = SandboxedFunctions(spec, BubblewrapSandbox(), server)
    places = [os.path.dirname(shown), os.getcwd(), str(tmp_path), "/var/tmp"]
    with socket.create_server(("", 0)) as listening, socket.socket(socket.AF_UNIX) as local:
        local.bind(str(tmp_path / "socket"))
        local.listen()
        more = {
            "outside": str(tmp_path),
            "places": places,
            "ports": [listening.getsockname()[1]],
            "address": socket.gethostbyname(socket.gethostname()),
            "abstract": tmp_path.name,
        }
        results, engine = run_agents(agents, [*FUNCTIONS], server=server, more=more)
    assert {name: one[0].record.status for name, one in results.items()} == FUNCTIONS
    for name in ("writes_outside", "connects_elsewhere"):
        assert results[name][0].record.turns[-1].rewards == {}, name
    assert not [place for place in places if os.path.exists(f"{place}/hostile")]
    assert "agent bug" in str(results["raises"][0].error)
    assert 'hostile_agents.py"' in str(results["raises"][0].error)  # a traceback
    assert "SystemExit" in str(results["leaves"][0].error)
    for name in ("good", "good_async"):
        check({"good": results[name]}, engine)

    for wrong, message in (
        (f"{shown}:missing", "has no 'missing'"),
        (f"{shown}:json", "an agent is a function"),
    ):
        server = EpisodeServer("127.0.0.1", 0, unix_socket=True)
        refused = SandboxedFunctions(replace(spec, spec=wrong), BubblewrapSandbox(), server)
        with pytest.raises(EnvironmentSetupError, match=message):
            run_agents(refused, [], server=server)


def test_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All share two workers. A worker that dies takes the others in it along (infra_error)."""
    spec = EnvironmentSpec(f"{FILE}:any_of_them", {}, role="agent")
    more = ["chats_on_after_the_end", "good", "good"]
    names = [name for name in STATUSES if name != "kills_itself"]
    results, engine = run_agents(FunctionAgents(spec, workers=2), [*names, *more])
    check(results, engine)
    assert "agent bug" in str(results["raises"][0].error)
    assert 'hostile_agents.py"' in str(results["raises"][0].error)  # a traceback
    assert "SystemExit" in str(results["leaves"][0].error)
    assert results["chats_on_after_the_end"][0].record.status == "done"
    monkeypatch.setenv("HOSTILE_PIDS", str(tmp_path / "pids"))
    results, engine = run_agents(
        FunctionAgents(spec, workers=2), ["kills_itself", "good", "kills_itself"]
    )
    assert {one.record.status for one in results["kills_itself"]} == {"infra_error"}
    name = "dies_with_a_process_in_another_session"
    results, engine = run_agents(FunctionAgents(spec, workers=1), [name])
    assert results[name][0].record.status == "infra_error"
    assert not is_running(int((tmp_path / "pids").read_text()))


@pytest.mark.parametrize("bypassed", [None, "", "example.com, .internal"])
def test_agents_do_not_call_the_policy_through_a_proxy(
    bypassed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clusters often set one for all of the web, with or without hosts that are exempt."""
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    if bypassed is not None:
        monkeypatch.setenv("no_proxy", bypassed)
    spec = EnvironmentSpec(f"{FILE}:any_of_them", {}, role="agent")
    for agents in (FunctionAgents(spec, workers=1), CommandAgents([sys.executable, str(FILE)])):
        results, engine = run_agents(agents, ["good"])
        check(results, engine)
        assert results["good"][0].record.status == "done"


@pytest.mark.parametrize(
    ("environment", "hosts"),
    [
        ({}, ["h", "h"]),
        ({"NO_PROXY": "a"}, ["a,h", "a,h"]),
        ({"NO_PROXY": "a", "no_proxy": "b, c"}, ["a,h", "b,c,h"]),
        ({"NO_PROXY": "a, h"}, ["a, h", "a, h"]),
        ({"no_proxy": "*"}, ["*", "*"]),
    ],
)
def test_hosts_without_a_proxy_are_added_once(environment: Any, hosts: list[str]) -> None:
    changed = environment | without_proxy(environment, "http://h:80/x")
    assert [changed["NO_PROXY"], changed["no_proxy"]] == hosts
    assert without_proxy(changed, "http://h:80/x") == {}


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


def test_agents_that_a_sandbox_does_not_show_are_refused(shown: str) -> None:
    for given, message in (
        ({"paths": ()}, "add its folder to read_only_paths"),
        ({"program": "no-such-program-here"}, "there is no program 'no-such-program-here' in it"),
    ):
        agents, server = sandboxed(shown, **given)
        with pytest.raises(EnvironmentSetupError, match=message):
            run_agents(agents, [], server=server)
        assert not server.unix_path.exists()
