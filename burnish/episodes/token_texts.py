"""The text of each token of a response, such that the texts joined are the text of the response.

Decoded alone, a token can lose a space (SentencePiece) or be a part of a character.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING

from burnish.byte_tokens import REPLACEMENT, byte_tokens, bytes_of, is_inside_character
from burnish.data.decoding import CONTEXT, Decode, begins_text, context_of, window_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_CONTEXT = 64  # of a run of byte tokens, which decode together
_MOST_SHARED = 8  # tokens of a few characters


@dataclass(frozen=True)
class TokenPart:
    """The part of a response that one token adds."""

    text: str
    """Empty for a token that adds nothing visible, such as the end of a turn, and for all but the
    last token of a character."""
    data: bytes
    """The bytes of the token. Those of a response joined are its text in UTF-8."""


def token_parts(
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[int],
    ids: Sequence[int],
    text: str,
    *,
    begin: int = 0,
    decode: Decode,
) -> tuple[TokenPart, ...]:
    """Return the part of each token of a response. Their texts joined are ``text``: the text of the
    response, or a beginning of it, from ``begin`` on. ``prompt_ids``: the tokens before the
    response. ``decode``: decodes tokens as the text."""
    if not ids:
        return ()
    places = _Places(tokenizer, prompt_ids, decode)
    for token in ids:
        places.add(token)
    ends = [min(max(end, begin), len(text)) for end in places.ends]
    ends[-1] = len(text)
    texts = [text[start:end] for start, end in pairwise([begin, *ends])]
    return tuple(_with_bytes(texts, bytes_of(tokenizer, ids)))


class _Places:
    """The lengths of a text after each of its tokens. A character counts once it is complete."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_ids: Sequence[int],
        decode: Decode,
    ) -> None:
        self._tokenizer, self._decoded = tokenizer, decode
        self._bytes = byte_tokens(tokenizer)
        before = window_of(tokenizer, prompt_ids)
        self._window = max(context_of(tokenizer, before), list(before[-_MOST_CONTEXT:]), key=len)
        self._seen = ""
        """Text of the window."""
        self._shorten()
        self._length = 0
        self.ends: list[int] = []

    def add(self, token: int) -> None:
        self._window.append(token)
        text = self._decode()
        common = common_length(self._seen, text)
        self._length -= len(self._seen) - common  # below 0: the token changes the prompt's text
        for place in range(len(self.ends) - 1, -1, -1):  # the token changes earlier text
            if self.ends[place] <= self._length:
                break
            self.ends[place] = self._length
        self._length += len(text) - common
        self.ends.append(self._length)
        self._seen = text
        if begins_text(self._tokenizer, token, self._decoded):
            self._window, self._seen = [], ""
        elif len(self._window) > 2 * CONTEXT:
            self._shorten()

    def _shorten(self) -> None:
        """Drop tokens on which the text of later ones does not depend."""
        begin = len(self._window) - len(context_of(self._tokenizer, self._window))
        first = max(0, len(self._window) - _MOST_CONTEXT)
        while begin > first and self._window[begin] in self._bytes:
            begin -= 1  # bytes decode together
        inside = (is_inside_character(self._bytes.get(i)) for i in self._window[begin:])
        self._window = self._window[begin + sum(takewhile(bool, inside)) :]
        self._seen = self._decode()

    def _decode(self) -> str:
        return self._decoded(self._window).rstrip(REPLACEMENT)


def common_length(first: str, second: str) -> int:
    """Return the length of the longest common beginning of two texts."""
    if second.startswith(first):
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _with_bytes(texts: Sequence[str], raw: Sequence[bytes | None]) -> Iterator[TokenPart]:
    """Yield the parts. ``raw``: bytes of each token, None if they are unknown. Where these are not
    its text, such as a special token that is left out, the bytes are those of the text."""
    place = 0
    while place < len(texts):
        end = _whole(texts, raw, place)
        for i in range(place, max(end, place + 1)):
            data = raw[i] if i < end else None
            yield TokenPart(texts[i], texts[i].encode("utf-8", "replace") if data is None else data)
        place = max(end, place + 1)


def _whole(texts: Sequence[str], raw: Sequence[bytes | None], place: int) -> int:
    """Return the end of the tokens from ``place`` on whose bytes are their text; ``place`` if there
    are none. Several tokens can share a character."""
    data, text = b"", ""
    for i in range(place, min(place + _MOST_SHARED, len(texts))):
        piece = raw[i]
        if piece is None:
            break
        data, text = data + piece, text + texts[i]
        if data.decode("utf-8", "replace") == text:
            return i + 1
    return place
