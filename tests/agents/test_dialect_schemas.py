"""Replies and events are valid for the models of the official clients.

The clients themselves accept objects with missing or wrong fields; other programs validate them.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from burnish.agents.anthropic_messages import Messages
from burnish.agents.calls import Choice, ModelCall, ModelReply
from burnish.agents.openai_chat import ChatCompletions, Completions
from burnish.agents.openai_responses import Responses

MADE = [
    {"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": {"a": [n]}}}
    for n in range(2)
]
SAMPLED: dict[str, Any] = {"token_texts": ("a", "b"), "logprobs": (-1.0, -2.0)}
CHOICES = {
    "text": Choice({"role": "assistant", "content": "ab"}, "stop", **SAMPLED),
    "empty": Choice({"role": "assistant", "content": ""}, "length", **SAMPLED),
    "calls": Choice(
        {"role": "assistant", "content": "", "reasoning_content": "t", "tool_calls": MADE},
        "tool_calls",
        **SAMPLED,
    ),
    "stopped": Choice(
        {"role": "assistant", "content": "a", "reasoning_content": "t"},
        "stop",
        stop_sequence="b",
        **SAMPLED,
    ),
}
FUNCTION = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
SCHEMAS: list[tuple[Any, Any, Any]] = [
    (ChatCompletions(), ChatCompletion, ChatCompletionChunk),
    (Completions(), Completion, Completion),
    (Responses(), Response, ResponseStreamEvent),
    (Messages(), Message, RawMessageStreamEvent),
]


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("choice", CHOICES.values(), ids=[*CHOICES])
@pytest.mark.parametrize(("dialect", "body", "event"), SCHEMAS)
def test_replies_and_events_have_the_types_of_the_client(
    dialect: Any, body: Any, event: Any, choice: Choice, logprobs: bool
) -> None:
    reply = ModelReply("r", 1, "m", (choice,), 9, 4, 2)
    tools = ({"type": "function", "function": FUNCTION},)
    call = ModelCall("m", tools=tools, logprobs=logprobs, stream_usage=True)
    TypeAdapter(body).validate_json(json.dumps(dialect.write(call, reply)), strict=True)
    adapter = TypeAdapter(event)
    for text in dialect.writer(call, reply.start).finish(reply):
        assert text.endswith("\n\n") and text.isascii()
        *name, data = text.strip().split("\n")
        if data == "data: [DONE]":
            continue
        adapter.validate_json(data.removeprefix("data: "), strict=True)
        if name:
            assert name == [f"event: {json.loads(data[6:])['type']}"]


def test_a_token_count_has_the_type_of_the_client() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "u"}], "system": "s"}
    call = Messages().read_count(body, max_messages=2)
    assert [message["role"] for message in call.messages] == ["system", "user"]
    assert call.max_tokens is None
    counted = Messages().write_count(12)
    assert MessageTokensCount.model_validate(counted, strict=True).input_tokens == 12
