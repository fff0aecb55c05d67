"""Prompts of the calls of one episode: those of recorded calls are extended, others rendered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from burnish.agents.calls import ModelCall, invalid
from burnish.agents.matching import History, digests_of, thoughts_of
from burnish.agents.replies import checked_ids
from burnish.chat_message import Message
from burnish.episodes.loop import Policy
from burnish.episodes.parsing import ParsedMessage
from burnish.episodes.renderer import TooLongError
from burnish.episodes.template import RendererError
from burnish.episodes.token_texts import TokenPart
from burnish.rollout.base import Completion
from burnish.types import Ids


@dataclass(eq=False)
class Recorded:
    """One answered call."""

    number: int
    """Place of the call in the order of arrival."""
    tools: tuple[Mapping[str, Any], ...]
    prompt: Prompt
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

    @property
    def was_seen(self) -> bool:
        return self.num_clients > 0 or self.is_continued


@dataclass(frozen=True)
class Prompt:
    """The prompt of a call."""

    ids: Ids
    messages: tuple[Message, ...]
    """The conversation. Prompts without a chat template are messages of a user."""
    parent: Recorded | None = None
    """The call whose conversation this one continues."""
    num_known: int = 0
    """Number of messages in that conversation."""
    digest: bytes = b""
    """Digest of the conversation; empty if later calls are not compared with it."""
    thoughts: tuple[bytes, ...] = ()
    """Digests of the reasoning in the conversation, as the policy reads it."""
    text: str = ""
    """The prompt, if it has no chat template."""


class Prompts:
    """Finds the prompt of each call. A call that continues a recorded one extends its tokens."""

    def __init__(self, policy: Policy, *, max_tokens: int) -> None:
        """``max_tokens``: maximum tokens of a prompt; of longer texts nothing is tokenized."""
        self._policy, self._max_tokens = policy, max_tokens
        self._history: History[Recorded] = History()
        self._texts: list[tuple[str, Recorded]] = []
        """Calls without a chat template, each with the text of its prompt and response."""

    def record(self, call: Recorded) -> None:
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
        is_text = prompt.text and call.text
        # Text does not show special tokens: its continuation does not continue their ids.
        if is_text and self._policy.renderer.special_ids.isdisjoint(call.completion.token_ids):
            self._texts.append((prompt.text + call.text, call))

    async def find(self, call: ModelCall) -> Prompt:
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
    ) -> Prompt:
        """Return the prompt of a conversation. Raises RendererError."""
        renderer, in_renderer = self._policy.renderer, self._policy.in_renderer
        if renderer.history == "template":
            return Prompt(
                await in_renderer(renderer.render, messages, tools, max_tokens=self._max_tokens),
                messages,
            )
        digests = await in_renderer(digests_of, messages, tools)
        continued = self._history.find(messages, digests)
        if continued is None:
            ids = await in_renderer(renderer.render, messages, tools, max_tokens=self._max_tokens)
            return Prompt(ids, messages, digest=digests[-1], thoughts=thoughts_of(messages))
        parent, num_known = continued
        before, sampled = parent.prompt.ids, parent.completion.token_ids
        ids = await in_renderer(
            renderer.bridge,
            before,
            sampled,
            messages[num_known:],
            tools,
            ended=parent.completion.finish_reason == "stop",
            max_tokens=self._max_tokens,
        )
        thoughts = (*parent.prompt.thoughts, *thoughts_of([parent.parsed.message]))
        return Prompt(ids, messages, parent, num_known, digests[-1], thoughts)

    async def _ids_prompt(self, token_ids: tuple[int, ...]) -> Prompt:
        renderer, in_renderer = self._policy.renderer, self._policy.in_renderer
        if len(token_ids) > self._max_tokens:
            raise TooLongError(f"the prompt has {len(token_ids)} tokens")
        ids = checked_ids(token_ids, renderer)
        text = await in_renderer(renderer.decode, ids)
        return Prompt(ids, (_user_message(text),), text=text)

    async def _text_prompt(self, text: str) -> Prompt:
        """Return a prompt without a chat template. If the text begins with that of a recorded call
        and its response, it continues their tokens."""
        renderer, in_renderer = self._policy.renderer, self._policy.in_renderer
        continued = [(prefix, call) for prefix, call in self._texts if text.startswith(prefix)]
        if not continued:
            ids = await in_renderer(renderer.encode, text, max_tokens=self._max_tokens)
            return Prompt(checked_ids(ids, renderer), (_user_message(text),), text=text)
        prefix, parent = max(continued, key=lambda pair: (len(pair[0]), pair[1].number))
        new = text[len(prefix) :]
        prefix_ids = parent.prompt.ids + parent.completion.token_ids
        more = await in_renderer(
            renderer.encode, new, after=prefix_ids[-1:], max_tokens=self._max_tokens
        )
        ids = prefix_ids + more
        before = (*parent.prompt.messages, parent.parsed.message)
        return Prompt(ids, (*before, _user_message(new)), parent, len(before), text=text)


def _user_message(text: str) -> Message:
    """Return text that the agent wrote as a message."""
    return {"role": "user", "content": text}
