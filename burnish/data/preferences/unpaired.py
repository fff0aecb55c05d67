"""Single responses with a binary label, for KTO: rows of their own, or the two halves of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from burnish.data.chat import check_tokenizer
from burnish.data.encoded import EncodedStream, load_all
from burnish.data.forms import open_rows
from burnish.data.preferences.config import PreferenceDataConfig
from burnish.data.preferences.encode import PreferenceStream, load_pairs, to_last_trained
from burnish.data.repeated import RepeatedPrompts
from burnish.data.rows import TokenRow, column, encode_exchange, exchange, prompt_column
from burnish.data.sources import DataError, Row, Source
from burnish.data.stream import RowRef
from burnish.types import Batch, rows_to_batch

DESIRABLE_LABELS = {"true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True)
class UnpairedExample:
    """One response with its label: desirable or not."""

    row: TokenRow
    desirable: bool


class UnpairedStream(EncodedStream[UnpairedExample]):
    """An endless, exactly resumable stream of labeled responses, each once per epoch of its
    source."""

    def __init__(
        self, config: PreferenceDataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int
    ) -> None:
        """``config`` must have a ``label_key``. Raises DataError if a source or the tokenizer
        cannot be used."""
        sources = open_rows(config)
        encoder = UnpairedEncoder(config, tokenizer, sources)
        super().__init__(config, encoder, seed=seed, sources=sources)

    def next(self, num_rows: int) -> Batch:
        """Return the next ``num_rows`` responses."""
        return _batch(self.take(num_rows), first_group=self.counts["rows_seen"] - num_rows)


class SplitPairsStream(PreferenceStream):
    """A stream of pairs, each split into a desirable and an undesirable response."""

    @property
    def num_rows(self) -> int | None:
        """Number of responses: two per pair. None: unknown, because a source is streamed."""
        pairs = super().num_rows
        return None if pairs is None else 2 * pairs

    def next(self, num_rows: int) -> Batch:
        """Return the next ``num_rows`` responses, from half as many pairs."""
        return split_pairs(super().next(num_rows // 2))


def load_unpaired(
    config: PreferenceDataConfig, tokenizer: PreTrainedTokenizerBase, *, section: str = "data"
) -> Batch:
    """Return all responses once, in file order. Raises DataError as the streams do."""
    if config.label_key is None:
        return split_pairs(load_pairs(config, tokenizer, section=section))
    sources = open_rows(config)
    encoder = UnpairedEncoder(config, tokenizer, sources)
    return _batch(load_all(sources, config, encoder, section=section), first_group=0)


def split_pairs(pairs: Batch) -> Batch:
    """Convert a batch of pairs to one of single responses. Even rows are desirable."""
    labels = torch.arange(pairs.num_rows) % 2 == 0
    return replace(pairs, rows_per_unit=1, labels=labels, margins=None)


def mismatched_pairs(batch: Batch, *, max_len: int) -> Batch:
    """Pair every prompt of the batch with the response of another prompt.

    KTO estimates the KL between policy and reference from these rows. Adjacent rows with the same
    prompt get the responses of the next prompt's rows, in turn. If each prompt has two rows, all
    responses are used. If there is only one prompt, every row keeps its own response.

    A row over ``max_len`` (the limit of the batch's own rows) is truncated on the left of its
    prompt. The last prompt token is always kept, because it predicts the first response token.
    """
    begins, ends = batch.offsets[:-1].tolist(), batch.offsets[1:].tolist()
    tokens, mask = batch.tokens.tolist(), batch.action_mask.tolist()
    cuts = [b + p for b, p in zip(begins, batch.prompt_lens.tolist(), strict=True)]
    prompts = [tuple(tokens[b:c]) for b, c in zip(begins, cuts, strict=True)]
    rows, masks = [], []
    for j, prompt in zip(_of_the_next_prompt(prompts), prompts, strict=True):
        response = tokens[cuts[j] : ends[j]]
        excess = len(prompt) + len(response) - max_len
        kept = prompt[min(max(0, excess), len(prompt) - 1) :]
        rows.append([*kept, *response])
        masks.append([False] * len(kept) + mask[cuts[j] : ends[j]])
    return rows_to_batch(rows, masks, prompt_lens=[0] * len(rows))


def _of_the_next_prompt(prompts: Sequence[tuple[int, ...]]) -> list[int]:
    """Return, for every row, the index of a row with another prompt.

    The row comes from the next run of equal prompts, cyclically. If all prompts are equal, it is
    the row itself.
    """
    runs = [list(run) for _, run in groupby(range(len(prompts)), key=lambda row: prompts[row])]
    if len(runs) > 1 and prompts[0] == prompts[-1]:  # one run that wraps around the end
        runs[0] = runs.pop() + runs[0]
    if len(runs) == 1:
        return list(range(len(prompts)))
    found = [0] * len(prompts)
    for run, following in zip(runs, runs[1:] + runs[:1], strict=True):
        for place, row in enumerate(run):
            found[row] = following[place % len(following)]
    return found


class UnpairedEncoder:
    """An encoder of labeled responses. Implements ``data.encoded.Encoder``."""

    unit = "row"
    limit_name = "max_len"

    def __init__(
        self,
        config: PreferenceDataConfig,
        tokenizer: PreTrainedTokenizerBase,
        sources: Sequence[Source],
    ) -> None:
        check_tokenizer(tokenizer)
        self.limit = config.max_len
        self._config, self._tokenizer = config, tokenizer
        self._repeated = RepeatedPrompts(config, [config.response_key], sources)

    def encode(self, row: Row, ref: RowRef) -> UnpairedExample:
        config = self._config
        prompt = prompt_column(row, config.prompt_key, config.prompt_template)
        given = exchange(row, prompt, config, key=config.response_key, field="response_key")
        assert config.label_key is not None
        desirable = _desirable_label(column(row, config.label_key, "label_key"), config)
        given = self._repeated.strip(ref.source, replace(given, may_be_empty=not desirable))
        encoded = to_last_trained(encode_exchange(self._tokenizer, given, config))
        return UnpairedExample(encoded, desirable)

    def length(self, item: UnpairedExample) -> int:
        return len(item.row.ids)

    def truncate(self, item: UnpairedExample) -> UnpairedExample | None:
        if self._config.overlong == "truncate_right":
            cut = item.row.without_right(self.limit)
            return None if cut is None else replace(item, row=cut)
        excess = self.length(item) - self.limit
        if excess >= item.row.prompt_len:
            return None
        row = item.row.without_left(excess)
        return None if row is None else replace(item, row=row)


def _desirable_label(value: Any, config: PreferenceDataConfig) -> bool:
    if isinstance(value, float) and value.is_integer():  # of a column with empty cells
        value = int(value)
    found = DESIRABLE_LABELS.get(str(value).strip().lower())
    if found is None:
        raise DataError(
            f"column {config.label_key!r} (label_key) contains {value!r}; use true or 1 for a "
            "desirable response, false or 0 for an undesirable one"
        )
    return found


def _batch(items: Sequence[UnpairedExample], *, first_group: int) -> Batch:
    batch = rows_to_batch(
        [item.row.ids for item in items],
        [item.row.mask for item in items],
        prompt_lens=[item.row.prompt_len for item in items],
        group_ids=[first_group + i for i in range(len(items))],
    )
    return replace(batch, labels=torch.tensor([item.desirable for item in items]))
