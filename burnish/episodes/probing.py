"""Fixed conversations on which a chat template is tested when a renderer is created.

They cover how published templates rewrite history: reasoning of earlier turns is dropped, white
space is stripped, tools or the system prompt move to the last user message, results are grouped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from burnish.data.chat import encode_conversation
from burnish.data.left_out import REFUSED_BEHIND_TURNS
from burnish.data.sources import DataError
from burnish.episodes.parsing import ParsedMessage
from burnish.reasoning_tags import Tags

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOOLS: tuple[Mapping[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look up a fact.",
            "parameters": {
                "type": "object",
                "properties": {
                    "key": {"type": "string", "description": "The key."},
                    "limit": {"type": "integer", "description": "How many."},
                },
                "required": ["key"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "measure",
            "description": "Measure a length.",
            "parameters": {
                "type": "object",
                "properties": {"key": {"type": "string", "description": "The object."}},
                "required": ["key"],
            },
        },
    },
)
"""Descriptions of two tools."""


@dataclass(frozen=True)
class ProbeConversation:
    """A conversation to test a template with."""

    name: str
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **entries: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **entries}


def call(name: str, arguments: Mapping[str, Any], call_id: str) -> dict[str, Any]:
    """Return a tool call. ``call_id`` has 9 characters, as Mistral's templates require."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": dict(arguments)},
    }


def result(content: str, name: str, call_id: str) -> dict[str, Any]:
    """Return the message with the result of a tool call."""
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": content}


def _calls(*names: str, first: int = 0, content: str = "", **entries: Any) -> dict[str, Any]:
    calls = [
        call(name, {"key": f"k{i}", "limit": i}, f"probe{i:04d}")
        for i, name in enumerate(names, start=first)
    ]
    return assistant(content, tool_calls=calls, **entries)


CONVERSATIONS: tuple[ProbeConversation, ...] = (
    ProbeConversation(
        "several user turns",
        (user("Hi."), assistant("Hello."), user("And?"), assistant("Nothing."), user("Bye.")),
    ),
    ProbeConversation(
        "a system prompt",
        ({"role": "system", "content": "Be brief."}, user("Hi."), assistant("Hello."), user("So?")),
    ),
    ProbeConversation(
        "a tool call",
        (user("How many?"), _calls("look_up"), result("12", "look_up", "probe0000")),
        TOOLS,
    ),
    ProbeConversation(
        "text before a tool call",
        (
            *(user("How many?"), _calls("look_up", content="I look it up.")),
            result("12", "look_up", "probe0000"),
        ),
        TOOLS,
    ),
    ProbeConversation(
        "several calls in one turn",
        (
            *(user("How long?"), _calls("look_up", "measure")),
            *(result("12", "look_up", "probe0000"), result("3 m", "measure", "probe0001")),
        ),
        TOOLS,
    ),
    ProbeConversation(
        "consecutive tool calls",
        (
            *(user("How long?"), _calls("look_up"), result("12", "look_up", "probe0000")),
            *(_calls("measure", first=1), result("3 m", "measure", "probe0001")),
        ),
        TOOLS,
    ),
    ProbeConversation(
        "tools and a second user message",
        (user("Hi."), assistant("Hello."), user("How many?")),
        TOOLS,
    ),
    ProbeConversation(
        "a tool call, an answer and a second user message",
        (
            *(user("How many?"), _calls("look_up"), result("12", "look_up", "probe0000")),
            *(assistant("There are 12."), user("Thanks. And now?")),
        ),
        TOOLS,
    ),
    ProbeConversation(
        "reasoning and a second user message",
        (user("2+2?"), assistant("4", reasoning_content="Two and two."), user("3+3?")),
    ),
    ProbeConversation(
        "reasoning before a tool call",
        (
            *(user("How many?"), _calls("look_up", reasoning_content="I should look.")),
            result("12", "look_up", "probe0000"),
        ),
        TOOLS,
    ),
    ProbeConversation(
        "reasoning before a tool call, an answer and a second user message",
        (
            *(user("How many?"), _calls("look_up", reasoning_content="I should look.")),
            result("12", "look_up", "probe0000"),
            *(assistant("There are 12."), user("Thanks. And now?")),
        ),
        TOOLS,
    ),
    ProbeConversation("an empty answer", (user("Say nothing."), assistant(""), user("Well?"))),
    ProbeConversation(
        "white space around texts",
        (user(" Hi. \n"), assistant("Hello. \n"), user("\n So? ")),
    ),
    ProbeConversation(
        "nested arguments",
        (
            user("Plot."),
            assistant(
                "",
                tool_calls=[
                    call(
                        "look_up", {"key": "ä\n\"'", "limit": 2, "more": [{"a": None}]}, "probe0000"
                    )
                ],
            ),
            result('{"ok": true}\n', "look_up", "probe0000"),
        ),
        TOOLS,
    ),
)
"""The conversations; each ends with a message that the policy answers."""


def reasoning_in_text(tags: Tags) -> ProbeConversation:
    """Return a conversation with reasoning inside the text of an answer."""
    answer = assistant(f"{tags.begin}\nTwo and two.\n{tags.end}\n\n4")
    return ProbeConversation(
        "reasoning in the text and a second user message", (user("2+2?"), answer, user("3+3?"))
    )


def reads_rendered_call(
    tokenizer: PreTrainedTokenizerBase, parse: Callable[..., ParsedMessage]
) -> bool:
    """Return whether ``parse``, that of a renderer, reads the call that the chat template writes.

    The response is that of a training row. A template of which no row can be made is not tested.
    """
    rendered = call("look_up", {"key": "two words", "limit": 2}, "probe0000")
    messages = [user("Go."), assistant("", tool_calls=[rendered])]
    try:
        ids, mask = encode_conversation(
            tokenizer, messages, tools=TOOLS, refused=REFUSED_BEHIND_TURNS
        )
    except DataError:
        return True
    turn = [place for place, trained in enumerate(mask) if trained]
    prompt, sampled = ids[: turn[0]] if turn else ids, [ids[place] for place in turn]
    parsed = parse(sampled, TOOLS, prompt_ids=prompt, ended=True)
    functions = [each["function"] for each in parsed.message.get("tool_calls", ())]
    return functions == [rendered["function"]]
