"""Tables of columnar files: Parquet and Arrow IPC. Functions raise the errors of pyarrow."""

from __future__ import annotations

from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from burnish.config.columns import arrow_batches, suffix_of

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIXES = (".parquet", ".arrow")
"""Suffixes of columnar files."""

_BATCH_ROWS = 10_000
"""Rows of Parquet that are decoded at a time."""


def opened(path: Path) -> pa.Table:
    """Return all rows of a file. Arrow files are memory-mapped; Parquet is decoded in memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if suffix_of(path) == ".parquet":
        return pq.read_table(path, memory_map=True)
    with arrow_batches(path) as (schema, batches):
        return pa.Table.from_batches(batches, schema)


def copied(path: Path) -> pa.Table:
    """Return all rows of a Parquet file from a memory-mapped temporary copy, which is written one
    batch at a time. The copy has no name, so it is freed together with the table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with NamedTemporaryFile(prefix="burnish-data-", suffix=".arrow") as copy:
        with pq.ParquetFile(path) as file, pa.ipc.new_stream(copy.name, file.schema_arrow) as out:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                out.write_batch(batch)
        return opened(Path(copy.name))


def first_rows(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the first ``count`` rows of a file without reading all of it."""
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = []
    if suffix_of(path) == ".parquet":
        with pq.ParquetFile(path) as file:
            batch = next(file.iter_batches(batch_size=count), None)
            return [] if batch is None else batch.to_pylist()
    with arrow_batches(path) as (_, batches):
        for batch in batches:
            rows += batch.slice(0, count - len(rows)).to_pylist()
            if len(rows) == count:
                break
    return rows
