"""Columnar files: what a row may decode to, and errors that name the row."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from burnish.config.sources import FileSource
from burnish.data.base import DataError
from burnish.data.files import first_rows, open_files
from burnish.data_files import arrow_files
from burnish.data_files.reading import first_row

MB = 1 << 20
Write = Callable[[pa.Table, Path], None]


def _parquet(**options: Any) -> Write:
    return lambda table, path: pq.write_table(
        table, path.with_suffix(".parquet"), compression="zstd", **options
    )


def _arrow(codec: str | None = None, *, stream: bool = False) -> Write:
    def write(table: pa.Table, path: Path) -> None:
        options = pa.ipc.IpcWriteOptions(compression=codec)
        new = pa.ipc.new_stream if stream else pa.ipc.new_file
        with new(str(path.with_suffix(".arrow")), table.schema, options=options) as file:
            file.write_table(table, max_chunksize=3)

    return write


WRITERS = {
    "parquet": _parquet(store_schema=False),
    "typed parquet": _parquet(),
    "prefixes": _parquet(use_dictionary=False, column_encoding="DELTA_BYTE_ARRAY"),
    "arrow": _arrow(),
    "arrow zstd": _arrow("zstd", stream=True),
}
LARGE = "x" * 3 * MB
LISTS = pa.array([["a"], ["b"] * 400_000, ["c"]])  # 8 bytes more for each value
LARGE_ROWS = {
    "text": pa.array(["a", LARGE, "b"]),
    "categorical": pa.array(["a", LARGE, "b"]).dictionary_encode(),
    "view": pa.array(["a", LARGE, "b"], pa.string_view()),
    "lists": LISTS,
    "nulls": LISTS.cast(pa.list_(pa.large_string())).cast(pa.list_(pa.string())),
    "objects": pa.array([{"a": ["a"]}, {"a": [LARGE]}, None]),
    "map": pa.array([[("a", "b")], [("a", LARGE)], []], pa.map_(pa.string(), pa.string())),
}


@pytest.fixture
def source(tmp_path: Path) -> Callable[[str, pa.Table], FileSource]:
    """Write a table, and return the source of its file."""

    def write(writer: str, table: pa.Table) -> FileSource:
        WRITERS[writer](table, tmp_path / "rows")
        (path,) = tmp_path.glob("rows.*")
        return FileSource(path=str(path))

    return write


@pytest.mark.parametrize("writer", ["parquet", "arrow", "arrow zstd"])
@pytest.mark.parametrize("kind", LARGE_ROWS)
def test_a_row_above_the_limit_is_named_and_others_are_not(
    kind: str, writer: str, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = source(writer, pa.table({"a": ["1", "2", "3"], "b": LARGE_ROWS[kind]}))
    monkeypatch.setattr(arrow_files, "MAX_ROW_BYTES", 2 * MB)
    for read in (lambda: open_files(config), lambda: first_rows(config, 3)):
        with pytest.raises(DataError, match=r"rows\.\w+ row 1: .* 2 MiB"):
            read()
    assert first_row(config.path) is not None
    monkeypatch.setattr(arrow_files, "MAX_ROW_BYTES", 8 * MB)
    assert len(open_files(config)) == len(first_rows(config, 3)) == 3


@pytest.mark.parametrize("writer", ["parquet", "prefixes"])
@pytest.mark.parametrize("in_lists", [False, True])
def test_repeated_texts_of_parquet_are_decoded_in_parts(
    in_lists: bool, writer: str, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 rows of 1 MB, stored once: at most 64 MiB and what a batch needs are allocated."""
    texts: Any = [LARGE[:1_000_000]] * 400
    table = pa.table({"a": [[text] for text in texts] if in_lists else texts})
    config = source(writer, table)
    del table
    assert Path(config.path).stat().st_size < 100_000
    before = pa.total_allocated_bytes()
    largest = 0
    for batch in arrow_files.record_batches(Path(config.path)):
        largest = max(largest, pa.total_allocated_bytes() - before)
        assert batch.num_rows >= 1
    assert 0 < largest < 200 * MB


def test_lists_that_repeat_a_text_are_measured_before_they_are_decoded(
    source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row of 1,000 texts of 1 MB among 2,000 rows without texts: 1 GB, stored in kilobytes."""
    monkeypatch.setattr(arrow_files, "_LIST_BYTES", 256 * MB)
    ends = np.concatenate([np.zeros(1001), np.full(1000, 1000)]).astype(np.int32)
    texts = pa.DictionaryArray.from_arrays(np.zeros(1000, np.int32), [LARGE[:1_000_000]])
    config = source("parquet", pa.table({"a": pa.ListArray.from_arrays(ends, texts)}))
    with pytest.raises(DataError, match=r"rows\.parquet row 1000: .* 256 MiB"):
        open_files(config)


@pytest.mark.parametrize("writer", ["typed parquet", "arrow"])
@pytest.mark.parametrize(
    "column",
    [
        pa.array(["ok", b"\xff"], pa.binary()).view(pa.string()),
        pa.array([0, 2**60], pa.timestamp("us")),
        pa.array([None, 0], pa.timestamp("us", "Nowhere/None")),
    ],
    ids=["not UTF-8", "no date", "no time zone"],
)
def test_a_value_that_python_cannot_represent_is_an_error_of_its_row(
    column: pa.Array, writer: str, source: Any
) -> None:
    config = source(writer, pa.table({"a": ["1", "2"], "b": column}))
    rows = open_files(config)
    assert rows[0].values["a"] == "1"
    for read in (lambda: rows[1], lambda: first_rows(config, 2)):
        with pytest.raises(DataError, match=r"rows\.\w+ row 1: "):
            read()


@pytest.mark.parametrize(
    "table",
    [
        pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["x", "x"]),
        pa.table({f"c{i}": [1] for i in range(12)}),
    ],
    ids=["equal names", "many"],
)
@pytest.mark.parametrize("writer", ["parquet", "arrow"])
def test_columns_that_are_no_row_are_refused(
    table: pa.Table, writer: str, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow_files, "MAX_COLUMNS", 10)
    config = source(writer, table)
    for read in (lambda: open_files(config), lambda: first_rows(config, 1)):
        with pytest.raises(DataError, match=r"rows\.\w+: it has .* columns"):
            read()


@pytest.mark.parametrize("codec", [None, "lz4"])
@pytest.mark.parametrize("stream", [False, True])
def test_damaged_arrow_files_give_rows_or_data_errors(
    stream: bool, codec: str | None, tmp_path: Path
) -> None:
    """Invalid offsets and indices would end the process, without an error."""
    path, rng = tmp_path / "rows.arrow", random.Random(0)
    columns = {
        "text": [f"text {i}" for i in range(9)],
        "messages": [[{"role": "user", "content": "x" * i}] for i in range(9)],
        "kind": pa.array(list("abcabcabc")).dictionary_encode(),
        "view": pa.array([f"a text that is not inline {i}" for i in range(9)], pa.string_view()),
    }
    _arrow(codec, stream=stream)(pa.table(columns), path)
    content, outcomes = path.read_bytes(), set()
    for _ in range(200):
        damaged = bytearray(content)
        for _ in range(rng.choice([1, 3, 20])):
            damaged[rng.randrange(len(damaged))] = rng.choice([0, 1, 127, 128, 255])
        path.write_bytes(damaged)
        first_row(str(path))
        try:
            rows = open_files(FileSource(path=str(path)))
            _ = [rows[i] for i in range(min(len(rows), 20))]
            outcomes.add("rows")
        except DataError:
            outcomes.add("error")
    assert outcomes == {"rows", "error"}
