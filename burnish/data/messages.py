"""Parse chat messages in the forms found in data: lists of objects, JSON text, ShareGPT turns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from burnish.chat_message import (
    Message,
    MessageError,
    canonical,
    is_refusal,
    trained_flag,
    with_calls_in_text,
    wrapped_tool,
)
from burnish.data.notices import note
from burnish.data.sources import DataError
from burnish.json_text import json_value

SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt", "bing", "bard"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
"""ShareGPT value of ``from`` in lower case -> message role."""

FUNCTION_CALL = "function_call"
"""ShareGPT value of ``from`` of an assistant's tool calls: ``{"name", "arguments"}`` as JSON
text."""

_LOOKS_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:""")

_REFUSAL = (
    "a message contains a `refusal` of the API's model, which is read as the text of the message, "
    "and trained as an answer if that is one; remove such rows if the model is not to refuse"
)

_LOOKS_LIKE_TOOLS = re.compile(r"""\s*(\[\s*)?\{\s*["'](type|name|function)["']\s*:""")


def as_messages(
    value: str | Sequence[Message], *, system_prompt: str | None = None
) -> list[dict[str, Any]]:
    """Return a list of messages in the form of :func:`burnish.chat_message.canonical`.

    A string becomes one user message, or the messages of its turns (HelpSteer2). ShareGPT turns
    (``from``, ``value``) become messages. Raises DataError if ``value`` is not a list of messages,
    or if it begins with another system message than ``system_prompt``.
    """
    if isinstance(value, str):
        value = _messages_of_text(value)
    if not isinstance(value, (list, tuple)) or not value:
        raise DataError(
            f"expected a string or a non-empty list of chat messages, got {_short(value)}"
        )
    messages = [_as_message(number, message) for number, message in enumerate(value)]
    first = messages[0]
    if system_prompt is None or (first["role"] == "system" and first["content"] == system_prompt):
        return messages
    if first["role"] == "system":
        raise DataError(
            "system_prompt is set, but the conversation already begins with a system message that "
            "differs; unset system_prompt, or remove the message from the data"
        )
    return [{"role": "system", "content": system_prompt}, *messages]


_TURN_MARK = re.compile(r"\r?\n<extra_id_1>(User|Assistant)\r?\n")


def _messages_of_text(text: str) -> list[dict[str, Any]]:
    """Return a text as one user message. If it has the turn marks of NeMo, as the prompts of
    HelpSteer2 have, return its turns, which begin and end with the user.

    >>> _messages_of_text("Hi\\n<extra_id_1>Assistant\\nHello\\n<extra_id_1>User\\nBye")[1]
    {'role': 'assistant', 'content': 'Hello'}
    """
    begins = text.startswith(("<extra_id_1>User\n", "<extra_id_1>User\r\n"))
    first, *rest = _TURN_MARK.split(f"\n{text}" if begins else text)
    if not rest:
        return [{"role": "user", "content": text}]
    names, contents = rest[::2], rest[1::2]
    if not first and names[0] == "User":
        first, names, contents = contents[0], names[1:], contents[1:]
    if names == ["Assistant", "User"] * (len(names) // 2) and all((first, *contents)):
        roles = ("user", *map(str.lower, names))
        return [{"role": r, "content": c} for r, c in zip(roles, (first, *contents), strict=True)]
    note(
        "turn_marks",
        "a text has turn marks (<extra_id_1>User, <extra_id_1>Assistant), but its turns do not "
        "alternate from the user to the user, so it is one message, marks included; write the "
        "prompt as messages",
    )
    return [{"role": "user", "content": text}]


def as_rendered(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return canonical messages as templates render them, with the calls of an answer in its text
    if they were sampled in another order than templates write. Raises DataError if no template
    text has this order."""
    try:
        return with_calls_in_text(messages)
    except MessageError as error:
        raise DataError(str(error)) from error


def parsed(value: Any) -> Any:
    """Parse JSON text of messages. Return any other value unchanged.

    CSV files and some Parquet files store conversations as text. Raises DataError if text begins
    like a list of messages but is not JSON.
    """
    if not isinstance(value, str) or not _LOOKS_LIKE_MESSAGES.match(value):
        return value
    try:
        content = json_value(value)
    except ValueError as error:
        raise DataError(
            f"the text {value[:60]!r} begins like a list of chat messages but is not JSON "
            f"({error}); write the messages as a list, or as JSON text (json.dumps, not str)"
        ) from error
    turns = isinstance(content, list) and all(
        isinstance(turn, dict) and ("role" in turn or {"from", "value"} <= set(turn))
        for turn in content
    )
    return content if turns else value


def without_nulls(value: Any) -> Any:
    """Remove keys whose value is None, recursively.

    A Parquet column has one type, so each message and each tool call has the keys of all others.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def trained_flags(messages: Sequence[Message]) -> list[bool]:
    """Return, for each message, whether its flags (``train``, ``weight``, ``loss``, ``loss_mask``)
    let it be trained on.

    Raises DataError for values other than true, false, 1 and 0, and for flags that differ.
    """
    flags = []
    for i, message in enumerate(messages):
        try:
            flags.append(trained_flag(message))
        except MessageError as error:
            raise DataError(f"message {i} ({message['role']}) {error}") from error
    return flags


def as_tools(value: Any) -> list[dict[str, Any]] | None:
    """Return tool descriptions given as a list or as JSON text, in the form of
    :func:`wrapped_tool`; None if ``value`` contains none.

    A tool description is an object with ``name`` or ``function``, or its JSON text. Raises
    DataError if only some of the items are tool descriptions, or if there is one without a list.
    """
    tools = _from_json(value)
    if _is_tool(tools):
        raise DataError(
            f"the tools are one object, not a list: {repr(value)[:60]}; write a list with it, or "
            "set tools_key: null to ignore it"
        )
    if not isinstance(tools, list) or not tools:
        return None
    tools = [_from_json(tool) for tool in tools]
    others = [number for number, tool in enumerate(tools) if not _is_tool(tool)]
    if others and len(others) < len(tools):
        raise DataError(
            f"item {others[0]} of the tools is no description of a function (an object with name "
            f"or function): {repr(tools[others[0]])[:60]}; correct or remove it, or set "
            "tools_key: null to ignore all tools"
        )
    return None if others else [wrapped_tool(tool) for tool in tools]


def _is_tool(value: Any) -> bool:
    return isinstance(value, dict) and bool({"name", "function"} & set(value))


def _from_json(value: Any) -> Any:
    """Return what JSON text contains; other values unchanged. Raises DataError for broken text of
    tools."""
    if not isinstance(value, str):
        return value
    try:
        return json_value(value)
    except ValueError as error:
        if _LOOKS_LIKE_TOOLS.match(value):
            raise DataError(
                f"the text {value[:60]!r} begins like tools but is not JSON ({error}); write the "
                "tools as a list, or as JSON text (json.dumps, not str), or set tools_key: null"
            ) from error
        return value


def _as_message(number: int, message: Any) -> dict[str, Any]:
    if isinstance(message, Mapping) and "role" not in message and "from" in message:
        message = _from_sharegpt(message)
    try:
        if is_refusal(message):
            note("refusal", _REFUSAL)
        return canonical(message)
    except MessageError as error:
        role = f" ({message['role']})" if isinstance(message, Mapping) and "role" in message else ""
        raise DataError(f"message {number}{role}: {error}") from error


def _from_sharegpt(turn: Message) -> dict[str, Any]:
    if turn["from"] == FUNCTION_CALL:
        calls = _tool_calls(turn.get("value"))
        rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
        return {"role": "assistant", "content": "", "tool_calls": calls, **rest}
    role = SHAREGPT_ROLES.get(str(turn["from"]).lower())
    if role is None:
        known = ", ".join((*SHAREGPT_ROLES, FUNCTION_CALL))
        raise DataError(
            f"a ShareGPT turn has the unknown `from` {turn['from']!r}; known are {known}. Rename "
            'it, or write the turn as {"role": ..., "content": ...}'
        )
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {"role": role, "content": turn.get("value"), **rest}


def with_sharegpt_role(turn: Any) -> Any:
    """Return a turn of ShareGPT that has the key ``role`` in place of ``from`` with its canonical
    role; any other value unchanged."""
    if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str):
        return turn
    role = SHAREGPT_ROLES.get(turn["role"].lower())
    return turn if role is None else {**turn, "role": role}


def _tool_calls(value: Any) -> list[dict[str, Any]]:
    """Return the tool calls of a ShareGPT turn: one call or a list of calls, usually JSON text."""
    reason = ""
    try:
        parsed = json_value(value) if isinstance(value, str) else value
    except ValueError as error:
        parsed, reason = None, f" ({error})"
    calls = parsed if isinstance(parsed, list) else [parsed]
    for call in calls:
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            raise DataError(
                f"a ShareGPT turn from {FUNCTION_CALL!r} must contain the JSON text of "
                f'{{"name": ..., "arguments": {{...}}}}, got {_short(value)}{reason}'
            )
    return calls


def _short(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:80]}"
