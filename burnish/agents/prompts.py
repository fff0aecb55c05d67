"""Prompts of the calls of one episode: a call that continues a recorded one extends its tokens, or
renders its messages (``history: template``); every other call is rendered as the client sent it.

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

from burnish.agents.calls import ModelCall, invalid, well_formed
from burnish.agents.replies import checked_ids
from burnish.chat_message import AnsweredCalls, Message
from burnish.compact import IntArray
from burnish.data.left_out import with_lost_texts
from burnish.episodes.loop import Policy
from burnish.episodes.parsing import ParsedMessage
from burnish.episodes.renderer import TooLongError
from burnish.episodes.template import RendererError
from burnish.episodes.token_texts import TokenPart
from burnish.rollout.base import Completion
from burnish.types import Ids

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
            turns = self._turns.get(digests[count - 1])
            if turns is None:
                continue
            # Reasoning that the client sent must be that of the turn. It may leave it out.
            sent = thoughts_of(messages[:count])
            known = [
                turn
                for turn in turns
                if len(sent) == len(turn.thoughts)
                and all(not a or a == b for a, b in zip(sent, turn.thoughts, strict=True))
            ]
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


@dataclass(eq=False)
class RecordedCall:
    """One answered call."""

    number: int
    """Place of the call in the order of arrival."""
    tools: tuple[Mapping[str, Any], ...]
    prompt: CallPrompt
    completion: Completion
    parsed: ParsedMessage
    text: str
    """Text of the response to a prompt without a chat template, with any stop string."""
    parts: tuple[TokenPart, ...]
    """Text of each sampled token, if the client wants log-probs."""
    conversation: str
    began: float
    ended: float
    num_clients: int = 0
    """Clients that got the reply: more than one after retries."""
    is_continued: bool = False
    """True if a later call shows that the client got the reply."""
    is_trained: bool = True

    @property
    def was_seen(self) -> bool:
        return self.num_clients > 0 or self.is_continued


@dataclass(frozen=True)
class CallPrompt:
    """The prompt of a call."""

    ids: Ids
    messages: tuple[Message, ...]
    """The conversation as the policy reads it: answers of recorded calls as they were sampled, not
    as the client sent them. Without a chat template, what the client wrote is messages of a user,
    and the contents joined are the text."""
    parent: RecordedCall | None = None
    """The call whose conversation this one continues."""
    num_known: int = 0
    """Number of messages in that conversation."""
    digest: bytes = b""
    """Digest of the conversation; empty if later calls are not compared with it."""
    thoughts: tuple[bytes, ...] = ()
    """Digests of the reasoning in the conversation, as the policy reads it."""
    text: str | None = None
    """The prompt, if it has no chat template."""
    left_out: tuple[str, ...] = ()
    """Kinds of notices about what the chat template leaves out of the messages."""


class Prompts:
    """Finds the prompt of each call. A call that continues a recorded one extends its tokens."""

    def __init__(self, policy: Policy, *, max_tokens: int) -> None:
        """``max_tokens``: maximum tokens of a prompt; of longer texts nothing is tokenized."""
        self._policy, self._max_tokens = policy, max_tokens
        self._history: History[RecordedCall] = History()
        self._texts: list[tuple[str, RecordedCall]] = []
        """Calls without a chat template, each with the text of its prompt and response, if that is
        the text of its tokens."""
        self._ids: list[tuple[Ids, RecordedCall]] = []
        """Calls without a chat template, each with the ids of its prompt and response."""

    def record(self, call: RecordedCall) -> None:
        """Let later calls continue this one."""
        prompt = call.prompt
        if prompt.parent is not None:
            prompt.parent.is_continued = True
        if prompt.digest:
            reply = call.parsed.message
            self._history.add(
                prompt.digest,
                reply,
                call,
                number=call.number,
                thoughts=(*prompt.thoughts, *thoughts_of([reply])),
            )
        if prompt.text is None:
            return
        sampled = call.completion.token_ids
        self._ids.append((IntArray(prompt.ids) + sampled, call))
        # Text does not show special tokens: its continuation does not continue their ids.
        if call.text and self._policy.renderer.special_ids.isdisjoint(sampled):
            self._texts.append((prompt.text + call.text, call))

    async def find(self, call: ModelCall) -> CallPrompt:
        """Return the prompt of a call. Raises CallError if it cannot be rendered, TooLongError if
        its text has more characters than its tokens could have."""
        try:
            if isinstance(call.prompt, str):
                return await self._text_prompt(call.prompt)
            if call.prompt is not None:
                return await self._ids_prompt(call.prompt)
            return await self._chat_prompt(call.messages, call.shown_tools)
        except TooLongError:
            raise
        except RendererError as error:
            raise invalid("messages", str(error)) from error

    async def _chat_prompt(
        self, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...]
    ) -> CallPrompt:
        """Return the prompt of a conversation. Raises RendererError."""
        renderer, in_renderer = self._policy.renderer, self._policy.in_renderer
        digests = await in_renderer(digests_of, messages, tools)
        parent, num_known = self._history.find(messages, digests) or (None, 0)
        thoughts = thoughts_of(messages)
        new = read = messages
        if parent is not None:
            recorded = (*parent.prompt.messages, parent.parsed.message)
            new = _with_recorded_ids(messages[num_known:], messages[:num_known], recorded)
            read = (*recorded, *new)
            thoughts = (*parent.prompt.thoughts, *thoughts_of([parent.parsed.message]))
        left_out: tuple[str, ...] = ()
        if parent is None or renderer.history == "template":
            render = renderer.render if parent is None else renderer.render_again
            ids, left_out = await in_renderer(
                with_lost_texts, render, read, tools, max_tokens=self._max_tokens
            )
        else:
            ids = await in_renderer(
                renderer.bridge,
                parent.prompt.ids,
                parent.completion.token_ids,
                new,
                tools,
                earlier=parent.prompt.messages,
                ended=parent.completion.finish_reason == "stop",
                max_tokens=self._max_tokens,
            )
        return CallPrompt(ids, read, parent, num_known, digests[-1], thoughts, left_out=left_out)

    async def _ids_prompt(self, token_ids: tuple[int, ...]) -> CallPrompt:
        """Return a prompt of token ids. If they begin with those of a recorded call and its
        response, it continues that call."""
        renderer, in_renderer = self._policy.renderer, self._policy.in_renderer
        if len(token_ids) > self._max_tokens:
            raise TooLongError(len(token_ids), f"the prompt has {len(token_ids)} tokens")
        ids = IntArray(checked_ids(token_ids, renderer))
        text = await in_renderer(renderer.decode, ids)
        known = [(prefix, call) for prefix, call in self._ids if ids[: len(prefix)] == prefix]
        if not known:
            return CallPrompt(ids, (_user_message(text),), text=text)
        prefix, parent = max(known, key=lambda pair: (len(pair[0]), pair[1].number))
        new = _text_behind(parent, text)
        if new is None:  # the response has special tokens, which its message does not show
            new = await in_renderer(renderer.response_text, prefix, ids[len(prefix) :])
        return _continued(parent, ids, new, text)

    async def _text_prompt(self, text: str) -> CallPrompt:
        """Return a prompt without a chat template. If the text begins with that of a recorded call
        and its response, it continues their tokens."""
        renderer, in_renderer = self._policy.renderer, self._policy.in_renderer
        known = [(prefix, call) for prefix, call in self._texts if text.startswith(prefix)]
        if not known:
            ids = await in_renderer(renderer.encode, text, max_tokens=self._max_tokens)
            return CallPrompt(checked_ids(ids, renderer), (_user_message(text),), text=text)
        prefix, parent = max(known, key=lambda pair: (len(pair[0]), pair[1].number))
        before = IntArray(parent.prompt.ids) + parent.completion.token_ids
        more = await in_renderer(
            renderer.encode, text[len(prefix) :], after=before[-1:], max_tokens=self._max_tokens
        )
        return _continued(parent, before + more, str(_text_behind(parent, text)), text)


def _with_recorded_ids(
    new: Sequence[Message], known: Sequence[Message], recorded: Sequence[Message]
) -> tuple[Message, ...]:
    """Return new messages whose results have the ids of the recorded calls. ``known``: the messages
    before, as the client sent them, which may have other ids; ``recorded``: the same, recorded."""
    ids: AnsweredCalls[str] = AnsweredCalls()
    for message, answer in zip(known, recorded, strict=True):
        pairs = zip(message.get("tool_calls") or (), answer.get("tool_calls") or (), strict=True)
        ids.add((sent.get("id"), call["id"]) for sent, call in pairs)
    identities = [ids.answered_by(message) for message in new]
    return tuple(
        message if identity is None else {**message, "tool_call_id": identity}
        for message, identity in zip(new, identities, strict=True)
    )


def _text_behind(call: RecordedCall, text: str) -> str | None:
    """Return the part of ``text`` behind the prompt of a call and the message of its response: with
    its stop string or end token. None if it does not begin with them."""
    before = f"{call.prompt.text}{call.parsed.message['content']}"
    return text[len(before) :] if text.startswith(before) else None


def _continued(parent: RecordedCall, ids: Ids, new: str, text: str) -> CallPrompt:
    """Return a prompt without a chat template that continues a call with the text ``new``."""
    before = (*parent.prompt.messages, parent.parsed.message)
    return CallPrompt(ids, (*before, _user_message(new)), parent, len(before), text=text)


def _user_message(text: str) -> Message:
    """Return text that the agent wrote as a message."""
    return {"role": "user", "content": text}
