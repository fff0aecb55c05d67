"""Read rows without a tokenizer: for the check of the first rows, before torch is imported, and for
the comparison of prompts."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from burnish.config.base import module_of
from burnish.data.base import Row
from burnish.data.config import DataConfig
from burnish.data.rows import column, prompt_column, response_column

C = TypeVar("C", bound=DataConfig)


class RowReader(Generic[C]):
    """Reads the columns that the config of a kind names. A kind whose rows say more has a subclass
    ``Reader`` in a file ``read.py``."""

    def __init__(self, config: C) -> None:
        self.config = config

    def prompt(self, row: Row) -> Any:
        """Return the prompt as it is in the row. Raises DataError without the row's position, which
        the caller adds."""
        return prompt_column(row, self.config.prompt_key, self.config.prompt_template)

    def contents(self, row: Row) -> list[Any]:
        """Return the texts and conversations that the job reads. Raises DataError as
        :meth:`prompt` does, also for another value that the row lacks."""
        for field, key in self.config.needed_keys.items():
            column(row, key, field)
        keys = self.config.content_keys
        return [self.prompt(row), *(response_column(row, key, f) for f, key in keys.items())]


def reader_of(config: DataConfig) -> RowReader[Any]:
    """Return the reader of the rows of a data section."""
    reader: RowReader[Any]
    reader = module_of(config, "read").Reader(config) if config.has_reader else RowReader(config)
    return reader
