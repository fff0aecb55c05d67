"""Config of sources of rows: files, Hugging Face datasets, environments and numbered tasks.

A kind is a class here, with the facts that checks and plans need, and its entry in the table of
``data/sources.py``, which opens it."""

from __future__ import annotations

import csv
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from burnish.config.base import Node, OlderKeys, PathText, on_off
from burnish.data_files import arrow_files
from burnish.data_files.reading import (
    DEFAULT_SPLIT,
    default_name,
    files_of,
    first_file,
    num_rows_of,
    only_split,
    splits_of_path,
)
from burnish.data_files.splits import FilesError, left_out_line


class Copies(NamedTuple):
    """Facts of a source whose rows every node reads from a copy of its own."""

    keys: dict[str, Any]
    files: list[Path]


class SourceSettings(Node, ABC):
    """Keys of every source."""

    is_made: ClassVar[bool] = False
    """True if the rows are made from a seed, not read from data."""
    has_prompts: ClassVar[bool] = True
    """False if only an environment makes the prompts of the rows."""

    weight: float = Field(1.0, gt=0)
    """Relative probability that a row comes from this source. Rows that are left out (``overlong``,
    ``on_bad_row``) do not count: another row of the source replaces each. Evaluations read all
    rows once."""

    @property
    @abstractmethod
    def place(self) -> str:
        """Path or name of the source in messages."""

    @property
    @abstractmethod
    def source_name(self) -> str | None:
        """Name of the source in prompt ids and metrics; None if only its environment knows it."""

    @property
    def files(self) -> list[Path]:
        """Files of the rows, in order; empty for other sources. Raises FilesError."""
        return []

    @property
    def first_file(self) -> str | None:
        """First of ``files`` that has a readable row, or else the path; None for other sources."""
        return None

    @property
    def left_out(self) -> tuple[Path, ...]:
        """Files of other splits in the same place. Raises FilesError."""
        return ()

    @property
    def row_limit(self) -> int | None:
        """Number of rows that are used at most; None: all."""
        return None

    @property
    def is_streamed(self) -> bool:
        """Return whether rows are read in order while training."""
        return False

    @property
    def identities(self) -> frozenset[str]:
        """Files or data set that the source reads; none if its rows are made, or on an error of the
        files, which other rules report."""
        return frozenset()

    def num_rows(self) -> int | None:
        """Return the number of rows, or None if it is unknown before the source is opened (hub
        datasets, unless streamed with ``max_samples``, and missing, large or unreadable files)."""
        return None

    def lines(self) -> list[tuple[str, str, str]]:
        """Return lines (name, value, origin) of the batch table."""
        return []

    def copies(self) -> Copies | None:
        """Return the facts that every node must have in common in place of ``path``; None if the
        path itself must be the same."""
        return None


class FileSource(SourceSettings):
    """Rows of a file: .jsonl (also .jsonl.gz and .jsonl.zst), .json (a list of objects), .csv,
    .parquet or .arrow; or of several files of one type: a folder or a glob."""

    kind: Literal["file"] = "file"
    path: PathText
    """Path of a file, a folder of files, or a glob such as ``data/train-*.parquet``, absolute or
    relative to the working directory. Several files are read in the order of their names. If the
    names say several splits (``train-*``, ``test-*``), only the training split is read."""
    max_samples: int | None = Field(None, ge=1)
    """Use only the first this many rows. None: all."""
    name: str | None = None
    """Name in prompt ids and metrics. None: the file's stem, or the name of the folder."""

    @property
    def place(self) -> str:
        return self.path

    @property
    def source_name(self) -> str:
        return self.name or default_name(self.path)

    @property
    def files(self) -> list[Path]:
        return files_of(self.path)

    @property
    def first_file(self) -> str:
        return first_file(self.path)

    @property
    def left_out(self) -> tuple[Path, ...]:
        return splits_of_path(self.path).left_out

    @property
    def row_limit(self) -> int | None:
        return self.max_samples

    @property
    def identities(self) -> frozenset[str]:
        try:
            return frozenset(os.path.realpath(file) for file in self.files)
        except FilesError:
            return frozenset()

    def num_rows(self) -> int | None:
        try:
            num = num_rows_of(self.files)
        except (*arrow_files.READ_ERRORS, csv.Error):
            return None
        return num if num is None else min(num, self.max_samples or num)

    def copies(self) -> Copies:
        return Copies({"name": self.source_name}, self.files)

    def advice(self) -> Iterator[str]:
        with suppress(FilesError):
            splits = splits_of_path(self.path)
            if splits.left_out:
                yield f"path={self.path}: {left_out_line(splits)}"


class StreamingConfig(Node):
    """Reading of a dataset in order."""

    shuffle_buffer: int = Field(1000, ge=1)
    """Rows held in memory and shuffled together."""


class HubSource(SourceSettings):
    """A HuggingFace dataset, by hub name or as a folder written by ``save_to_disk``."""

    older_keys = (
        OlderKeys("streaming", "streaming", on_off, {"shuffle_buffer": ("shuffle_buffer", 1000)}),
    )

    kind: Literal["dataset"] = "dataset"
    path: PathText
    """Hub name or folder."""
    subset: str | None = None
    """Configuration name of the dataset. None: the default."""
    split: str | None = None
    """Split to read. None: train, or the split of a folder that has a single one."""
    max_samples: int | None = Field(None, ge=1)
    """Use only the first this many rows. None: all."""
    name: str | None = None
    """Name in prompt ids and metrics. None: the last part of ``path``."""
    streaming: Annotated[StreamingConfig | None, BeforeValidator(on_off)] = None
    """Read rows in order while training, instead of downloading them first: ``true``, or a mapping.
    The number of rows is ``max_samples``, which the dataset must have; None: unknown, and the job
    needs ``max_steps``."""

    @property
    def place(self) -> str:
        return self.path

    @property
    def split_read(self) -> str:
        """The split that is read."""
        return self.split or only_split(Path(self.path)) or DEFAULT_SPLIT

    @property
    def source_name(self) -> str:
        return self.name or Path(self.path).name

    @property
    def row_limit(self) -> int | None:
        return self.max_samples

    @property
    def is_streamed(self) -> bool:
        return self.streaming is not None

    @property
    def identities(self) -> frozenset[str]:
        place = os.path.realpath(self.path) if os.path.exists(self.path) else self.path
        return frozenset({f"{place}[{self.subset}][{self.split_read}]"})

    def num_rows(self) -> int | None:
        return self.max_samples if self.is_streamed else None

    def lines(self) -> list[tuple[str, str, str]]:
        if self.streaming is None:
            return []
        origin = f"{self.path}: {self.streaming.shuffle_buffer} in memory"
        return [("streamed rows", str(self.max_samples or "?"), origin)]

    def copies(self) -> Copies | None:
        folder = Path(self.path)
        return Copies({}, sorted(folder.rglob("*.arrow"))) if folder.is_dir() else None


class EnvironmentSource(SourceSettings):
    """Prompts made by an environment, which also scores the responses (reward kind
    ``environment``)."""

    is_made: ClassVar[bool] = True

    kind: Literal["environment"] = "environment"
    environment: str = "reasoning_gym"
    """``reasoning_gym``, or ``module:Class`` of a custom environment."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment; for reasoning_gym ``dataset`` (the task's name) and its
    parameters."""
    size: int = Field(1000, ge=1)
    """Number of distinct items."""
    seed: int = 0
    """Seed of the items. Use a different one for evaluation."""
    name: str | None = None
    """Name in prompt ids and metrics. None: the environment's own name."""

    @property
    def place(self) -> str:
        return self.name or self.environment

    @property
    def user_code(self) -> list[tuple[str, str]]:
        return [("environment", self.environment)] if ":" in self.environment else []

    @property
    def source_name(self) -> str | None:
        return self.name

    def num_rows(self) -> int:
        return self.size


class SeedSource(SourceSettings):
    """Numbered tasks without data, for multi-turn environments that make a task from its seed
    (``rollout.episodes``)."""

    is_made: ClassVar[bool] = True
    has_prompts: ClassVar[bool] = False

    kind: Literal["seeds"] = "seeds"
    size: int = Field(1000, ge=1)
    """Number of distinct tasks."""
    seed: int = Field(0, ge=0)
    """Seed of the tasks. Use a different one for evaluation."""
    name: str = "seeds"
    """Name in prompt ids and metrics."""

    @property
    def place(self) -> str:
        return self.name

    @property
    def source_name(self) -> str:
        return self.name

    def num_rows(self) -> int:
        return self.size


def _path_to_file_source(value: Any) -> Any:
    if isinstance(value, str):
        return {"kind": "file", "path": value}
    if isinstance(value, dict) and "kind" not in value:
        return {"kind": "file", **value}
    return value


SourceConfig = Annotated[
    Annotated[FileSource | HubSource | EnvironmentSource | SeedSource, Field(discriminator="kind")],
    BeforeValidator(_path_to_file_source),
]
"""Source of rows. A plain string is the path of a file."""
