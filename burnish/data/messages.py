"""Parse chat messages in the forms found in data: lists of objects, JSON text, ShareGPT turns."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from burnish.data.sources import DataError

Message = Mapping[str, Any]
"""``{"role": "user", "content": "..."}``. Other keys are passed to the chat template unchanged."""

SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
"""ShareGPT value of ``from`` -> message role."""

FUNCTION_CALL = "function_call"
"""ShareGPT value of ``from`` of an assistant's tool calls: ``{"name", "arguments"}`` as JSON
text."""

TRAIN_FLAGS = ("train", "weight")
"""Keys of a message that say whether it is trained on: true or false, 1 or 0."""

_LOOKS_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:""")


def as_messages(
    value: str | Sequence[Message], *, system_prompt: str | None = None
) -> list[dict[str, Any]]:
    """Return a validated list of messages, without keys whose value is None.

    A string becomes one user message. ShareGPT turns (``from``, ``value``) become messages. Raises
    DataError if ``value`` is not a list of messages, or if there would be two system messages.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, (list, tuple)) or not value:
        raise DataError(
            f"expected a string or a non-empty list of chat messages, got {_short(value)}"
        )
    messages = [_as_message(message) for message in value]
    if system_prompt is None:
        return messages
    if messages[0]["role"] == "system":
        raise DataError(
            "system_prompt is set, but the conversation already begins with a system message; "
            "unset system_prompt, or remove the message from the data"
        )
    return [{"role": "system", "content": system_prompt}, *messages]


def parsed(value: Any) -> Any:
    """Parse JSON text of messages. Return any other value unchanged.

    CSV files and some Parquet files store conversations as text. Raises DataError if text begins
    like a list of messages but is not JSON.
    """
    if not isinstance(value, str) or not _LOOKS_LIKE_MESSAGES.match(value):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"the text {value[:60]!r} begins like a list of chat messages but is not JSON "
            f"({error}); write the messages as a list, or as JSON text (json.dumps, not str)"
        ) from error
    turns = isinstance(found, list) and all(
        isinstance(turn, dict) and ("role" in turn or {"from", "value"} <= set(turn))
        for turn in found
    )
    return found if turns else value


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
    """Return, for each message, False if it has ``train: false`` or ``weight: 0``, else True.

    Raises DataError for other values, and for two flags of one message that differ.
    """
    flags = []
    for i, message in enumerate(messages):
        given = {key: message[key] for key in TRAIN_FLAGS if message.get(key) is not None}
        for key, value in given.items():
            if not isinstance(value, bool | int | float) or value not in (0, 1):
                raise DataError(
                    f"message {i} ({message['role']}) has {key}: {value!r}; use train: true or "
                    "false, or weight: 1 or 0"
                )
        if len({bool(value) for value in given.values()}) > 1:
            raise DataError(
                f"message {i} ({message['role']}) has train: {given['train']} and weight: "
                f"{given['weight']}, which differ; keep one"
            )
        flags.append(all(given.values()))
    return flags


def without_flags(message: Message) -> dict[str, Any]:
    """Return the message without the keys in :data:`TRAIN_FLAGS`."""
    return {key: value for key, value in message.items() if key not in TRAIN_FLAGS}


def as_tools(value: Any) -> list[dict[str, Any]] | None:
    """Return tool descriptions given as a list or as JSON text; None if ``value`` is neither.

    A tool description is an object with ``name`` or ``function``.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, list) or not value:
        return None
    named = all(isinstance(tool, dict) and {"name", "function"} & set(tool) for tool in value)
    return value if named else None


def _as_message(message: Any) -> dict[str, Any]:
    if isinstance(message, Mapping) and "role" not in message and "from" in message:
        message = _from_sharegpt(message)
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise DataError(
            f'a chat message must be an object {{"role": ..., "content": ...}}, got '
            f"{_short(message)}"
        )
    kept = {key: value for key, value in message.items() if value is not None}
    if "content" not in kept and "tool_calls" not in kept:
        raise DataError(f"a chat message has no `content`: {_short(message)}")
    return kept


def _from_sharegpt(turn: Message) -> dict[str, Any]:
    if turn["from"] == FUNCTION_CALL:
        calls = _tool_calls(turn.get("value"))
        rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
        return {"role": "assistant", "content": "", "tool_calls": calls, **rest}
    role = SHAREGPT_ROLES.get(str(turn["from"]))
    if role is None:
        known = ", ".join((*SHAREGPT_ROLES, FUNCTION_CALL))
        raise DataError(
            f"a ShareGPT turn has the unknown `from` {turn['from']!r}; known are {known}. Rename "
            'it, or write the turn as {"role": ..., "content": ...}'
        )
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {"role": role, "content": turn.get("value"), **rest}


def _tool_calls(value: Any) -> list[dict[str, Any]]:
    """Return the tool calls of a ShareGPT turn: one call or a list of calls, usually JSON text."""
    try:
        given = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        given = None
    calls = given if isinstance(given, list) else [given]
    for call in calls:
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            raise DataError(
                f"a ShareGPT turn from {FUNCTION_CALL!r} must contain the JSON text of "
                f'{{"name": ..., "arguments": {{...}}}}, got {_short(value)}'
            )
    functions = [{"name": c["name"], "arguments": c.get("arguments") or {}} for c in calls]
    return [{"type": "function", "function": function} for function in functions]


def _short(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:80]}"
