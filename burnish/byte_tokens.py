"""Byte tokens of a vocabulary (``<0xE6>``), and the last tokens of a text that contains them.

SentencePiece vocabularies write a character without a token as the tokens of its bytes. The fast
decoder reads a run of byte tokens at once: if its bytes are not UTF-8, each of them becomes U+FFFD,
also the letters among them. So the text of a token can depend on tokens far before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
"""The character that decoding writes for bytes that are no character."""

_known: WeakKeyDictionary[PreTrainedTokenizerBase, dict[int, int]] = WeakKeyDictionary()


def byte_tokens(tokenizer: PreTrainedTokenizerBase) -> Mapping[int, int]:
    """Return id -> byte of the tokens that stand for one byte. Empty for byte-level vocabularies,
    which write bytes as letters."""
    known = _known.get(tokenizer)
    if known is None:
        names = {f"<0x{byte:02X}>": byte for byte in range(256)}
        ids = {name: tokenizer.convert_tokens_to_ids(name) for name in names}
        known = _known[tokenizer] = {
            token: names[name]
            for name, token in ids.items()
            if isinstance(token, int)
            and tokenizer.convert_ids_to_tokens(token) == name
            and str(tokenizer.decode([token])) != name  # else it is a word of the vocabulary
        }
    return known


def bytes_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[bytes | None]:
    """Return the bytes of each token: of byte tokens, and of byte-level vocabularies. None for
    others."""
    values = byte_tokens(tokenizer)
    pieces = zip(ids, tokenizer.convert_ids_to_tokens(list(ids)), strict=True)
    return [bytes([values[i]]) if i in values else _bytes_of(str(piece)) for i, piece in pieces]


def _bytes_of(piece: str) -> bytes | None:
    """Return the bytes of a token of a byte-level vocabulary."""
    alphabet = _byte_alphabet()
    try:
        return bytes(alphabet[character] for character in piece)
    except KeyError:
        return None


@cache
def _byte_alphabet() -> dict[str, int]:
    """Return character -> byte of byte-level vocabularies: printable Latin-1 stands for itself, the
    other bytes are numbered from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }


def is_inside_character(byte: int | None) -> bool:
    """Return whether ``byte`` is a byte of a character other than its first one, in UTF-8."""
    return byte is not None and 0x80 <= byte < 0xC0


class TailTokens:
    """The last tokens of a growing text, such that they decode to the end of its text, but for the
    beginning of the first one (its space, or ``##``).

    They begin with a complete character. In a run of byte tokens that is not UTF-8, all of them are
    one byte that is no character on its own. Each token takes constant time.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int | None) -> None:
        """``size``: number of tokens to keep, up to three more for a character. None: all."""
        self.ids: list[int] = []
        self.is_cut = False
        """True if tokens before ``ids`` were dropped."""
        self._size = size
        self._bytes = byte_tokens(tokenizer)
        self._no_character = _no_character(tokenizer, self._bytes)
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._run_length = 0
        self._run_is_broken = False

    def add(self, token: int) -> None:
        """Append a token."""
        byte = self._bytes.get(token)
        if byte is None:
            self._utf8.reset()
            self._run_length, self._run_is_broken = 0, False
        elif self._no_character is not None:
            token = self._in_run(token, byte, self._no_character)
        self.ids.append(token)
        if self._size is not None and len(self.ids) > self._size:
            begin = len(self.ids) - self._size
            for _ in range(3):  # a character has at most three more bytes
                if begin and is_inside_character(self._bytes.get(self.ids[begin])):
                    begin -= 1
            self.is_cut |= begin > 0
            del self.ids[:begin]

    def _in_run(self, token: int, byte: int, no_character: int) -> int:
        """Return the token to append for a byte token, and replace those before it in its run if
        the run is not UTF-8 because of it."""
        self._run_length += 1
        if self._run_is_broken:
            return no_character
        try:
            self._utf8.decode(bytes([byte]))
        except UnicodeDecodeError:
            self._run_is_broken = True
            begin = max(0, len(self.ids) - self._run_length + 1)
            self.ids[begin:] = [no_character] * (len(self.ids) - begin)
            return no_character
        return token


def _no_character(tokenizer: PreTrainedTokenizerBase, values: Mapping[int, int]) -> int | None:
    """Return a byte token that is not UTF-8 in any run of itself. None if the decoder reads the
    characters of a run one by one, or if every run is UTF-8."""
    last = max(values, key=values.__getitem__, default=None)
    first = min(values, key=values.__getitem__, default=None)
    if last is None or first is None or values[last] < 0x80 or values[first] >= 0x80:
        return None
    text = str(tokenizer.decode([first, last]))
    return last if text == REPLACEMENT * 2 else None
