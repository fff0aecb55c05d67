"""Columns of data files, read when a recipe is loaded. A column that a recipe names and a file
lacks is then reported with the recipe's other problems.

Only the first row of a file is read. A file that does not exist (an earlier job may write it) or
cannot be read causes no error here, but when the data are opened."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from burnish.config.explain import nearest

LARGEST_JSON = 16 << 20
"""Maximum bytes of a .json file, which is parsed as a unit; a larger one is not checked."""
_MAX_DEPTH = 100
"""Maximum nesting of a row. Deeper ones exhaust the stack of later readers."""


def json_value(text: str) -> Any:
    """Parse JSON. Raises ValueError for invalid JSON, nesting deeper than 100 levels, or an integer
    with more digits than Python converts."""
    too_deep = f"it is nested deeper than {_MAX_DEPTH} levels"
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    if text.count("[") + text.count("{") > _MAX_DEPTH and _deeper_than(value, _MAX_DEPTH):
        raise ValueError(too_deep)
    return value


def _deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        inside = [v.values() if isinstance(v, dict) else v for v in level if _is_nested(v)]
        if not inside:
            return False
        level = [item for items in inside for item in items]
    return True


def _is_nested(value: Any) -> bool:
    return isinstance(value, (dict, list))


def columns_of(path: str) -> tuple[str, ...] | None:
    """Return the names of the columns of a data file's first row, or None if they cannot be
    read."""
    found = first_row(path)
    return tuple(map(str, found)) if found else None


def first_row(path: str) -> Mapping[str, Any] | None:
    """Return the first row of a data file as column -> value, or None if it cannot be read."""
    file = Path(path)
    try:
        return _first_row(file, file.suffix.lower())
    except (OSError, ValueError, csv.Error):  # pyarrow's errors and json's are ValueErrors
        return None


def missing_columns(paths: Iterable[str], wanted: Mapping[str, str | None]) -> Iterator[str]:
    """Yield an error for each of the ``wanted`` columns (field -> its value; None: not wanted) and
    each file without it."""
    for path in paths:
        have = columns_of(path)
        for field, name in wanted.items():
            if have is not None and name is not None and name not in have:
                yield (
                    f"{field}={name}: {path} has no such column; its columns are "
                    f"{', '.join(have)}{nearest(name, have)}. Correct {field}, or add the column"
                )


def _first_row(file: Path, suffix: str) -> Mapping[str, Any] | None:
    if not file.is_file():
        return None
    if suffix == ".parquet":
        return _first_of_parquet(file)
    if suffix == ".json":
        small = file.stat().st_size <= LARGEST_JSON
        rows = json_value(file.read_text(encoding="utf-8-sig")) if small else None
        row = rows[0] if isinstance(rows, list) and rows else None
        return row if isinstance(row, dict) else None
    with file.open(encoding="utf-8-sig", newline="") as text:
        if suffix == ".csv":
            reader = csv.reader(text)
            header = next(reader, [])
            cells = next((cells for cells in reader if cells), [])
            return {**dict.fromkeys(header), **dict(zip(header, cells, strict=False))} or None
        line = next((line for line in text if line.strip()), "null") if suffix in _LINES else ""
    row = json_value(line or "null")
    return row if isinstance(row, dict) else None


_LINES = (".jsonl", ".ndjson")


def _first_of_parquet(file: Path) -> Mapping[str, Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        names: list[str] = table.schema_arrow.names
        for batch in table.iter_batches(batch_size=1):
            row: dict[str, Any] = batch.to_pylist()[0]
            return row
    return dict.fromkeys(names)
