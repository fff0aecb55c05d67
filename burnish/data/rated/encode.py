"""Batches of single responses with scores or a class, the training data of regression and
classification reward models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from burnish.data.chat import check_tokenizer
from burnish.data.preferences.encode import to_last_trained
from burnish.data.rated.config import RatedDataConfig
from burnish.data.rated.read import target_of
from burnish.data.repeated import RepeatedPrompts
from burnish.data.rows import TokenRow, encode_exchange, exchange, prompt_column
from burnish.data.sources import Row, Source
from burnish.data.stream import RowRef
from burnish.types import Batch, rows_to_batch


@dataclass(frozen=True)
class RatedExample:
    """One response with its target."""

    row: TokenRow
    target: tuple[float, ...] | int
    """Scores in the order of the outputs, or the index of the class."""


class RatedEncoder:
    """An encoder of rated responses. Implements ``data.encoded.Encoder``."""

    unit = "row"
    limit_name = "max_len"

    def __init__(
        self,
        config: RatedDataConfig,
        tokenizer: PreTrainedTokenizerBase,
        sources: Sequence[Source],
    ) -> None:
        check_tokenizer(tokenizer)
        self.limit = config.max_len
        self._config, self._tokenizer = config, tokenizer
        self._repeated = RepeatedPrompts(
            config, [config.response_key], sources, config.repeated_prompt
        )

    def encode(self, row: Row, ref: RowRef) -> RatedExample:
        config = self._config
        prompt = prompt_column(row, config.prompt_key, config.prompt_template)
        given = exchange(
            row,
            prompt,
            config,
            key=config.response_key,
            field="response_key",
            use_tokens=config.use_tokens,
        )
        given = replace(given, may_be_empty=True)
        given = self._repeated.strip(ref.source, given)
        encoded = to_last_trained(encode_exchange(self._tokenizer, given, config))
        return RatedExample(encoded, target_of(row, config))

    def length(self, item: RatedExample) -> int:
        return len(item.row.ids)

    def truncate(self, item: RatedExample) -> RatedExample | None:
        """Truncate the prompt on the left. Return None if no prompt token would be left."""
        excess = self.length(item) - self.limit
        if excess >= item.row.prompt_len:
            return None
        row = item.row.without_left(excess)
        return None if row is None else replace(item, row=row)

    def batch(self, items: Sequence[RatedExample], *, first_group: int) -> Batch:
        """Return responses as rows. Each has its own group id."""
        batch = rows_to_batch(
            [item.row.ids for item in items],
            [item.row.mask for item in items],
            prompt_lens=[item.row.prompt_len for item in items],
            group_ids=[first_group + i for i in range(len(items))],
        )
        targets = torch.tensor([item.target for item in items])
        return replace(batch, labels=targets.float() if targets.ndim == 2 else targets)


def make_encoder(
    config: RatedDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[Source],
    *,
    in_episodes: bool,
) -> RatedEncoder:
    """Return the encoder of rated responses, see ``data/encoders.py``."""
    return RatedEncoder(config, tokenizer, sources)
