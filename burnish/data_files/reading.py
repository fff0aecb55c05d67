"""Data files of a source: the files that a path names, the columns and the first row of each, and
their number of rows. Checks of a recipe read these before the data are opened.

A file that does not exist (an earlier job may write it) or cannot be read causes no error here, but
when the data are opened."""

from __future__ import annotations

import csv
import io
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

from burnish.data_files import arrow_files
from burnish.data_files.splits import FilesError, Splits, splits_of
from burnish.json_text import json_value
from burnish.small_files import read_small

LARGEST_JSON = 16 << 20
"""Maximum bytes of a .json file, which is parsed as a unit; a larger one is not checked."""
_LARGEST_COUNTED = 2 << 30
"""Text files with more bytes than this are not counted before a run."""


def decoded(values: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a row, with bytes that are UTF-8 as text: some writers of Parquet store
    texts in binary columns. Other bytes (images) are kept."""
    for key, value in values.items():
        if type(value) is bytes:
            with suppress(UnicodeDecodeError):
                values[key] = value.decode()
    return values


# --- files


DEFAULT_SPLIT = "train"
"""Split of a data set that is read if a recipe names none."""
SAVED_DATASET = ("dataset_dict.json", "state.json")
"""Files of a folder written by ``datasets.save_to_disk``: one of them exists."""

_WILDCARD = re.compile(r"[*?\[]")


def files_of(path: str) -> list[Path]:
    """Return the sorted files that the path of a file source names.

    They are the file itself, the files directly in a folder, or the matches of a glob (``*``,
    ``?``, ``[...]``, and ``**`` for all subfolders). A path that exists is not read as a glob. If
    the names say several splits (``train-*``, ``test-*``), only the files of the training split are
    returned. A folder without other files than a subfolder ``data`` is read there. Hidden files of
    a folder, and those without a suffix, ending in ``.md`` or beginning with ``_`` are left out.
    The list is empty if a folder has no other files, or if nothing matches a glob; a path that does
    not exist is returned as it is. Raises FilesError if types differ, if it is ambiguous which
    split is meant, or if a folder cannot be listed.
    """
    return list(splits_of_path(path).train)


def splits_of_path(path: str) -> Splits:
    """Return the files that the path of a file source names, and those of other splits. Raises
    FilesError as :func:`files_of` does."""
    place = root = Path(path)
    try:
        if place.is_dir() and not is_saved_dataset(place):
            data = place / "data"
            files = _files_in(place) or (_files_in(data) if data.is_dir() else [])
        elif is_glob(path):
            files = [Path(match) for match in glob(path, recursive=True) if Path(match).is_file()]
            root = Path(_WILDCARD.split(path, maxsplit=1)[0].rpartition("/")[0] or ".")
        else:
            files = [place]
    except OSError as error:
        raise FilesError(
            f"{path} cannot be listed: {error}; correct the path or its permissions"
        ) from error
    files.sort()
    splits = Splits(tuple(files)) if files == [place] else splits_of(files, root)
    types = Counter(map(suffix_of, splits.train))
    for file in splits.train:
        if suffix_of(file) != suffix_of(splits.train[0]):
            kind = types.most_common(1)[0][0]
            raise FilesError(
                f"{path} has files of several types, such as {splits.train[0]} and {file}; select "
                f"one with a glob such as {file.parent / ('*' + kind)}, or list each type as a "
                "source of its own"
            )
    return splits


def _files_in(folder: Path) -> list[Path]:
    files = [file for file in folder.iterdir() if file.is_file()]
    files = [file for file in files if not file.name.startswith((".", "_"))]
    return [file for file in files if file.suffix.lower() not in ("", ".md")]


def is_glob(path: str) -> bool:
    """Return whether the path is a pattern: it has a wildcard and does not exist."""
    return _WILDCARD.search(path) is not None and not Path(path).exists()


def is_saved_dataset(folder: Path) -> bool:
    """Return whether a folder was written by ``datasets.save_to_disk``."""
    return any((folder / name).exists() for name in SAVED_DATASET)


def only_split(folder: Path) -> str | None:
    """Return the name of the split of a folder written by ``save_to_disk`` that has a single one;
    None for other folders, and if its file cannot be read."""
    splits, split = (folder / name for name in SAVED_DATASET)
    try:
        if splits.exists():
            names = json_value(read_small(splits).decode())["splits"]
            return str(names[0]) if len(names) == 1 else None
        if split.exists():
            return str(json_value(read_small(split).decode())["_split"] or DEFAULT_SPLIT)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None


def default_name(path: str) -> str:
    """Return the name of a source without one: the stem of a file, the name of a folder, and for a
    glob the letters before its first wildcard, or the folder before it.

    >>> [default_name(p) for p in ("a/rows.jsonl.gz", "a/train-*.parquet", "a/**/*.json", "*.csv")]
    ['rows', 'train', 'a', 'rows']
    """
    place = Path(path)
    if not is_glob(path):
        known = place.suffix.lower() in COMPRESSED
        if place.is_dir():
            return Path(os.path.abspath(path)).name or "rows"
        return Path(place.stem).stem if known else place.stem
    folder, _, begin = _WILDCARD.split(path, maxsplit=1)[0].rpartition("/")
    return begin.rstrip("-_.") or Path(folder).name or "rows"


def first_file(path: str) -> str:
    """Return the first file of a source that has a readable row; ``path`` itself if none has."""
    try:
        files = files_of(path)
    except FilesError:
        return path
    if files == [Path(path)]:
        return path
    for file in files:
        row = first_row(str(file))
        if row is not None and any(value is not None for value in row.values()):
            return str(file)
    return path


def check_columns(files: Sequence[Path]) -> None:
    """Raise FilesError if two files of one source have different columns.

    Rows of JSON may lack columns: one of two first rows must have all columns of the other. Files
    without rows are not compared.
    """
    known: tuple[Path, frozenset[str]] | None = None
    for file in files if len(files) > 1 else ():
        names = _names_of(file)
        if names is None:
            continue
        if known is None:
            known = (file, names)
        other, columns = known
        optional = suffix_of(file) in (".json", *LINES)
        if columns == names or (optional and (columns < names or names < columns)):
            continue
        raise FilesError(
            f"{other} and {file} have different columns ({', '.join(sorted(columns))}; "
            f"{', '.join(sorted(names))}), but are files of one source. Select the files of one "
            "kind with a glob, or list each kind as a source of its own"
        )


def _names_of(file: Path) -> frozenset[str] | None:
    """Return the names of the columns of a file, or None if they cannot be read."""
    if suffix_of(file) != ".parquet":
        names = columns_of(str(file))
        return None if names is None else frozenset(names)
    try:
        with arrow_files.parquet_file(file) as opened:
            return frozenset(arrow_files.data_columns(opened.schema_arrow))
    except arrow_files.READ_ERRORS:
        return None


COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
"""Suffix after ``.jsonl`` -> pyarrow's name of the compression."""


def suffix_of(path: Path) -> str:
    """Return the suffix of a data file in lower case; both suffixes of a compressed one.

    >>> suffix_of(Path("train.v2.JSONL.gz"))
    '.jsonl.gz'
    """
    last = path.suffix.lower()
    return Path(path.stem).suffix.lower() + last if last in COMPRESSED else last


MAX_LINE_BYTES = arrow_files.MAX_ROW_BYTES
"""Maximum size of one line of a compressed file, decompressed."""
MAX_BLANK_BYTES = 16 << 20
"""Maximum size of consecutive blank lines of a compressed file, decompressed."""
_BLOCK = 1 << 18


class _BoundedLines(io.RawIOBase):
    """Decompressed lines, with a limit per line: a few kilobytes can decompress to gigabytes."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self._stream = stream
        self._line = self._blank = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Read up to a block. Raises OSError if a line or blank lines exceed their limit."""
        data = self._stream.read(min(len(buffer), _BLOCK))
        buffer[: len(data)] = data
        end = data.rfind(b"\n") + 1
        self._line = len(data) - end + (0 if end else self._line)
        rest = len(data) - len(data.rstrip())
        self._blank = rest + (self._blank if rest == len(data) else 0)
        if self._line > MAX_LINE_BYTES:
            raise OSError(f"a line decompresses to more than {MAX_LINE_BYTES >> 20} MiB")
        if self._blank > MAX_BLANK_BYTES:
            raise OSError(f"blank lines decompress to more than {MAX_BLANK_BYTES >> 20} MiB")
        return len(data)


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
        io.BufferedReader(_BoundedLines(stream), _BLOCK) as lines,
    ):
        yield cast(BinaryIO, lines)


def first_lines(path: Path, count: int) -> list[tuple[int, bytes]]:
    """Return (number from 1, line) of the first ``count`` lines of a file that are not blank."""
    with opened_lines(path) as lines:
        filled = ((n, line) for n, line in enumerate(lines, start=1) if line.strip())
        return list(islice(filled, count))


# --- columns


def columns_of(path: str, keys: Iterable[str] = ()) -> tuple[str, ...] | None:
    """Return the names of the columns of a data file's first row, or None if they cannot be
    read. ``keys``: dotted paths to return too, if the row has them."""
    row = first_row(path)
    if not row:
        return None
    nested = [key for key in keys if "." in key and nested_value(row, key) is not None]
    return (*map(str, row), *nested)


def nested_value(row: Mapping[str, Any], path: str) -> Any:
    """Return the value of a column, or the value that a dotted path finds in nested objects, lists
    (by number) and JSON text; None if there is none.

    >>> nested_value({"request": {"messages": ["Hi"]}}, "request.messages.0")
    'Hi'
    """
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
            try:
                value = json_value(value)
            except ValueError:
                return None
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def first_row(path: str) -> Mapping[str, Any] | None:
    """Return the first row of a data file as column -> value, or None if it cannot be read."""
    file, suffix = Path(path), suffix_of(Path(path))
    row: Any = None
    try:
        if not file.is_file():
            return None
        if suffix in arrow_files.SUFFIXES:
            if rows := arrow_files.first_rows(file, 1):
                return decoded(rows[0])
            with arrow_files.opened(file) as (schema, _):
                return dict.fromkeys(schema.names)
        if suffix == ".csv":
            with file.open(encoding="utf-8-sig", newline="") as text:
                reader = csv.reader(text)
                header = next(reader, [])
                cells = next((cells for cells in reader if cells), [])
                return {**dict.fromkeys(header), **dict(zip(header, cells, strict=False))} or None
        if suffix == ".json" and file.stat().st_size <= LARGEST_JSON:
            values = json_value(file.read_text(encoding="utf-8-sig"))
            row = values[0] if isinstance(values, list) and values else None
        elif suffix in LINES and (lines := first_lines(file, 1)):
            row = json_value(lines[0][1].decode("utf-8-sig"))
    except (*arrow_files.READ_ERRORS, csv.Error):  # (errors of JSON are ValueErrors)
        return None
    return row if isinstance(row, dict) else None


_PLAIN_LINES = (".jsonl", ".ndjson")
LINES = (*_PLAIN_LINES, *(plain + more for plain in _PLAIN_LINES for more in COMPRESSED))
"""Suffixes of files with one JSON object per line."""


# --- number of rows


def num_rows_of(paths: Sequence[Path]) -> int | None:
    """Return the number of rows of the files of a source; None if one is missing, or if counting
    its lines would take long. Raises as the readers of the formats do."""
    if not all(path.is_file() for path in paths):  # a pipe has no end
        return None
    columnar = bool(paths) and suffix_of(paths[0]) in arrow_files.SUFFIXES
    if not columnar and sum(path.stat().st_size for path in paths) > _LARGEST_COUNTED:
        return None
    sizes = [_rows_of_file(path) for path in paths]
    return sum(size or 0 for size in sizes) if sizes and None not in sizes else None


def _rows_of_file(path: Path) -> int | None:
    suffix = suffix_of(path)
    if suffix == ".parquet":
        return arrow_files.num_rows_of_parquet(path)
    if suffix == ".arrow":
        with arrow_files.opened(path) as (_, batches):
            return sum(int(batch.num_rows) for batch in batches)
    if suffix in LINES:
        with opened_lines(path) as lines:
            return sum(1 for line in lines if line.strip())
    if suffix == ".csv":
        with path.open(encoding="utf-8-sig", newline="") as text:
            return max(0, sum(1 for cells in csv.reader(text) if cells) - 1)
    if suffix == ".json":
        rows = json_value(path.read_text(encoding="utf-8-sig"))
        return len(rows) if isinstance(rows, list) else None
    return None
