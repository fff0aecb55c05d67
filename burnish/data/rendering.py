"""Render conversations with a chat template, and detect from renderings what it leaves out.

Templates read messages in different forms: arguments of tool calls as an object or as JSON text,
tool calls with an empty content or without one, reasoning under one of three keys. The form that
a template renders is found by rendering short conversations with marks in their fields
(:class:`Habits`), once per template, and messages are rendered in that form.

Reading order: render_text, Habits, check_rendering.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from jinja2 import TemplateError

from burnish.chat_message import REASONING, USUAL_ROLES, Message, roles_of
from burnish.data.notices import note
from burnish.data.sources import DataError
from burnish.templates import render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]] | None

THINK, THINK_END = "<think>", "</think>"
"""Markers of reasoning inside the text of an answer."""


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
    if tools or any("tool_calls" in m or REASONING[0] in m for m in messages):
        habits = habits_of(tokenizer, tools)
        messages = habits.adapted(messages)
        if tools and habits.bare_tools:
            tools = [tool.get("function", tool) for tool in tools]
    return _render(tokenizer, messages, add_generation_prompt, tools, today)


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
    bare_tools: bool = False
    """Tools are rendered only as ``{"name", "parameters"}`` without OpenAI's wrapper."""
    marks_others: bool = False
    """Blocks ``{% generation %}`` of the template are not the answers, each from its beginning."""

    def ignores_reasoning_of(self, message: Message) -> bool:
        """Return whether the message has reasoning that the template never renders."""
        ignores = self.reasoning_key is None and not self.cuts_reasoning
        return ignores and REASONING[0] in message

    def adapted(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages in the form that the template reads."""
        moves = self.reasoning_key not in (None, REASONING[0])
        if not (self.json_arguments or self.without_content or moves):
            return messages
        return [self._adapted(message) for message in messages]

    def _adapted(self, message: Message) -> Message:
        adapted = dict(message)
        if calls := message.get("tool_calls"):
            if self.json_arguments:
                adapted["tool_calls"] = [_with_json_arguments(call) for call in calls]
            if self.without_content and not message["content"]:
                del adapted["content"]
        if self.reasoning_key is not None and REASONING[0] in message:
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
        probe = _Probe(tokenizer, _TOOLS if tools else None)
        json_arguments, without_content = probe.form_of_calls()
        known[key] = Habits(
            json_arguments=json_arguments,
            without_content=without_content,
            reasoning_key=probe.reasoning_key(),
            cuts_reasoning=probe.cuts_reasoning(),
            ignored=frozenset(probe.ignored(json_arguments, without_content)),
            bare_tools=bool(tools) and probe.bare_tools(),
            marks_others=probe.marks_others(),
        )
    return known[key]


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


class _Probe:
    """Renders short conversations with marks in their fields."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: Tools) -> None:
        self._tokenizer, self._tools = tokenizer, tools

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
        """Return whether the text before ``</think>`` is missing in the last answer."""
        content = f"{THINK}\n{_THOUGHT}\n{THINK_END}\n\n{_ANSWER}"
        text = self._text({"role": "assistant", "content": content}) or ""
        return _ANSWER in text and _THOUGHT not in text

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


# --- fields that are left out

Field = Literal["content", "text with tool calls", "tool calls", "tools", "empty answer"]
"""Part of a message whose loss changes the meaning of a conversation. ``empty answer``: a trained
answer without text and tool calls."""

REFUSED: frozenset[Field] = frozenset(
    {"content", "text with tool calls", "tool calls", "empty answer"}
)
"""Fields that may not be left out of training data."""
REFUSED_IN_EPISODES: frozenset[Field] = frozenset({"content"})
"""Fields that may not be left out of a running episode. The policy may write text with tool
calls, and a tool format may be described in the system prompt, with calls that the template does
not render."""
_Shape = tuple[str, bool, int, bool]
_Sequence = tuple[str, tuple[_Shape, ...], bool]
_LeftOut = tuple[tuple[Field, str], ...]
_left_out: WeakKeyDictionary[PreTrainedTokenizerBase, dict[_Sequence, _LeftOut]] = (
    WeakKeyDictionary()
)
_MOST_SEQUENCES = 4096  # cached sequences of shapes per tokenizer


def check_rendering(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Tools = None,
    *,
    system_prompt: str | None = None,
    refused: Collection[Field] = REFUSED,
) -> None:
    """Raise DataError if the chat template leaves out text or tool calls. Record a notice if it
    leaves out tools, reasoning, names or ids of calls, and for unknown roles.

    The check renders marks in place of the contents, once for each sequence of message shapes
    (role and fields). ``refused``: the fields that are checked; messages of a running episode may
    contain text that the policy wrote with tool calls, which many templates leave out.
    """
    for field, role in _fields_left_out(tokenizer, messages, tools):
        if field == "tools":
            note("tools_ignored", _TOOLS_IGNORED)
        elif field in refused:
            raise _left_out_error(field, role, system_prompt)
    _note_unknown_roles(str(tokenizer.chat_template), messages)
    _note_ignored(habits_of(tokenizer, tools), messages)


def _left_out_error(field: Field, role: str, system_prompt: str | None) -> DataError:
    if field == "tool calls":
        return DataError(
            f"the chat template leaves out the tool calls of the role {role!r}, so the model "
            "would be trained on an answer without them. Set model.chat_template to a template "
            "that renders tool calls, or write the calls as text into the content"
        )
    if field == "text with tool calls":
        return DataError(
            f"the chat template leaves out the text of a message of the role {role!r} that has "
            "tool calls. Set model.chat_template to a template that renders both, or remove the "
            "text"
        )
    subject = f"messages of the role {role!r}"
    if role == "system" and system_prompt is not None:
        subject = "the system prompt (system_prompt)"
    return DataError(
        f"the chat template leaves out {subject}: it does not render that role, so the model would "
        "never see the text. Set model.chat_template to a template that renders it, or put the "
        "text into a user message"
    )


_TOOLS_IGNORED = (
    "the chat template does not render tools, so the model does not see those in the column "
    "tools_key; set model.chat_template to one that does, or tools_key: null"
)


def _note_unknown_roles(template: str, messages: Sequence[Message]) -> None:
    """Record a notice for a role that is neither a usual one nor named in the template: it is
    rendered in a form that no training data of the model has."""
    for role in {message["role"] for message in messages} - USUAL_ROLES:
        if f"'{role}'" not in template and f'"{role}"' not in template:
            note(
                "unknown_role",
                f"the chat template does not name the role {role!r}, but renders its messages, in "
                "a form that the model does not know; rename the role to one of "
                f"{', '.join(sorted(USUAL_ROLES))}",
            )


def _note_ignored(habits: Habits, messages: Sequence[Message]) -> None:
    """Record notices for fields of the messages that the template does not render, and for blocks
    of the template that have no effect."""
    if habits.marks_others and any(message["role"] == "assistant" for message in messages):
        note(
            "generation_blocks_ignored",
            "the chat template marks other texts than entire answers with {% generation %}, but "
            "all answers are trained, each from its beginning to its end token; set "
            "data.train_on_turns, or train: false in messages, to train some answers only",
        )
    for message in messages:
        if len(message) == 2:
            continue
        if habits.ignores_reasoning_of(message):
            note(
                "reasoning_ignored",
                "the chat template does not render reasoning, so the model does not learn it; set "
                "model.chat_template to one that does, or write the reasoning into the content",
            )
        for key in ("name", "tool_call_id"):
            if key in message and (message["role"], key) in habits.ignored:
                note(
                    f"{key}_ignored",
                    f"the chat template does not render {key!r} of messages of the role "
                    f"{message['role']!r}, so the model does not see it; set model.chat_template "
                    "to one that does, if results or speakers cannot be told apart without it",
                )


def _fields_left_out(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools
) -> _LeftOut:
    """Return (field, role) of everything that is not rendered, from the cache if possible."""
    known = _left_out.setdefault(tokenizer, {})
    shapes = tuple(
        (m["role"], _has_prose(m), len(m.get("tool_calls", ())), REASONING[0] in m)
        for m in messages
    )
    key = (str(tokenizer.chat_template), shapes, bool(tools))
    if key not in known:
        if len(known) >= _MOST_SEQUENCES:
            known.clear()
        known[key] = _find_left_out(tokenizer, messages, tools)
    return known[key]


def _has_prose(message: Message) -> bool:
    """Return whether the content is text that every template should render."""
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip())


def _find_left_out(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools
) -> _LeftOut:
    marked = [_marked(i, message) for i, message in enumerate(messages)]
    prompts = messages[-1]["role"] != "assistant"
    try:
        text = render_text(tokenizer, marked, add_generation_prompt=prompts, tools=tools)
        plain = text if not tools else render_text(tokenizer, marked, add_generation_prompt=prompts)
    except DataError:  # the template inspects contents; rendering the row itself reports errors
        return ()
    left_out: list[tuple[Field, str]] = []
    for i, message in enumerate(messages):
        role, calls = str(message["role"]), message.get("tool_calls", ())
        if _has_prose(message) and f"marker{i}end" not in text:
            left_out.append(("text with tool calls" if calls else "content", role))
        marks = [f"{mark}{i}x{k}end" for k in range(len(calls)) for mark in ("name", "value")]
        if not all(mark in text for mark in marks):
            left_out.append(("tool calls", role))
    if tools and plain == text:
        left_out.append(("tools", ""))
    return tuple(left_out)


def _marked(i: int, message: Message) -> dict[str, Any]:
    """Return a message with marks in place of its content and its tool calls."""
    marked = dict(message)
    if _has_prose(message):
        marked["content"] = f"marker{i}end"
    if "tool_calls" in message:
        marked["tool_calls"] = [
            {
                **call,
                "function": {"name": f"name{i}x{k}end", "arguments": {"key": f"value{i}x{k}end"}},
            }
            for k, call in enumerate(message["tool_calls"])
        ]
    return marked
