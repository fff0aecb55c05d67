"""Where the steps of a response end: what a process reward model is asked about."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


def step_ends(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], separator: str) -> list[int]:
    """The places in response ``ids`` [T] at which a step ends, in order: the token that completes a
    separator, where there is text in front of it since the last one; and the last token of the
    response. What follows the last separator belongs to the step before it where it has no text of
    its own (an end token, spaces). A response of one step or of none has one place, T - 1."""
    text = str(tokenizer.decode(list(ids), skip_special_tokens=True))
    ends: list[int] = []
    begin, pending = 0, False
    while (found := text.find(separator, begin)) >= 0:
        pending = pending or bool(text[begin:found].strip())
        begin = found + len(separator)
        if pending:
            ends.append(_token_of(tokenizer, ids, begin))
            pending = False
    last = len(ids) - 1
    if not text[begin:].strip() and ends:
        ends.pop()
    return [*(end for end in dict.fromkeys(ends) if end < last), last]


def _token_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], length: int) -> int:
    """The first token with which the decoded text is ``length`` characters long."""
    low, high = 0, len(ids) - 1
    while low < high:
        middle = (low + high) // 2
        # Half a character decodes to a mark of its own, which is not yet the character.
        text = str(tokenizer.decode(list(ids[: middle + 1]), skip_special_tokens=True))
        if len(text.rstrip("\ufffd")) >= length:
            high = middle
        else:
            low = middle + 1
    return low
