"""Preference pairs as batches: row 2i is the chosen response, row 2i + 1 the rejected one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from burnish.config.columns import finite_number, without_fraction
from burnish.data.messages import as_messages
from burnish.data.notices import note
from burnish.data.preferences.config import PreferenceDataConfig
from burnish.data.response_rows import ResponseRows, single_responses
from burnish.data.rows import EncodedRow, Exchange, column, is_text
from burnish.data.sources import DataError, Row, Source
from burnish.data.stream import RowRef
from burnish.templates import of_conversation
from burnish.types import Batch, rows_to_batch

_EQUAL = (
    "chosen and rejected have the same tokens, so the pair prefers neither; drop it, or correct "
    "the row (chat templates often strip white space, in which responses may differ)"
)
DESIRABLE_LABELS = {"true": True, "false": False, "1": True, "0": False}
_MARGIN_FIX = "correct the row, or set margin_key to a column of numbers"


@dataclass(frozen=True)
class Pair:
    """Two responses to one prompt. Both rows begin with the same ``chosen.prompt_len`` tokens."""

    chosen: EncodedRow
    rejected: EncodedRow
    margin: float | None = None
    """How much better the chosen response is. None if the data has no margin."""


@dataclass(frozen=True)
class UnpairedExample:
    """One response with its label: desirable or not."""

    row: EncodedRow
    desirable: bool


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
        self.limit, self._config, self._tokenizer = config.max_len, config, tokenizer
        self._responses = _responses(config, tokenizer, sources)

    def encode(self, row: Row, ref: RowRef) -> Pair:
        better, worse = self._responses.exchanges(row)
        worse = replace(worse, may_be_empty=True)
        as_chat = not is_text(better.prompt, better.response, worse.response)
        chosen = self._responses.encode(better, ref, as_chat=as_chat)
        rejected = self._responses.encode(worse, ref, as_chat=as_chat)
        begins = [list(side.ids[: side.prompt_len]) for side in (chosen, rejected)]
        if begins[0] != begins[1]:
            raise DataError(
                f"the two responses follow different prompts ({len(begins[0])} and "
                f"{len(begins[1])} tokens), but a pair must share one prompt; "
                + self._same_prompt(better, worse)
            )
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

    def batch(self, items: Sequence[Pair], *, first_group: int) -> Batch:
        """Return pairs as two rows each. Each pair has its own group id."""
        rows = [row for pair in items for row in (pair.chosen, pair.rejected)]
        batch = rows_to_batch(
            [row.ids for row in rows],
            [row.mask for row in rows],
            prompt_lens=[row.prompt_len for row in rows],
            group_ids=[first_group + i // 2 for i in range(len(rows))],
        )
        margins = [pair.margin for pair in items if pair.margin is not None for _ in range(2)]
        return replace(
            batch,
            rows_per_unit=2,
            margins=torch.tensor(margins, dtype=torch.float32) if margins else None,
        )

    def _same_prompt(self, better: Exchange, worse: Exchange) -> str:
        """Return how both responses of a row get the same prompt."""
        templates = []
        for side in (better, worse):
            answer = [] if isinstance(side.response, str) else as_messages(side.response)
            conversation = [*as_messages(side.prompt), *answer]
            templates.append(of_conversation(self._tokenizer, conversation, side.tools))
        if templates[0] is not templates[1]:
            return (
                "the tokenizer has chat templates with names, and only one of the responses calls "
                "a tool: its prompt is rendered by 'tool_use', the other's by 'default'. Add the "
                f"tools as a column {self._config.tools_key or 'tools'!r} (tools_key), with which "
                "both are rendered by 'tool_use'"
            )
        return (
            "give both responses as text, or as messages that follow the same conversation. A "
            "message with train: false before the first trained answer is part of the prompt, so "
            "both responses need it"
        )

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
        self.limit, self._config = config.max_len, config
        self._responses = _responses(config, tokenizer, sources)

    def encode(self, row: Row, ref: RowRef) -> UnpairedExample:
        config, (response,) = self._config, self._responses.exchanges(row)
        assert config.label_key is not None
        desirable = _desirable_label(column(row, config.label_key, "label_key"), config)
        response = replace(response, may_be_empty=not desirable)
        encoded = self._responses.encode(response, ref)
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

    def batch(self, items: Sequence[UnpairedExample], *, first_group: int) -> Batch:
        """Return responses as rows. Each has its own group id."""
        batch = single_responses(items, first_group=first_group)
        return replace(batch, labels=torch.tensor([item.desirable for item in items]))


def _responses(
    config: PreferenceDataConfig, tokenizer: PreTrainedTokenizerBase, sources: Sequence[Source]
) -> ResponseRows:
    return ResponseRows(
        config,
        tokenizer,
        sources,
        repeated_prompt=config.repeated_prompt,
        use_tokens=config.use_tokens,
    )


def _desirable_label(value: Any, config: PreferenceDataConfig) -> bool:
    label = DESIRABLE_LABELS.get(str(without_fraction(value)).strip().lower())
    if label is None:
        raise DataError(
            f"column {config.label_key!r} (label_key) contains {value!r}; use true or 1 for a "
            "desirable response, false or 0 for an undesirable one"
        )
    return label


def make_encoder(
    config: PreferenceDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[Source],
    *,
    in_episodes: bool,
) -> PairEncoder | UnpairedEncoder:
    """Return the encoder of pairs, or of single responses with a label, see
    ``data/encoded.py``."""
    kind = PairEncoder if config.label_key is None else UnpairedEncoder
    return kind(config, tokenizer, sources)
