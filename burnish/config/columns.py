"""Columns of data files, read when a recipe is loaded. A column that a recipe names and a file
lacks is then reported with the recipe's other problems.

Only the first row of a file is read. A file that does not exist (an earlier job may write it) or
cannot be read causes no error here, but when the data are opened."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

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


COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
"""Suffix after ``.jsonl`` -> pyarrow's name of the compression."""


def suffix_of(path: Path) -> str:
    """Return the suffix of a data file in lower case; both suffixes of a compressed one.

    >>> suffix_of(Path("train.v2.JSONL.gz"))
    '.jsonl.gz'
    """
    last = path.suffix.lower()
    return Path(path.stem).suffix.lower() + last if last in COMPRESSED else last


@contextmanager
def opened_lines(path: Path) -> Iterator[BinaryIO]:
    """Open a file of lines for reading bytes, decompressed if its suffix says so."""
    compression = COMPRESSED.get(path.suffix.lower())
    if compression is None:
        with path.open("rb") as file:
            yield file
        return
    import pyarrow as pa

    with (
        pa.CompressedInputStream(pa.OSFile(str(path)), compression) as stream,
        io.BufferedReader(stream) as lines,
    ):
        yield cast(BinaryIO, lines)


def columns_of(path: str) -> tuple[str, ...] | None:
    """Return the names of the columns of a data file's first row, or None if they cannot be
    read."""
    found = first_row(path)
    return tuple(map(str, found)) if found else None


def first_row(path: str) -> Mapping[str, Any] | None:
    """Return the first row of a data file as column -> value, or None if it cannot be read."""
    file = Path(path)
    try:
        return _first_row(file, suffix_of(file))
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
    if suffix in LINES:
        with opened_lines(file) as lines:
            first = next((line for line in lines if line.strip()), b"null")
        row = json_value(first.decode("utf-8-sig"))
        return row if isinstance(row, dict) else None
    if suffix != ".csv":
        return None
    with file.open(encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text)
        header = next(reader, [])
        cells = next((cells for cells in reader if cells), [])
        return {**dict.fromkeys(header), **dict(zip(header, cells, strict=False))} or None


_PLAIN_LINES = (".jsonl", ".ndjson")
LINES = (*_PLAIN_LINES, *(plain + more for plain in _PLAIN_LINES for more in COMPRESSED))
"""Suffixes of files with one JSON object per line."""


def _first_of_parquet(file: Path) -> Mapping[str, Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        names: list[str] = table.schema_arrow.names
        for batch in table.iter_batches(batch_size=1):
            row: dict[str, Any] = batch.to_pylist()[0]
            return row
    return dict.fromkeys(names)
