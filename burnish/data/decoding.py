"""Decode the tokens of a response to its text.

The text has no special tokens, such as the end token, but it has the tags of the reasoning, which
are special tokens in some models (Magistral: ``[THINK]``), and those of channels (gpt-oss).
Otherwise what reads the text could not tell the reasoning from the answer, and the tokens of the
text would be others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from burnish.byte_tokens import byte_tokens, is_inside_character
from burnish.chat_message import REASONING
from burnish.data.pieces import adds_space_behind, plain_ids
from burnish.data.rendering import render_text, tags_of, writes_channels
from burnish.data.sources import DataError
from burnish.reasoning_tags import CHANNEL_TOKENS, Tags, after_reasoning
from burnish.special_tokens import special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("burnish")

CONTEXT = 8
"""Tokens before others that determine how these decode."""
Decode = Callable[[Sequence[int]], str]
_Known = tuple[Tags | None, Mapping[int, str], dict[int, str] | None]
_known: WeakKeyDictionary[PreTrainedTokenizerBase, _Known] = WeakKeyDictionary()


def hidden_tokens(tokenizer: PreTrainedTokenizerBase) -> Mapping[int, str]:
    """Return id -> text of the special tokens that the text of a response lacks."""
    without_tags = _without_tags(tokenizer)
    return special_tokens(tokenizer) if without_tags is None else without_tags


def response_decoder(tokenizer: PreTrainedTokenizerBase, *, shown: str = "") -> Decode:
    """Return the function that decodes tokens as text of a response. The text also has the special
    tokens that occur in ``shown``, such as a separator of steps."""
    hidden = _without_tags(tokenizer)
    if shown and (kept := tokens_within(tokenizer, shown)):
        tokens = special_tokens(tokenizer) if hidden is None else hidden
        hidden = {token: text for token, text in tokens.items() if token not in kept}
    return partial(_decoded, tokenizer, hidden)


def context_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[int]:
    """Return the last tokens of ``ids``, behind which other tokens decode as behind all of them.

    They begin with a complete character and have tokens that every text shows. The text of a run of
    byte tokens may depend on more of them (:mod:`burnish.byte_tokens`).
    """
    hidden, values = hidden_tokens(tokenizer), byte_tokens(tokenizer)
    begin, num_shown = len(ids), 0
    while begin and (
        num_shown < CONTEXT
        or (num_shown < CONTEXT + 3 and is_inside_character(values.get(ids[begin])))
    ):
        begin -= 1
        num_shown += ids[begin] not in hidden
    return list(ids[begin:])


def response_text(
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    *,
    shown: str = "",
) -> str:
    """Return the text of ``response_ids`` as a continuation of ``prompt_ids``, without special
    tokens other than tags of reasoning and those in ``shown``."""
    decode = response_decoder(tokenizer, shown=shown)
    return text_behind(tokenizer, prompt_ids, response_ids, decode)


def text_behind(
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    decode: Decode,
) -> str:
    """Return the text of ``response_ids`` that the tokenizer encodes as these behind the text of
    ``prompt_ids``, if it would make them of any text.

    Decoded alone, a response can lose its first space (SentencePiece) or gain ``##`` (WordPiece).
    Decoded behind a special token, it can gain a space that the tokenizer itself adds there.
    Example: the ids ``[/INST] ▁a`` are those of ``[/INST]a`` to Llama 2's tokenizer, which decodes
    them as ``[/INST] a``. ``decode``: as :func:`response_decoder` returns it, or with special
    tokens.
    """
    ends = [i + 1 for i, token in enumerate(response_ids) if begins_text(tokenizer, token, decode)]
    first, *others = (list(response_ids[a:b]) for a, b in pairwise([0, *ends, len(response_ids)]))
    text, before = decode(first), window_of(tokenizer, prompt_ids)
    if before:
        head, both = decode(before), decode([*before, *first])
        text = both[len(head) :] if both.startswith(head) else text
    return text + "".join(map(decode, others))


def window_of(tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> Sequence[int]:
    """Return the tokens of a prompt with which its response is decoded: none behind a token to
    which the tokenizer adds a space, because text behind it is encoded as if it were alone."""
    return () if prompt_ids and adds_space_behind(tokenizer, prompt_ids[-1]) else prompt_ids


def begins_text(tokenizer: PreTrainedTokenizerBase, token: int, decode: Decode) -> bool:
    """Return whether the tokens behind a visible ``token`` of a response are decoded without those
    before them, as in :func:`window_of`."""
    return adds_space_behind(tokenizer, token) and bool(decode([token]))


def report_unread(tokenizer: PreTrainedTokenizerBase) -> None:
    """Log once per chat template if the answer of a rendered message is not what is read of its
    tokens: the template writes reasoning in a form that Burnish does not know."""
    template = str(tokenizer.chat_template)
    known = _reported.setdefault(tokenizer, set())
    if tokenizer.chat_template is None or template in known:
        return
    known.add(template)
    answer, thought = "qzanswerzq", "qzthoughtzq"
    question = {"role": "user", "content": "Go."}
    message = {"role": "assistant", "content": answer, REASONING[0]: thought}
    try:
        prompt = render_text(tokenizer, [question], add_generation_prompt=True)
        text = render_text(tokenizer, [question, message], add_generation_prompt=False)
    except DataError:  # it renders no such answer, or no conversation
        return
    decode = response_decoder(tokenizer)
    if not text.startswith(prompt) or answer not in decode(plain_ids(tokenizer, answer)):
        return
    ids = plain_ids(tokenizer, text[len(prompt) :])
    if after_reasoning(decode(ids), prompt).strip() != answer:
        log.warning(
            "the chat template writes the reasoning and the text of an answer in a form that "
            "Burnish does not read (%r): rewards, conversations of episodes and served messages "
            "have both, and what is between them, as the text of the answer. Set "
            "model.chat_template to one that writes reasoning in tags such as <think>",
            text[len(prompt) :][:200],
        )


_reported: WeakKeyDictionary[PreTrainedTokenizerBase, set[str]] = WeakKeyDictionary()


def tokens_within(tokenizer: PreTrainedTokenizerBase, text: str) -> set[int]:
    """Return the special tokens that occur in ``text``."""
    return {token for token, name in special_tokens(tokenizer).items() if name and name in text}


def removes_spaces(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether decoding removes spaces before punctuation. transformers does not do it for
    BPE, whatever the setting."""
    from transformers import PreTrainedTokenizerFast

    is_fast = isinstance(tokenizer, PreTrainedTokenizerFast)
    if is_fast and type(tokenizer.backend_tokenizer.model).__name__ == "BPE":
        return False
    return bool(tokenizer.clean_up_tokenization_spaces)


def tokenizer_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return what the tokenizer decodes, with special tokens and its own spaces."""
    return str(tokenizer.decode(list(ids)))


def _decoded(
    tokenizer: PreTrainedTokenizerBase, hidden: Collection[int] | None, ids: Sequence[int]
) -> str:
    if hidden is None:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))
    return str(tokenizer.decode([token for token in ids if token not in hidden]))


def _without_tags(tokenizer: PreTrainedTokenizerBase) -> dict[int, str] | None:
    """Return the special tokens that are no tags of the chat template's reasoning or channels.
    None: no special token is one."""
    tags, has_channels = tags_of(tokenizer), writes_channels(tokenizer)
    if tags is None and not has_channels:
        return None
    special, known = special_tokens(tokenizer), _known.get(tokenizer)
    if known is None or known[0] is not tags or known[1] is not special:
        parts = (*((tags.begin, tags.end) if tags else ()), *(CHANNEL_TOKENS * has_channels))
        shown = {token for part in parts for token in plain_ids(tokenizer, part)}
        hidden = {token: text for token, text in special.items() if token not in shown}
        known = (tags, special, hidden if len(hidden) < len(special) else None)
        _known[tokenizer] = known
    return known[2]
