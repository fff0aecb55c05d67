"""A chat template as text: what it writes between a turn and the next response.

A short conversation with a placeholder answer is rendered, and the text after the placeholder is
what follows a turn. No code depends on a model family.

Reading order: ChatTemplate.continuation, ChatTemplate.probe.
"""

from __future__ import annotations

import json
import re  # house: ok it escapes special tokens
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from itertools import product
from typing import TYPE_CHECKING, Any

from burnish.chat_message import Message
from burnish.data.left_out import REFUSED_BEHIND_TURNS, Field, check_rendering
from burnish.data.rendering import habits_of, render_text, tags_of
from burnish.data.sources import DataError
from burnish.episodes.formats import format_of
from burnish.episodes.framing import Framing
from burnish.episodes.probing import (
    CONVERSATIONS,
    TOOLS,
    ProbeConversation,
    assistant,
    call,
    reasoning_in_text,
    user,
)
from burnish.episodes.token_texts import common_length
from burnish.errors import BurnishError
from burnish.model_text import Pattern
from burnish.reasoning_tags import Tags
from burnish.special_tokens import inner_ends, special_tokens
from burnish.templates import of_conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]]
Marks = tuple[str, str] | None
"""Characters before and after literal text; None if a text has none."""
_MARK = "qzanswerzq"
_OPTIONS = {
    "model.chat_template_kwargs": "chat_template_kwargs",
    "set model.chat_template to": "start the server with --chat-template and",
    "Set model.chat_template to": "Start the server with --chat-template and",
    "model.chat_template": "--chat-template",
    "model.tokenizer_path": "the tokenizer in the model folder",
    "the environment offers tools": "the request has tools",
}
"""Words about recipes in messages -> words about servers."""
_SHOWN, _BEFORE = 60, 20  # characters of a text shown after and before a difference
_MOST_SHAPES = 4096  # cached sequences of roles
_FIRST_MARK, _LAST_MARK = 0xF0000, 0xFFFFD
"""Private-use characters (plane 15), of which two surround literal text."""


class RendererError(BurnishError, ValueError):
    """A chat template cannot be used for episodes, or a message cannot be rendered. The message
    contains the reason and the fix.

    ``remedy``: the fix in a recipe. ``server_remedy``: the fix for ``burnish serve``, if it is
    another one than a chat template.
    """

    def __init__(self, reason: str, remedy: str = "", *, server_remedy: str = "") -> None:
        super().__init__(f"{reason}. {remedy}" if remedy else reason)
        self._reason, self._server_remedy = reason, server_remedy

    @property
    def for_server(self) -> str:
        """Return the message without keys of recipes, which a server does not have."""
        remedy = f". {self._server_remedy}" if self._server_remedy else ""
        text = f"{self._reason}{remedy}"
        for key, option in _OPTIONS.items():
            text = text.replace(key, option)
        return text


@dataclass(frozen=True)
class Difference:
    """The first difference between bridged prompts and a complete rendering."""

    conversation: str
    """Name of the conversation in ``probing.CONVERSATIONS``."""
    position: int
    """Character at which the texts differ."""
    bridged: str
    """Text of the previous prompt, the turn and its continuation, around ``position``."""
    rendered: str
    """Text of the complete rendering, around ``position``."""

    def __str__(self) -> str:
        return (
            f"in the conversation {self.conversation!r}, at character {self.position}, the prompt "
            f"is {self.bridged!r} if earlier turns are kept as they were, and "
            f"{self.rendered!r} if all messages are rendered again"
        )


@dataclass(frozen=True)
class Continuation:
    """Text between a turn and the next response, in three parts. ChatML: "", "<|im_end|>",
    "\\n<|im_start|>user\\n...". ``end`` is empty if the template writes no end token."""

    before_end: str
    end: str
    rest: str


class ChatTemplate:
    """Text of conversations, rendered with a tokenizer's chat template.

    ``today``: date for templates that write one. None: the date of each call.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, today: datetime | None) -> None:
        self._tokenizer = tokenizer
        self._today = today
        texts = set(special_tokens(tokenizer).values()) - {""}
        longest_first = sorted(texts, key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._special = Pattern(pattern, is_own=False)
        """Matches special tokens."""
        self._moved: dict[tuple[Any, ...], str | None] = {}
        """Shape of new messages -> the role of the first one that does not follow an answer."""

    def check(
        self,
        messages: Sequence[Message],
        tools: Tools,
        refused: Collection[Field],
        *,
        conversation: Sequence[Message] = (),
    ) -> None:
        """Raise DataError if the template leaves out one of the ``refused`` fields.
        ``conversation``: as in :meth:`text`."""
        written = of_conversation(self._tokenizer, conversation or messages, tools)
        check_rendering(written, messages, list(tools) or None, refused=refused)

    def text(
        self,
        messages: Sequence[Message],
        tools: Tools,
        *,
        generate: bool,
        conversation: Sequence[Message] = (),
    ) -> str:
        """Return the text of a conversation, with the generation prompt if ``generate``.
        ``conversation``: the messages that select its template, if ``messages`` are a part or
        another form of them. Raises DataError if the template rejects it."""
        return render_text(
            of_conversation(self._tokenizer, conversation or messages, tools),
            messages,
            add_generation_prompt=generate,
            tools=list(tools) or None,
            today=self._today,
        )

    def continuation(
        self, new: Sequence[Message], tools: Tools, *, earlier: Sequence[Message] = ()
    ) -> Continuation:
        """Return the text that the template writes between a turn and the answer to ``new``.

        ``earlier``: the conversation that the turn answers. Templates look there for how the next
        answer begins (a system message with "/no_think" closes the reasoning of all answers). If it
        is empty, or the template rejects it, a question takes its place.

        Raises RendererError if the placeholder answer is not in the rendering or a new message is
        rendered before it, DataError if the template rejects the messages.
        """
        text = repr(new)
        mark = next(m for m in (_MARK + "z" * i for i in range(len(text) + 1)) if m not in text)
        results = _leading_results(new)
        with_call = _placeholder(mark, results)
        short = [user("Go."), with_call, *new]
        conversation = [*earlier, *short]
        self.check(short, tools, REFUSED_BEHIND_TURNS, conversation=conversation)
        render = partial(self.text, tools=tools, conversation=conversation)
        for answer in (with_call, {**with_call, "content": mark}) if results else (with_call,):
            head = render([user("Go."), answer], generate=False)
            full = render([user("Go."), answer, *new], generate=True)
            if answer is with_call and 0 < head.count(mark) < len(results):
                raise RendererError(
                    f"the chat template renders {head.count(mark)} of the {len(results)} tool "
                    "calls of a turn, so a result would belong to another call. Run one call per "
                    "turn"
                )
            if mark in head and mark in full:
                self._check_places(answer, mark, new, tools)
                after_head, after_full = head.rpartition(mark)[2], full.rpartition(mark)[2]
                if earlier:
                    after_full = self._behind(
                        earlier, [answer, *new], tools, mark=mark, after=after_full
                    )
                return self._split(after_head, after_full, is_call=bool(results))
        raise RendererError(
            "the chat template does not render the assistant's earlier turns (a placeholder answer "
            "is missing from the text), so a conversation cannot be extended. Set "
            "model.chat_template to one that renders all messages"
        )

    def _behind(
        self,
        earlier: Sequence[Message],
        behind: Sequence[Message],
        tools: Tools,
        *,
        mark: str,
        after: str,
    ) -> str:
        """Return ``after``, the text behind an answer with the text ``mark`` in a short
        conversation, with the beginning of the next answer that the template writes in the real
        one. Other differences stay out: templates also write earlier messages there (Mistral's the
        system message)."""
        with suppress(DataError):
            conversation = [*earlier, *behind]
            render = partial(self.text, tools=tools, conversation=conversation)
            full = render(conversation, generate=True)
            if mark not in full or full.rpartition(mark)[2] == after:
                return after
            without = render(conversation, generate=False)
            short = render([user("Go."), *behind], generate=False).rpartition(mark)[2]
            begin = full[common_length(full, without) :]
            return after[: common_length(after, short)] + begin
        return after

    def _check_places(
        self, answer: Message, mark: str, new: Sequence[Message], tools: Tools
    ) -> None:
        """Raise RendererError if the template does not render the text of a new message after the
        answer before it. It is rendered once for each sequence of roles, with marks as texts."""
        has_text = [bool(str(m.get("content") or "").strip()) for m in new]
        roles = tuple((str(m["role"]), has) for m, has in zip(new, has_text, strict=True))
        shape = (roles, bool(answer["content"]), bool(tools))
        if shape not in self._moved:
            if len(self._moved) >= _MOST_SHAPES:
                self._moved.clear()
            texts = [f"qznew{i}zq" * has for i, has in enumerate(has_text)]
            marked = [{**m, "content": t} if t else m for m, t in zip(new, texts, strict=True)]
            try:
                full = self.text([user("Go."), answer, *marked], tools, generate=True)
            except DataError:  # the template inspects contents
                full = mark + "".join(texts)
            after = full.rpartition(mark)[2]
            moved = (
                role for (role, _), text in zip(roles, texts, strict=True) if text not in after
            )
            self._moved[shape] = next(moved, None)
        if (role := self._moved[shape]) is not None:
            raise RendererError(
                f"the chat template writes a message of the role {role!r} that follows an answer "
                "somewhere else (at the beginning of the conversation, for example), but a prompt "
                "is only extended at its end, so the model would never see the text. Put the text "
                "into a user message"
            )

    def _split(self, after_head: str, after_full: str, *, is_call: bool) -> Continuation:
        """Split the text after an answer at its end token.

        ``after_head``: the text if the conversation ends there. ``after_full``: the text if the new
        messages follow. After a tool call both begin with the rest of the call.
        """
        ends = self._special.finditer(after_head)
        if after_full.startswith(after_head):
            if not ends:
                return Continuation("", "", after_full[len(after_head) * is_call :])
            begin, end = ends[-1].span()
            before = "" if is_call else after_full[:begin]
            return Continuation(before, after_full[begin:end], after_full[end:])
        # The last turn ends differently (gpt-oss: <|return|> instead of <|end|>).
        end_token = self._special.search(after_full)
        if end_token is None or is_call:
            raise RendererError(
                "the chat template writes the end of a turn as "
                f"{after_head[-_SHOWN:]!r} if it is the last and as {after_full[:_SHOWN]!r} if "
                "more follow, so the end of the turn cannot be located and a conversation cannot "
                "be extended. Set model.chat_template to one that only appends"
            )
        begin, end = end_token.span()
        return Continuation(after_full[:begin], end_token[0], after_full[end:])

    def probe(self) -> tuple[tuple[Difference, ...], dict[str, str]]:
        """Compare bridged texts with complete renderings of the probe conversations.

        Return (first differences, conversation -> why the template cannot render or extend it).
        Raises RendererError if no probe conversation can be extended.
        """
        differences = []
        rejected: dict[str, str] = {}
        tags = self.tags()
        conversations = list(CONVERSATIONS)
        if tags is not None and habits_of(self._tokenizer).reasoning_key is None:
            conversations.append(reasoning_in_text(tags))
        for conversation in conversations:
            try:
                difference = self._difference(conversation)
            except (DataError, RendererError) as error:
                rejected[conversation.name] = str(error)
                continue
            if difference is not None:
                differences.append(difference)
        if len(rejected) == len(conversations):
            raise RendererError(
                "the chat template cannot extend any conversation, so episodes of several turns "
                f"are impossible. {next(iter(rejected.values()))}"
            )
        return tuple(differences), rejected

    def _difference(self, conversation: ProbeConversation) -> Difference | None:
        """Return the first difference in one conversation, or None. Raises as ``_continuation``."""
        messages, tools = conversation.messages, conversation.tools
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for turn, following in zip(turns, [*turns[1:], len(messages)], strict=True):
            prompt = self.text(messages[:turn], tools, generate=True)
            head = self.text(messages[: turn + 1], tools, generate=False)
            full = self.text(messages[:following], tools, generate=True)
            new = self.continuation(list(messages[turn + 1 : following]), tools)
            sampled = self._sampled(head[len(prompt) :], new)
            content, tags = messages[turn]["content"], self.tags()
            block = tags.block(content) if tags else None
            if block is not None and block[0].strip() not in sampled:
                # The policy writes reasoning first, and the template cuts it out of the text.
                sampled = str(content).removesuffix(block[1].lstrip()) + sampled
            bridged = prompt + sampled + new.rest
            if not head.startswith(prompt):  # the generation prompt has text that history lacks
                bridged = prompt
            if bridged != full:
                at = common_length(bridged, full)
                shown = slice(max(0, at - _BEFORE), at + _SHOWN)
                return Difference(conversation.name, at, bridged[shown], full[shown])
        return None

    def _sampled(self, turn: str, following: Continuation) -> str:
        """Return the part of a last turn that the policy samples: up to its end token."""
        if not following.end:  # the next message's first token ends the turn (GLM), or EOS does
            glm = self._special.match(following.rest)
            return turn if glm else turn.rstrip() + str(self._tokenizer.eos_token)
        before, end, behind = turn.rpartition(following.end)
        if end and not self._special.sub("", behind).strip():
            return before + end
        ends = self._special.finditer(turn)  # the last turn has an end token of its own
        return turn[: ends[-1].end()] if ends else turn

    def end_tokens(self) -> tuple[frozenset[int], frozenset[int]]:
        """Return (tokens that end a turn if it is the last, or wherever it is; those and the tokens
        that end a turn if a user message or a tool result follows), with and without tools."""
        stop: set[str] = set()
        close: set[str] = set()
        result = {"role": "tool", "tool_call_id": "probe0000", "name": "look_up", "content": "1"}
        for new, tools in product(([user("Go on.")], [result]), (TOOLS, ())):
            try:
                continuation = self.continuation(new, tools)
                answer = _placeholder(_MARK, _leading_results(new))
                head = self.text([user("Go."), answer], tools, generate=False)
            except (DataError, RendererError):
                continue
            stop |= set(self._special.findall(head.rpartition(_MARK)[2])[-1:])
            close |= {continuation.end} - {""}
            first = self._special.match(continuation.rest)
            if not continuation.end and first:  # the next message's first token ends the turn (GLM)
                stop.add(first[0])
        stop_ids, close_ids = (
            {int(str(self._tokenizer.convert_tokens_to_ids(token))) for token in tokens}
            for tokens in (stop or {str(self._tokenizer.eos_token or "")} - {""}, close)
        )
        stop_ids |= inner_ends(self._tokenizer)
        return frozenset(stop_ids), frozenset(stop_ids | close_ids)

    def framing(self, is_delimiter: Callable[[str], bool]) -> Framing:
        """Return the texts with special tokens around an answer inside its turn.

        ``is_delimiter``: whether a text tells the parser of responses where a field is. (gpt-oss
        writes the channel before an answer.)
        """
        openings: set[str] = set()
        closings: set[str] = set()
        question, answer, tags = [user("Go.")], assistant(_MARK), self.tags()
        for tools in (TOOLS, ()):
            try:
                continuation = self.continuation([user("Go on.")], tools)
                prompt = self.text(question, tools, generate=True)
                before, _, after = self.text([*question, answer], tools, generate=False).rpartition(
                    _MARK
                )
            except (DataError, RendererError):
                continue
            # A prompt may end with a block of reasoning, and the answer have none, or its own.
            start = prompt if tags is None else tags.of_prompt(prompt)[0]
            opening = before.removeprefix(start) if before.startswith(start) else ""
            openings.add(opening if tags is None else opening.rpartition(tags.end)[2])
            last = self._special.finditer(after)[-1:]
            for closing in (continuation.before_end, *(after[: end.start()] for end in last)):
                closings |= {closing[: part.end()] for part in self._special.finditer(closing)}
        openings, closings = (
            {
                text.strip()
                for text in texts
                if self._special.search(text) and not is_delimiter(text)
            }
            for texts in (openings, closings)
        )
        return Framing(
            *(tuple(sorted(texts, key=lambda t: (-len(t), t))) for texts in (openings, closings))
        )

    def marked(
        self, messages: Sequence[Message], tools: Tools, *, follow: bool = False
    ) -> tuple[list[dict[str, Any]], Marks]:
        """Return (the messages with marks around special tokens in tool results, and in messages
        that answer the policy; the marks). ``follow``: the messages follow a turn of the policy.

        An answer is data: a web page that contains ``<|im_end|>``, or an error that quotes it,
        must not end a turn. The marks are characters that no message, tool or template contains.
        """
        marks: Marks = None
        marked = []
        for message in messages:
            follow = follow or message["role"] == "assistant"
            content, role = message.get("content"), message["role"]
            is_data = role == "tool" or (follow and role != "assistant")
            if is_data and isinstance(content, str) and self._special.search(content):
                marks = marks or _unused_characters(
                    [messages, tools, self._tokenizer.chat_template]
                )
                literal = self._special.sub(rf"{marks[0]}\g<0>{marks[1]}", content)
                message = {**message, "content": literal}
            marked.append(dict(message))
        return marked, marks

    @cached_property
    def generation_prompt(self) -> str:
        """Text that the template writes at the end of a prompt."""
        without = self.text([user("Go.")], (), generate=False)
        with_prompt = self.text([user("Go.")], (), generate=True)
        return with_prompt.removeprefix(without) if with_prompt.startswith(without) else ""

    def call_format(self) -> str | None:
        """Return the name of the format in which tool calls are rendered, if it is known."""
        question = [user("Go.")]
        answer = assistant("", tool_calls=[call("look_up", {"key": _MARK}, "probe0000")])
        try:
            prompt = self.text(question, TOOLS, generate=False)
            text = self.text([*question, answer], TOOLS, generate=False)
            turn = text.removeprefix(prompt).removeprefix(self.generation_prompt)
        except DataError:
            return None
        return format_of(turn) if _MARK in turn else None

    def tags(self) -> Tags | None:
        """Return the tags of reasoning of the template. None: a block of reasoning is text, which
        later prompts and rows keep."""
        return tags_of(self._tokenizer)


def literal_parts(text: str, marks: Marks) -> list[tuple[str, bool]]:
    """Split a text at the marks of :meth:`ChatTemplate.marked` into (part, whether its special
    tokens are ordinary text). A mark without the other one is left out.

    >>> literal_parts("a(b)c", ("(", ")"))
    [('a', False), ('b', True), ('c', False)]
    """
    if marks is None:
        return [(text, False)]
    begin, end = marks
    plain, *others = text.split(begin)
    parts = [(plain.replace(end, ""), False)]
    for other in others:
        literal, closing, rest = other.partition(end)
        parts += [(literal, bool(closing)), (rest.replace(end, ""), False)]
    return [(part, literal) for part, literal in parts if part]


def _unused_characters(values: Any) -> tuple[str, str]:
    """Return two private-use characters that no text in JSON values contains."""
    text = json.dumps(values, ensure_ascii=False, default=str)
    unused = (chr(i) for i in range(_FIRST_MARK, _LAST_MARK + 1) if chr(i) not in text)
    return next(unused), next(unused)


def _leading_results(messages: Sequence[Message]) -> list[Message]:
    end = next((i for i, m in enumerate(messages) if m.get("role") != "tool"), len(messages))
    return list(messages[:end])


def _placeholder(mark: str, results: Sequence[Message]) -> dict[str, Any]:
    """Return an answer with the text ``mark`` at its end: in the arguments of the calls that
    ``results`` belong to, else as the content."""
    if not results:
        return assistant(mark)
    calls = [call(r["name"], {"key": mark}, r["tool_call_id"]) for r in results]
    return assistant("", tool_calls=calls)
