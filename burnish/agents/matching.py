"""Find the recorded turn that a call continues.

Clients send the entire conversation with every call, and many change it on the way: they drop
reasoning, rename the ids of calls, write arguments in another order, strip white space. Such
changes do not matter here: messages are compared by role, text, and the names and arguments of tool
calls. The recorded tokens stay as they were sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Generic, TypeVar

from burnish.agents.calls import well_formed
from burnish.chat_message import Message

T = TypeVar("T")


class History(Generic[T]):
    """Turns of an episode, found by the conversation that they end with."""

    def __init__(self) -> None:
        self._turns: dict[bytes, tuple[int, T]] = {}

    def add(self, digest: bytes, reply: Message, turn: T, *, number: int) -> None:
        """Record ``turn``: the answer ``reply`` to the conversation whose last digest is
        ``digest``. Of turns with the same conversation, the one with the largest ``number`` is
        found, in whichever order they are added."""
        key = _extended(digest, reply)
        if key not in self._turns or self._turns[key][0] < number:
            self._turns[key] = (number, turn)

    def find(self, messages: Sequence[Message], digests: Sequence[bytes]) -> tuple[T, int] | None:
        """Return the turn that ``messages`` continue and the number of messages of its
        conversation; None if there is none. ``digests``: :func:`digests_of` the messages.

        It is the longest one, if only messages that are not the assistant's follow it. Otherwise
        the client has inserted or rewritten an answer, and the conversation is a new one.
        """
        for count in range(len(messages) - 1, 0, -1):
            if messages[count]["role"] == "assistant":
                return None
            if (known := self._turns.get(digests[count - 1])) is not None:
                return known[1], count
        return None


def digests_of(messages: Iterable[Message], tools: Sequence[Any]) -> tuple[bytes, ...]:
    """Return a digest of the tools and the first n messages, for n = 1, 2, ..."""
    first = blake2b(_canonical(list(tools)), digest_size=16).digest()
    return tuple(accumulate(messages, _extended, initial=first))[1:]


def _extended(digest: bytes, message: Message) -> bytes:
    """Return the digest of a conversation with one more message."""
    return blake2b(digest + message_key(message), digest_size=16).digest()


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
