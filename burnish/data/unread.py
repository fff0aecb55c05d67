"""Columns of rows and keys of messages that other tools read as weights, masks or parts of the
prompt, and that nothing reads here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from burnish.chat_message import TRAIN_FLAGS
from burnish.config.forms import HISTORY, INPUTS, INSTRUCTION, FormError, as_list
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
_COLUMNS = MARKS | EXCLUSIONS | {*PROMPT_COLUMNS, HISTORY, *INPUTS}
_FLAGS = (MARKS | EXCLUSIONS).difference(TRAIN_FLAGS)
_ROLE_KEYS = ("role", "from")
_PER_ROLE = ("train", "loss", "loss_mask")
"""Flags of messages with which other tools also train messages of users."""


def note_marks(row: Row, config: DataConfig) -> None:
    """Record a notice if the row has a column that nothing reads: one in :data:`MARKS` or
    :data:`EXCLUSIONS` that would change its loss (rewards read all columns of prompts), one in
    :data:`PROMPT_COLUMNS`, or a part of an Alpaca prompt."""
    if _COLUMNS.isdisjoint(row.columns):
        return
    used = {value for name, value in config if name.endswith("_key")}
    for names in (value for name, value in config if name.endswith("_keys")):
        used |= set(names or ())
    used |= set(fields_of(config.prompt_template)) if config.prompt_template else set()
    for key in PROMPT_COLUMNS:
        if row.columns.get(key) and key not in used:
            note_template_variables(key, row.columns[key])
    for key in set(_parts_of_a_prompt(row.columns, config)) - used:
        if not _is_read(row, config):
            note(
                "column_unread",
                f"the column {key!r} is {repr(row.columns[key])[:40]} here, but it is no part of "
                "the prompt, so the model does not see it; name the columns instruction, input, "
                "history and output, without a key of the prompt (form alpaca), write all turns "
                "as messages, or remove the column",
            )
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


def _parts_of_a_prompt(columns: Mapping[str, Any], config: DataConfig) -> Iterator[str]:
    """Yield the columns with turns before the prompt, unless other columns have their texts, too,
    and with the input of an instruction that is the prompt."""
    history = columns.get(HISTORY)
    turns = [text for text in _texts(as_list(history) or history) if text.strip()]
    if turns:
        others = "\n".join(
            text for key in columns if key != HISTORY for text in _texts(columns[key])
        )
        if not all(text in others for text in turns):
            yield HISTORY
    is_instruction = config.prompt_key == INSTRUCTION and config.prompt_template is None
    for key in INPUTS if is_instruction else ():
        if isinstance(columns.get(key), str) and columns[key].strip():
            yield key


def _texts(node: Any) -> Iterator[str]:
    """Yield the texts in a value, without those of roles."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from () if key in _ROLE_KEYS else _texts(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _texts(value)


def _is_read(row: Row, config: DataConfig) -> bool:
    """Return whether the form of the row has all parts of its prompt."""
    try:
        return config.reading_of(row.columns).form in ("alpaca", "comparison")
    except FormError:  # several forms, of which the first row had one
        return row.original is not None


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
