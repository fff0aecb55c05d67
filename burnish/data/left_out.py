"""Detect parts of messages that a chat template does not render.

Marks in place of texts and calls are rendered once for each sequence of message shapes. What is
missing is refused, or recorded as a notice.

Reading order: check_rendering, Field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from weakref import WeakKeyDictionary

from burnish.chat_message import REASONING, USUAL_ROLES, Message
from burnish.data.messages import as_rendered
from burnish.data.notices import collecting, note
from burnish.data.rendering import Habits, Tools, habits_of, render_text
from burnish.data.sources import DataError
from burnish.data.thoughts import end_of_reasoning, marked_parts
from burnish.reasoning_tags import Tags
from burnish.templates import of_conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

Field = Literal[
    "content",
    "text with tool calls",
    "tool calls",
    "tools",
    "empty answer",
    "text at marks",
    "end of reasoning",
]
"""Part of a message whose loss changes the meaning of a conversation. ``empty answer``: a trained
answer without text and tool calls. ``text at marks``: text of a message that mentions ``<think>``
or ``</think>``. ``end of reasoning``: reasoning of a trained answer behind a closing tag in it."""

REFUSED: frozenset[Field] = frozenset(
    {
        *("content", "text with tool calls", "tool calls", "empty answer", "text at marks"),
        "end of reasoning",
    }
)
"""Fields that may not be left out of training data."""
REFUSED_IN_PROMPTS: frozenset[Field] = frozenset({"content", "tool calls"})
"""Fields that may not be left out of the prompt of an episode or of a request. The policy may write
text with tool calls, which many templates leave out."""
REFUSED_BEHIND_TURNS: frozenset[Field] = frozenset({"content"})
"""Fields that may not be left out of messages behind a turn that is kept as tokens. A tool format
may be described in the system prompt, with calls that the template does not render."""
_LOST_TEXTS = frozenset({"text_with_calls_dropped", "text_at_marks_dropped", "reasoning_ignored"})
_Shape = tuple[str, bool, tuple[bool, ...], bool, tuple[str, ...]]
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
    tokenizer, messages = of_conversation(tokenizer, messages, tools), as_rendered(messages)
    habits = habits_of(tokenizer, tools)
    for field, role in _fields_left_out(tokenizer, messages, tools, habits.tags):
        if field == "tools":
            note("tools_ignored", _TOOLS_IGNORED)
        elif field in refused:
            raise _left_out_error(field, role, system_prompt, habits.tags)
        elif field == "text at marks":
            note("text_at_marks_dropped", _text_at_marks(habits.tags))
        elif field == "text with tool calls":
            note("text_with_calls_dropped", str(_left_out_error(field, role, None, habits.tags)))
    template = str(tokenizer.chat_template)
    for role in {message["role"] for message in messages} - USUAL_ROLES:
        if f"'{role}'" not in template and f'"{role}"' not in template:
            note(
                "unknown_role",
                f"the chat template does not name the role {role!r}, but renders its messages, in "
                "a form that the model does not know; rename the role to one of "
                f"{', '.join(sorted(USUAL_ROLES))}",
            )
    _note_ignored(habits, messages, template)


def with_lost_texts(
    render: Callable[..., T], *args: Any, **options: Any
) -> tuple[T, tuple[str, ...]]:
    """Return the result of ``render``, and the kinds of notices about texts of the messages that
    the template left out meanwhile."""
    with collecting() as notes:
        result = render(*args, **options)
    return result, tuple(kind for kind in notes if kind in _LOST_TEXTS)


def renders_tools(tokenizer: PreTrainedTokenizerBase, tools: Tools) -> bool:
    """Return whether the chat template shows descriptions of tools to the model."""
    question = [{"role": "user", "content": "Go."}]
    tokenizer = of_conversation(tokenizer, question, tools)
    left_out = _fields_left_out(tokenizer, question, tools, habits_of(tokenizer, tools).tags)
    return all(field != "tools" for field, _ in left_out)


def _left_out_error(field: Field, role: str, system_prompt: str | None, tags: Tags) -> DataError:
    if field == "tool calls":
        return DataError(
            f"the chat template leaves out the tool calls of the role {role!r}, so the model "
            "would see, or be trained on, an answer without them. Set model.chat_template to a "
            "template that renders tool calls, or write the calls as text into the content"
        )
    if field == "text with tool calls":
        return DataError(
            f"the chat template leaves out the text of a message of the role {role!r} that has "
            "tool calls. Set model.chat_template to a template that renders both, or remove the "
            "text"
        )
    if field == "text at marks":
        return DataError(f"{_text_at_marks(tags)} (role {role!r})")
    subject = f"messages of the role {role!r}"
    if role == "system" and system_prompt is not None:
        subject = "the system prompt (system_prompt)"
    return DataError(
        f"the chat template leaves out {subject}: it does not render that role, so the model would "
        "never see the text. Set model.chat_template to a template that renders it, or put the "
        "text into a user message"
    )


def _text_at_marks(tags: Tags) -> str:
    return (
        f"the chat template leaves out text of a message that mentions {tags.begin} or {tags.end}: "
        "it reads all text up to such a mark as reasoning. Write the marks in another way "
        "(`think`), set model.chat_template to one that does not split texts, or drop the row "
        "(data.on_bad_row: skip drops all such rows)"
    )


_TOOLS_IGNORED = (
    "the chat template does not render tools, so the model does not see those in the column "
    "tools_key; set model.chat_template to one that does, or tools_key: null"
)


_OWN_KEYS = {
    "functions": "give the tools in a column (data.tools_key)",
    "tools": "give the tools in a column (data.tools_key)",
    "function_calls": "write the calls as `tool_calls`",
    "tool_plan": "write it as `reasoning_content`",
    "documents": "write them into the content",
}
"""Keys of messages with texts that templates of some families read (OLMo 3, Cohere, Phi 4) -> what
others read in their place."""


def _note_unopened(message: Message, tags: Tags) -> None:
    """Record a notice if text counts as reasoning because of the mark at its end."""
    content = message.get("content")
    if not isinstance(content, str) or content.lstrip().startswith(tags.begin):
        return
    if tags.end in content and end_of_reasoning(message, marked_parts(message, tags), tags):
        note(
            "reasoning_unopened",
            f"an answer has {tags.end} without {tags.begin} at its beginning, so the text before "
            f"it counts as reasoning. Write {tags.begin} at the beginning if it is, else write the "
            "mark in another way (`/think`)",
        )


def _note_ignored(habits: Habits, messages: Sequence[Message], template: str) -> None:
    """Record notices for fields of the messages that the template does not render, and for blocks
    of the template that have no effect."""
    if habits.marks_others and any(message["role"] == "assistant" for message in messages):
        note(
            "generation_blocks_ignored",
            "the chat template marks other texts than entire answers with {% generation %}, but "
            "all answers are trained, each from its beginning to its end token; set "
            "data.train_on_turns, or train: false in messages, to train some answers only",
        )
    splits = habits.tags.end in template
    for message in messages:
        if splits:
            _note_unopened(message, habits.tags)
        if len(message) == 2:
            continue
        if habits.ignores_reasoning_of(message):
            note(
                "reasoning_ignored",
                "the chat template does not render reasoning, so the model does not learn it; set "
                "model.chat_template to one that does, or write the reasoning into the content",
            )
        for key, way in _OWN_KEYS.items():
            reads = (f".{key}", f"'{key}'", f'"{key}"')
            if message.get(key) and not any(text in template for text in reads):
                note(
                    f"{key}_ignored",
                    f"the chat template does not read {key!r} of messages, so the model does not "
                    f"see it; {way}, or set model.chat_template to one that reads it",
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
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools, tags: Tags
) -> _LeftOut:
    """Return (field, role) of everything that is not rendered, from the cache if possible."""
    known = _left_out.setdefault(tokenizer, {})
    shapes = tuple(
        (
            *(m["role"], _has_prose(m), tuple(map(_names_id, m.get("tool_calls", ())))),
            REASONING[0] in m,
            marked_parts(m, tags),
        )
        for m in messages
    )
    key = (str(tokenizer.chat_template), shapes, bool(tools))
    if key not in known:
        if len(known) >= _MOST_SEQUENCES:
            known.clear()
        known[key] = _find_left_out(tokenizer, messages, tools, tags)
    return known[key]


def _names_id(call: Message) -> bool:
    """Return whether the name of a tool call is a word of its id, which some templates render alone
    (Kimi K2: ``functions.look_up:0``)."""
    name = re.escape(call["function"]["name"])
    return re.search(rf"(?<!\w){name}(?!\w)", str(call.get("id", ""))) is not None


def _has_prose(message: Message) -> bool:
    """Return whether the content is text that every template should render."""
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip())


def _find_left_out(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools, tags: Tags
) -> _LeftOut:
    marked = [_marked(i, message, tags) for i, message in enumerate(messages)]
    prompts = messages[-1]["role"] != "assistant"
    try:
        text = render_text(tokenizer, marked, add_generation_prompt=prompts, tools=tools)
        plain = text if not tools else render_text(tokenizer, marked, add_generation_prompt=prompts)
    except DataError:  # the template inspects contents; rendering the row itself reports errors
        return ()
    left_out: list[tuple[Field, str]] = []
    for i, message in enumerate(messages):
        role, calls = str(message["role"]), message.get("tool_calls", ())
        if (lost := _lost_text(i, message, text, tags)) is not None:
            left_out.append(("text with tool calls" if calls and lost == "content" else lost, role))
        names = [
            str(call["id"]) if _names_id(call) and str(call["id"]) in text else f"name{i}x{k}end"
            for k, call in enumerate(calls)
        ]
        values = [f"value{i}x{k}end" for k in range(len(calls))]
        if not all(mark in text for mark in (*names, *values)):
            left_out.append(("tool calls", role))
    if tools and plain == text:
        left_out.append(("tools", ""))
    return tuple(left_out)


def _lost_text(i: int, message: Message, text: str, tags: Tags) -> Field | None:
    """Return which text of a message is missing in the rendering of its marks, except for its
    reasoning; None if all is there."""
    if not _has_prose(message):
        return None
    parts = marked_parts(message, tags)
    begin = end_of_reasoning(message, parts, tags) if parts else 0
    answer = _content(i, parts or ("",), begin)
    if answer in text:
        return None
    is_split = bool(parts) and (message["role"] == "assistant" or f"marker{i}x" in text)
    return "text at marks" if is_split else "content"


def _content(i: int, parts: Sequence[str], begin: int = 0) -> str:
    """Return marks in place of the texts between the marks of reasoning, from part ``begin``."""
    return "".join(part or f"marker{i}x{k}end" for k, part in enumerate(parts) if k >= begin)


def _marked(i: int, message: Message, tags: Tags) -> dict[str, Any]:
    """Return a message with marks in place of its content and its tool calls."""
    marked = dict(message)
    if _has_prose(message):
        marked["content"] = _content(i, marked_parts(message, tags) or ("",))
    if "tool_calls" in message:
        marked["tool_calls"] = [
            {
                **call,
                "function": {"name": f"name{i}x{k}end", "arguments": {"key": f"value{i}x{k}end"}},
            }
            for k, call in enumerate(message["tool_calls"])
        ]
    return marked
