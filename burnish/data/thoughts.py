"""Reasoning in the text of an answer: the block ``<think>...</think>`` at its beginning.

The first ``</think>`` ends the block. Marks after it, or in the middle of a text, are text.
"""

from __future__ import annotations

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


def with_reasoning_key(message: Message) -> Message:
    """Return an answer with its reasoning in the key, instead of at the beginning of its text."""
    is_answer = message["role"] == "assistant" and REASONING[0] not in message
    block = reasoning_block(message.get("content") or "") if is_answer else None
    if block is None:
        return message
    return {**message, REASONING[0]: block[0].strip(), "content": block[1].lstrip()}


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
