"""The conversation of an episode for the report, from the record in a sample file.

The record (``samples.episode_record``) contains text of models and environments. All of it stays
text: contents, reasoning and arguments of tool calls are strings here, numbers are finite.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from burnish.observe.report_figures import is_finite

MAX_EPISODE_CHARS = 60_000  # of one episode, to limit the size of the page
_MIN_CHARS = 200  # of one text of an episode beyond that size


@dataclass
class EmbeddedConversation:
    """An episode as JSON values: its status, first messages, tools and turns."""

    data: dict[str, Any]
    """``status``, ``seconds``, ``num_turns``, ``num_rows`` and ``turns``. Turns in the middle of a
    long episode are omitted."""
    opening: dict[str, Any]
    """``messages`` and ``tools``, which are equal for all members of a group."""
    num_chars: int
    """Characters of the texts in ``data``."""
    is_shortened: bool
    """True if a text is truncated or a turn is omitted."""


def read_conversation(
    text: str, truncated: Callable[[str, int | None], str]
) -> EmbeddedConversation | None:
    """Return the conversation of a record, or None if it is not such a record.

    ``truncated(text, limit)`` truncates a text; ``limit`` None is the usual limit.
    """
    try:
        record = json.loads(text)
        texts = _Texts(truncated, MAX_EPISODE_CHARS)
        opening = {
            "messages": [_message(message, texts) for message in record["start"]],
            "tools": [_tool(tool, texts) for tool in record["tools"]],
        }
        row_of = {t: i for i, row in enumerate(record["rows"]) for t, _ in row["spans"] if t >= 0}
        texts.num_chars = 0
        turns = _turns(record["turns"], texts, row_of)
        data = {
            "status": str(record["status"]),
            "seconds": _number(record["seconds"]),
            "num_turns": len(record["turns"]),
            "num_rows": len(record["rows"]),
            "turns": turns,
        }
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None
    is_shortened = texts.is_shortened or len(turns) < len(record["turns"])
    return EmbeddedConversation(data, opening, texts.num_chars, is_shortened)


class _Texts:
    """Truncates texts, the more the closer an episode is to its limit."""

    def __init__(self, truncated: Callable[[str, int | None], str], limit: int) -> None:
        self._truncated, self.limit = truncated, limit
        self.num_chars = 0
        self.is_shortened = False

    @property
    def full(self) -> bool:
        return self.num_chars >= self.limit

    def __call__(self, value: Any) -> str:
        """Return a value as text: a string unchanged, other values as JSON."""
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)
        shown = self._truncated(text, _MIN_CHARS if self.full else None)
        self.is_shortened |= shown != text
        self.num_chars += len(shown)
        return shown


def _turns(
    record: list[Mapping[str, Any]], texts: _Texts, row_of: Mapping[int, int]
) -> list[dict[str, Any]]:
    """Return the turns from both ends until the limit of texts, in the order of time."""
    turns: dict[int, dict[str, Any]] = {}
    for number in outside_in(len(record)):
        if texts.full and len(turns) >= 2:
            break
        turns[number] = {"number": number, "row": row_of.get(number)} | _turn(record[number], texts)
    return [turns[number] for number in sorted(turns)]


def outside_in(count: int) -> Iterator[int]:
    """Yield the last number, the first, the second last, and so on."""
    for i in range(count):
        yield i // 2 if i % 2 else count - 1 - i // 2


def _turn(turn: Mapping[str, Any], texts: _Texts) -> dict[str, Any]:
    numbers = ("tokens", "prompt_tokens", "cached_tokens", "engine_s", "environment_s")
    return {
        "message": _message(turn["message"], texts),
        "answer": [_message(message, texts) for message in turn["answer"]],
        "rewards": {texts(name): _number(value) for name, value in turn["rewards"].items()},
        "counts": {texts(name): _number(value) for name, value in turn["counts"].items()},
        "problem": texts(turn["problem"]),
        **{name: _number(turn[name]) for name in numbers},
    }


def _message(message: Mapping[str, Any], texts: _Texts) -> dict[str, Any]:
    """Return a message with ``role`` and ``text``, and, if it has them, ``name`` (of the tool),
    ``reasoning`` and ``calls``."""
    entry: dict[str, Any] = {"role": texts(message["role"]), "text": texts(_content(message))}
    if message.get("name"):
        entry["name"] = texts(message["name"])
    if message.get("reasoning_content"):
        entry["reasoning"] = texts(message["reasoning_content"])
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    if calls:
        entry["calls"] = [
            {"name": texts(call.get("name", "")), "arguments": texts(call.get("arguments", {}))}
            for call in calls
        ]
    return entry


def _content(message: Mapping[str, Any]) -> Any:
    """Return the content of a message: text, or blocks, of which those with text become text."""
    content = message.get("content")
    if not isinstance(content, list):
        return "" if content is None else content
    parts = [
        block["text"] if isinstance(block, dict) and isinstance(block.get("text"), str) else block
        for block in content
    ]
    if all(isinstance(part, str) for part in parts):
        return "\n".join(parts)
    return parts


def _tool(tool: Mapping[str, Any], texts: _Texts) -> dict[str, str]:
    function = tool.get("function", tool)
    return {"name": texts(function.get("name", "")), "schema": texts(function)}


def _number(value: Any) -> float | None:
    return value if is_finite(value) else None
