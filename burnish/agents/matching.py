"""Find the recorded turn that a call continues.

Clients send the entire conversation with every call, and many change it on the way: they drop
reasoning, rename the ids of calls, write arguments in another order or numbers as JavaScript does,
strip white space. Such changes do not matter here: messages are compared by role, text, name, and
the names and arguments of tool calls. Reasoning that a client returns must be that of the turn. The
recorded tokens stay as they were sampled.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Generic, TypeVar

from burnish.agents.calls import well_formed
from burnish.chat_message import Message

T = TypeVar("T")


@dataclass(frozen=True)
class _Turn(Generic[T]):
    number: int
    turn: T
    thoughts: tuple[bytes, ...]


class History(Generic[T]):
    """Turns of an episode, found by the conversation that they end with."""

    def __init__(self) -> None:
        self._turns: defaultdict[bytes, list[_Turn[T]]] = defaultdict(list)

    def add(
        self,
        digest: bytes,
        reply: Message,
        turn: T,
        *,
        number: int,
        thoughts: tuple[bytes, ...],
    ) -> None:
        """Record ``turn``: the answer ``reply`` to the conversation whose last digest is
        ``digest``. ``thoughts``: the reasoning of all answers, ``reply`` included, as the policy
        wrote it."""
        self._turns[_extended(digest, reply)].append(_Turn(number, turn, thoughts))

    def find(self, messages: Sequence[Message], digests: Sequence[bytes]) -> tuple[T, int] | None:
        """Return the turn that ``messages`` continue and the number of messages of its
        conversation; None if there is none. ``digests``: :func:`digests_of` the messages.

        It is the longest one, if only messages that are not the assistant's follow it. Otherwise
        the client has inserted or rewritten an answer, and the conversation is a new one. Of turns
        with the same conversation, the one with the largest number is found, in whichever order
        they are added.
        """
        for count in range(len(messages) - 1, 0, -1):
            if messages[count]["role"] == "assistant":
                return None
            sent = thoughts_of(messages[:count]) if digests[count - 1] in self._turns else ()
            known = [t for t in self._turns.get(digests[count - 1], ()) if _agree(sent, t.thoughts)]
            if known:
                return max(known, key=lambda turn: turn.number).turn, count
        return None


def thoughts_of(messages: Iterable[Message]) -> tuple[bytes, ...]:
    """Return a digest of the reasoning of every answer in a conversation; empty bytes for none."""
    texts = (
        str(message.get("reasoning_content") or "").strip()
        for message in messages
        if message["role"] == "assistant"
    )
    return tuple(
        blake2b(text.encode("utf-8", "replace"), digest_size=8).digest() if text else b""
        for text in texts
    )


def _agree(sent: tuple[bytes, ...], known: tuple[bytes, ...]) -> bool:
    """Return whether the reasoning that a client sent is the known one. It may leave it out."""
    return len(sent) == len(known) and all(
        not mine or mine == other for mine, other in zip(sent, known, strict=True)
    )


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
    functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
    calls = [[function.get("name"), _doubles(function.get("arguments"))] for function in functions]
    name = message.get("name") or "" if message["role"] != "tool" else ""
    return _canonical(well_formed([message["role"], text, calls, name]))


def _doubles(value: Any) -> Any:
    """Return a JSON value whose numbers are doubles, as those of JavaScript are: 1 and 1.0 are
    equal, and so are integers that a double does not distinguish."""
    if isinstance(value, Mapping):
        return {key: _doubles(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_doubles(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    try:
        return float(value) + 0.0  # -0.0 becomes 0.0
    except OverflowError:
        return None  # infinity, which JSON does not have


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r:.60} is not JSON")
