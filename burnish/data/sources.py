"""Rows of files, HuggingFace datasets and environments, each knowing where it stands.

Not for: what the columns mean (prompts, sft, preference) or in which order rows come (stream).
"""

from __future__ import annotations

import csv
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from burnish.config.columns import json_value
from burnish.config.data import EnvironmentSource, FileSource, HubSource, SourceConfig
from burnish.config.explain import nearest

_CSV_FIELD_LIMIT = 2**31 - 1  # csv's own limit of 131072 characters is shorter than a long document


class DataError(ValueError):
    """Data, or a description of it, that cannot be used: what, where, why, what to do."""


@dataclass(frozen=True)
class Row:
    """One data row.

    Example: ``Row(values={"prompt": "1+1=", "label": "2"}, where="data/train.jsonl:12")``.
    """

    values: Mapping[str, Any]
    where: str
    """For messages: ``path:line`` (1-based) for text files, ``path row i`` (0-based, as in prompt
    ids) otherwise."""
    environment: Mapping[str, Any] | None = None
    """What makes the item again: name, options, size, seed, index. None: not from an
    environment."""
    fills_nulls: bool = False
    """Whether the format gives nested objects the keys of all other rows, with null as their value
    (Parquet, Arrow)."""


class Source(Protocol):
    """A fixed number of rows that can be read in any order."""

    name: str

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Row: ...


def open_source(config: SourceConfig) -> Source:
    """The rows that ``config`` describes. Raises DataError where there are none."""
    if isinstance(config, FileSource):
        source = _open_file(config)
    elif isinstance(config, HubSource):
        source = _open_dataset(config)
    else:
        source = _EnvironmentRows(config)
    if len(source) == 0:
        place = config.environment if isinstance(config, EnvironmentSource) else config.path
        raise DataError(f"{place}: the data set is empty; give a source with at least one row")
    return source


def open_sources(configs: Sequence[SourceConfig]) -> list[Source]:
    """All sources. Raises DataError where two share a name: prompt ids would not be unique."""
    sources = [open_source(config) for config in configs]
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise DataError(
                f"{names.count(name)} data sources are called {name!r}; their rows could not be "
                "told apart in ids and metrics. Set a different `name` for each"
            )
    return sources


# --- files


class _JsonLines:
    """A .jsonl file of which only the line offsets are held."""

    def __init__(self, path: Path, name: str) -> None:
        self.name = name
        self._path = path
        self._offsets, self._lines = array("q"), array("q")
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._offsets.append(offset)
                    self._lines.append(number)
                offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, i: int) -> Row:
        where = f"{self._path}:{self._lines[i]}"
        with self._path.open("rb") as file:
            file.seek(self._offsets[i])
            line = file.readline()
        try:
            values = json_value(line.decode("utf-8-sig"))
        except ValueError as error:  # of text that is not UTF-8, too
            raise DataError(
                f"{where}: the line is not JSON that can be read ({error}); it begins "
                f"{line[:60]!r}. Correct or remove the line"
            ) from error
        return Row(_as_object(values, where), where)


class _Rows:
    """Rows held in memory (or memory-mapped), given by a function of their index."""

    def __init__(self, name: str, size: int, read: Callable[[int], Row]) -> None:
        self.name = name
        self._size, self._read = size, read

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, i: int) -> Row:
        return self._read(i)


def _open_file(config: FileSource) -> Source:
    path = Path(config.path)
    reader = _READERS.get(path.suffix.lower())
    if not path.exists():
        raise DataError(_missing_file(path))
    if path.is_dir():
        raise DataError(
            f"{path} is a folder, not a file. For a folder written by save_to_disk use "
            f"{{kind: dataset, path: {path}}}"
        )
    if reader is None:
        raise DataError(
            f"{path}: unknown file type {path.suffix!r}; known are {', '.join(sorted(_READERS))}. "
            "Convert (or unpack) the file"
        )
    return reader(path, config.name or path.stem)


def _missing_file(path: Path) -> str:
    here = f"{path} does not exist (working directory: {Path.cwd()})"
    if not path.parent.is_dir():
        return f"{here}, and neither does its folder {path.parent}"
    siblings = [p.name for p in path.parent.iterdir()]
    return f"{here}{nearest(path.name, siblings) or '; its folder has nothing of a similar name'}"


def _read_json(path: Path, name: str) -> Source:
    try:
        values = json_value(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:  # of text that is not UTF-8, too
        hint = " (one object per line? Then call it .jsonl)" if "Extra data" in str(error) else ""
        raise DataError(f"{path}: the file is not JSON that can be read: {error}{hint}") from error
    if not isinstance(values, list):
        raise DataError(
            f"{path} holds one {type(values).__name__}; a .json data set is a list of objects, "
            "one per row"
        )

    def read(i: int) -> Row:
        where = f"{path} row {i}"
        return Row(_as_object(values[i], where), where)

    return _Rows(name, len(values), read)


def _read_csv(path: Path, name: str) -> Source:  # house: ok a loop over rows in a file in a try
    rows: list[Row] = []
    limit = csv.field_size_limit(_CSV_FIELD_LIMIT)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            if len(set(header)) != len(header):
                raise DataError(f"{path}:1: the header names a column twice: {', '.join(header)}")
            begin = reader.line_num + 1
            for cells in reader:
                if cells:
                    rows.append(_csv_row(header, cells, f"{path}:{begin}"))
                begin = reader.line_num + 1
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: the file is not CSV in UTF-8: {error}") from error
    finally:
        csv.field_size_limit(limit)
    return _Rows(name, len(rows), rows.__getitem__)


def _csv_row(header: Sequence[str], cells: Sequence[str], where: str) -> Row:
    if len(cells) != len(header):
        raise DataError(
            f"{where}: {len(cells)} cells, and the header has {len(header)} columns "
            f"({', '.join(header)}). Put cells that contain a comma in quotes"
        )
    return Row(dict(zip(header, cells, strict=True)), where)


def _read_parquet(path: Path, name: str) -> Source:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, memory_map=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: the file is not readable as parquet: {error}") from error

    def read(i: int) -> Row:
        where = f"{path} row {i}"
        try:
            return Row(table.slice(i, 1).to_pylist()[0], where, fills_nulls=True)
        except (pa.ArrowException, ValueError, OverflowError) as error:
            raise DataError(f"{where}: the row cannot be read: {error}") from error

    return _Rows(name, table.num_rows, read)


def _as_object(values: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(values, dict):
        raise DataError(
            f"{where}: a row is an object with named columns, and this one is a "
            f"{type(values).__name__}"
        )
    return values


_READERS: dict[str, Callable[[Path, str], Source]] = {
    ".jsonl": _JsonLines,
    ".ndjson": _JsonLines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


# --- data sets and environments


def _open_dataset(config: HubSource) -> Source:
    import datasets

    folder = Path(config.path)
    if not folder.exists() and config.path.startswith((".", "/", "~")):
        raise DataError(_missing_file(folder))
    saved = any((folder / f).exists() for f in ("dataset_dict.json", "state.json"))
    try:
        if saved:
            dataset = _choose_split(datasets.load_from_disk(config.path), config)
        else:
            dataset = datasets.load_dataset(config.path, config.subset, split=config.split)
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(
            f"data set {config.path!r} (subset {config.subset!r}, split {config.split!r}) cannot "
            f"be loaded: {error}. Check the name, or download it where there is a network and use "
            "its folder"
        ) from error

    def read(i: int) -> Row:
        return Row(dataset[i], f"{config.path}[{config.split}] row {i}", fills_nulls=True)

    return _Rows(config.name or folder.name, len(dataset), read)


def _choose_split(saved: Any, config: HubSource) -> Any:
    """The split of what ``load_from_disk`` gave: a dict of splits, or a single one."""
    if isinstance(saved, dict):
        if config.split not in saved:
            splits = [str(split) for split in saved]
            raise DataError(
                f"{config.path} has no split {config.split!r}; it has "
                f"{', '.join(splits)}{nearest(config.split, splits)}"
            )
        return saved[config.split]
    asked = "split" in config.model_fields_set
    if asked and saved.split is not None and str(saved.split) != config.split:
        raise DataError(f"{config.path} holds the split {str(saved.split)!r}, not {config.split!r}")
    return saved


class _EnvironmentRows:
    """Items of an environment; each row says how the reward finds the item again."""

    def __init__(self, config: EnvironmentSource) -> None:
        from burnish.environments.base import make_environment

        self._environment = make_environment(
            config.environment, dict(config.options), size=config.size, seed=config.seed
        )
        self._origin = {
            "name": config.environment,
            "options": dict(config.options),
            "size": config.size,
            "seed": config.seed,
        }
        self.name = config.name or self._environment.name

    def __len__(self) -> int:
        return len(self._environment)

    def __getitem__(self, i: int) -> Row:
        where = f"environment {self.name} row {i}"
        return Row(dict(self._environment.item(i)), where, {**self._origin, "index": i})
