"""Batches of step-labeled solutions, the training data of a process reward model.

A batch has one row per solution, with a label on the last token of each step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from burnish.config.columns import finite_number
from burnish.data.chat import check_tokenizer, encode_completion, encode_prompt, end_texts
from burnish.data.rows import (
    column,
    note_unused_template,
    prompt_column,
    system_of,
    tools_column,
)
from burnish.data.sources import DataError, Row, Source
from burnish.data.steps.config import STEP_KEYS, StepsDataConfig
from burnish.data.stream import RowRef
from burnish.types import Batch, steps_to_batch

_log = logging.getLogger("burnish")

HARD_LABELS = {
    **dict.fromkeys(("true", "+", "good"), 1.0),
    **dict.fromkeys(("false", "-", "bad"), 0.0),
}


@dataclass(frozen=True)
class EncodedSolution:
    """Token ids of prompt and steps. ``ends[k]`` is the index of the last token of step k."""

    ids: Sequence[int]
    prompt_len: int
    ends: Sequence[int]
    labels: Sequence[float]
    """One per step, in [0, 1]."""


class StepsEncoder:
    """An encoder of labeled solutions. Implements ``data.encoded.Encoder``."""

    unit = "row"
    limit_name = "max_len"

    def __init__(self, config: StepsDataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        check_tokenizer(tokenizer)
        if problem := separator_problem(tokenizer, config.step_separator):
            raise DataError(f"data: {problem}")
        self.limit = config.max_len
        self._config, self._tokenizer = config, tokenizer
        self._warned = False

    def encode(self, row: Row, ref: RowRef) -> EncodedSolution:
        config, tokenizer = self._config, self._tokenizer
        prompt = prompt_column(row, config.prompt_key, config.prompt_template)
        steps, labels = self._steps(row), self._labels(row)
        if len(steps) != len(labels):
            raise DataError(
                f"there are {len(steps)} steps and {len(labels)} labels; give one label per step"
            )
        before, ids = encode_prompt(
            tokenizer,
            prompt,
            system_prompt=system_of(row, config, prompt),
            apply_chat_template=config.apply_chat_template,
            tools=tools_column(row, config),
        )
        if isinstance(prompt, str) and not config.apply_chat_template:
            note_unused_template(tokenizer, ids, config)
        prompt_len, ends = len(ids), []
        for k, step in enumerate(steps):
            last = k == len(steps) - 1 and config.add_end_token
            text = self._text(step, k, last=last)
            ids, _ = encode_completion(tokenizer, ids, text, prompt=before, add_eos=last)
            before += text
            ends.append(len(ids) - 1)
        return EncodedSolution(ids, prompt_len, ends, labels)

    def _text(self, step: str, k: int, *, last: bool) -> str:
        """Return a step as rewards split it: the separator occurs first at its end. The ``last``
        step before an end token may have one, with nothing behind it."""
        separator = self._config.step_separator
        text = without_separator(step, separator)
        if not text.strip():
            raise DataError(
                f"step {k} is {step!r}, only a part of step_separator={separator!r}; drop "
                "the step, or choose another separator"
            )
        if not last:
            return text + separator
        behind = step.removeprefix(text).strip()
        return step if separator not in step or behind in ("", separator.strip()) else text

    def length(self, item: EncodedSolution) -> int:
        return len(item.ids)

    def truncate(self, item: EncodedSolution) -> EncodedSolution | None:
        """Truncate the prompt on the left. Return None if no prompt token would be left."""
        excess = len(item.ids) - self.limit
        if excess >= item.prompt_len:
            return None
        ends = [end - excess for end in item.ends]
        return EncodedSolution(item.ids[excess:], item.prompt_len - excess, ends, item.labels)

    def batch(self, items: Sequence[EncodedSolution], *, first_group: int) -> Batch:
        """Return solutions as rows. Each has its own group id."""
        batch = steps_to_batch(
            [item.ids for item in items],
            [item.ends for item in items],
            prompt_lens=[item.prompt_len for item in items],
        )
        labels = torch.tensor([label for item in items for label in item.labels])
        step_labels = torch.zeros(batch.tokens.numel())
        step_labels[batch.action_mask] = labels.float()
        ids = torch.arange(first_group, first_group + len(items))
        return replace(batch, step_labels=step_labels, group_ids=ids)

    def _steps(self, row: Row) -> list[str]:
        key = self._config.steps_key
        if key is None:
            present = (key for key in STEP_KEYS if row.values.get(key) is not None)
            key = next(present, STEP_KEYS[0])
        steps = column(row, key, "steps_key")
        if isinstance(steps, str) or not isinstance(steps, Sequence):
            raise DataError(
                f"the steps are a {type(steps).__name__}, not a list of texts; split them into a "
                "list"
            )
        if not steps:
            raise DataError("the list of steps is empty; drop the row")
        for k, step in enumerate(steps):
            if not isinstance(step, str) or not step.strip():
                raise DataError(f"step {k} is {step!r}; a step is a text that is not empty")
        separator = self._config.step_separator
        inside = [k for k, s in enumerate(steps) if separator in without_separator(s, separator)]
        if inside and not self._warned:
            self._warned = True
            _log.warning(
                "%s: step %d contains the step_separator %r, so a reward would see two steps; "
                "choose a separator that no step contains (logged once)",
                *(row.where, inside[0], separator),
            )
        return list(steps)

    def _labels(self, row: Row) -> list[float]:
        key = self._config.labels_key
        labels = column(row, key, "labels_key")
        if isinstance(labels, str) or not isinstance(labels, Sequence):
            raise DataError(f"column {key!r} (labels_key) holds {labels!r}, not a list of labels")
        return [_label(label, key, k) for k, label in enumerate(labels)]


def separator_problem(tokenizer: PreTrainedTokenizerBase, separator: str) -> str | None:
    """Return why ``separator`` cannot separate the steps of a response; None if it can."""
    texts = filter(None, end_texts(tokenizer).values())
    end = next((text for text in texts if text in separator), None)
    if end is None:
        return None
    return (
        f"step_separator={separator!r} has {end!r}, which ends a response of this model, so no "
        "step could follow; use a text or another special token"
    )


def without_separator(step: str, separator: str) -> str:
    """Return ``step`` without separators and parts of them at its end.

    >>> without_separator("x\\n", "\\n\\n"), without_separator("a;b;", ";")
    ('x', 'a;b')
    """
    text = step
    while True:
        overlap = (text + separator).find(separator, max(0, len(text) - len(separator)))
        if overlap == len(text):
            return text
        text = text[:overlap]


def _label(value: Any, key: str, step: int) -> float:
    """Return the probability that a step is correct."""
    named = HARD_LABELS.get(str(value).strip().lower())
    if named is not None:
        return named
    number = finite_number(value)
    if number is None or not 0.0 <= number <= 1.0:
        raise DataError(
            f"column {key!r} (labels_key) holds {value!r} for step {step}; a label is true or "
            "false, 1 or 0, '+' or '-', good or bad, or a probability between 0 and 1"
        )
    return number


def make_encoder(
    config: StepsDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[Source],
    *,
    in_episodes: bool,
) -> StepsEncoder:
    """Return the encoder of labeled solutions, see ``data/encoded.py``."""
    return StepsEncoder(config, tokenizer)
