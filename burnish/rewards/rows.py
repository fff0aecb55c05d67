"""Encode a prompt and a response as the token row that ``burnish rm`` would train on.

Used for reward models whose tokenizer, end token or chat template differs from the policy's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from burnish.data.chat import encode_completion, encode_conversation, encode_prompt
from burnish.rewards.base import RewardError, RewardInput
from burnish.special_tokens import special_tokens
from burnish.transcript import Episode

log = logging.getLogger("burnish")

Pair = tuple[Sequence[int], Sequence[int]]
"""(prompt token ids, response token ids)."""
Encode = Callable[[RewardInput], Pair]
"""Function that encodes an item."""


def sampled_ids(item: RewardInput) -> Pair:
    """Return the policy's own token ids: (prompt ids, response ids). Of an episode, they are those
    of its last row: the conversation up to the last response."""
    return item.sample.prompt_ids, item.sample.response_ids


def same_rows(
    reward_tokenizer: PreTrainedTokenizerBase, policy_tokenizer: PreTrainedTokenizerBase
) -> bool:
    """Return whether a reward model reads the policy's token ids as the rows that it was trained
    on: both tokenizers have the same vocabulary, end token and chat template. A reward model
    without a template reads any markup of the policy."""
    template = reward_tokenizer.chat_template
    if template is not None and template != policy_tokenizer.chat_template:
        return False
    if reward_tokenizer.eos_token_id != policy_tokenizer.eos_token_id:
        return False
    return reward_tokenizer.get_vocab() == policy_tokenizer.get_vocab()


def encode_text(
    tokenizer: PreTrainedTokenizerBase, prompt: str, response: str = "", *, ended: bool = False
) -> tuple[list[int], list[int]]:
    """Return (prompt ids, response ids) of plain text, encoded like plain training rows.

    The prompt starts with the tokenizer's leading special tokens, once, and has no trailing ones.
    No token spans the boundary between prompt and response. The response ends with the EOS token if
    ``ended``.
    """
    _, head = encode_prompt(tokenizer, prompt)
    if len(head) > 1 and head[0] == head[1] == tokenizer.bos_token_id:
        head = head[1:]  # the chat template already added the BOS token
    ids, _ = encode_completion(tokenizer, head, response, add_eos=ended)
    return head, ids[len(head) :]


class RowEncoder:
    """An encoder of prompts and responses that uses the reward model's own tokenizer.

    Prompts made of messages are rendered with the reward model's chat template, because the
    policy's markup would be plain text to it. Without a template, the policy's rendered text is
    used, and a warning is logged once. Of an episode, the prompt is the conversation before the
    last response; its messages need the template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        """``name``: the reward's name, for the log."""
        self.tokenizer, self.name = tokenizer, name
        self._said = False

    def __call__(self, item: RewardInput) -> Pair:
        """Return (prompt ids, response ids). Raises RewardError if an episode needs the template
        that the tokenizer does not have."""
        prompt, sample = item.prompt, item.sample
        ended = sample.finish_reason == "stop"
        if sample.episode is not None:
            return self._conversation(sample.episode, ended=ended)
        if prompt.messages is None:
            return encode_text(self.tokenizer, prompt.text, sample.text, ended=ended)
        if self.tokenizer.chat_template is None:
            self._say_markup()
            return encode_text(self.tokenizer, prompt.text, sample.text, ended=ended)
        answer = {"role": "assistant", "content": sample.text}
        return self._encoded([*prompt.messages, answer], ended=ended)

    def _conversation(self, episode: Episode, *, ended: bool) -> Pair:
        """Return (ids of all messages before the last response, ids of that response)."""
        if self.tokenizer.chat_template is None:
            raise RewardError(
                f"reward {self.name!r}: its tokenizer has no chat template, which the "
                "conversations of episodes need; set its model.chat_template to the template that "
                "it was trained with"
            )
        messages = episode.messages
        while messages[-1]["role"] != "assistant":  # the answer to the last response
            messages.pop()
        return self._encoded(messages, tools=episode.tools, ended=ended)

    def _encoded(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        ended: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Pair:
        """Return (ids before the last message, ids of that message, which is the assistant's)."""
        ids, mask = encode_conversation(
            self.tokenizer,
            messages,
            trained_from=len(messages) - 1,
            tools=list(tools) or None,
            refused=("content", "tool calls"),  # a policy may answer with no text
        )
        begin = mask.index(True)
        end = len(mask) - mask[::-1].index(True)
        if not ended and ids[end - 1] in special_tokens(self.tokenizer):
            end -= 1
        return ids[:begin], ids[begin:end]

    def _say_markup(self) -> None:
        if not self._said:
            self._said = True
            log.warning(
                "reward %r: prompts are conversations but its tokenizer has no chat template, so "
                "it reads the policy's chat markup as plain text; set its model.chat_template to "
                "the template that it was trained with",
                self.name,
            )
