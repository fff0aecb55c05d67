"""Read rows of data files. Each row has its position: the file, and its line or row."""

from __future__ import annotations

import csv
import errno
import hashlib
import os
import shutil
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, TypeVar

import numpy as np

from burnish.config.explain import nearest
from burnish.config.sources import FileSource, SourceConfig
from burnish.data import tables
from burnish.data.base import EMPTY, DataError, Row, Rows, Source, columnar_row
from burnish.data_files import arrow_files
from burnish.data_files.arrow_files import READ_ERRORS, ColumnarError
from burnish.data_files.reading import (
    COMPRESSED,
    LARGEST_JSON,
    LINES,
    check_columns,
    files_of,
    first_lines,
    is_glob,
    opened_lines,
    suffix_of,
)
from burnish.data_files.splits import FilesError
from burnish.json_text import json_value

R = TypeVar("R")

_CSV_FIELD_LIMIT = 2**31 - 1  # csv's default of 131072 characters is too small for long documents


class _JsonLines:
    """A .jsonl file. Only its line offsets are kept in memory.

    A compressed file is decompressed to a temporary file, which is deleted with the source.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self._path = self._plain = path
        if path.suffix.lower() in COMPRESSED:
            self._folder = TemporaryDirectory(prefix="burnish-data-")
            self._plain = Path(self._folder.name) / path.stem
            _decompress(path, self._plain)
        self._offsets, self._lines = array("q"), array("q")
        offset = 0
        with self._plain.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._offsets.append(offset)
                    self._lines.append(number)
                offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, i: int) -> Row:
        where = f"{self._path}:{self._lines[i]}"
        with self._plain.open("rb") as file:
            file.seek(self._offsets[i])
            line = file.readline()
        return _json_row(line, where)


def _decompress(path: Path, target: Path) -> None:
    try:
        with opened_lines(path) as lines, target.open("wb") as file:
            shutil.copyfileobj(lines, file, 1 << 20)
    except OSError as error:
        _check_space(path, error)
        raise DataError(
            f"{path}: the file cannot be decompressed: {error}. It may be truncated, or not be "
            f"{COMPRESSED[path.suffix.lower()]}; download or write it again"
        ) from error


def _json_row(line: bytes, where: str) -> Row:
    try:
        values = json_value(line.decode("utf-8-sig"))
    except ValueError as error:  # also raised for text that is not UTF-8
        raise DataError(
            f"{where}: the line is not valid JSON ({error}); it begins {line[:60]!r}. Correct or "
            "remove the line"
        ) from error
    return Row(_as_object(values, where), where)


class _Shards:
    """The rows of several files, file after file."""

    def __init__(self, name: str, shards: Sequence[Source]) -> None:
        self.name = name
        self._shards = shards
        self._begins = np.cumsum([0, *map(len, shards)])

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __getitem__(self, i: int) -> Row:
        shard = int(np.searchsorted(self._begins, i, side="right")) - 1
        return self._shards[shard][i - int(self._begins[shard])]


def first_rows(config: FileSource, count: int) -> list[Row]:
    """Return the first ``count`` rows of a source without reading the other rows.

    Return [] for very large .json files. Raises DataError if there is none, or as
    :func:`open_files` does.
    """
    rows: list[Row] = []
    for path in _files_of(config):
        if suffix_of(path) == ".json" and path.stat().st_size > LARGEST_JSON:
            return rows
        rows += _first_of(path, count - len(rows))
        if len(rows) == count:
            break
    if not rows:
        raise DataError(EMPTY.format(place=config.path))
    return rows


def _first_of(path: Path, count: int) -> list[Row]:
    suffix = suffix_of(path)
    if suffix in tables.SUFFIXES:
        values = _columnar(path, lambda: arrow_files.first_rows(path, count))
        return [columnar_row(row, f"{path} row {i}") for i, row in enumerate(values)]
    if suffix == ".csv":
        return _csv_rows(path, count)
    if suffix == ".json":
        whole = _read_json(path, "")
        return [whole[i] for i in range(min(count, len(whole)))]
    return _first_lines(path, count)


def _first_lines(path: Path, count: int) -> list[Row]:
    try:
        lines = first_lines(path, count)
    except OSError as error:
        raise DataError(f"{path}: the file cannot be read: {error}") from error
    return [_json_row(line, f"{path}:{n}") for n, line in lines]


def open_files(config: FileSource) -> Source:
    """Open the files of a source. Raises DataError if a file is missing, unreadable or of another
    kind than the others.

    Parquet files are copied to temporary Arrow files, each of several files when it is first used.
    The copies are memory-mapped, so they need not fit in memory.
    """
    paths, name = _files_of(config), config.source_name
    if len(paths) == 1:
        return _reader_of(paths[0])(paths[0], name)
    is_parquet = suffix_of(paths[0]) == ".parquet"
    return _Shards(
        name, [(_copied_rows if is_parquet else _reader_of(path))(path, name) for path in paths]
    )


def files_digests(configs: Sequence[SourceConfig]) -> dict[str, str]:
    """Return name -> digest of the file names, in order, of each source with several files. The
    digest does not change if their common folder is moved."""
    digests = {}
    for config in configs:
        paths = config.files
        if len(paths) > 1:
            common = os.path.commonpath([path.parent for path in paths])
            names = "\n".join(os.path.relpath(path, common) for path in paths)
            digests[str(config.source_name)] = hashlib.sha256(names.encode()).hexdigest()[:16]
    return digests


def content_digest(path: Path) -> bytes:
    """Return the SHA-256 of a file. The result is kept in this process until the file changes."""
    stat = path.stat()
    return _content_digest(path, (stat.st_size, stat.st_mtime_ns, stat.st_ino))


@cache
def _content_digest(path: Path, state: tuple[int, int, int]) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _files_of(config: FileSource) -> list[Path]:
    """Return the files of a source. Raises DataError if there is none, or if they are missing, of
    unknown type, or of different types or columns."""
    try:
        paths = files_of(config.path)
        for path in paths:
            _reader_of(path)
        check_columns(paths)
    except FilesError as error:
        raise DataError(str(error)) from error
    if paths:
        return paths
    known = ", ".join(sorted(_READERS))
    if is_glob(config.path):
        raise DataError(
            f"no file matches the glob {config.path} (working directory: {Path.cwd()}); correct "
            "the pattern, or write the files first"
        )
    raise DataError(
        f"{config.path} is a folder without data files ({known}); write the files first, use a "
        f"glob such as {Path(config.path) / '**' / '*.parquet'} for files in its subfolders, or "
        f"{{kind: dataset, path: {config.path}}} for a Hugging Face dataset"
    )


def _reader_of(path: Path) -> Callable[[Path, str], Source]:
    """Return the reader for a file. Raises DataError if the file is missing or of unknown type."""
    reader = _READERS.get(suffix_of(path))
    if not path.exists():
        raise DataError(missing_file(path))
    if path.is_dir():
        raise DataError(
            f"{path} is a folder written by save_to_disk; use {{kind: dataset, path: {path}}}"
        )
    if not path.is_file():
        raise DataError(
            f"{path} is not a regular file (but a pipe, a socket or a device), from which rows "
            "cannot be read more than once; write its content to a file"
        )
    if reader is None:
        raise DataError(
            f"{path}: unknown file type {suffix_of(path)!r}; known are "
            f"{', '.join(sorted(_READERS))}. Convert (or unpack) the file"
        )
    return reader


def missing_file(path: Path) -> str:
    """Return an error message for a path that does not exist, with the nearest name."""
    problem = f"{path} does not exist (working directory: {Path.cwd()})"
    if not path.parent.is_dir():
        return f"{problem}, and neither does its folder {path.parent}; correct the path"
    siblings = [p.name for p in path.parent.iterdir()]
    near = nearest(path.name, siblings)
    return problem + (near or "; its folder has no file of a similar name. Correct the path")


def _read_json(path: Path, name: str) -> Source:
    try:
        values = json_value(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:  # also raised for text that is not UTF-8
        hint = (
            " (if it has one object per line, name it .jsonl)"
            if "Extra data" in str(error)
            else ". Write it as a JSON list of objects in UTF-8"
        )
        raise DataError(f"{path}: the file is not valid JSON: {error}{hint}") from error
    if not isinstance(values, list):
        raise DataError(
            f"{path} contains one {type(values).__name__}; a .json data set must be a list of "
            "objects, one per row"
        )

    def read(i: int) -> Row:
        where = f"{path} row {i}"
        return Row(_as_object(values[i], where), where)

    return Rows(name, len(values), read)


def _read_csv(path: Path, name: str) -> Source:
    rows = _csv_rows(path)
    return Rows(name, len(rows), rows.__getitem__)


def _csv_rows(  # house: ok a loop over rows in a file in a try
    path: Path, count: int | None = None
) -> list[Row]:
    rows: list[Row] = []
    limit = csv.field_size_limit(_CSV_FIELD_LIMIT)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            if len(set(header)) != len(header):
                raise DataError(
                    f"{path}:1: the header names a column twice: {', '.join(header)}. Rename "
                    "one of them"
                )
            begin = reader.line_num + 1
            for cells in reader:
                if count is not None and len(rows) >= count:
                    break
                if cells:
                    rows.append(_csv_row(header, cells, f"{path}:{begin}"))
                begin = reader.line_num + 1
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: the file is not CSV in UTF-8: {error}. Save it as UTF-8, separated by "
            "commas, with quotes around cells that contain commas, quotes or line breaks"
        ) from error
    finally:
        csv.field_size_limit(limit)
    return rows


def _csv_row(header: Sequence[str], cells: Sequence[str], where: str) -> Row:
    if len(cells) != len(header):
        raise DataError(
            f"{where}: {len(cells)} cells, but the header has {len(header)} columns "
            f"({', '.join(header)}). Quote cells that contain a comma"
        )
    return Row(dict(zip(header, cells, strict=True)), where)


def _columnar_rows(path: Path, name: str) -> Source:
    table = _columnar(path, lambda: tables.opened(path))
    return _rows_of_table(path, name, len(table), lambda: table)


def _copied_rows(path: Path, name: str) -> Source:
    """Return the rows of a Parquet file, which is copied when one of them is read."""
    size = _columnar(path, lambda: arrow_files.num_rows_of_parquet(path))

    def copy() -> tables.Table:
        table = tables.copied(path)
        if len(table) != size:
            raise OSError(f"it has {len(table)} rows, but its footer says {size}")
        return table

    return _rows_of_table(path, name, size, cache(lambda: _columnar(path, copy)))


def _rows_of_table(path: Path, name: str, size: int, table: Callable[[], tables.Table]) -> Source:
    def read(i: int) -> Row:
        values = _columnar(path, lambda: table().row(i))
        return columnar_row(values, f"{path} row {i}")

    return Rows(name, size, read)


def _columnar(path: Path, read: Callable[[], R]) -> R:
    """Call ``read``. Raises DataError if the file is not readable."""
    try:
        return read()
    except ColumnarError as error:
        raise DataError(f"{path}{error}") from error
    except READ_ERRORS as error:
        _check_space(path, error)
        kind = suffix_of(path).removeprefix(".")
        raise DataError(
            f"{path}: the file is not readable as {kind}: {error}. Write it again, or give it the "
            "extension of its format"
        ) from error


def _check_space(path: Path, error: BaseException) -> None:
    """Raise DataError if ``error`` says that the temporary copy of a file does not fit."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise DataError(
            f"{path}: the temporary copy of its rows does not fit into {gettempdir()} ({error}). "
            "Set the environment variable TMPDIR to a folder with more space"
        ) from error


def _as_object(values: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(values, dict):
        raise DataError(
            f"{where}: a row must be an object with named columns, but this one is a "
            f'{type(values).__name__}. Write it as {{"COLUMN": ...}}'
        )
    return values


_READERS: dict[str, Callable[[Path, str], Source]] = {
    **dict.fromkeys(LINES, _JsonLines),
    ".json": _read_json,
    ".csv": _read_csv,
    **dict.fromkeys(tables.SUFFIXES, _columnar_rows),
}
