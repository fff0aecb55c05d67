"""Config of sources of rows: files, Hugging Face datasets, environments and numbered tasks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from burnish.config.base import Node, PathText
from burnish.config.columns import default_name, splits_of_path
from burnish.config.split_files import FilesError, left_out_line


class _Source(Node):
    """Keys of every source."""

    weight: float = Field(1.0, gt=0)
    """Relative probability of drawing from this source."""


class FileSource(_Source):
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
    def source_name(self) -> str:
        """Name of the source in prompt ids and metrics."""
        return self.name or default_name(self.path)

    def advice(self) -> Iterator[str]:
        with suppress(FilesError):
            splits = splits_of_path(self.path)
            if splits.left_out:
                yield f"path={self.path}: {left_out_line(splits)}"


class HubSource(_Source):
    """A HuggingFace dataset, by hub name or as a folder written by ``save_to_disk``."""

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
    streaming: bool = False
    """Read rows in order while training, instead of downloading them first. The number of rows is
    ``max_samples``, which the dataset must have; None: unknown, and the job needs ``max_steps``."""
    shuffle_buffer: int = Field(1000, ge=1)
    """Rows held in memory and shuffled together, if ``streaming``."""

    def rules(self) -> Iterator[str]:
        if self.is_own("shuffle_buffer") and not self.streaming:
            yield (
                f"shuffle_buffer={self.shuffle_buffer} has no effect without streaming, because "
                "all rows are shuffled together; remove it, or set streaming=true"
            )


class EnvironmentSource(_Source):
    """Prompts made by an environment, which also scores the responses (reward kind
    ``environment``)."""

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


class SeedSource(_Source):
    """Numbered tasks without data, for multi-turn environments that make a task from its seed
    (``rollout.episodes``)."""

    kind: Literal["seeds"] = "seeds"
    size: int = Field(1000, ge=1)
    """Number of distinct tasks."""
    seed: int = Field(0, ge=0)
    """Seed of the tasks. Use a different one for evaluation."""
    name: str = "seeds"
    """Name in prompt ids and metrics."""


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
