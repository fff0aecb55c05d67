"""Tokens of rows with a prompt and responses in columns: preferences and rated responses."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Protocol

from transformers import PreTrainedTokenizerBase

from burnish.data.chat import check_tokenizer
from burnish.data.config import DataConfig
from burnish.data.held_out import PartOfRows
from burnish.data.rows import (
    EncodedRow,
    Exchange,
    encode_exchange,
    exchange,
    is_text,
    prompt_column,
    response_column,
    to_last_trained,
)
from burnish.data.sources import DataError, Row, Source
from burnish.data.stream import RowRef
from burnish.data.streamed import num_first
from burnish.types import Batch, rows_to_batch

_log = logging.getLogger("burnish")

_LOOKED_AT = 100
"""Number of rows of a source that are examined."""


class RepeatedPrompts:
    """The sources whose responses begin with their prompt, as in some preference data sets
    (hh-rlhf). The prompt would occur twice in the encoded text.

    A single row is not enough evidence, because an answer may begin with the words of a short
    prompt. A source counts only if all of its first 100 rows repeat the prompt, of which some may
    be held out: both parts are read alike."""

    def __init__(
        self,
        config: DataConfig,
        keys: Sequence[str],
        sources: Sequence[Source],
        choice: Literal["auto", "strip", "keep"],
    ) -> None:
        """``keys``: the columns with responses. ``choice``: the key ``repeated_prompt``."""
        self._config, self._keys = config, keys
        self._sources = {
            source.name
            for source in sources
            if choice == "strip" or (choice == "auto" and self._all_repeat(source))
        }

    def strip(self, source: str, exchange: Exchange) -> Exchange:
        """Remove the prompt from the beginning of the response, if its source repeats prompts."""
        prompt, response = exchange.prompt, exchange.response
        if source not in self._sources or exchange.response_ids or not is_text(prompt, response):
            return exchange
        return replace(exchange, response=response.removeprefix(prompt))

    def _all_repeat(self, source: Source) -> bool:
        source = source.whole if isinstance(source, PartOfRows) else source
        repeats, num = num_repeating(source, self._config, self._keys)
        if repeats == num:
            _log.warning(
                "data source %r: every response of the first %d rows begins with its prompt, which "
                "is stripped; set repeated_prompt: keep if it belongs to the response",
                *(source.name, num),
            )
        elif 2 * repeats > num:
            _log.warning(
                "data source %r: the responses of %d of the first %d rows begin with their prompt, "
                "which is kept; set repeated_prompt: strip if the data repeats the prompt",
                *(source.name, repeats, num),
            )
        return repeats == num


def num_repeating(source: Source, config: DataConfig, keys: Sequence[str]) -> tuple[int, int]:
    """Return (rows whose responses begin with the prompt, rows examined) of the first 100 rows.
    ``keys``: the columns with responses."""
    num, repeats = num_first(source, _LOOKED_AT), 0
    for i in range(num):
        try:
            row = source[i]
            prompt = prompt_column(row, config.prompt_key, config.prompt_template)
            responses = [response_column(row, key, "") for key in keys]
        except DataError:  # encoding the row reports the error
            continue
        if prompt and is_text(prompt, *responses):
            repeats += all(r.startswith(prompt) and r != prompt for r in responses)
    return repeats, num


class HasRow(Protocol):
    """An example of one response."""

    @property
    def row(self) -> EncodedRow: ...


class ResponseRows:
    """Reads the responses of rows, each after the row's prompt."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        sources: Sequence[Source],
        *,
        repeated_prompt: Literal["auto", "strip", "keep"],
        use_tokens: bool,
    ) -> None:
        """``config``: its ``content_keys`` are the columns of the responses."""
        check_tokenizer(tokenizer)
        self._config, self._tokenizer, self._use_tokens = config, tokenizer, use_tokens
        self._columns = config.content_keys
        self._repeated = RepeatedPrompts(
            config, list(self._columns.values()), sources, repeated_prompt
        )

    def exchanges(self, row: Row) -> list[Exchange]:
        """Return the prompt with each response, in the order of ``content_keys``."""
        prompt = prompt_column(row, self._config.prompt_key, self._config.prompt_template)
        return [
            exchange(
                row, prompt, self._config, key=column, field=field, use_tokens=self._use_tokens
            )
            for field, column in self._columns.items()
        ]

    def encode(self, response: Exchange, ref: RowRef, *, as_chat: bool = False) -> EncodedRow:
        """Return prompt and response as tokens, to the last trained one. ``as_chat``: as for
        :func:`burnish.data.rows.encode_exchange`."""
        stripped = self._repeated.strip(ref.source, response)
        return to_last_trained(
            encode_exchange(self._tokenizer, stripped, self._config, as_chat=as_chat)
        )


def single_responses(items: Sequence[HasRow], *, first_group: int) -> Batch:
    """Return responses as rows. Each has its own group id."""
    return rows_to_batch(
        [item.row.ids for item in items],
        [item.row.mask for item in items],
        prompt_lens=[item.row.prompt_len for item in items],
        group_ids=[first_group + i for i in range(len(items))],
    )
