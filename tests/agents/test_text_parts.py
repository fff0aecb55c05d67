"""Text parts of requests: a conversation has the same text in every API and in data files."""

from __future__ import annotations

from typing import Any

import pytest

from burnish.agents.anthropic_messages import Messages
from burnish.agents.openai_chat import ChatCompletions
from burnish.agents.openai_responses import Responses
from burnish.chat_message import canonical


def parts(kind: str, *texts: str) -> list[dict[str, str]]:
    return [{"type": kind, "text": text} for text in texts]


def conversation(kind: str) -> list[dict[str, Any]]:
    answer = "output_text" if kind == "input_text" else kind
    return [
        {"role": "user", "content": parts(kind, "2", "+2?")},
        {"role": "assistant", "content": parts(answer, "4", ".")},
        {"role": "user", "content": parts(kind, "Sure", "?\n", "Think.")},
    ]


@pytest.mark.parametrize(
    ("dialect", "key", "kind"),
    [
        (ChatCompletions(), "messages", "text"),
        (Messages(), "messages", "text"),
        (Responses(), "input", "input_text"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_parts_are_joined_as_in_data_files(dialect: Any, key: str, kind: str) -> None:
    sent = conversation(kind)
    body = {"model": "m", "max_tokens": 5, key: sent}
    read = list(dialect.read(body, max_messages=10).messages)
    assert read == [canonical(message) for message in sent]
    assert [message["content"] for message in read] == ["2+2?", "4.", "Sure?\nThink."]


def test_blocks_of_tool_results_and_thoughts_are_joined_too() -> None:
    answer = [
        {"type": "thinking", "thinking": "I ", "signature": ""},
        {"type": "thinking", "thinking": "add.", "signature": ""},
        {"type": "tool_use", "id": "c1", "name": "add", "input": {}},
    ]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": parts("text", "4", "2")}
    messages = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": [*parts("text", "a", "b"), result, *parts("text", "c", "d")]},
    ]
    body = {"model": "m", "max_tokens": 5, "system": parts("text", "x", "y"), "messages": messages}
    system, _, said, before, tool, after = Messages().read(body, max_messages=10).messages
    assert [m["content"] for m in (system, before, tool, after)] == ["xy", "ab", "42", "cd"]
    assert said["reasoning_content"] == "I add."
