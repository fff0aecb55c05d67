"""Texts of a sample that rewards read besides its response: the prompt before it, and both as
OpenRLHF sends them."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from burnish.data.chat import response_text
from burnish.rewards.base import RewardError, RewardInput

_PROMPT_END = 64  # characters or tokens


def text_before(item: RewardInput, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what the policy read before its last response, as text with special tokens."""
    prompt, (ids, _) = item.prompt, item.sample.last_response
    if item.sample.episode is None:
        return prompt.text
    known, begin = prompt.token_ids, len(prompt.token_ids)
    if ids[:begin] != known:
        return _decoded(tokenizer, ids)
    head, both = _decoded(tokenizer, known), _decoded(tokenizer, ids)
    return prompt.text + (
        both[len(head) :] if both.startswith(head) else _decoded(tokenizer, ids[begin:])
    )


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
    together with the prompt, because decoded alone it could lose a leading space. Of an episode,
    the response is its last one, and the prompt all that the policy read before it. Raises
    RewardError for an episode without a tokenizer.
    """
    sample = item.sample
    if sample.episode is None and not (special_tokens and tokenizer):
        return item.prompt.text, item.prompt.text + sample.text
    if tokenizer is None:
        raise RewardError("texts of episodes need the policy's tokenizer; pass it to RemoteScorer")
    prompt, (prompt_ids, response_ids) = text_before(item, tokenizer), sample.last_response
    if not special_tokens:
        return prompt, prompt + response_text(tokenizer, prompt_ids, response_ids)
    head, both = _decoded(tokenizer, prompt_ids), _decoded(tokenizer, prompt_ids + response_ids)
    tail = both[len(head) :] if both.startswith(head) else _decoded(tokenizer, response_ids)
    return prompt, prompt + tail


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
