"""Demonstrations as batches of token rows: conversations, prompts with responses, or plain text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from burnish.chat_message import with_cut_end
from burnish.data.chat import (
    check_text,
    check_tokenizer,
    encode_completion,
    encode_conversation,
    encode_plain_conversation,
    encode_prompt,
    trained_turns,
)
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.demonstrations.read import demonstration_key
from burnish.data.episode_rows import OTHER_MESSAGES, has_tokens, sampled_row
from burnish.data.left_out import check_rendering
from burnish.data.messages import as_messages, trained_flags
from burnish.data.notices import note
from burnish.data.rows import (
    PLAIN_TEXT,
    EncodedRow,
    content_column,
    encode_exchange,
    exchange,
    is_cut,
    note_other_tokens,
    prompt_column,
    system_of,
    token_row,
    tools_column,
)
from burnish.data.sources import DataError, Row, Source
from burnish.data.stream import RowRef
from burnish.data.unread import note_flags, note_other_roles
from burnish.types import Batch, rows_to_batch


class SFTEncoder:
    """An encoder of demonstrations. Implements ``data.encoded.Encoder``."""

    unit = "row"
    limit_name = "max_len"

    def __init__(self, config: SFTDataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        check_tokenizer(tokenizer)
        self.limit = config.max_len
        self._config, self._tokenizer = config, tokenizer
        self._only_last = config.train_on_turns == "last"

    def encode(self, row: Row, ref: RowRef) -> EncodedRow:
        encoded = self._encode(row)
        if not self._config.train_on_prompt:
            return encoded
        end = len(encoded.mask) - list(reversed(encoded.mask)).index(True)
        widened = token_row(encoded.ids, [i < end for i in range(len(encoded.ids))])
        return replace(widened, answers=encoded.answers)

    def length(self, item: EncodedRow) -> int:
        return len(item.ids)

    def truncate(self, item: EncodedRow) -> EncodedRow | None:
        """Truncate on the left or right. Return None if no token is left to train on.

        An answer that loses its beginning is not trained on; one that loses its end is.
        """
        if self._config.overlong == "truncate_right":
            return item.without_right(self.limit)
        return item.without_left(len(item.ids) - self.limit)

    def batch(self, items: Sequence[EncodedRow], *, first_group: int) -> Batch:
        """Return demonstrations as rows. Each has its own group id."""
        return rows_to_batch(
            [row.ids for row in items],
            [row.mask for row in items],
            prompt_lens=[row.prompt_len for row in items],
            group_ids=range(first_group, first_group + len(items)),
        )

    def _encode(self, row: Row) -> EncodedRow:
        config, tokenizer = self._config, self._tokenizer
        kind = demonstration_key(row, config)
        if config.use_tokens and kind in (config.text_key, config.response_key) and has_tokens(row):
            note_other_tokens(OTHER_MESSAGES)
        if kind == config.text_key:
            return self._encode_text(row.values[kind])
        if kind == config.response_key:
            prompt = prompt_column(row, config.prompt_key, config.prompt_template)
            row_exchange = exchange(
                *(row, prompt, config),
                key=kind,
                field="response_key",
                use_tokens=config.use_tokens,
            )
            encoded = encode_exchange(tokenizer, row_exchange, config, only_last=self._only_last)
            return replace(encoded, answers=encoded.mask)
        content = content_column(row, kind, "messages_key")
        if isinstance(content, str):
            raise DataError(
                f"column {kind!r} (messages_key) holds a string, not a list of messages"
            )
        system = system_of(row, config, content)
        is_plain = row.values.get(PLAIN_TEXT) is True
        if is_plain and system is not None:
            raise DataError(
                "there is a system message (system_prompt of the recipe, or a column system or "
                "system_prompt), but the row is plain text (plain_text: true), which is used "
                "unchanged; remove it, or use rows of chat messages"
            )
        messages = as_messages(content, system_prompt=system)
        tools = tools_column(row, config)
        if config.train_on_prompt and not all(trained_flags(messages)):
            raise DataError(
                "a message has train: false or weight: 0, but train_on_prompt=true trains on all "
                "tokens; remove the flag, or set train_on_prompt: false"
            )
        if config.train_on_prompt:
            note_flags(messages, range(len(messages)))
        else:
            note_other_roles(messages)
        cut = is_cut(row, kind, "messages_key")
        if config.use_tokens:
            trained = trained_turns(messages, only_last=self._only_last)
            sampled = sampled_row(row, tokenizer, messages, tools, trained=trained)
            if sampled is not None:
                return replace(sampled, answers=sampled.mask)
        if is_plain:
            plain = encode_plain_conversation(
                tokenizer, messages, only_last=self._only_last, is_cut=cut
            )
            encoded = token_row(*plain)
            return replace(encoded, answers=encoded.mask)
        check_rendering(tokenizer, messages, tools, system_prompt=system)
        if cut:
            messages = with_cut_end(messages)
        encoded = token_row(
            *encode_conversation(tokenizer, messages, only_last=self._only_last, tools=tools)
        )
        return replace(encoded, answers=encoded.mask)

    def _encode_text(self, text: str) -> EncodedRow:
        if not isinstance(text, str):
            raise DataError(
                f"column {self._config.text_key!r} (text_key) holds a {type(text).__name__}, not "
                "a string"
            )
        check_text(self._tokenizer, text, refuse=True)
        if self._config.system_prompt is not None:
            raise DataError(
                f"system_prompt is set, but text (column {self._config.text_key!r}, text_key) is "
                "used unchanged; remove system_prompt, or use rows of messages"
            )
        _, ids = encode_prompt(self._tokenizer, text)
        if ids[-1:] == [self._tokenizer.eos_token_id]:
            note("double_eos", "the text already ends with the end token; it is kept once")
        else:
            ids, _ = encode_completion(self._tokenizer, ids, "")
        return token_row(ids, [True] * len(ids))


def make_encoder(
    config: SFTDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[Source],
    *,
    in_episodes: bool,
) -> SFTEncoder:
    """Return the encoder of demonstrations, see ``data/encoded.py``."""
    return SFTEncoder(config, tokenizer)
