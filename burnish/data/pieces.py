"""Tokenize one piece of a text as the tokenizer does within the text.

Many tokenizers treat the start of a text differently: SentencePiece-style ones and ByteLevel with
``add_prefix_space`` prepend a space, others strip white space or start a word. A piece that
continues a text must not get that. So it is tokenized behind a neighbor, and the neighbor's ids are
removed. A neighbor that merges with the piece shows in its ids; then the next one is used. Each
fact of a tokenizer is found by tokenizing probes, never by the names of its parts.

Example: a tokenizer with ``a`` -> ``▁a`` and ``x\\na`` -> ``▁x \\n a`` encodes the answer ``a``
after ``assistant\\n`` as ``a``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from burnish.data.base import DataError
from burnish.vocabulary import beyond_embeddings, num_embeddings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # one byte of a character without a token
_NEIGHBORS = ("a\n", "a", "a.", "a)", "a:", "a\t", "a0", "a\u3002", "\u2192", "Q#")
"""Neighbors of a piece whose preceding text is unknown or merges with it. No token begins in one
and ends in a piece with all of them."""
_PROBES = ("a", " a", "\na")
_TAIL = 8
"""Characters of the preceding text that are a neighbor."""
_MOST_HEADS = 1024
"""Neighbors whose ids are cached per tokenizer."""


def encode_piece(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    after: Sequence[int] = (),
    before: str = "",
    literal: bool = False,
) -> list[int]:
    """Tokenize ``text`` without adding special tokens.

    ``after``: the token that precedes it, if any; then the piece gets nothing that the tokenizer
    adds at the start of a text. What the tokenizer does behind an added token in the middle of a
    text, such as a space, remains. ``before``: the preceding text, if it is known. ``literal``:
    special tokens in ``text`` are tokenized as ordinary text.
    """
    ids = None
    if after and text:
        ids = _continued(tokenizer, text, after[-1], before, literal=literal)
    if ids is None:
        ids = plain_ids(tokenizer, text, literal=literal)
    check_embeddings(tokenizer, ids)
    return ids


def plain_ids(tokenizer: PreTrainedTokenizerBase, text: str, *, literal: bool = False) -> list[int]:
    """Return the ids of a text of its own, without special tokens around it. ``literal``: as in
    :func:`encode_piece`."""
    options = {"split_special_tokens": True} if literal else {}
    try:
        encoded = tokenizer(text, add_special_tokens=False, verbose=False, **options)
    except (TypeError, UnicodeEncodeError) as error:  # of tokenizers, for half of a surrogate pair
        place = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
        if place is None:
            raise
        raise DataError(
            f"the text has half of a surrogate pair ({text[place]!a}) after "
            f"{text[max(0, place - 20) : place]!r}, which is no character, so it has no tokens; "
            "remove it (a text that was cut inside an emoji has one)"
        ) from error
    return list(encoded["input_ids"])


def check_embeddings(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> None:
    """Raise DataError if the model has no embedding for one of the ids
    (:mod:`burnish.vocabulary`)."""
    token = beyond_embeddings(tokenizer, ids)
    if token is not None:
        text = str(tokenizer.convert_ids_to_tokens(token))
        raise DataError(
            f"the token {text[:60]!r} has the id {token}, but the model has embeddings for "
            f"{num_embeddings(tokenizer)} tokens. Use the model's own tokenizer "
            "(model.tokenizer_path), remove the text from the row, or resize the model's embeddings"
        )


def adds_space_behind(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Return whether the tokenizer adds a space to any text behind the added token ``token``, also
    to one that begins with a space (SentencePiece's prefix behind a special token)."""
    contexts = _contexts_of(tokenizer)
    if token not in contexts.added:
        return False
    if token not in contexts.spaces:
        ids, spaced = (encode_piece(tokenizer, text, after=(token,)) for text in ("a", " a"))
        head, both = tokenizer.decode([token]), tokenizer.decode([token, *ids])
        contexts.spaces[token] = ids != spaced and both == f"{head} a"
    return contexts.spaces[token]


@dataclass
class _Contexts:
    """Contexts in which a tokenizer encodes a text differently than alone."""

    added: dict[int, str]
    """Added tokens, but for single bytes: id -> text."""
    within: bool = False
    """Text that continues other text."""
    behind: dict[int, bool] = field(default_factory=dict)
    """Added token -> text behind it."""
    heads: dict[tuple[str, bool], list[int]] = field(default_factory=dict)
    """(neighbor, literal) -> its ids; empty if it is of no use."""
    spaces: dict[int, bool] = field(default_factory=dict)
    """Added token -> whether text behind it gets a space of the tokenizer's own."""


_contexts: WeakKeyDictionary[PreTrainedTokenizerBase, _Contexts] = WeakKeyDictionary()


def _contexts_of(tokenizer: PreTrainedTokenizerBase) -> _Contexts:
    contexts = _contexts.get(tokenizer)
    if contexts is None:
        texts = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}
        contexts = _Contexts({i: t for i, t in texts.items() if t and not _BYTE.fullmatch(t)})
        _contexts[tokenizer] = contexts
        contexts.within = any(
            _behind(tokenizer, neighbor, probe) not in (None, plain_ids(tokenizer, probe))
            for neighbor in _NEIGHBORS
            for probe in _PROBES
        )
    return contexts


def _continued(
    tokenizer: PreTrainedTokenizerBase, text: str, token: int, before: str, *, literal: bool
) -> list[int] | None:
    """Return the ids of ``text`` behind ``token``; None: those of the text alone."""
    contexts = _contexts_of(tokenizer)
    neighbors = (before[-_TAIL:], *_NEIGHBORS) if contexts.within else ()
    name = contexts.added.get(token)
    if name is not None:
        if token not in contexts.behind:
            contexts.behind[token] = any(
                _behind(tokenizer, name, probe) != plain_ids(tokenizer, probe) for probe in _PROBES
            )
        if not contexts.behind[token]:
            return None
        neighbors = neighbors if literal else (name, *neighbors)
    for neighbor in filter(None, neighbors):
        ids = _behind(tokenizer, neighbor, text, literal=literal)
        if ids is not None:
            return ids
    return None


def _behind(
    tokenizer: PreTrainedTokenizerBase, neighbor: str, text: str, *, literal: bool = False
) -> list[int] | None:
    """Return the ids of ``text`` behind ``neighbor``; None if no token ends between both."""
    heads = _contexts_of(tokenizer).heads
    head = heads.get((neighbor, literal))
    if head is None:
        if len(heads) >= _MOST_HEADS:
            heads.clear()
        head = plain_ids(tokenizer, neighbor, literal=literal)
        if tokenizer.unk_token_id in head[-1:]:  # it may include the characters that follow
            head = []
        heads[neighbor, literal] = head
    ids = plain_ids(tokenizer, neighbor + text, literal=literal)
    return ids[len(head) :] if head and ids[: len(head)] == head else None
