"""Find the tokens at which the steps of a response end. A process reward model scores them."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


def step_ends(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], separator: str) -> list[int]:
    """Return the indices in response ``ids`` [T] at which a step ends, in order.

    A step ends at the token that completes a separator, if there is text since the previous
    separator. The last step ends at the last token of the response. Tokens without text after the
    last separator (an end token, spaces) belong to the step before it. A response with at most one
    step has one index, T - 1.
    """
    text = str(tokenizer.decode(list(ids), skip_special_tokens=True))
    ends: list[int] = []
    begin, pending = 0, False
    while (separator_begin := text.find(separator, begin)) >= 0:
        pending = pending or bool(text[begin:separator_begin].strip())
        begin = separator_begin + len(separator)
        if pending:
            ends.append(_token_of(tokenizer, ids, begin))
            pending = False
    last = len(ids) - 1
    if not text[begin:].strip() and ends:
        ends.pop()
    return [*(end for end in dict.fromkeys(ends) if end < last), last]


def _token_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], length: int) -> int:
    """Return the index of the first token with which the decoded text has ``length`` characters."""
    low, high = 0, len(ids) - 1
    while low < high:
        middle = (low + high) // 2
        # An incomplete character decodes to U+FFFD, which does not count yet.
        text = str(tokenizer.decode(list(ids[: middle + 1]), skip_special_tokens=True))
        if len(text.rstrip("\ufffd")) >= length:
            high = middle
        else:
            low = middle + 1
    return low
