"""Open sources of rows: files, Hugging Face datasets and environments. Each row has its position.

The meaning of columns is defined by the kinds of data, the row order in stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from burnish.config.explain import nearest
from burnish.config.sources import EnvironmentSource, HubSource, SeedSource, SourceConfig
from burnish.data import files
from burnish.data.base import EMPTY, DataError, Row, Rows, Source, columnar_row
from burnish.data.files import missing_file
from burnish.data.streamed import StreamedRows, num_first
from burnish.data_files.arrow_files import READ_ERRORS
from burnish.data_files.class_labels import labels_in_features, with_class_names
from burnish.data_files.reading import DEFAULT_SPLIT, is_saved_dataset
from burnish.environments.multi_turn import TASK_NUMBER

__all__ = ["DataError", "Row", "Source", "first_rows", "open_source", "open_sources"]


def open_source(config: SourceConfig) -> Source:
    """Open the source described by ``config``. Raises DataError if it has no rows."""
    source = _READERS[config.kind].open_rows(config)
    if num_first(source, 1) == 0:
        raise DataError(EMPTY.format(place=config.place))
    limit = config.row_limit
    if limit is None or isinstance(source, StreamedRows) or limit >= len(source):
        return source
    return Rows(source.name, limit, source.__getitem__)


def open_sources(configs: Sequence[SourceConfig]) -> list[Source]:
    """Open all sources. Raises DataError if two share a name: prompt ids would not be unique."""
    sources = [open_source(config) for config in configs]
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise DataError(
                f"{names.count(name)} data sources are called {name!r}, so their ids and metrics "
                "would collide. Set a different `name` for each"
            )
    return sources


def first_rows(config: SourceConfig, count: int = 3) -> list[Row]:
    """Return the first ``count`` rows of a source of files without reading the other rows.

    Return [] for other sources and for very large .json files. Raises DataError as
    :func:`open_source` does.
    """
    return _READERS[config.kind].first_rows(config, count)


def _first_of_dataset(config: HubSource, count: int) -> list[Row]:
    """Return no rows: reading them may take long. Raises DataError if the folder is missing."""
    _check_folder(config)
    return []


def _open_dataset(config: HubSource) -> Source:
    import datasets

    _check_folder(config)
    folder = Path(config.path)
    more = {"streaming": True} if config.streaming is not None else {}
    try:
        if is_saved_dataset(folder):
            dataset = _choose_split(datasets.load_from_disk(config.path), config)
            dataset = dataset.with_format(None)  # (set_format is saved, and gives tensors)
            dataset = dataset.to_iterable_dataset() if config.streaming is not None else dataset
        else:
            dataset = datasets.load_dataset(
                config.path, config.subset, split=config.split_read, **more
            )
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(
            f"data set {config.path!r} (subset {config.subset!r}, split "
            f"{config.split_read!r}) cannot be loaded: {error}. Check the name, or download it on "
            "a machine with network access and use its folder"
        ) from error

    features = {} if dataset.features is None else dataset.features.to_dict()
    labeled = labels_in_features(features)
    split = dataset.split or config.split_read
    name, place = config.name or folder.name, f"{config.path}[{split}]"
    if config.streaming is not None:
        if labeled:
            dataset = dataset.map(partial(with_class_names, labeled=labeled))
        return StreamedRows(
            *(name, dataset),
            place=place,
            block_size=config.streaming.shuffle_buffer,
            num_rows=config.max_samples,
        )

    def read(i: int) -> Row:
        where = f"{place} row {i}"
        try:
            return columnar_row(with_class_names(dataset[i], labeled), where)
        except READ_ERRORS as error:
            raise DataError(
                f"{where}: the row cannot be read: {type(error).__name__}: {error}. Correct or "
                "remove it, and write the data set again"
            ) from error

    return Rows(name, len(dataset), read)


def _check_folder(config: HubSource) -> None:
    folder = Path(config.path)
    if not folder.exists() and config.path.startswith((".", "/", "~")):
        raise DataError(missing_file(folder))


def _choose_split(saved: Any, config: HubSource) -> Any:
    """Return the configured split of a ``load_from_disk`` result (dict of splits or one split)."""
    if isinstance(saved, dict):
        split_name = config.split_read
        if split_name not in saved:
            splits = [str(split) for split in saved]
            raise DataError(
                f"{config.path} has no split {split_name!r}; it has "
                f"{', '.join(splits)}{nearest(split_name, splits)}"
            )
        return saved[split_name]
    split = str(saved.split or DEFAULT_SPLIT)
    if config.split not in (None, split):
        raise DataError(
            f"{config.path} is the split {split!r}, not {config.split!r}. Remove split to read all "
            "of it; to read a part, save that part as a folder (Dataset.select), or set "
            "data.held_out to evaluate on rows that are not trained"
        )
    return saved


def _seed_rows(config: SeedSource) -> Source:
    def read(i: int) -> Row:
        seed = int(np.random.SeedSequence([config.seed, i]).generate_state(1)[0])
        row = {"prompt": str(i), "seed": seed, TASK_NUMBER: i}
        return Row(row, f"{config.name} row {i}")

    return Rows(config.name, config.size, read)


class _EnvironmentRows:
    """Items of an environment. Each row contains the arguments to recreate its item, for the
    reward."""

    def __init__(self, config: EnvironmentSource) -> None:
        from burnish.environments.make import make_environment

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


class _Reader(NamedTuple):
    """How rows of a kind of source are read."""

    open_rows: Callable[[Any], Source]
    first_rows: Callable[[Any, int], list[Row]] = lambda config, count: []


_READERS: Mapping[str, _Reader] = {
    "file": _Reader(files.open_files, files.first_rows),
    "dataset": _Reader(_open_dataset, _first_of_dataset),
    "environment": _Reader(_EnvironmentRows),
    "seeds": _Reader(_seed_rows),
}
"""Kind of a source -> its reader."""
