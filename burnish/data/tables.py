"""Tables of columnar files: Parquet and Arrow IPC. Functions raise the errors of
:mod:`burnish.data_files.arrow_files`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from burnish.data_files.arrow_files import (
    SUFFIXES,
    check_positions,
    record_batches,
    row_values,
)
from burnish.data_files.arrow_files import opened as opened_batches
from burnish.data_files.reading import suffix_of

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["SUFFIXES", "Table", "copied", "opened"]


class Table:
    """Rows of record batches, whose positions are checked when a batch is first read."""

    def __init__(self, batches: Iterable[pa.RecordBatch]) -> None:
        self._batches = [batch for batch in batches if batch.num_rows]
        self._begins = list(accumulate((b.num_rows for b in self._batches), initial=0))
        self._checked: set[int] = set()

    def __len__(self) -> int:
        return self._begins[-1]

    def row(self, i: int) -> dict[str, Any]:
        """Return the values of row ``i``. Raises ColumnarError if it cannot be read."""
        number = bisect_right(self._begins, i) - 1
        batch, first = self._batches[number], self._begins[number]
        if number not in self._checked:
            check_positions(batch)
            self._checked.add(number)
        return row_values(batch, i - first, i)


def opened(path: Path) -> Table:
    """Return all rows of a file, memory-mapped: of an Arrow file in place, of other files (Parquet,
    compressed Arrow) from a temporary copy."""
    if suffix_of(path) == ".parquet":
        return copied(path)
    if sum(batch.nbytes for batch in record_batches(path)) > path.stat().st_size:
        return copied(path)
    with opened_batches(path) as (_, batches):
        return Table(batches)


def copied(path: Path) -> Table:
    """Return all rows of a file from a memory-mapped temporary copy, which is written one batch at
    a time. The copy has no name, so it is freed together with the table."""
    import pyarrow as pa

    with NamedTemporaryFile(prefix="burnish-data-", suffix=".arrow") as copy:
        with opened_batches(path) as (schema, _), pa.ipc.new_stream(copy.name, schema) as out:
            for batch in record_batches(path):
                out.write_batch(batch)
        with opened_batches(Path(copy.name)) as (_, batches):
            return Table(batches)
