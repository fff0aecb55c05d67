"""Demonstrations as batches of token rows: conversations, prompts with responses, or plain text."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from burnish.config.data import SFTDataConfig
from burnish.config.explain import nearest
from burnish.data.chat import (
    as_messages,
    check_tokenizer,
    encode_completion,
    encode_conversation,
    encode_prompt,
)
from burnish.data.encoded import EncodedStream, load_all
from burnish.data.rows import TokenRow, column, encode_exchange, prompt_column, token_row
from burnish.data.sources import DataError, Row, open_sources
from burnish.data.stream import RowRef
from burnish.types import Batch, rows_to_batch


class SFTStream(EncodedStream[TokenRow]):
    """Demonstrations without end, each once per epoch of its source, resumable at the exact row."""

    def __init__(
        self, config: SFTDataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int
    ) -> None:
        """Raises DataError where a source or the tokenizer cannot be used."""
        super().__init__(config, _SFTEncoder(config, tokenizer), seed=seed)

    def next(self, num_rows: int) -> Batch:
        """The next ``num_rows`` rows, each a group of its own, unique within the run."""
        first = self.counts["rows_seen"]
        return _batch(self.take(num_rows), first_group=first)


def load_rows(
    config: SFTDataConfig, tokenizer: PreTrainedTokenizerBase, limit: int | None = None
) -> Batch:
    """All rows once, in file order; at most ``limit``. Raises DataError as the stream does."""
    sources = open_sources(config.sources)
    return _batch(load_all(sources, config, _SFTEncoder(config, tokenizer), limit=limit))


class _SFTEncoder:
    unit = "row"
    limit_name = "max_len"

    def __init__(self, config: SFTDataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        check_tokenizer(tokenizer)
        self.limit = config.max_len
        self._config, self._tokenizer = config, tokenizer

    def encode(self, row: Row, ref: RowRef) -> TokenRow:
        encoded = self._encode(row)
        if not self._config.train_on_prompt:
            return encoded
        end = len(encoded.mask) - list(reversed(encoded.mask)).index(True)
        return token_row(encoded.ids, [i < end for i in range(len(encoded.ids))])

    def length(self, item: TokenRow) -> int:
        return len(item.ids)

    def cut(self, item: TokenRow) -> TokenRow | None:
        return item.without_left(len(item.ids) - self.limit)

    def _encode(self, row: Row) -> TokenRow:
        config, tokenizer = self._config, self._tokenizer
        if row.values.get(config.messages_key) is not None:
            given = column(row, config.messages_key, "messages_key")
            if isinstance(given, str):
                raise DataError(
                    f"column {config.messages_key!r} (messages_key) holds a string, not a list of "
                    "messages"
                )
            messages = as_messages(given, system_prompt=config.system_prompt)
            return token_row(*encode_conversation(tokenizer, messages))
        if row.values.get(config.response_key) is not None:
            prompt = prompt_column(row, config.prompt_key, config.prompt_template)
            return encode_exchange(tokenizer, prompt, row.values[config.response_key], config)
        if row.values.get(config.text_key) is not None:
            return self._encode_text(row.values[config.text_key])
        wanted = {
            "messages_key": config.messages_key,
            "response_key": config.response_key,
            "text_key": config.text_key,
        }
        hints = [nearest(key, row.values) for key in wanted.values()]
        raise DataError(
            "nothing to learn from: none of the columns "
            f"{', '.join(f'{v!r} ({k})' for k, v in wanted.items())} has a value; the columns are "
            f"{', '.join(row.values)}{next(filter(None, hints), '')}"
        )

    def _encode_text(self, text: str) -> TokenRow:
        if not isinstance(text, str):
            raise DataError(
                f"column {self._config.text_key!r} (text_key) holds a {type(text).__name__}, not "
                "a string"
            )
        _, ids = encode_prompt(self._tokenizer, text, system_prompt=self._config.system_prompt)
        ids, _ = encode_completion(self._tokenizer, ids, "")
        return token_row(ids, [True] * len(ids))


def _batch(rows: Sequence[TokenRow], *, first_group: int = 0) -> Batch:
    return rows_to_batch(
        [row.ids for row in rows],
        [row.mask for row in rows],
        prompt_lens=[row.prompt_len for row in rows],
        group_ids=range(first_group, first_group + len(rows)),
    )
