"""Messages and tools that go through an API keep their form: that of conversations and of rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.agents.anthropic_messages import Messages
from burnish.agents.calls import Choice, ModelCall, ModelReply
from burnish.agents.openai_chat import ChatCompletions
from burnish.agents.openai_responses import Responses
from burnish.data.messages import as_tools

CHAT, RESPONSES, MESSAGES = ChatCompletions(), Responses(), Messages()

TEXT = st.text(max_size=8)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), TEXT).filter(
        lambda value: value not in (float("inf"), -float("inf"))
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Conversations of user, assistant and tool messages, with ids that are unique."""
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(TEXT)})
    num_calls = 0
    for _ in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": draw(TEXT)})
        made: dict[str, Any] = {"role": "assistant", "content": draw(TEXT)}
        if reasoning := draw(TEXT):
            made["reasoning_content"] = reasoning
        results = []
        for arguments in draw(st.lists(st.dictionaries(TEXT, JSON, max_size=3), max_size=3)):
            name, call_id = draw(st.sampled_from(["a", "b-1"])), f"id{num_calls}"
            num_calls += 1
            function = {"name": name, "arguments": arguments}
            made.setdefault("tool_calls", []).append(
                {"id": call_id, "type": "function", "function": function}
            )
            result = {"role": "tool", "content": draw(TEXT), "tool_call_id": call_id, "name": name}
            results.append(result)
        messages += [made, *results]
    return [*messages, {"role": "user", "content": "end"}]


def sent_by_client(dialect: Any, message: Mapping[str, Any]) -> list[Any]:
    """Return what a client appends to its conversation for a neutral message."""
    if message["role"] == "assistant":
        call = ModelCall("m", show_reasoning=True)
        reply = ModelReply("r", 1, "m", (Choice(message, "stop"),), 9, 4, 2)
        written = json.loads(json.dumps(dialect.write(call, reply)))
        if dialect is CHAT:
            return [written["choices"][0]["message"]]
        if dialect is RESPONSES:
            return list(written["output"])
        return [{"role": "assistant", "content": written["content"]}]
    if message["role"] == "tool" and dialect is RESPONSES:
        call_id, output = message["tool_call_id"], message["content"]
        return [{"type": "function_call_output", "call_id": call_id, "output": output}]
    if message["role"] == "tool" and dialect is MESSAGES:
        call_id, result = message["tool_call_id"], message["content"]
        block = {"type": "tool_result", "tool_use_id": call_id, "content": result}
        return [{"role": "user", "content": [block]}]
    return [{key: value for key, value in message.items() if key != "name"}]


@settings(max_examples=150, deadline=None)
@given(messages=conversations())
@pytest.mark.parametrize("dialect", [CHAT, RESPONSES, MESSAGES])
def test_messages_survive_every_api(dialect: Any, messages: list[dict[str, Any]]) -> None:
    key = "input" if dialect is RESPONSES else "messages"
    sent = [part for message in messages for part in sent_by_client(dialect, message)]
    body = {"model": "m", "max_tokens": 5, key: json.loads(json.dumps(sent))}
    assert list(dialect.read(body, max_messages=100).messages) == messages


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize("strict", [{}, {"strict": True}, {"strict": None}])
@pytest.mark.parametrize("entries", [{}, {"description": "F."}, {"description": None}])
@pytest.mark.parametrize("schema", [None, SCHEMA])
@pytest.mark.parametrize("dialect", [CHAT, RESPONSES, MESSAGES])
def test_tools_of_every_api_are_those_of_a_row(
    dialect: Any, schema: Any, entries: dict[str, Any], strict: dict[str, Any]
) -> None:
    """The keys that a client leaves out, or sends as null, are left out. Only chat completions send
    the tool itself, so only they keep ``strict``."""
    function = {"name": "f", **entries, **({} if schema is None else {"parameters": schema})}
    sent: dict[str, Any] = {"type": "function", "function": {**function, **strict}}
    if dialect is RESPONSES:
        sent = {"type": "function", **function, **strict}
    if dialect is MESSAGES:
        sent = {("input_schema" if k == "parameters" else k): v for k, v in function.items()}
    key = "input" if dialect is RESPONSES else "messages"
    message = {"role": "user", "content": "u"}
    body = {"model": "m", "max_tokens": 5, key: [message], "tools": [sent]}
    kept = {**function, **strict} if dialect is CHAT else function
    row = as_tools([{k: v for k, v in kept.items() if v is not None}])
    assert json.dumps(list(dialect.read(body, max_messages=9).tools)) == json.dumps(row)
    if dialect is RESPONSES:
        assert json.dumps(as_tools([sent])) == json.dumps(row)
    if dialect is MESSAGES:  # a row in the form of the request, and in that of MCP
        custom = {"type": "custom", **sent, "cache_control": {"type": "ephemeral"}}
        mcp = {("inputSchema" if k == "input_schema" else k): v for k, v in sent.items()}
        for form in (sent, custom, mcp) if schema else ():
            assert json.dumps(as_tools([form])) == json.dumps(row)
