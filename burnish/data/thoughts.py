"""Reasoning in the text of an answer: the block ``<think>...</think>`` at its beginning.

The first ``</think>`` ends the block. Marks after it, or in the middle of a text, are text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from burnish.chat_message import REASONING, Message

THINK, THINK_END = "<think>", "</think>"
"""Markers of reasoning inside the text of an answer."""
_MOST_PARTS = 16


def reasoning_block(text: str) -> tuple[str, str] | None:
    """Return (reasoning, text behind it) of an answer that begins with a block of reasoning.

    >>> reasoning_block("<think>why</think>4 </think>"), reasoning_block("4 <think>why</think>")
    (('why', '4 </think>'), None)
    """
    begin = text.lstrip()
    if not begin.startswith(THINK) or THINK_END not in begin:
        return None
    block, _, rest = begin.removeprefix(THINK).partition(THINK_END)
    return block, rest


@dataclass(frozen=True)
class Thought:
    """Reasoning of an answer, and the text behind it."""

    reasoning: str
    gap: str
    """White space between the end of the reasoning and the text."""
    text: str
    """Text of the answer, without white space around it."""

    @classmethod
    def of(cls, message: Message) -> Thought:
        """Return the reasoning of an answer, from its key or from the beginning of its text."""
        content = message["content"]
        if reasoning := message.get(REASONING[0]):
            return cls(reasoning.strip("\n"), "\n\n", content.strip())
        head, end, text = content.partition(THINK_END)
        head = head.lstrip()
        if not end or (THINK in head and not head.startswith(THINK)):
            return cls("", "\n\n", content.strip())
        gap = text[: len(text) - len(text.lstrip())]
        return cls(head.removeprefix(THINK).strip("\n"), gap, text.strip())


def prompt_block(prompt: str) -> tuple[str, Literal["opened", "closed", "none"]]:
    """Return a prompt without the block of reasoning that it ends with, and the state of the block.

    >>> prompt_block("A:<think>\\n"), prompt_block("A:<think></think>"), prompt_block("A:</think>")
    (('A:', 'opened'), ('A:', 'closed'), ('A:', 'closed'))
    """
    text = prompt.rstrip()
    if text.endswith(THINK):
        return text.removesuffix(THINK), "opened"
    if not text.endswith(THINK_END):
        return prompt, "none"
    head = text.removesuffix(THINK_END)
    opened = head.rstrip()
    return opened.removesuffix(THINK) if opened.endswith(THINK) else head, "closed"


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


def split_rendered(rendered: str, thought: Thought, *, rewrites: bool) -> RenderedAnswer:
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
        if reasoning and begin.startswith(reasoning) and behind.lstrip().startswith(THINK_END):
            end = behind.index(THINK_END)
            block, rest = space + reasoning + behind[:end], behind[end + len(THINK_END) :]
            is_closed, is_line = True, "\n" in behind[:end]
        elif thought.text and begin.startswith(thought.text):
            break
        elif begin.startswith(THINK):
            is_open, rest = True, begin.removeprefix(THINK)
        elif begin.startswith(THINK_END):
            is_closed, is_line, is_open = True, "\n" in space, False
            rest = begin.removeprefix(THINK_END)
        elif rewrites and reasoning and is_open and THINK_END in begin:
            block, _, rest = rest.partition(THINK_END)
            is_closed, is_line = True, block.endswith("\n")
        else:
            break
    text = rest.lstrip()
    gap = rest[: len(rest) - len(text)]
    return RenderedAnswer(block and block.strip("\n"), is_closed, is_line, gap, text)


def with_reasoning_key(message: Message) -> Message:
    """Return an answer with its reasoning in the key, instead of at the beginning of its text."""
    is_answer = message["role"] == "assistant" and REASONING[0] not in message
    block = reasoning_block(message.get("content") or "") if is_answer else None
    if block is None:
        return message
    return {**message, REASONING[0]: block[0].strip(), "content": block[1].lstrip()}


def text_behind_repeated(message: Message) -> str | None:
    """Return the text behind a block that repeats the reasoning under its key; None without one."""
    reasoning = message.get(REASONING[0], "").strip()
    block = reasoning_block(message.get("content") or "") if reasoning else None
    return block[1].lstrip() if block is not None and block[0].strip() == reasoning else None


def without_empty_block(message: Message) -> Message:
    """Return an answer without an empty block of reasoning at the beginning of its text."""
    head, end, text = message["content"].partition(THINK_END)
    is_empty = bool(end) and not head.strip().removeprefix(THINK).strip()
    return {**message, "content": text.lstrip()} if is_empty else message


def marked_parts(message: Message) -> tuple[str, ...]:
    """Return the marks of reasoning in the text of a message, with an empty string for each text
    before, between and after them. Without marks: (). Of many parts: the first and the last.

    >>> marked_parts({"role": "assistant", "content": "<think>why</think>4"})
    ('<think>', '', '</think>', '')
    """
    content = message.get("content")
    if not isinstance(content, str) or "think>" not in content:
        return ()
    parts: list[str] = []
    for i, ended in enumerate(content.split(THINK_END)):
        parts += [THINK_END] if i else []
        for k, text in enumerate(ended.split(THINK)):
            parts += [THINK] if k else []
            parts += [""] if text and not text.isspace() else []
    half = _MOST_PARTS // 2
    parts = parts if len(parts) <= _MOST_PARTS else parts[:half] + parts[-half:]
    return tuple(parts) if any(parts) else ()


def end_of_reasoning(message: Message, parts: tuple[str, ...]) -> int:
    """Return the number of :func:`marked_parts` that are reasoning, its marks included.

    Reasoning is a block at the beginning, also one that is not closed. Without reasoning in its
    key, it is also the text before the first ``</think>``, as a model writes it if the prompt opens
    the block.
    """
    if message["role"] != "assistant" or not parts:
        return 0
    opens = parts[0] == THINK
    if THINK_END not in parts:
        return len(parts) if opens else 0
    end = parts.index(THINK_END) + 1
    is_unopened = REASONING[0] not in message and THINK not in parts[:end]
    return end if opens or is_unopened else 0
