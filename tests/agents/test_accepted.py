"""Parts of requests that an episode cannot answer as they are: tools of a server, namespaces of
tools, references to tools, and system messages inside of a conversation."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from agent_session import TOOL, call, session, user

from burnish.agents.accepted import Accepted, with_late_system_as_user
from burnish.agents.anthropic_messages import Messages
from burnish.agents.calls import CallError, Choice, ModelReply
from burnish.agents.openai_chat import ChatCompletions
from burnish.agents.openai_responses import Responses
from burnish.episodes.rows import episode_rows
from burnish.episodes.runner import episode_sample
from burnish.observe.samples import episode_record
from burnish.rollout.sample_state import episode_from_plain, episode_to_plain
from burnish.types import Prompt

SPAWN = {"type": "function", "name": "spawn", "parameters": {"type": "object"}, "strict": False}
RESPONSES_BODY = {
    "model": "policy",
    "input": "hi",
    "tools": [
        {**SPAWN, "name": "run"},
        {"type": "namespace", "name": "agents", "tools": [SPAWN, {**SPAWN, "name": "run"}]},
        {"type": "web_search", "external_web_access": True},
    ],
}


def reply_of(*names: str) -> ModelReply:
    calls = [
        {
            "id": f"call_{name}",
            "type": "function",
            "function": {"name": name, "arguments": {"a": 1}},
        }
        for name in names
    ]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    return ModelReply("r-0", 1, "policy", (Choice(message, "tool_calls"),), 3, 0, 5)


async def ask(backend: Any, *messages: Any, **fields: Any) -> Any:
    fields = {"model": "policy", **fields}
    reply = await backend.respond(replace(call(*messages), **fields), digest=random.randbytes(8))
    return reply.choices[0].message


def read(dialect: Any, body: Any) -> Any:
    return dialect.read(body, max_messages=50)


@pytest.mark.parametrize("stream", [False, True])
def test_functions_of_a_namespace_are_called_and_returned_by_their_own_name(stream: bool) -> None:
    sent = read(Responses(), RESPONSES_BODY)
    names = [tool["function"]["name"] for tool in sent.tools]
    assert names == ["run", "agents__spawn", "agents__run"]
    reply = reply_of("run", "agents__spawn", "agents__run")
    if stream:
        events = "".join(Responses().writer(sent, reply.start).finish(reply))
        assert events.count('"namespace": "agents"') == 6  # added, done and completed of two items
    items = Responses().write(sent, reply)["output"]
    called = [(item.get("namespace"), item["name"]) for item in items]
    assert called == [(None, "run"), ("agents", "spawn"), ("agents", "run")]
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
        for item in items
    ]
    back = read(Responses(), {**RESPONSES_BODY, "input": [*items, *outputs]})
    assert back.messages[0]["tool_calls"] == list(reply.choices[0].message["tool_calls"])
    assert not [name for name in back.ignored if name.startswith("input.")]


def test_tools_of_the_server_are_refused_with_the_way_out_or_dropped_and_counted() -> None:
    async def scenario(accepted: Accepted) -> Any:
        async with session() as (backend, _):
            backend.accepted = accepted
            await backend.respond(read(Responses(), RESPONSES_BODY), digest=b"a")
            return backend.counts

    with pytest.raises(CallError, match=r"tools\[2\]\.type is 'web_search'.*drop") as refused:
        asyncio.run(scenario(Accepted()))
    assert refused.value.status == 400
    assert asyncio.run(scenario(Accepted(server_tools="drop")))["dropped_web_search"] == 1
    hosted = [{"type": "web_search_20250305", "name": "web_search"}]
    body = {"model": "m", "max_tokens": 5, "messages": [user("hi")], "tools": hosted}
    assert read(Messages(), body).server_tools == {"tools[0].type": "web_search_20250305"}
    with pytest.raises(CallError, match="describe other tools by their schema"):
        read(Messages(), {**body, "tools": [{"type": "bash_20250124", "name": "bash"}]})


CHAT_SEARCH = {"type": "web_search"}


@pytest.mark.parametrize(
    ("dialect", "tools", "choice", "found"),
    [
        (Messages(), [{"type": "web_search_20250305", "name": "web_search"}], "any", "auto"),
        (Messages(), [{"type": "web_search_20250305", "name": "web_search"}], "named", "auto"),
        (Responses(), [CHAT_SEARCH], "required", "auto"),
        (Responses(), [CHAT_SEARCH], CHAT_SEARCH, "auto"),
        (Responses(), [CHAT_SEARCH, SPAWN], "required", "required"),
        (Responses(), RESPONSES_BODY["tools"], {"type": "function", "name": "spawn"}, "required"),
        (ChatCompletions(), [CHAT_SEARCH], "required", "auto"),
    ],
)
def test_a_choice_of_a_tool_of_the_server_is_left_to_the_backend(
    dialect: Any, tools: Any, choice: Any, found: str
) -> None:
    body: dict[str, Any] = {"model": "m", "messages": [user("hi")], "tools": tools}
    if isinstance(dialect, Messages):
        body["max_tokens"] = 5
        choice = {"type": "any"} if choice == "any" else {"type": "tool", "name": "web_search"}
    if isinstance(dialect, Responses):
        body = {"model": "m", "input": "hi", "tools": tools}
    call = read(dialect, {**body, "tool_choice": choice})
    assert call.tool_choice == found and call.server_tools
    with pytest.raises(CallError, match="drop"):
        Accepted().apply(call, Counter())
    counts: Counter[str] = Counter()
    Accepted(server_tools="drop").apply(call, counts)
    assert [name for name in counts if name.startswith("dropped_web_search")]


def test_a_reference_to_a_tool_is_text_with_its_name() -> None:
    references = [{"type": "tool_reference", "tool_name": name} for name in ("Glob", "Grep")]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": references}
    use = {"type": "tool_use", "id": "t1", "name": "ToolSearch", "input": {}}
    messages = [
        user("hi"),
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    found = read(Messages(), {"model": "m", "max_tokens": 5, "messages": messages})
    assert found.messages[-1]["content"] == "[tool Glob][tool Grep]"


def test_late_system_messages_become_part_of_the_users_and_extend_as_before() -> None:
    """Messages that a later request adds after an answer change none before it."""
    draw = random.Random(0)
    for _ in range(300):
        roles = [draw.choice(["system", "user", "user", "tool"]) for _ in range(draw.randint(1, 5))]
        runs = [roles, *([draw.choice(["system", "user", "tool"])] for _ in range(3))]
        messages: list[dict[str, Any]] = []
        converted: tuple[Any, ...] = ()
        for number, run in enumerate(runs):
            messages += [{"role": role, "content": f"{number}{i}"} for i, role in enumerate(run)]
            found = with_late_system_as_user(messages)
            assert found[: len(converted)] == converted
            texts = "\n\n".join(message["content"] for message in found)
            assert texts == "\n\n".join(message["content"] for message in messages)
            late = [m["role"] for m in found if m["role"] == "system"]
            first = next(
                (i for i, m in enumerate(messages) if m["role"] != "system"), len(messages)
            )
            assert len(late) == first
            messages.append({"role": "assistant", "content": "a"})
            converted = (*found, messages[-1])
    counts: Counter[str] = Counter()
    accepted = Accepted(late_system="user")
    plain = call(user("hi"), tools=(TOOL,))
    assert accepted.apply(plain, counts) is plain and not counts
    late = accepted.apply(call(user("hi"), {"role": "system", "content": "x"}), counts)
    assert late.messages == (user("hi\n\nx"),) and counts == {"late_system": 1}


def test_calls_that_are_not_trained_are_recorded_and_in_no_row() -> None:
    """A title without tools, and a call of a small model, during the work of the agent. A call
    without tools that continues the work is only a part of the next prompt."""

    async def scenario(accepted: Accepted) -> Any:
        async with session() as (backend, engine):
            backend.accepted = accepted
            work = [user("work")]
            title = await ask(backend, user("title"))
            work.append(await ask(backend, *work, tools=(TOOL,)))
            await ask(backend, user("small"), tools=(TOOL,), model="haiku")
            work += [user("more")]
            work.append(await ask(backend, *work))
            work += [user("end")]
            await ask(backend, *work, tools=(TOOL,))
            return backend.result({"reward": 1.0}), engine, title

    everything, engine, _ = asyncio.run(scenario(Accepted()))
    assert len(everything.calls) == 5 and not everything.record.untrained
    found, engine, title = asyncio.run(scenario(Accepted(train_calls="main")))
    record = found.record
    assert len(found.calls) == 2 and len(record.turns) == 2 and len(record.untrained) == 3
    assert record.untrained[0].message == title
    assert record.untrained[0].prompt == (user("title"),)
    counts = record.turns[-1].counts
    assert counts["untrained_without_tools"] == 2 and counts["untrained_other_model"] == 1
    sampled = {tuple(ids) for _, ids in engine.log}
    trained = {tuple(call.completion.token_ids) for call in found.calls}
    rows = episode_rows(found.calls)
    in_rows = [
        t for row in rows for t, m in zip(row.response_ids, row.action_mask, strict=True) if m
    ]
    assert sorted(in_rows) == sorted(token for ids in trained for token in ids)
    assert len(sampled - trained) == 3, "each sampled token is trained once, or is named"
    assert record.turns[-1].prompt is not None, "it continues a call that is in no row"
    assert episode_from_plain(episode_to_plain(record)) == record
    sample = episode_sample(Prompt("p", (1,), "work"), "p/0", found)
    stored = episode_record(sample)["untrained"]
    assert [turn["prompt"][0]["content"] for turn in stored] == ["title", "small", "work"]


def test_an_agent_none_of_whose_calls_is_trained_fails_with_the_key() -> None:
    async def scenario() -> Any:
        async with session() as (backend, _):
            backend.accepted = Accepted(train_calls="main")
            await ask(backend, user("hi"))
            return backend.result({"reward": 1.0})

    assert "none of the 1 calls" in str(asyncio.run(scenario()).error)
