"""Find the recorded turn that a call continues.

Clients send the entire conversation with every call, and many change it on the way: they drop
reasoning, rename the ids of calls, write arguments in another order, strip white space. Such
changes do not matter here: messages are compared by role, text, and the names and arguments of tool
calls. The recorded tokens stay as they were sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Generic, TypeVar

from burnish.agents.calls import well_formed
from burnish.data.messages import Message

T = TypeVar("T")


class History(Generic[T]):
    """Turns of an episode, found by the conversation that they end with."""

    def __init__(self) -> None:
        self._turns: dict[bytes, T] = {}

    def add(
        self, messages: Sequence[Message], reply: Message, tools: Sequence[Any], turn: T
    ) -> None:
        """Record ``turn``: the answer ``reply`` to ``messages``, with ``tools``. A later turn
        replaces an earlier one with the same conversation."""
        *_, last = _digests([*messages, reply], tools)
        self._turns[last] = turn

    def find(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[T, int] | None:
        """Return the turn that ``messages`` continue and the number of messages of its
        conversation; None if there is none.

        It is the longest one, if only messages that are not the assistant's follow it. Otherwise
        the client has inserted or rewritten an answer, and the conversation is a new one.
        """
        digests = list(_digests(messages, tools))
        for count in range(len(messages) - 1, 0, -1):
            if messages[count]["role"] == "assistant":
                return None
            if (turn := self._turns.get(digests[count - 1])) is not None:
                return turn, count
        return None


def _digests(messages: Iterable[Message], tools: Sequence[Any]) -> Iterator[bytes]:
    """Yield a digest of the tools and the first n messages, for n = 1, 2, ..."""
    digest = blake2b(_canonical(list(tools)), digest_size=16).digest()
    for message in messages:
        digest = blake2b(digest + message_key(message), digest_size=16).digest()
        yield digest


def message_key(message: Message) -> bytes:
    """Return the part of a message by which it is recognized, in a canonical form."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else _canonical(content).decode()
    if message["role"] == "assistant":
        text = text.strip()
    functions = [made.get("function", made) for made in message.get("tool_calls") or ()]
    calls = [[function.get("name"), function.get("arguments")] for function in functions]
    return _canonical(well_formed([message["role"], text, calls]))


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r:.60} is not JSON")
