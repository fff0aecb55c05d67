"""Batches of single responses with scores or a class, the training data of regression and
classification reward models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from burnish.data.rated.config import RatedDataConfig
from burnish.data.rated.read import target_of
from burnish.data.response_rows import ResponseRows, single_responses
from burnish.data.rows import EncodedRow
from burnish.data.sources import Row, Source
from burnish.data.stream import RowRef
from burnish.types import Batch


@dataclass(frozen=True)
class RatedExample:
    """One response with its target."""

    row: EncodedRow
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
        self.limit, self._config = config.max_len, config
        self._responses = ResponseRows(
            config,
            tokenizer,
            sources,
            repeated_prompt=config.repeated_prompt,
            use_tokens=config.use_tokens,
        )

    def encode(self, row: Row, ref: RowRef) -> RatedExample:
        (response,) = self._responses.exchanges(row)
        encoded = self._responses.encode(replace(response, may_be_empty=True), ref)
        return RatedExample(encoded, target_of(row, self._config))

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
        batch = single_responses(items, first_group=first_group)
        targets = torch.tensor([item.target for item in items])
        return replace(batch, labels=targets.float() if targets.ndim == 2 else targets)


def make_encoder(
    config: RatedDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[Source],
    *,
    in_episodes: bool,
) -> RatedEncoder:
    """Return the encoder of rated responses, see ``data/encoded.py``."""
    return RatedEncoder(config, tokenizer, sources)
