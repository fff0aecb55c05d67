"""The columns of data files, read when a recipe is loaded: a column that a recipe names and a file
does not have is then one of the recipe's problems, told with the others.

Only the first row of a file is looked at. A file that is not there (an earlier job may have to
write it), or that cannot be read, says nothing here; opening the data does.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from burnish.config.explain import nearest

_LARGEST_JSON = 16 << 20
"""A .json file is parsed as a whole; a larger one says nothing here."""


def columns_of(path: str) -> tuple[str, ...] | None:
    """Names of the columns of a data file's first row. None: it does not say."""
    file = Path(path)
    try:
        found = _first_row(file, file.suffix.lower())
    except (OSError, ValueError, csv.Error):  # pyarrow's errors and json's are ValueErrors
        return None
    return tuple(map(str, found)) if found else None


def missing_columns(paths: Iterable[str], wanted: Mapping[str, str | None]) -> Iterator[str]:
    """One sentence for each of the ``wanted`` columns (field -> its value; None: not wanted) and
    each file without it."""
    for path in paths:
        have = columns_of(path)
        for field, name in wanted.items():
            if have is not None and name is not None and name not in have:
                yield (
                    f"{field}={name}: {path} has no such column; its columns are "
                    f"{', '.join(have)}{nearest(name, have)}. Correct {field}, or add the column"
                )


def _first_row(file: Path, suffix: str) -> Iterable[Any] | None:
    if not file.is_file():
        return None
    if suffix == ".parquet":
        import pyarrow.parquet

        names: list[str] = pyarrow.parquet.read_schema(file).names
        return names
    if suffix == ".json":
        small = file.stat().st_size <= _LARGEST_JSON
        rows = json.loads(file.read_text(encoding="utf-8-sig")) if small else None
        row = rows[0] if isinstance(rows, list) and rows else None
        return row if isinstance(row, dict) else None
    with file.open(encoding="utf-8-sig", newline="") as text:
        if suffix == ".csv":
            return next(csv.reader(text), None)
        line = next((line for line in text if line.strip()), "null") if suffix == ".jsonl" else ""
    row = json.loads(line or "null")
    return row if isinstance(row, dict) else None
