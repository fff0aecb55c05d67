"""Preference pairs as batches: row 2i is the chosen response, row 2i + 1 the rejected one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedTokenizerBase

from burnish.config.columns import finite_number
from burnish.data.chat import check_tokenizer
from burnish.data.encoded import EncodedStream, load_all
from burnish.data.forms import open_rows
from burnish.data.notices import note
from burnish.data.preferences.config import PreferenceDataConfig
from burnish.data.repeated import RepeatedPrompts
from burnish.data.rows import (
    TokenRow,
    column,
    encode_exchange,
    exchange,
    is_text,
    prompt_column,
)
from burnish.data.sources import DataError, Row, Source
from burnish.data.stream import RowRef
from burnish.types import Batch, rows_to_batch

_EQUAL = (
    "chosen and rejected have the same tokens, so the pair prefers neither; drop it, or correct "
    "the row (chat templates often strip white space, in which responses may differ)"
)
_MARGIN_FIX = "correct the row, or set margin_key to a column of numbers"


@dataclass(frozen=True)
class Pair:
    """Two responses to one prompt. Both rows begin with the same ``chosen.prompt_len`` tokens."""

    chosen: TokenRow
    rejected: TokenRow
    margin: float | None = None
    """How much better the chosen response is. None if the data has no margin."""


class PreferenceStream(EncodedStream[Pair]):
    """An endless stream of pairs, each once per epoch of its source. Resumes at the exact pair."""

    def __init__(
        self, config: PreferenceDataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int
    ) -> None:
        """Raises DataError if a source or the tokenizer cannot be used."""
        sources = open_rows(config)
        encoder = PairEncoder(config, tokenizer, sources)
        super().__init__(config, encoder, seed=seed, sources=sources)

    def next(self, num_pairs: int) -> Batch:
        """Return the next ``num_pairs`` pairs as 2 * num_pairs rows.

        Each pair has its own group id, unique within the run.
        """
        first = self.counts["pairs_seen"]
        return _batch(self.take(num_pairs), first_group=first)


def load_pairs(
    config: PreferenceDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None = None,
    *,
    section: str = "data",
) -> Batch:
    """Return all pairs once, in file order, at most ``limit``.

    Raises DataError as the stream does.
    """
    sources = open_rows(config)
    encoder = PairEncoder(config, tokenizer, sources)
    return _batch(load_all(sources, config, encoder, limit=limit, section=section))


class PairEncoder:
    """An encoder of pairs. Implements ``data.encoded.Encoder``."""

    unit = "pair"
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
        keys = (config.chosen_key, config.rejected_key)
        self._repeated = RepeatedPrompts(config, keys, sources)

    def encode(self, row: Row, ref: RowRef) -> Pair:
        config = self._config
        prompt = prompt_column(row, config.prompt_key, config.prompt_template)
        better = exchange(row, prompt, config, key=config.chosen_key, field="chosen_key")
        worse = exchange(row, prompt, config, key=config.rejected_key, field="rejected_key")
        worse = replace(worse, may_be_empty=True)
        as_chat = not is_text(prompt, better.response, worse.response)
        chosen, rejected = (
            to_last_trained(
                encode_exchange(
                    self._tokenizer, self._repeated.strip(ref.source, one), config, as_chat=as_chat
                )
            )
            for one in (better, worse)
        )
        _check_shared_prompt(chosen, rejected)
        if list(chosen.ids) == list(rejected.ids):
            note("equal", _EQUAL)
        return Pair(chosen, rejected, self._margin(row))

    def length(self, item: Pair) -> int:
        return max(len(item.chosen.ids), len(item.rejected.ids))

    def truncate(self, item: Pair) -> Pair | None:
        """Remove the same leading prompt tokens from both rows, so that the prompt stays shared; or
        the end of each row over the limit (``truncate_right``).

        Return None if no prompt would be left, because a comparison needs a prompt, or if the rows
        are equal without their ends.
        """
        if self._config.overlong == "truncate_right":
            better = item.chosen.without_right(self.limit)
            worse = item.rejected.without_right(self.limit)
            if better is None or worse is None or list(better.ids) == list(worse.ids):
                return None
            return replace(item, chosen=better, rejected=worse)
        excess = self.length(item) - self.limit
        if excess >= item.chosen.prompt_len:
            return None
        chosen, rejected = item.chosen.without_left(excess), item.rejected.without_left(excess)
        if chosen is None or rejected is None:
            return None
        return replace(item, chosen=chosen, rejected=rejected)

    def _margin(self, row: Row) -> float | None:
        key = self._config.margin_key
        if key is None:
            return None
        value = column(row, key, "margin_key")
        margin = finite_number(value)
        if margin is None:
            raise DataError(
                f"column {key!r} (margin_key) contains {repr(value)[:60]}, not a finite number; "
                + _MARGIN_FIX
            )
        return margin


def to_last_trained(row: TokenRow) -> TokenRow:
    """Remove the tokens after the last trained token, which is the end token.

    Chat templates often add a newline after it. No sampled response contains that newline, and a
    reward model scores the last token.
    """
    end = len(row.mask) - row.mask[::-1].index(True) if any(row.mask) else len(row.mask)
    return replace(row, ids=row.ids[:end], mask=row.mask[:end])


def _check_shared_prompt(chosen: TokenRow, rejected: TokenRow) -> None:
    """Raise DataError unless both rows begin with the same tokens, up to the first trained one."""
    begins = [row.ids[: row.prompt_len] for row in (chosen, rejected)]
    if begins[0] != begins[1]:
        raise DataError(
            f"the two responses follow different prompts ({len(begins[0])} and {len(begins[1])} "
            "tokens), but a pair must share one prompt; give both responses as text, or as "
            "messages that follow the same conversation. A message with train: false before the "
            "first trained answer is part of the prompt, so both responses need it"
        )


def _batch(pairs: Sequence[Pair], *, first_group: int = 0) -> Batch:
    rows = [row for pair in pairs for row in (pair.chosen, pair.rejected)]
    batch = rows_to_batch(
        [row.ids for row in rows],
        [row.mask for row in rows],
        prompt_lens=[row.prompt_len for row in rows],
        group_ids=[first_group + i // 2 for i in range(len(rows))],
    )
    margins = [pair.margin for pair in pairs if pair.margin is not None for _ in range(2)]
    return replace(
        batch,
        rows_per_unit=2,
        margins=torch.tensor(margins, dtype=torch.float32) if margins else None,
    )
