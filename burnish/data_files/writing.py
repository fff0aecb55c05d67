"""Write rows to files that data sources can read: JSON lines and Parquet."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from burnish.errors import BurnishError
from burnish.json_text import json_types

_log = logging.getLogger(__name__)

Rows = Iterable[Mapping[str, Any]]


def json_line(row: Mapping[str, Any]) -> bytes:
    """Return a row as one line of strict JSON in UTF-8, with a line feed.

    Non-finite numbers become null, and values without a JSON type text (:func:`json_types`). A lone
    surrogate, which UTF-8 cannot encode, stays an escape.
    """
    plain = json_types(row, finite=True)
    try:
        return (json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(plain, allow_nan=False) + "\n").encode()


def read_lines(body: bytes) -> Iterator[dict[str, Any]]:
    """Yield the rows of lines written by :func:`json_line`."""
    for line in body.split(b"\n"):
        if line:
            yield json.loads(line)


class ColumnError(BurnishError, ValueError):
    """A column with incompatible values that may not be converted to JSON text."""


def write_parquet(
    parts: Sequence[Callable[[], Rows]], path: Path, *, as_they_are: frozenset[str] = frozenset()
) -> None:
    """Write all rows of ``parts``, one row group per part.

    Parts are read twice: first for the column types, then for writing. A column's type is inferred
    from its values: numbers, text, lists, structs. A column with incompatible values (text in one
    row, a number in another) is written as JSON text, with a warning. Raises ColumnError if such a
    column is in ``as_they_are``.
    """
    columns: dict[str, None] = {}
    as_text: set[str] = set()
    types: dict[str, pa.DataType] = {}
    for read in parts:
        rows = list(read())
        columns |= dict.fromkeys(name for row in rows for name in row)
        for name in dict.fromkeys(name for row in rows for name in row):
            column_type = _type_of([row.get(name) for row in rows])
            merged = _merged(types[name], column_type) if name in types else column_type
            if merged is None:
                as_text.add(name)
            else:
                types[name] = merged
    types |= {name: pa.string() for name in as_text}
    for name in sorted(as_text & as_they_are):
        raise ColumnError(
            f"the values of column {name!r} have several types (text and lists, or messages of "
            "different forms), but a column of a Parquet file has one type"
        )
    if as_text:
        _log.warning("columns written as JSON text, of mixed types: %s", ", ".join(sorted(as_text)))
    schema = pa.schema([(name, types[name]) for name in columns])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for read in parts:
            table = [dict.fromkeys(columns) | dict(row) for row in read()]
            for cells in table:
                for name, value in cells.items():
                    is_text = name in as_text and value is not None
                    cells[name] = json.dumps(value) if is_text else _valid_text(value)
            if table:
                writer.write_table(pa.Table.from_pylist(table, schema=schema))


def _valid_text(value: Any) -> Any:
    """Replace lone surrogates with ``?``, because Parquet text is UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-8", errors="replace").decode("utf-8")
    if isinstance(value, list):
        return [_valid_text(item) for item in value]
    if isinstance(value, dict):
        return {_valid_text(key): _valid_text(item) for key, item in value.items()}
    return value


def _type_of(values: Sequence[Any]) -> pa.DataType | None:
    """Return the common type of all values, or None if there is none or Parquet cannot store it."""
    try:
        common = pa.array([_valid_text(value) for value in values]).type
        pq.write_table(pa.table({"c": pa.array([], type=common)}), io.BytesIO())
    except (pa.ArrowException, OverflowError):
        return None
    return common


def _merged(first: pa.DataType, second: pa.DataType | None) -> pa.DataType | None:
    if second is None:
        return None
    try:
        return (
            pa.unify_schemas(
                [pa.schema([("c", first)]), pa.schema([("c", second)])],
                promote_options="permissive",
            )
            .field("c")
            .type
        )
    except pa.ArrowException:
        return None
