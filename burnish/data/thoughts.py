"""Reasoning in the text of an answer: the block ``<think>...</think>`` at its beginning.

The first ``</think>`` ends the block. Marks after it, or in the middle of a text, are text. Each
model family has tags of its own (:mod:`burnish.reasoning_tags`).
"""

from __future__ import annotations

from dataclasses import dataclass

from burnish.chat_message import REASONING, Message
from burnish.reasoning_tags import Tags, split_channels

_MOST_PARTS = 16


@dataclass(frozen=True)
class Thought:
    """Reasoning of an answer, and the text behind it."""

    reasoning: str
    gap: str
    """White space between the end of the reasoning and the text."""
    text: str
    """Text of the answer, without white space around it."""

    @classmethod
    def of(cls, message: Message, tags: Tags) -> Thought:
        """Return the reasoning of an answer, from its key or from the beginning of its text."""
        content = message["content"]
        if reasoning := message.get(REASONING[0]):
            return cls(reasoning.strip("\n"), tags.gap, content.strip())
        head, end, text = content.partition(tags.end)
        head = head.lstrip()
        if not end or (tags.begin in head and not head.startswith(tags.begin)):
            return cls("", tags.gap, content.strip())
        gap = text[: len(text) - len(text.lstrip())]
        return cls(head.removeprefix(tags.begin).strip("\n"), gap, text.strip())


@dataclass(frozen=True)
class RenderedAnswer:
    """An answer as a chat template renders it, in parts."""

    reasoning: str | None
    """Reasoning in its block, without line breaks around it. None: there is none."""
    is_closed: bool
    """The template writes the end of a block, which may be empty or not opened."""
    is_line: bool
    """The end of the block follows a line break."""
    gap: str
    """White space between the end of the block and the text."""
    text: str
    """The text, and what the template writes behind it."""


def split_rendered(
    rendered: str, thought: Thought, tags: Tags, *, rewrites: bool
) -> RenderedAnswer:
    """Split the rendering of an answer whose reasoning and text are ``thought``.

    Marks before the reasoning or the text are the template's: of a block that it opens or closes
    once more, or of an empty one. ``rewrites``: the template reads the reasoning from its key, so
    that another text in the block is the reasoning, rewritten.
    """
    reasoning, rest = thought.reasoning.strip(), rendered
    is_closed = is_line = is_open = False
    block: str | None = None
    while block is None:
        begin = rest.lstrip()
        space = rest[: len(rest) - len(begin)]
        behind = begin[len(reasoning) :]
        if reasoning and begin.startswith(reasoning) and behind.lstrip().startswith(tags.end):
            end = behind.index(tags.end)
            block, rest = space + reasoning + behind[:end], behind[end + len(tags.end) :]
            is_closed, is_line = True, "\n" in behind[:end]
        elif thought.text and begin.startswith(thought.text):
            break
        elif begin.startswith(tags.begin):
            is_open, rest = True, begin.removeprefix(tags.begin)
        elif begin.startswith(tags.end):
            is_closed, is_line, is_open = True, "\n" in space, False
            rest = begin.removeprefix(tags.end)
        elif rewrites and reasoning and is_open and tags.end in begin:
            block, _, rest = rest.partition(tags.end)
            is_closed, is_line = True, block.endswith("\n")
        else:
            break
    text = rest.lstrip()
    gap = rest[: len(rest) - len(text)]
    return RenderedAnswer(block and block.strip("\n"), is_closed, is_line, gap, text)


def with_reasoning_key(message: Message, tags: Tags) -> Message:
    """Return an answer with its reasoning in the key, instead of at the beginning of its text."""
    is_answer = message["role"] == "assistant" and REASONING[0] not in message
    block = tags.block(message.get("content") or "") if is_answer else None
    if block is None:
        return message
    return {**message, REASONING[0]: block[0].strip(), "content": block[1].lstrip()}


def without_channels(message: Message) -> Message:
    """Return an answer whose text has channels, with its reasoning in the key and its answer as
    text: as it was parsed, if it has a key already."""
    parts = split_channels(message.get("content") or "") if message["role"] == "assistant" else None
    if parts is None:
        return message
    reasoning = message.get(REASONING[0]) or parts.reasoning
    return {**message, **({REASONING[0]: reasoning} if reasoning else {}), "content": parts.answer}


def text_behind_repeated(message: Message, tags: Tags) -> str | None:
    """Return the text behind a block that repeats the reasoning under its key; None without one."""
    reasoning = message.get(REASONING[0], "").strip()
    block = tags.block(message.get("content") or "") if reasoning else None
    return block[1].lstrip() if block is not None and block[0].strip() == reasoning else None


def without_empty_block(message: Message, tags: Tags) -> Message:
    """Return an answer without an empty block of reasoning at the beginning of its text."""
    head, end, text = message["content"].partition(tags.end)
    is_empty = bool(end) and not head.strip().removeprefix(tags.begin).strip()
    return {**message, "content": text.lstrip()} if is_empty else message


def marked_parts(message: Message, tags: Tags) -> tuple[str, ...]:
    """Return the marks of reasoning in the text of a message, with an empty string for each text
    before, between and after them. Without marks: (). Of many parts: the first and the last.

    >>> from burnish.reasoning_tags import THINK
    >>> marked_parts({"role": "assistant", "content": "<think>why</think>4"}, THINK)
    ('<think>', '', '</think>', '')
    """
    content = message.get("content")
    if not isinstance(content, str) or not (tags.begin in content or tags.end in content):
        return ()
    parts: list[str] = []
    for i, ended in enumerate(content.split(tags.end)):
        parts += [tags.end] if i else []
        for k, text in enumerate(ended.split(tags.begin)):
            parts += [tags.begin] if k else []
            parts += [""] if text and not text.isspace() else []
    half = _MOST_PARTS // 2
    parts = parts if len(parts) <= _MOST_PARTS else parts[:half] + parts[-half:]
    return tuple(parts) if any(parts) else ()


def end_of_reasoning(message: Message, parts: tuple[str, ...], tags: Tags) -> int:
    """Return the number of :func:`marked_parts` that are reasoning, its marks included.

    Reasoning is a block at the beginning, also one that is not closed. Without reasoning in its
    key, it is also the text before the first ``</think>``, as a model writes it if the prompt opens
    the block.
    """
    if message["role"] != "assistant" or not parts:
        return 0
    opens = parts[0] == tags.begin
    if tags.end not in parts:
        return len(parts) if opens else 0
    end = parts.index(tags.end) + 1
    is_unopened = REASONING[0] not in message and tags.begin not in parts[:end]
    return end if opens or is_unopened else 0
