"""A prompt and a response as the token row that ``burnish rm`` would train on, for reward models
with another tokenizer than the policy's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from burnish.data.chat import encode_completion, encode_conversation, encode_prompt
from burnish.rewards.base import RewardInput

log = logging.getLogger("burnish")

Encode = Callable[[RewardInput], tuple[Sequence[int], Sequence[int]]]
"""Token ids of the prompt, and of the response."""


def sampled_ids(item: RewardInput) -> tuple[Sequence[int], Sequence[int]]:
    """Return the ids that the policy read and wrote."""
    return item.sample.prompt_ids, item.sample.response_ids


def encode_text(
    tokenizer: PreTrainedTokenizerBase, prompt: str, response: str = "", *, ended: bool = False
) -> tuple[list[int], list[int]]:
    """Return (prompt ids, response ids) of plain text, as plain training rows have them.

    The prompt has the special tokens that the tokenizer puts in front, once, and none behind; no
    token crosses the border; the response has the end token if it ``ended``.
    """
    _, head = encode_prompt(tokenizer, prompt)
    if len(head) > 1 and head[0] == head[1] == tokenizer.bos_token_id:
        head = head[1:]  # a chat template wrote it already
    ids, _ = encode_completion(tokenizer, head, response, add_eos=ended)
    return head, ids[len(head) :]


class RowEncoder:
    """Encode prompts and responses with the reward model's own tokenizer.

    Prompts made of messages are rendered by its own chat template: the policy's markup would be
    plain text to it. Without a template that text is all there is, which is logged once.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        """``name``: of the reward, for the log."""
        self.tokenizer, self.name = tokenizer, name
        self._said = False

    def __call__(self, item: RewardInput) -> tuple[Sequence[int], Sequence[int]]:
        """Return (prompt ids, response ids)."""
        prompt, sample = item.prompt, item.sample
        ended = sample.finish_reason == "stop"
        if prompt.messages is None:
            return encode_text(self.tokenizer, prompt.text, sample.text, ended=ended)
        if self.tokenizer.chat_template is None:
            self._say_markup()
            return encode_text(self.tokenizer, prompt.text, sample.text, ended=ended)
        answer = {"role": "assistant", "content": sample.text}
        ids, mask = encode_conversation(
            self.tokenizer, [*prompt.messages, answer], trained_from=len(prompt.messages)
        )
        begin = mask.index(True)
        end = len(mask) - mask[::-1].index(True)
        special = not self.tokenizer.decode([ids[end - 1]], skip_special_tokens=True)
        if not ended and special:
            end -= 1
        return ids[:begin], ids[begin:end]

    def _say_markup(self) -> None:
        if not self._said:
            self._said = True
            log.warning(
                "reward %r: prompts are conversations and its tokenizer has no chat template, so "
                "it reads the policy's chat markup as plain text; set its model.chat_template to "
                "the one that it was trained with",
                self.name,
            )
