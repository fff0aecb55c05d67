"""Rows of a Hugging Face dataset that is streamed: read in order, one block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from burnish.data.base import DataError, Row, Source, columnar_row
from burnish.data_files.arrow_files import READ_ERRORS

if TYPE_CHECKING:
    from datasets import IterableDataset


class StreamedRows:
    """A source of which one block of rows is in memory. Implements ``stream.Blocks``. Without
    ``num_rows``, the row after the block is read as well, so that the last block is known.

    Blocks begin at multiples of ``block_size``. Reading an earlier block restarts the dataset.
    Example: with 10 rows and ``block_size`` 4, the blocks begin at 0, 4 and 8; the last has 2 rows.
    """

    def __init__(
        self,
        name: str,
        dataset: IterableDataset,
        *,
        place: str,
        block_size: int,
        num_rows: int | None,
    ) -> None:
        """``place``: name of the dataset in positions of rows. ``num_rows``: rows to read, which
        the dataset must have; None: all, of unknown number."""
        self.name, self.block_size, self.num_rows = name, block_size, num_rows
        self._dataset, self._place = dataset, place
        self._convert: Callable[[Row], Row] = lambda row: row
        self._start: dict[str, Any] = dataset.state_dict()
        self._restart(self._start)

    def __len__(self) -> int:
        if self.num_rows is None:
            raise DataError(
                f"{self._place} is streamed, so its number of rows is unknown; set max_samples of "
                "the source, or remove streaming"
            )
        return self.num_rows

    def __getitem__(self, i: int) -> Row:
        begin = i - i % self.block_size
        if i - begin >= self.load(begin):
            raise IndexError(f"{self._place} has no row {i}")
        values = self._rows[i - begin]
        return self._convert(columnar_row(values, f"{self._place} row {i}"))

    def converted(self, convert: Callable[[Row], Row]) -> StreamedRows:
        """Return this source with ``convert`` applied to each of its rows."""
        self._convert = convert
        return self

    def first(self, count: int) -> int:
        """Return the number of rows, at most ``count``."""
        for begin in range(0, count, self.block_size):
            num = self.load(begin)
            if num < self.block_size:
                return min(count, begin + num)
        return count

    def load(self, begin: int) -> int:
        """Read the block that begins at row ``begin``, a multiple of ``block_size``. Return its
        number of rows; 0 after the last block. Raises DataError if rows cannot be read."""
        if begin < self._begin:
            self._restart(self._start)
        while self._begin < begin and len(self._rows) in (self.block_size, 0):
            self._read(max(0, self._begin + self.block_size))
            if not self._rows:
                break
        return len(self._rows) if self._begin == begin else 0

    @property
    def is_last(self) -> bool:
        if self.num_rows is not None:
            return self._begin + len(self._rows) >= self.num_rows
        return not self._peeked

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the block in memory. JSON-serializable."""
        return {
            **self._layout(),
            "begin": self._begin,
            "dataset": self._block_state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the block in memory from the dataset, without reading the rows before it. Raises
        DataError if the blocks or the files of the dataset differ."""
        for key, value in self._layout().items():
            if state[key] != value:
                raise DataError(
                    f"data source {self.name!r} had {key}={state[key]} when the run was saved but "
                    f"has {value} now; the saved position would point at other rows. Restore it, "
                    "or start a new run"
                )
        self._restart(state["dataset"])
        if state["begin"] >= 0:
            self._read(int(state["begin"]))

    def _layout(self) -> dict[str, int]:
        return {"shuffle_buffer": self.block_size, "num_shards": self._dataset.num_shards}

    def _restart(self, state: dict[str, Any]) -> None:
        """Continue reading at ``state`` of the dataset, with no block in memory."""
        self._dataset.load_state_dict(state)
        self._iterator: Iterator[dict[str, Any]] = iter(self._dataset)
        self._begin, self._rows = -self.block_size, list[dict[str, Any]]()
        self._peeked = list[dict[str, Any]]()
        self._block_state = self._next_state = state

    def _read(self, begin: int) -> None:
        """Read the next block from the dataset; ``begin`` is its first row."""
        import datasets
        import httpx

        limit, self._block_state = self.block_size, self._next_state
        if self.num_rows is not None:
            limit = max(0, min(limit, self.num_rows - begin))
        try:
            rows = [*self._peeked, *islice(self._iterator, limit - len(self._peeked))]
            self._next_state = self._dataset.state_dict()
            self._peeked = list(islice(self._iterator, 1)) if self.num_rows is None else []
        except (*READ_ERRORS, httpx.HTTPError, datasets.exceptions.DatasetsError) as error:
            self._restart(self._start)
            raise DataError(
                f"{self._place}: the {limit} rows from row {begin} on cannot be streamed "
                f"({type(error).__name__}: {error}). Correct the data; after a connection error, "
                "resume the run"
            ) from error
        if self.num_rows is not None and len(rows) < limit:
            raise DataError(
                f"{self._place} has only {begin + len(rows)} rows, but max_samples="
                f"{self.num_rows} is the length of a streamed source; lower it"
            )
        self._begin, self._rows = begin, rows


def num_first(source: Source, count: int) -> int:
    """Return the number of rows of a source, at most ``count``. A streamed source is read up to
    there."""
    return source.first(count) if isinstance(source, StreamedRows) else min(count, len(source))
