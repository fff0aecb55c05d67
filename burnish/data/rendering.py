"""Render conversations with a chat template, in the form that it reads.

Templates read messages in different forms: arguments of tool calls as an object or as JSON text,
tool calls with an empty content or without one, reasoning under one of three keys. The form that
a template renders is found by rendering short conversations with marks in their fields
(:class:`Habits`), once per template, and messages are rendered in that form.

Reading order: render_text, Habits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from jinja2 import TemplateError

from burnish.chat_message import REASONING, Message, roles_of, with_names_of_calls
from burnish.data.notices import note
from burnish.data.sources import DataError
from burnish.data.thoughts import text_behind_repeated, with_reasoning_key, without_channels
from burnish.reasoning_tags import REASONING_TAGS, THINK, BlockState, Tags, split_channels
from burnish.templates import of_conversation, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]] | None


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    tools: Tools = None,
    today: datetime | None = None,
) -> str:
    """Return the text of a conversation of canonical messages (:mod:`burnish.chat_message`).
    ``today``: date for templates that write one.

    Raises DataError if there is no chat template, or if it rejects the conversation.
    """
    messages = with_names_of_calls(messages)
    tokenizer = of_conversation(tokenizer, messages, tools)
    if tools or any(_has_forms(message) for message in messages):
        habits = habits_of(tokenizer, tools)
        messages = habits.adapted(messages)
        if tools and habits.bare_tools:
            tools = [tool.get("function", tool) for tool in tools]
    return _render(tokenizer, messages, add_generation_prompt, tools, today)


def _has_forms(message: Message) -> bool:
    """Return whether templates read a message in different forms."""
    if "tool_calls" in message or REASONING[0] in message:
        return True
    content = message.get("content") or ""
    return message["role"] == "assistant" and content.lstrip().startswith(_BEGINS)


_BEGINS = tuple(tags.begin for tags in REASONING_TAGS)


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    tools: Tools,
    today: datetime | None = None,
) -> str:
    if tokenizer.chat_template is None:
        raise DataError(
            "the tokenizer has no chat template, but the row is a conversation; set "
            "model.chat_template to a Jinja template (or a path to one), or use plain string "
            "prompts with apply_chat_template: false"
        )
    try:
        return render_chat(
            tokenizer,
            [dict(message) for message in messages],
            tools=None if tools is None else [dict(tool) for tool in tools],
            add_generation_prompt=add_generation_prompt,
            today=today,
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise DataError(
            f"the chat template rejects the conversation (roles: {roles_of(messages)}): {error}"
        ) from error


@dataclass(frozen=True)
class Habits:
    """The forms in which a chat template reads messages, found from renderings."""

    json_arguments: bool
    """Arguments of tool calls have to be JSON text (DeepSeek)."""
    without_content: bool
    """Tool calls are rendered only if the message has no content."""
    reasoning_key: str | None
    """Key under which the reasoning of the last answer is rendered. None: it is not."""
    cuts_reasoning: bool
    """Reasoning inside the text of the last answer is not rendered (DeepSeek-R1, QwQ)."""
    ignored: Collection[tuple[str, str]]
    """(role, key) of names and call ids that are not rendered."""
    empty_block: bool = False
    """Reasoning inside the text of an answer follows an empty block, which is filled from the key
    (Qwen3.8)."""
    prompt_block: BlockState = "none"
    """State of the block of reasoning at the end of the generation prompt after a question. Opened:
    the reasoning is added to the rendered answer."""
    bare_tools: bool = False
    """Tools are rendered only as ``{"name", "parameters"}`` without OpenAI's wrapper."""
    tags: Tags = THINK
    """Tags around reasoning: those of the template, else ``<think>``."""
    has_tags: bool = True
    """The template has tags of reasoning. Others write it in channels (gpt-oss), or never."""
    marks_others: bool = False
    """Blocks ``{% generation %}`` of the template are not the answers, each from its beginning."""

    def ignores_reasoning_of(self, message: Message) -> bool:
        """Return whether the message has reasoning that the template never renders."""
        adds = self.cuts_reasoning or self.prompt_block == "opened"
        return self.reasoning_key is None and not adds and REASONING[0] in message

    def with_reasoning_once(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message without its reasoning in the text, or under its key, if both are the
        same: in the place that the template does not render."""
        text = text_behind_repeated(message, self.tags)
        if text is None:
            return message
        note(
            "double_reasoning",
            f"a message has the same reasoning under `{REASONING[0]}` and in its text; it is kept "
            "once. Remove one from the data",
        )
        if self.ignores_reasoning_of(message):
            return {key: value for key, value in message.items() if key != REASONING[0]}
        return {**message, "content": text}

    def adapted(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages in the form that the template reads."""
        moves = self.reasoning_key not in (None, REASONING[0])
        if not (self.json_arguments or self.without_content or self.empty_block or moves):
            return messages
        return [self._adapted(message) for message in messages]

    def _adapted(self, message: Message) -> Message:
        adapted = dict(with_reasoning_key(message, self.tags) if self.empty_block else message)
        if calls := message.get("tool_calls"):
            if self.json_arguments:
                adapted["tool_calls"] = [_with_json_arguments(call) for call in calls]
            if self.without_content and not message["content"]:
                del adapted["content"]
        if self.reasoning_key is not None and REASONING[0] in adapted:
            adapted[self.reasoning_key] = adapted.pop(REASONING[0])
        return adapted


_habits: WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[str, bool], Habits]] = (
    WeakKeyDictionary()
)


def habits_of(tokenizer: PreTrainedTokenizerBase, tools: Tools = None) -> Habits:
    """Return the habits of the tokenizer's chat template, for conversations with or without
    tools."""
    known = _habits.setdefault(tokenizer, {})
    key = (str(tokenizer.chat_template), bool(tools))
    if key not in known:
        own_tags = tags_of(tokenizer)
        tags = own_tags or THINK
        probe = _Probe(tokenizer, _TOOLS if tools else None, tags)
        json_arguments, without_content = probe.form_of_calls()
        known[key] = Habits(
            json_arguments=json_arguments,
            without_content=without_content,
            reasoning_key=probe.reasoning_key(),
            cuts_reasoning=probe.cuts_reasoning(),
            empty_block=probe.empty_block(),
            prompt_block=probe.prompt_block(),
            ignored=frozenset(probe.ignored(json_arguments, without_content)),
            bare_tools=bool(tools) and probe.bare_tools(),
            tags=tags,
            has_tags=own_tags is not None,
            marks_others=probe.marks_others(),
        )
    return known[key]


_tags: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[str, Tags | None]] = WeakKeyDictionary()


def tags_of(tokenizer: PreTrainedTokenizerBase) -> Tags | None:
    """Return the tags of reasoning of the tokenizer's chat template: those that it writes around
    reasoning or in the generation prompt, else those that its source mentions. None: it has none,
    so that a block of reasoning is text."""
    template = str(tokenizer.chat_template)
    known = _tags.get(tokenizer)
    if known is None or known[0] != template:
        known = _tags[tokenizer] = (template, _Probe(tokenizer, None).tags())
    return known[1]


def writes_channels(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template writes answers in channels (gpt-oss)."""
    template = str(tokenizer.chat_template)
    return "<|channel|>" in template and "<|message|>" in template


_GENERATION = re.compile(r"\{%(-?)\s*(end|)generation\s*(-?)%\}")
_ANSWER, _THOUGHT = "qzanswerzq", "qzthoughtzq"
_TOOLS: Tools = (
    {
        "type": "function",
        "function": {
            "name": "qznamezq",
            "description": "Look up a value.",
            "parameters": {"type": "object", "properties": {"qzkeyzq": {"type": "string"}}},
        },
    },
)


def with_reasoning_once(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: Tools
) -> list[dict[str, Any]]:
    """Return the messages, with reasoning under its key and in the text kept once, and without
    channels in the text. Raises DataError if a text in channels is more than reasoning and an
    answer."""
    messages = [_without_channels(message) for message in messages]
    if not any(REASONING[0] in message for message in messages):
        return messages
    habits = habits_of(of_conversation(tokenizer, messages, tools), tools)
    return [habits.with_reasoning_once(message) for message in messages]


def _without_channels(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    channels = split_channels(content) if message["role"] == "assistant" else None
    if channels is None:
        return message
    if not channels.is_plain:
        raise DataError(
            "the text of an answer has messages in channels that are not one text of reasoning and "
            f"one answer ({content[:60]!r}): a call, a preamble, or no answer. As text they would "
            "be written in another way; give them as tool_calls and reasoning_content, or keep the "
            "tokens of sampled responses (with_tokens: true)"
        )
    return dict(without_channels(message))


class _Probe:
    """Renders short conversations with marks in their fields."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tools: Tools, tags: Tags = THINK
    ) -> None:
        self._tokenizer, self._tools, self._tags = tokenizer, tools, tags
        self._thought_as_text = f"{tags.begin}\n{_THOUGHT}\n{tags.end}\n\n{_ANSWER}"

    def _text(self, *messages: Message) -> str | None:
        """Return the text of a question and the messages, or None if the template rejects it."""
        return self._conversation({"role": "user", "content": "Go."}, *messages)

    def _conversation(self, *messages: Message) -> str | None:
        try:
            generate = messages[-1]["role"] != "assistant"
            return _render(self._tokenizer, messages, generate, self._tools)
        except DataError:
            return None

    def _call(self, json_arguments: bool, without_content: bool) -> dict[str, Any]:
        function = {"name": "qznamezq", "arguments": {"qzkeyzq": "qzvaluezq"}}
        call: dict[str, Any] = {"id": "probe0000", "type": "function", "function": function}
        call = _with_json_arguments(call) if json_arguments else call
        content = {} if without_content else {"content": ""}
        return {"role": "assistant", **content, "tool_calls": [call]}

    def form_of_calls(self) -> tuple[bool, bool]:
        """Return (arguments as JSON text, no content): the first form that is rendered."""
        for without_content, json_arguments in product((False, True), repeat=2):
            text = self._text(self._call(json_arguments, without_content)) or ""
            rendered = "qznamezq" in text and "qzkeyzq" in text and "qzvaluezq" in text
            if rendered and "'qzkeyzq'" not in text:  # Python source is no form of arguments
                return json_arguments, without_content
        return False, False

    def reasoning_key(self) -> str | None:
        """Return the key under which reasoning is rendered, or None."""
        for key in REASONING:
            text = self._text({"role": "assistant", "content": _ANSWER, key: _THOUGHT})
            if _THOUGHT in (text or ""):
                return key
        return None

    def cuts_reasoning(self) -> bool:
        """Return whether the text before the closing tag is missing in the last answer."""
        text = self._text({"role": "assistant", "content": self._thought_as_text}) or ""
        return _ANSWER in text and _THOUGHT not in text

    def empty_block(self) -> bool:
        """Return whether reasoning in the text follows a block that the key would fill."""
        key = self.reasoning_key()
        if key is None:
            return False
        filled = self._text({"role": "assistant", "content": _ANSWER, key: _THOUGHT}) or ""
        text = self._text({"role": "assistant", "content": self._thought_as_text}) or ""
        end = self._tags.end
        return text.count(end) > filled.count(end) > 0

    def prompt_block(self) -> BlockState:
        """Return the state of the block of reasoning at the end of the generation prompt."""
        prompt = self._conversation({"role": "user", "content": "Go."}) or ""
        return self._tags.of_prompt(prompt)[1]

    def tags(self) -> Tags | None:
        """Return the tags of reasoning, see :func:`tags_of`."""
        if self._tokenizer.chat_template is None:
            return None
        key = self.reasoning_key()
        answer = {"role": "assistant", "content": _ANSWER, key or "": _THOUGHT}
        written, mark, _ = (self._text(answer) or "").partition(_THOUGHT)
        prompt = (self._conversation({"role": "user", "content": "Go."}) or "").rpartition("Go.")
        source = str(self._tokenizer.chat_template)
        evidence = (
            *(tags for tags in REASONING_TAGS if mark and written.rstrip().endswith(tags.begin)),
            *(tags for tags in REASONING_TAGS if tags.begin in prompt[2]),
            *(tags for tags in REASONING_TAGS if tags.end in source and not tags.is_word),
            *(tags for tags in REASONING_TAGS if tags.begin in source and not tags.is_word),
        )
        return next(iter(evidence), None)

    def ignored(self, json_arguments: bool, without_content: bool) -> list[tuple[str, str]]:
        """Return (role, key) of the names and ids that do not change the rendering."""
        call = self._call(json_arguments, without_content)
        result = {
            "role": "tool",
            "content": _ANSWER,
            "name": "qznamezq",
            "tool_call_id": "probe0000",
        }
        ignored = []
        for key, other in (("name", "qzotherzq"), ("tool_call_id", "probe1111")):
            text = self._text(call, result)
            if text is not None and text == self._text(call, {**result, key: other}):
                ignored.append(("tool", key))
        for role in ("system", "user", "assistant"):
            texts = [self._named(role, name) for name in ("qznamezq", "qzotherzq")]
            if texts[0] is not None and texts[0] == texts[1]:
                ignored.append((role, "name"))
        return ignored

    def bare_tools(self) -> bool:
        """Return whether the name of a tool is rendered only without OpenAI's wrapper."""
        user = {"role": "user", "content": "Go."}
        assert self._tools is not None
        bare = _Probe(self._tokenizer, [tool["function"] for tool in self._tools])
        wrapped = "qznamezq" in (self._conversation(user) or "")
        return not wrapped and "qznamezq" in (bare._conversation(user) or "")

    def marks_others(self) -> bool:
        """Return whether the blocks ``{% generation %}`` are other texts than the answers."""
        template = str(self._tokenizer.chat_template)
        marked = copy(self._tokenizer)
        marked.chat_template = _GENERATION.sub(
            r"{%\1 if true %}{{ 'qz\2generation' }}{% endif \3%}", template
        )
        if marked.chat_template == template:
            return False
        turns = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": _ANSWER}] * 2
        text = _Probe(marked, self._tools)._conversation(*turns) or ""
        before, *blocks = text.split("qzgeneration")
        begins = []
        for block in blocks:
            answer, _, behind = block.partition("qzendgeneration")
            begins += [before] * answer.count(_ANSWER)
            before += answer + behind
        prompts = [self._conversation(*turns[:end]) or "" for end in (1, 3)]
        skipped = (
            begin.removeprefix(prompt).strip()
            for begin, prompt in zip(begins, prompts, strict=False)
            if begin.startswith(prompt)
        )
        return before.count(_ANSWER) == 2 and (len(begins) != 2 or any(skipped))

    def _named(self, role: str, name: str) -> str | None:
        """Return the text of a conversation whose message of ``role`` has a name."""
        roles = {
            "system": ("system", "user"),
            "user": ("user",),
            "assistant": ("user", "assistant"),
        }
        messages = [{"role": each, "content": _ANSWER} for each in roles[role]]
        named = [{**m, "name": name} if m["role"] == role else m for m in messages]
        return self._conversation(*named)


def _with_json_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
