"""Rows as batches of tokens: an endless stream for training, or all rows once for evaluation."""

from __future__ import annotations

from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from burnish.data.config import DataConfig
from burnish.data.encoded import BatchEncoder, EncodedStream, encoder_of, load_all
from burnish.data.forms import open_rows
from burnish.types import Batch


class BatchStream(EncodedStream[Any]):
    """An endless stream of the rows of a data section, each once per epoch of its source. Resumes
    at the exact row."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        section: str = "data",
    ) -> None:
        """Raises DataError if a source or the tokenizer cannot be used."""
        sources = open_rows(config)
        self._batches = cast(BatchEncoder[Any], encoder_of(config, tokenizer, sources))
        super().__init__(config, self._batches, seed=seed, sources=sources, section=section)

    def next(self, num: int) -> Batch:
        """Return the next ``num`` items: single rows, or pairs of rows. Each item has its own group
        id, unique within the run."""
        items = self.take(num)
        return self._batches.batch(items, first_group=self.num_seen - num)


def load_batch(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None = None,
    *,
    section: str = "data",
) -> Batch:
    """Return all rows once, in file order, at most ``limit``. Raises DataError as the stream
    does."""
    sources = open_rows(config)
    encoder = cast(BatchEncoder[Any], encoder_of(config, tokenizer, sources))
    items = load_all(sources, config, encoder, limit=limit, section=section)
    return encoder.batch(items, first_group=0)
