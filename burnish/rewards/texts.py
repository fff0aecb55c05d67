"""Texts of a sample that rewards read besides its response: the prompt before it, and both as
OpenRLHF sends them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from burnish.data.decoding import response_decoder, text_behind
from burnish.rewards.base import RewardError, RewardInput

_PROMPT_END = 64  # characters or tokens


def text_before(item: RewardInput, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the policy read before its last response, as text with special tokens."""
    prompt, (ids, _) = item.prompt, item.sample.last_response
    if item.sample.episode is None:
        return prompt.text
    known, begin = prompt.token_ids, len(prompt.token_ids)
    decode = partial(_decoded, tokenizer)
    if ids[:begin] != known:
        return text_behind(tokenizer, (), ids, decode)
    return prompt.text + text_behind(tokenizer, known, ids[begin:], decode)


def prompt_end(item: RewardInput, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return the end of what the policy read before its last response, long enough for the tag of
    reasoning that it may open. Without the policy's tokenizer, that of an episode is the end of its
    first prompt."""
    if item.sample.episode is None or tokenizer is None:
        return item.prompt.text[-_PROMPT_END:]
    return _decoded(tokenizer, item.sample.last_response[0][-_PROMPT_END:])


def prompt_and_query(
    item: RewardInput, tokenizer: PreTrainedTokenizerBase | None, *, special_tokens: bool = True
) -> tuple[str, str]:
    """Return the texts of the prompt, and of prompt + response, which starts with the former.

    With ``special_tokens`` and a tokenizer, the response includes its special tokens. It is decoded
    behind the prompt (:func:`burnish.data.decoding.text_behind`), because decoded alone it could
    lose a leading space, and a server that tokenizes both gets the policy's tokens. Of an episode,
    the response is its last one, and the prompt all that the policy read before it. Raises
    RewardError for an episode without a tokenizer.
    """
    sample = item.sample
    if tokenizer is None:
        if sample.episode is not None:
            raise RewardError(
                "texts of episodes need the policy's tokenizer; pass it to RemoteScorer"
            )
        return item.prompt.text, item.prompt.text + sample.text
    prompt, (prompt_ids, response_ids) = text_before(item, tokenizer), sample.last_response
    decode = partial(_decoded, tokenizer) if special_tokens else response_decoder(tokenizer)
    return prompt, prompt + text_behind(tokenizer, prompt_ids, response_ids, decode)


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
