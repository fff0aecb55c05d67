"""Columns that other tools read as weights or masks of a row, and that nothing reads here."""

from __future__ import annotations

from typing import Any

from burnish.config.data import DataConfig, PromptDataConfig
from burnish.config.templates import fields_of
from burnish.data.base import Row
from burnish.data.notices import note

MARKS = frozenset(
    {
        *("weight", "weights", "loss_weight", "sample_weight", "train"),
        *("mask", "loss_mask", "completion_mask", "assistant_masks", "attention_mask"),
    }
)
"""Columns with which other tools weight rows or leave tokens out of the loss."""


def note_marks(row: Row, config: DataConfig) -> None:
    """Record a notice if the row has a column in :data:`MARKS` that would change its loss, and that
    nothing reads. Rewards read all columns of prompts."""
    if MARKS.isdisjoint(row.columns) or isinstance(config, PromptDataConfig):
        return
    used = {value for name, value in config if name.endswith("_key")}
    for names in (value for name, value in config if name.endswith("_keys")):
        used |= set(names or ())
    used |= set(fields_of(config.prompt_template)) if config.prompt_template else set()
    for key in MARKS.intersection(row.columns) - used:
        if _weighs(row.columns[key]):
            note(
                "column_unread",
                f"the column {key!r} is {repr(row.columns[key])[:40]} here, but no column weights "
                "a row or leaves it out, so the row is trained like others; remove the rows that "
                "should not be trained (a message of a conversation can have train: false), or "
                "the column",
            )


def _weighs(value: Any) -> bool:
    """Return whether a mark differs from 1 or true, or a list has such an entry."""
    if isinstance(value, list | tuple):
        return any(map(_weighs, value))
    return value is not None and str(value).lower() not in ("", "1", "1.0", "true")
