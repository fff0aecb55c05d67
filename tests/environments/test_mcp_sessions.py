"""Sessions with MCP servers over HTTP: a server that loses them, and one that does not work."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from mcp_http_hostile import hostile_server
from mcp_played import Played, calls, episode, http_server

from burnish.environments import mcp_connection, mcp_servers
from burnish.environments.base import EpisodeInfraError


def end_shared(played: Played, name: str) -> None:
    played.environment._mcp._servers.shared[name].close()  # type: ignore[union-attr]


def test_a_server_that_started_again_gets_a_new_session(tmp_path: Path) -> None:
    """It does not know the sessions of its predecessor, and has not run the calls. Two episodes
    that share a session call at once. One with a session of its own is lost."""
    odd = tmp_path / "odd"
    with ExitStack() as stack:
        url, process = stack.enter_context(http_server(odd=odd))
        shared = {"kept": {"url": url, "per_episode": False}}
        given = ({"own": {"url": url}}, shared, shared)
        own, one, two = [stack.enter_context(episode(mcp=mcp)) for mcp in given]
        first = json.loads(own("note", text="a"))
        assert one("add", a=1, b=2) == two("add", a=1, b=2) == "3"
        process.kill()
        process.wait()
        port = int(url.rpartition(":")[2].partition("/")[0])
        stack.enter_context(http_server(port=port, odd=odd))

        async def both() -> list[Any]:
            message = calls(("add", {"a": 2, "b": 2}), ("note", {"text": "b"}))
            return await asyncio.gather(*(p.environment.step(message) for p in (one, two)))

        steps = asyncio.run(both())
        for step in steps:
            assert step.messages[0]["content"] == "4"
            assert json.loads(step.messages[1]["content"])["pid"] != first["pid"]
            assert step.counts["tool_errors"] == 0
        assert sum(step.counts["mcp_restarts"] for step in steps) >= 1
        with pytest.raises(EpisodeInfraError, match="state of the episode is lost"):
            own("note", text="b")
        end_shared(one, "kept")


UNKNOWN = '{"jsonrpc": "2.0", "id": null, "error": {"code": %d, "message": "%s"}}'
JSON, TEXT = "application/json", "text/plain"
SESSION_LOST = {
    "protocol": (404, JSON, UNKNOWN % (-32001, "Session not found")),
    "text": (404, TEXT, "Not Found"),
    "html": (404, "text/html", "<h1>404</h1>"),
    "gone": (410, TEXT, ""),
    "bad request": (400, JSON, UNKNOWN % (-32000, "Bad Request: No valid session ID provided")),
}


@pytest.mark.parametrize("kind", SESSION_LOST)
def test_a_lost_session_is_never_an_answer_to_the_policy(kind: str, tmp_path: Path) -> None:
    odd = tmp_path / "odd"
    with http_server(odd=odd) as (url, _):
        shared = {"s": {"url": url, "per_episode": False}}
        with episode(mcp=shared) as one, episode(mcp={"own": {"url": url}}) as own:
            assert one("add", a=1, b=1) == own("add", a=1, b=1) == "2"
            odd.write_text(json.dumps([1, *SESSION_LOST[kind]]))
            assert one("add", a=1, b=2) == "3"
            assert one.counts["mcp_restarts"] == 1 and one.counts["tool_errors"] == 0
            odd.write_text(json.dumps([mcp_servers.MAX_SESSIONS, *SESSION_LOST[kind]]))
            with pytest.raises(EpisodeInfraError, match="MCP server s"):
                one("add", a=1, b=2)
            assert not odd.exists()
            assert one("add", a=2, b=2) == "4"
            odd.write_text(json.dumps([1, *SESSION_LOST[kind]]))
            with pytest.raises(EpisodeInfraError, match="MCP server own"):
                own("add", a=1, b=2)
            end_shared(one, "s")


@pytest.mark.parametrize("status", [401, 429, 503])
def test_a_server_that_does_not_work_ends_episodes_and_a_refusal_does_not(
    status: int, tmp_path: Path
) -> None:
    odd = tmp_path / "odd"
    with ExitStack() as stack:
        url, _ = stack.enter_context(http_server(odd=odd))
        one = stack.enter_context(episode(mcp={"s": {"url": url, "per_episode": False}}))
        own = stack.enter_context(episode(mcp={"own": {"url": url}}))
        for refusal in (400, 422, 500):
            odd.write_text(json.dumps([2, refusal, TEXT, "no"]))
            assert one("add", a=1, b=2).startswith("error: ")
            assert own("add", a=1, b=2).startswith("error: ")
            assert one("add", a=1, b=2) == own("add", a=1, b=2) == "3"
        odd.write_text(json.dumps([-1, status, TEXT, "no"]))
        with pytest.raises(EpisodeInfraError, match=f"HTTP status {status}"):
            own("add", a=1, b=2)
        for _ in range(mcp_servers.MAX_LOSSES):
            assert one("add", a=1, b=2).startswith("error: the MCP server s ended")
        with pytest.raises(EpisodeInfraError, match=f"HTTP status {status}"):
            one("add", a=1, b=2)
        odd.unlink()
        assert one("add", a=1, b=2) == "3"
        end_shared(one, "s")


WAITS = ("silent", "drip", "comments", "flood", "wrong_id", "reconnect")
"""Replies that never end, or that answer another call."""
REFUSED = {
    "huge": "more than 16777216 bytes",
    "garbage": "Failed to parse JSON",
    "garbage_event": "Failed to parse SSE",
    "nested": "Failed to parse JSON",
    "surrogate": "Failed to parse JSON",
    "wrong": "returned an invalid result",
    "error": "Server returned an error",
    "long_error": "xxx",
    "ansi": "red",
    "server_error": "Connection closed",
    "server_event": "busy",
    "status": "no row",
}
"""Replies that are an error for the policy. The session continues."""
LOST = ("accepted", "line", "kind", "redirect", "no_http", "unfinished")
"""Replies that end the session."""


def test_hostile_replies_over_http_cost_at_most_the_timeout(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing but the result reaches the terminal, streams are not opened again and again, and a
    connection ends although the server never answers the end of its session."""
    monkeypatch.setattr(mcp_connection, "CLOSE_TIMEOUT_S", 0.2)
    with hostile_server() as server:
        mcp = {"h": {"url": server.url}}
        with episode(mcp=mcp, timeout_s=20, max_result_chars=600) as played:
            results = {name: played(name) for name in REFUSED}
            assert played("good") == "good"
        for name, reason in REFUSED.items():
            assert results[name].startswith("error: ") and reason in results[name], name
            assert len(results[name]) < 700
        for name in LOST:
            lost = pytest.raises(EpisodeInfraError, match="MCP server h")
            with episode(mcp=mcp, timeout_s=20) as played, lost:
                played(name)
        with episode(mcp=mcp, timeout_s=0.5) as played:
            for name in WAITS:
                assert played(name).startswith("error: TimeoutError"), name
            assert played("good") == "good"
        assert server.requests["GET"] < 60
        running = set(mcp_connection._running)
        assert not asyncio.run(still_running(running))
    assert capfd.readouterr() == ("", "")


async def still_running(tasks: set[asyncio.Task[None]]) -> list[asyncio.Task[None]]:
    """Return the tasks of another loop that do not end within 10 s."""
    for _ in range(100):
        if all(task.done() for task in tasks):
            return []
        await asyncio.sleep(0.1)
    return [task for task in tasks if not task.done()]
