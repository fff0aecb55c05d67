"""Read demonstrations without a tokenizer."""

from __future__ import annotations

from typing import Any

from burnish.config.explain import nearest
from burnish.config.forms import unread_form
from burnish.data.base import DataError, Row
from burnish.data.demonstrations.config import SHAREGPT_KEY, SFTDataConfig
from burnish.data.messages import as_messages
from burnish.data.reader import RowReader
from burnish.data.rows import column, content_column, response_column


class Reader(RowReader[SFTDataConfig]):
    """Reads demonstrations."""

    def prompt(self, row: Row) -> Any:
        """Return the prompt of a response, the messages before the last, or a text."""
        kind = demonstration_key(row, self.config)
        if kind == self.config.response_key:
            return super().prompt(row)
        if kind == self.config.text_key:
            return row.values[kind]
        return as_messages(row.values[kind])[:-1]

    def contents(self, row: Row) -> list[Any]:
        kind = demonstration_key(row, self.config)
        if kind == self.config.text_key:
            return []
        if kind != self.config.response_key:
            return [content_column(row, kind, "messages_key")]
        return [super().prompt(row), response_column(row, kind, "response_key")]


def demonstration_key(row: Row, config: SFTDataConfig) -> str:
    """Return the column with the row's demonstration: messages, a response, or text.

    Raises DataError if no such column has a value, or if the row has none of the columns that the
    recipe sets explicitly.
    """
    keys = {
        "messages_key": config.messages_key,
        "response_key": config.response_key,
        "text_key": config.text_key,
    }
    named = {field: key for field, key in keys.items() if config.is_own(field)}
    if named and not set(named.values()) & set(row.values):
        field, key = next(iter(named.items()))
        column(row, key, field)
    others = [SHAREGPT_KEY] if "messages_key" not in named else []
    for key in [*list(keys.values())[:2], *others, config.text_key]:
        if row.values.get(key) is not None:
            return key
    hints = [nearest(key, row.values) for key in keys.values()]
    raise DataError(
        "nothing to learn from: none of the columns "
        f"{', '.join(f'{v!r} ({k})' for k, v in keys.items())} has a value; the columns are "
        f"{', '.join(row.values)}{next(filter(None, hints), '') or unread_form(row.values)}"
    )
