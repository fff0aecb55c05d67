"""Rows of data, sources of rows, and the error of unusable data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from burnish.data_files.reading import decoded
from burnish.errors import BurnishError


class DataError(BurnishError, ValueError):
    """Unusable data or data config. The message says what is wrong, where, why, and what to do."""


@dataclass(frozen=True)
class Row:
    """One data row.

    Example: ``Row(values={"prompt": "1+1=", "label": "2"}, where="data/train.jsonl:12")``.
    """

    values: Mapping[str, Any]
    where: str
    """Position for messages: ``path:line`` (1-based) for text files, otherwise ``path row i``
    (0-based, as in prompt ids)."""
    environment: Mapping[str, Any] | None = None
    """Arguments that recreate the item: name, options, size, seed, index. None if the row is not
    from an environment."""
    fills_nulls: bool = False
    """True if the format fills nested objects with the keys of all other rows, with null as their
    value (Parquet, Arrow)."""
    original: Mapping[str, Any] | None = None
    """Columns before the row was converted from a public form. None: it was not converted."""

    @property
    def columns(self) -> Mapping[str, Any]:
        """Columns of the row as they are in its file."""
        return self.values if self.original is None else self.original


def columnar_row(values: dict[str, Any], where: str) -> Row:
    """Return a row of a columnar format (Parquet, Arrow, Hugging Face datasets)."""
    return Row(decoded(values), where, fills_nulls=True)


class Source(Protocol):
    """A fixed number of rows that can be read in any order."""

    name: str

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Row: ...


EMPTY = "{place}: the data set is empty; use a source with at least one row"
"""Message of an empty source."""


class Rows:
    """Rows in memory (or memory-mapped), read by a function of their index."""

    def __init__(self, name: str, size: int, read: Callable[[int], Row]) -> None:
        self.name = name
        self._size, self._read = size, read

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, i: int) -> Row:
        return self._read(i)
