"""Tools of MCP servers: results, state, failures of servers, and the end of their processes."""

from __future__ import annotations

import asyncio
import json
import os
import select
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import mcp_types
import pytest
from chat_families import chat_tokenizer
from mcp_played import calls, episode, http_server
from pydantic import TypeAdapter, ValidationError
from scripted_engine import ScriptedEngine

from burnish.config.episodes import Episodes, McpServerConfig
from burnish.config.model import ModelConfig, PrecisionConfig, ScratchConfig
from burnish.config.rewards import FailurePolicy, ShapingConfig
from burnish.environments import mcp_servers
from burnish.environments.base import EnvironmentSetupError, EpisodeInfraError, ToolError
from burnish.environments.pool import EnvironmentPool, EpisodeFailedError, OpenEpisode
from burnish.environments.tools import ToolEnvironment
from burnish.episodes.runner import EpisodeRunner
from burnish.jobs.episodes import build_episode_pool, environment_spec
from burnish.observe.timeline import Timeline
from burnish.rewards.episode.reward import EpisodeScorer
from burnish.rewards.reward_set import RewardSet
from burnish.rollout.base import Request, Sampling
from burnish.runtime.inline import InlineRuntime
from burnish.tool_arguments import argument_problem
from burnish.types import Prompt

EPISODES: TypeAdapter[Any] = TypeAdapter(Episodes)

HERE = Path(__file__).parent
STDIO = {"command": [sys.executable, str(HERE / "mcp_server.py"), "stdio"]}
TINY = {"command": [sys.executable, str(HERE / "mcp_hostile.py"), "tiny"]}


def wait_for_end(pid: int) -> None:
    """Wait for the end of a process that may not be a child."""
    try:
        at = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(at, select.POLLIN)
    try:
        assert poll.poll(30_000), f"process {pid} did not end"
    finally:
        os.close(at)


def test_calls_of_a_stdio_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process per episode: the second one has none of the first one's notes."""
    monkeypatch.setenv("MCP_SECRET", "s3cret")
    monkeypatch.setenv("MCP_OTHER", "other")
    server = {**STDIO, "pass_env": ["MCP_SECRET"], "env": {"MCP_PLAIN": "plain"}}
    with episode(mcp={"tests": server}) as played, episode(mcp={"tests": server}) as other:
        schema = {
            t["function"]["name"]: t for t in played.environment.reset({"prompt": "x"}, 0).tools
        }
        assert schema["add"]["function"]["description"] == "Add two integers."
        assert schema["add"]["function"]["parameters"]["required"] == ["a", "b"]
        assert played("add", a=1, b=2) == "3"
        assert played("add", a=1) == "error: ValidationError: 'b' is a required property"
        assert played("add", a=1, b="q").startswith("error: ValidationError: b: 'q' is not of type")
        assert played("nothing").startswith("error: UnknownToolError: there is no tool 'nothing'")
        assert played.counts == {
            "tool_calls": 1,
            "tool_errors": 1,
            "tool_timeouts": 0,
            "mcp_restarts": 0,
        }
        names = ("MCP_SECRET", "MCP_PLAIN", "MCP_OTHER")
        got = played.all(*[("variable", {"name": name}) for name in names])
        assert got == ["s3cret", "plain", "not set"]
        assert json.loads(played("point", x=1)) == {"x": 1, "y": 2}
        assert played("picture") == "seen:\n(image of type image/png left out)"
        assert played("fail", text="no such file").startswith("error: ")
        assert played("sample").startswith("error: ") and played("ask").startswith("error: ")
        first = json.loads(played("note", text="a")) and json.loads(played("note", text="b"))
        second = json.loads(other("note", text="c"))
        assert first["notes"] == ["a", "b"] and second["notes"] == ["c"]
        assert first["pid"] != second["pid"]
    for pid in (first["pid"], second["pid"]):
        wait_for_end(pid)


def test_structured_content_without_text_is_json() -> None:
    types = mcp_servers.types
    result = types.CallToolResult(content=[], structured_content={"é": [1]})
    assert mcp_servers.result_text(result) == '{"é": [1]}'
    link = types.ResourceLink(type="resource_link", uri="file:///a", name="a")
    text = types.TextResourceContents(uri="file:///b", text="of b")
    blob = types.BlobResourceContents(uri="file:///c", blob="AA==")
    parts = [
        types.EmbeddedResource(type="resource", resource=resource) for resource in (text, blob)
    ]
    text_of_result = mcp_servers.result_text(types.CallToolResult(content=[link, *parts]))
    assert (
        text_of_result
        == "(link to file:///a: a)\nof b\n(resource file:///c left out: it is not text)"
    )


def test_a_hostile_server_only_costs_calls() -> None:
    """Hanging, printing what is no message, long and invalid results."""
    with episode(mcp={"tiny": TINY}, timeout_s=20, max_result_chars=100) as played:
        assert played("garbage") == "printed"
        assert played("surrogates") == "a\ufffd \U0001f600"
        assert played("long").endswith("(cut: 30000 characters in total)")
        assert played("wrong").startswith("error: MCP server tiny returned an invalid result")
        for code in (-32000, -32001, -32002, -32050, -32600, -32601, -32602, -32603, -32700, 0, 1):
            for message in ("Connection closed", "SSE stream failed: x", "database is locked"):
                assert played("refuse", code=code, message=message) == f"error: {message}"
        assert played("pid").isdigit()
    with episode(mcp={"tiny": TINY}, timeout_s=0.5) as played:
        assert played("hang") == "error: TimeoutError: the call took longer than 0.5 s"
        assert played.counts["tool_timeouts"] == 1


@pytest.mark.parametrize("name", ["die", "huge"])
def test_the_loss_of_an_episodes_server_ends_the_episode(name: str) -> None:
    with episode(mcp={"tiny": TINY}) as played:
        with pytest.raises(EpisodeInfraError, match="the state of the episode is lost") as caught:
            played(name)
    reasons = {"die": "out of memory", "huge": "more than 16777216 bytes"}
    assert reasons[name] in str(caught.value)
    with episode(mcp={"tiny": TINY}) as played:
        assert played("pid").isdigit()


def test_a_shared_server_is_started_again() -> None:
    """Both episodes use one process. Its death is an error message; the limit is consecutive."""
    shared = {"tiny": {**TINY, "per_episode": False, "prefix": "t."}}
    with episode(mcp=shared) as one, episode(mcp=shared) as two:
        first = one("t.pid")
        assert two("t.pid") == first
        for _ in range(mcp_servers.MAX_LOSSES):
            assert one("t.die") == "error: the MCP server tiny ended during the call"
        wait_for_end(int(first))
        assert two("t.pid") not in (first, "") and two.counts["mcp_restarts"] == 1
        assert one.counts["mcp_restarts"] == 1  # of its last turn
        for _ in range(mcp_servers.MAX_LOSSES):
            one("t.die")
        with pytest.raises(EpisodeInfraError, match="out of memory"):
            one("t.die")


def test_a_shared_server_that_hangs_is_started_again() -> None:
    shared = {"tiny": {**TINY, "per_episode": False}}
    with episode(mcp=shared, timeout_s=20) as played:
        first = played("pid")
    with episode(mcp=shared, timeout_s=0.3) as played:
        for _ in range(mcp_servers.MAX_TIMEOUTS):
            assert "TimeoutError" in played("hang")
    wait_for_end(int(first))
    with episode(mcp=shared, timeout_s=20) as played:
        assert played("pid") != first and played.counts["mcp_restarts"] == 1
        played.environment._mcp._servers.shared["tiny"].close()  # type: ignore[union-attr]


def test_nothing_of_a_server_outlives_its_episode_or_its_worker() -> None:
    """Descendants in other sessions, one of them an orphan, end as well: of a closed
    episode, of a server that died, and of an episode that is open when its worker is killed."""
    config = EPISODES.validate_python({"mcp": {"tiny": TINY}, "max_tokens": 100})
    pool = EnvironmentPool(environment_spec(config), workers=1)

    async def opened() -> OpenEpisode:
        return await pool.open({"prompt": "x"}, 0, timeout_s=30)

    async def spawn(episode: OpenEpisode) -> list[int]:
        step = await episode.step(calls(("spawn", {})), timeout_s=30)
        pids: list[int] = json.loads(step.messages[0]["content"])
        return pids

    async def play() -> list[int]:
        try:
            await pool.start()
            one, two, three = await opened(), await opened(), await opened()
            closed = await spawn(one)
            await one.close()
            for pid in closed:
                await asyncio.to_thread(wait_for_end, pid)
            dead = await spawn(two)
            with pytest.raises(EpisodeFailedError, match="out of memory") as caught:
                await two.step(calls(("die", {})), timeout_s=30)
            assert caught.value.status == "infra_error"
            return [*closed, *dead, *await spawn(three)]
        finally:
            await pool.close()

    pids = asyncio.run(play())
    assert len(set(pids)) == 9
    for pid in pids:
        wait_for_end(pid)


def test_calls_of_an_http_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token is sent. A server that ends loses the session of the episode; shared, the next
    call connects again."""
    monkeypatch.setenv("MCP_TOKEN", "s3cret")
    with http_server("s3cret") as (url, process):
        good = {"url": url, "token_env": "MCP_TOKEN", "tools": ["add", "note"]}
        shared = {"shared": {**good, "per_episode": False}}
        with pytest.raises(EnvironmentSetupError, match=r"(?s)episodes\.mcp\.x: .*HTTP status 401"):
            ToolEnvironment.check_options(mcp={"x": {"url": url}})
        with episode(mcp={"own": good}) as one, episode(mcp=shared) as two:
            assert one("add", a=1, b=2) == two("add", a=1, b=2) == "3"
            assert one("fail", text="x").startswith("error: UnknownToolError")
            process.kill()
            process.wait()
            with pytest.raises(EpisodeInfraError, match="MCP server own"):
                one("add", a=1, b=2)
            assert two("add", a=1, b=2) == "error: the MCP server shared ended during the call"
            with pytest.raises(EpisodeInfraError, match="MCP server shared"):
                two("add", a=1, b=2)
            port = int(url.rpartition(":")[2].partition("/")[0])
            with http_server("s3cret", port):
                assert two("add", a=2, b=2) == "4" and two.counts["mcp_restarts"] == 1
                two.environment._mcp._servers.shared["shared"].close()  # type: ignore[union-attr]


def hostile(mode: str, **more: Any) -> dict[str, Any]:
    return {"command": [sys.executable, str(HERE / "mcp_hostile.py"), mode], **more}


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (hostile("crash"), "database"),
        (hostile("endless"), r"(?s)mcp\.s: .*more than 16777216 bytes"),
        (hostile("hang"), r"within 1\.5"),
        (hostile("schema"), "invalid JSON"),
        (hostile("pages"), "1000"),
        (hostile("tiny", tools=["pids"]), "'pids'.*nearest: pid"),
        (hostile("tiny", prefix="a" * 126), "contain"),
        ({"command": ["no-such-program"]}, "program"),
        ({**TINY, "pass_env": ["MCP_UNSET"]}, "pass_env"),
        ({"url": "http://127.0.0.1:1/mcp"}, r"(?s)mcp\.s: .*ConnectError"),
    ],
)
def test_servers_that_cannot_be_used_are_errors_before_the_run(
    server: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "hang" in server.get("command", ()):
        monkeypatch.setattr(mcp_servers, "LIST_TIMEOUT_S", 1.5)
    with pytest.raises(EnvironmentSetupError, match=message):
        ToolEnvironment.check_options(mcp={"s": server})


def test_equal_names_need_a_prefix(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text('def pid() -> int:\n    """Return a number."""\n    return 7\n')
    with pytest.raises(EnvironmentSetupError, match=r"name 'pid' .*mcp\.a\.prefix.*'a_'"):
        ToolEnvironment(tools=[f"{path}:pid"], mcp={"a": TINY})
    with pytest.raises(EnvironmentSetupError, match=r"\(MCP server a and MCP server b\)"):
        ToolEnvironment(mcp={"a": TINY, "b": {**TINY, "env": {"X": "1"}}})
    with episode(tools=[f"{path}:pid"], mcp={"a": {**TINY, "prefix": "a_"}}) as played:
        own, others = played.all(("pid", {}), ("a_pid", {}))
    assert own == "7" and others.isdigit()


def test_episodes_of_a_recipe_call_a_server_and_replay_a_lost_one(tmp_path: Path) -> None:
    """Two episodes, one prompt: turn 1 calls a Python function, turn 2 the server, turn 3 answers.
    The first attempt of the first episode kills its server, so the episode is played again."""
    tokenizer = chat_tokenizer("chatml")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    path = tmp_path / "own.py"
    path.write_text('def seven() -> int:\n    """Return a number."""\n    return 7\n')
    config = EPISODES.validate_python(
        {"tools": [f"{path}:seven"], "mcp": {"tiny": TINY}, "max_tokens": 4096}
        | {"tool_format": "hermes", "max_failed_frac": 0.0}
    )
    pool = build_episode_pool(
        config,
        ModelConfig(scratch=ScratchConfig(max_position_embeddings=1 << 16)),
        InlineRuntime(tokenizer, precision=PrecisionConfig(), device="cpu", timeline=Timeline()),
    )
    assert pool is not None
    killed: list[str] = []

    def answer(request: Request) -> list[int]:
        episode, _, turn = request.request_id.rpartition("/")
        name = {"0": "seven", "1": "pid"}.get(turn)
        if turn == "1" and not killed:
            killed.append(episode)
            name = "die"
        call = f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'
        ids = tokenizer(call if name else "done", add_special_tokens=False)["input_ids"]
        return [*ids, end]

    shaping = ShapingConfig()
    rewards = RewardSet(
        [(EpisodeScorer(None, name="all"), 1.0)],
        on_failure=FailurePolicy(),
        shaping=shaping,
        generate_max_len=100,
    )
    engine = ScriptedEngine(answer, tokenizer)
    try:
        runner = EpisodeRunner(engine, rewards, Sampling(100), pool, num_samples=2, seed=3)
        (drawn,) = runner.draw_all([Prompt("task:0@0", (1,), "task 0")])
        group, stats = drawn.group, runner.stats([drawn])
    finally:
        pool.close()
    pids = []
    assert group is not None
    for sample in group.samples:
        assert sample.episode is not None and sample.episode.status == "done"
        first, second, _ = sample.episode.turns
        assert [message["content"] for message in first.answer] == ["7"]
        pids.append(int(second.answer[0]["content"]))
    assert len(set(pids)) == 2 and len(killed) == 1
    for pid in pids:
        wait_for_end(pid)
    measured = stats.floats()
    assert measured["episodes/counts/tool_calls"] == 4
    assert measured["episodes/counts/mcp_restarts"] == 0


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "burnish.environments.mcp_servers")
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(EnvironmentSetupError, match=r"pip install 'burnish\[mcp\]'"):
        ToolEnvironment(mcp={"a": TINY})
    monkeypatch.setitem(sys.modules, "mcp", ModuleType("mcp"))  # of another version
    with pytest.raises(EnvironmentSetupError, match=r"cannot import name .* from 'mcp'"):
        ToolEnvironment(mcp={"a": TINY})


def test_rules_of_the_config() -> None:
    def broken(**fields: Any) -> list[str]:
        return EPISODES.validate_python({"max_tokens": 99, **fields}).broken_rules()

    both = {"tools": ["a.py:b"], "mcp": {"a": TINY, "b": {"url": "https://a/mcp"}}}
    assert not broken(**both)
    assert EPISODES.validate_python({"max_tokens": 99, "mcp": {"a": TINY}}).kind == "tools"
    with pytest.raises(ValidationError, match="tools and agent are set"):
        broken(mcp={"a": TINY}, agent="a.py:b")
    assert "tool_timeout_s=100" in broken(mcp={"a": TINY}, tool_timeout_s=100)[0]
    wrong = {
        "a": {},
        "b": {**TINY, "url": "http://a"},
        "c": {"url": "ftp://a"},
        "d": {"url": "http://a", "env": {"A": "b"}},
        "e": {**TINY, "token_env": "A"},
        "f": {**TINY, "prefix": "a b"},
        "g": {**TINY, "tools": []},
    }
    problems = broken(mcp=wrong)
    words = (
        "neither is set",
        "both are set",
        "must begin with http",
        "env has no effect with url",
        "token_env has no effect with command",
        "may contain only",
        "tools is empty",
    )
    assert len(problems) == len(words)
    for name, word, text in zip(wrong, words, problems, strict=True):
        assert text.startswith(f"mcp.{name}: ") and word in text


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({"properties": {"x": {"pattern": "^(a+)+$"}}}, {"x": "a" * 40 + "b"}),
        ({"properties": {"x": {"uniqueItems": True}}}, {"x": [{"a": i} for i in range(3000)] * 2}),
    ],
)
def test_arguments_of_the_policy_are_compared_in_bounded_time(schema: Any, arguments: Any) -> None:
    tool = mcp_types.Tool(name="t", input_schema={"type": "object", **schema})
    begin = time.process_time()
    with pytest.raises(ToolError):
        mcp_servers._make_tool("s", McpServerConfig(command=("x",)), tool).validated(arguments)
    assert time.process_time() - begin < 5


def test_a_reference_that_cannot_be_resolved_is_refused_at_the_start() -> None:
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/none"}}}
    with pytest.raises(EnvironmentSetupError, match="invalid JSON schema"):
        mcp_servers._make_tool(
            "s", McpServerConfig(command=("x",)), mcp_types.Tool(name="t", input_schema=schema)
        )


@pytest.mark.parametrize(
    ("keywords", "is_shown"),
    [
        ({"items": [{"type": "number"}, {"type": "number"}], "minItems": 2}, False),
        ({"dependencies": {"a": ["b"]}, "minItems": 2}, True),
    ],
)
def test_a_tool_is_checked_by_the_draft_that_it_declares(keywords: Any, is_shown: bool) -> None:
    declared = {"$schema": "http://json-schema.org/draft-07/schema#"}
    schema = {"type": "object", "properties": {"x": keywords}}
    tool = mcp_servers._make_tool(
        "s",
        McpServerConfig(command=("x",)),
        mcp_types.Tool(name="t", input_schema=declared | schema),
    )
    parameters = tool.schema["function"]["parameters"]
    assert parameters == (declared | schema if is_shown else schema)
    for value in ([1, 2], {"a": 1, "b": 1}):
        assert tool.validated({"x": value}) == {"x": value}
    wrong = {"a": 1} if is_shown else [1, "a"]
    with pytest.raises(ToolError):
        tool.validated({"x": wrong})
    assert argument_problem(parameters, {"x": wrong}) is not None
