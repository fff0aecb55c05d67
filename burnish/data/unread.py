"""Columns of rows and keys of messages that other tools read as weights or masks, and that nothing
reads here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from burnish.chat_message import TRAIN_FLAGS
from burnish.config.templates import fields_of
from burnish.data.base import Row
from burnish.data.config import DataConfig
from burnish.data.notices import note

MARKS = frozenset(
    {
        *("weight", "weights", "loss_weight", "sample_weight", "train"),
        *("mask", "loss_mask", "completion_mask", "assistant_masks", "attention_mask"),
        *("trainable", "training", "train_on", "train_detail"),
    }
)
"""Names with which other tools weight rows or leave tokens out of the loss. 1 or true: trained."""
EXCLUSIONS = frozenset({"masked", "exclude", "excluded"})
"""Names with which other tools leave rows or messages out of the loss. 1 or true: not trained."""
PROMPT_COLUMNS = ("chat_template_kwargs", "documents")
"""Columns that other tools pass to the chat template."""
_COLUMNS = MARKS | EXCLUSIONS | set(PROMPT_COLUMNS)
_FLAGS = (MARKS | EXCLUSIONS).difference(TRAIN_FLAGS)
_PER_ROLE = ("train", "loss", "loss_mask")
"""Flags of messages with which other tools also train messages of users."""


def note_marks(row: Row, config: DataConfig) -> None:
    """Record a notice if the row has a column in :data:`MARKS` or :data:`EXCLUSIONS` that would
    change its loss, or one in :data:`PROMPT_COLUMNS`, and that nothing reads. Rewards read all
    columns of prompts."""
    if _COLUMNS.isdisjoint(row.columns):
        return
    used = {value for name, value in config if name.endswith("_key")}
    for names in (value for name, value in config if name.endswith("_keys")):
        used |= set(names or ())
    used |= set(fields_of(config.prompt_template)) if config.prompt_template else set()
    for key in PROMPT_COLUMNS:
        if row.columns.get(key) and key not in used:
            note_template_variables(key, row.columns[key])
    if not config.is_trained:
        return
    for key in sorted((MARKS | EXCLUSIONS).intersection(row.columns) - used):
        if _weighs(key, row.columns[key]):
            note(
                "column_unread",
                f"the column {key!r} is {repr(row.columns[key])[:40]} here, but no column weights "
                "a row or leaves it out, so the row is trained like others; remove the rows that "
                "should not be trained (a message of a conversation can have train: false), or "
                "the column",
            )


def note_template_variables(key: str, value: Any) -> None:
    """Record a notice for variables of the chat template that a row has at ``key``."""
    note(
        "column_unread",
        f"{key!r} is {repr(value)[:40]} here, but the chat template gets the same variables for "
        "all rows; set them in model.chat_template_kwargs, and train rows with other values in "
        "another run",
    )


def note_flags(messages: Sequence[Mapping[str, Any]], trained: Iterable[int]) -> None:
    """Record a notice if a trained message has a key in :data:`MARKS` or :data:`EXCLUSIONS` that
    would change its loss, other than those that are read. ``trained``: indices of messages."""
    for i in trained:
        if _FLAGS.isdisjoint(messages[i]):
            continue
        for key in sorted(_FLAGS.intersection(messages[i])):
            if _weighs(key, value := messages[i][key]):
                note(
                    "message_flag_unread",
                    f"message {i} ({messages[i]['role']}) has {key}: {repr(value)[:40]}, which is "
                    "not read, so the message is trained like others; write train: false (or "
                    "weight, loss or loss_mask: 0) in messages that should not be trained",
                )


def note_other_roles(messages: Sequence[Mapping[str, Any]]) -> None:
    """Record a notice if the flags of a message that is not the assistant's would train it."""
    for i, message in enumerate(messages):
        flags = [key for key in _PER_ROLE if message.get(key)]
        if flags and message["role"] != "assistant":
            note(
                "message_flag_unread",
                f"message {i} ({message['role']}) has {flags[0]}: {message[flags[0]]!r}, but only "
                "messages of the assistant are trained; remove the flag, or set "
                "data.train_on_prompt: true to train on all tokens",
            )


def _weighs(name: str, value: Any) -> bool:
    """Return whether a mark does not mean to train, or a list has such an entry."""
    if isinstance(value, list | tuple):
        return any(_weighs(name, item) for item in value)
    trains = ("", "0", "0.0", "false") if name in EXCLUSIONS else ("", "1", "1.0", "true")
    return value is not None and str(value).lower() not in trains
