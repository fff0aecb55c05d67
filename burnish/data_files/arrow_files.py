"""Record batches of columnar data files (Parquet and Arrow IPC), with a limit per row.

A few hundred bytes of Parquet can decode to gigabytes: pages are compressed, and a long text of a
dictionary can occur in every row. Batches are therefore sized from the footer and the
dictionaries before they are decoded. Reading order: :func:`record_batches`, then :func:`size_of`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.data_files.class_labels import labels_in_schema, with_class_names
from burnish.errors import BurnishError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

SUFFIXES = (".parquet", ".arrow")
"""Suffixes of columnar files."""
MAX_COLUMNS = 10_000
MAX_ROW_BYTES = 256 << 20
"""Maximum size of one row, decoded. Lists count 8 bytes more for each value."""
_BATCH_ROWS = 10_000
_BATCH_BYTES = 64 << 20
"""Maximum rows and approximate bytes of Parquet that are decoded at a time."""
_LIST_BYTES = 1 << 30
"""Lists of texts are measured before they are decoded if one could have more bytes."""
_VALUE_BYTES = 8

FOR_INSPECTION = {b"burnish": b"for inspection"}
"""Metadata of columns that files of Burnish have for people: they are no columns of data."""
SAMPLE_COLUMNS = (
    *("step", "split", "prompt_id", "group_id", "sample_id", "prompt", "response", "reward"),
    *("reward_parts", "advantage", "finish_reason", "response_tokens", "label", "version"),
    "episode",
)
"""Columns of data of a sample file of a run (``observe/samples.py``)."""
INSPECTED_SAMPLE_COLUMNS = (
    *("dropped", "tokens", "token_ids", "row_numbers", "turns", "action_mask", "versions"),
    *("sampler_logprobs", "trainer_logprobs", "ref_logprobs", "teacher_logprobs", "entropies"),
    *("token_advantages", "values", "tokens_omitted"),
)
"""Its columns for people. In files of older versions they lack the metadata of
:data:`FOR_INSPECTION`."""

_NOT_IMPLEMENTED = "Not yet implemented"
"""Text of pyarrow's error for a column whose encoding has no dictionary."""

READ_ERRORS = (
    *(OSError, ValueError, OverflowError, LookupError),
    *(MemoryError, NotImplementedError, TypeError),
)
"""Errors of pyarrow for unreadable files and values."""


class ColumnarError(BurnishError, ValueError):
    """Rows or a column of a file cannot be used. The message follows the path of the file."""

    def __init__(self, problem: str, rows: str = "") -> None:
        """``rows``: such as ``row 3``; "" if the problem is not one of rows."""
        super().__init__(f"{' ' * bool(rows)}{rows}: {problem}")


def record_batches(
    path: Path, count: int | None = None, *, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a file, or those of its first ``count`` rows, whose positions are
    checked (:func:`check_positions`). ``columns``: those that are read of Parquet, if the file has
    them. None: all columns of data (:func:`data_columns`).

    Raises ColumnarError if a row decodes to more than MAX_ROW_BYTES, or if the columns have equal
    names or unsupported types; otherwise the errors of pyarrow.
    """
    first = 0
    with opened(path, columns) as (schema, batches):
        _check_number(len(schema.names))
        if len(set(schema.names)) < len(schema.names):
            twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
            raise ColumnarError(f"it has several columns named {', '.join(twice)}; rename them")
        for field in schema:
            _check_type(field.type, field.name)
        for batch in batches if count is None else _head(batches, count):
            if count is not None:
                check_positions(batch)
            check_rows(batch, first)
            yield batch
            first += batch.num_rows


def _head(batches: Iterator[pa.RecordBatch], count: int) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch.slice(0, count)
        count -= batch.num_rows
        if count <= 0:
            return


def first_rows(path: Path, count: int) -> list[dict[str, Any]]:
    """Return the first ``count`` rows of a file without reading all of it. Raises ColumnarError for
    a row that cannot be read."""
    rows: list[dict[str, Any]] = []
    for batch in record_batches(path, count):
        rows += [row_values(batch, i, len(rows) + i) for i in range(batch.num_rows)]
    return rows


@contextmanager
def opened(
    path: Path, columns: Sequence[str] | None = None
) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    """Open a file for reading its schema and its batches, which are not checked. ``columns``: as in
    :func:`record_batches`.

    Batches of Arrow IPC (the file format, or the stream format of ``datasets``) are memory-mapped
    and stay valid after this context.
    """
    import pyarrow as pa

    if path.suffix.lower() == ".parquet":
        with parquet_file(path) as file:
            _check_number(file.metadata.num_columns)
            schema = file.schema_arrow
            if columns is None and (names := data_columns(schema)) != schema.names:
                columns, schema = names, pa.schema(map(schema.field, names), schema.metadata)
            yield schema, _parquet_batches(file, path, columns)
        return
    with path.open("rb") as head:
        is_file_format = head.read(6) == b"ARROW1"
        mapped = None if is_utf8(path) else mmap(head.fileno(), 0, access=ACCESS_READ)
    source = pa.memory_map(str(path)) if mapped is None else pa.BufferReader(mapped)
    if is_file_format:
        reader = pa.ipc.open_file(source)
        yield reader.schema, map(reader.get_batch, range(reader.num_record_batches))
    else:
        with pa.ipc.open_stream(source) as stream:
            yield stream.schema, iter(stream)


@contextmanager
def parquet_file(path: Path, **options: Any) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file, memory-mapped if its path is UTF-8: pyarrow reads no other paths."""
    import pyarrow.parquet as pq

    with ExitStack() as stack:
        named = is_utf8(path)
        source: Any = path if named else stack.enter_context(path.open("rb"))
        yield stack.enter_context(pq.ParquetFile(source, memory_map=named, **options))


def is_utf8(path: Path) -> bool:
    """Return whether a path is UTF-8, as Python's texts of other bytes are not."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def data_columns(schema: pa.Schema) -> list[str]:
    """Return the names of the columns that are read as data: all but those of sample files that are
    for inspection."""
    names = set(schema.names)
    if names.issuperset(SAMPLE_COLUMNS) and names <= {*SAMPLE_COLUMNS, *INSPECTED_SAMPLE_COLUMNS}:
        return [name for name in schema.names if name in SAMPLE_COLUMNS]
    return [
        field.name
        for field in schema
        if not FOR_INSPECTION.items() <= dict(field.metadata or {}).items()
    ]


def num_rows_of_parquet(path: Path) -> int:
    """Return the number of rows of a Parquet file, by its footer."""
    with parquet_file(path) as file:
        return int(file.metadata.num_rows)


def row_values(rows: pa.RecordBatch, i: int, number: int) -> dict[str, Any]:
    """Return row ``i`` of a batch, which is row ``number`` of its file, as Python values. Class
    labels are their names.

    Raises ColumnarError if Python cannot represent one of them."""
    try:
        values: dict[str, Any] = rows.slice(i, 1).to_pylist()[0]
    except READ_ERRORS as error:
        raise ColumnarError(
            f"the row cannot be read: {type(error).__name__}: {error}. Correct or remove it, and "
            "write the file again",
            f"row {number}",
        ) from error
    return with_class_names(values, labels_in_schema(rows.schema.metadata))


# --- limits


def _check_number(num_columns: int) -> None:
    if num_columns > MAX_COLUMNS:
        raise ColumnarError(
            f"it has {num_columns} columns, but at most {MAX_COLUMNS} are read; leave out others"
        )


def _check_type(kind: pa.DataType, column: str) -> None:
    import pyarrow as pa

    is_any = pa.types
    unbounded = (is_any.is_list_view, is_any.is_large_list_view, is_any.is_run_end_encoded)
    if any(check(kind) for check in (*unbounded, is_any.is_union)):
        raise ColumnarError(
            f"the column {column!r} has the type {str(kind)[:100]}, whose rows have no known size; "
            "write it as lists, structs, texts or numbers"
        )
    if is_any.is_dictionary(kind):
        _check_type(kind.value_type, column)
    for i in range(kind.num_fields):
        _check_type(kind.field(i).type, column)


def check_rows(batch: pa.RecordBatch, first: int) -> None:
    """Raise ColumnarError if a row is too large. ``first`` is the number of the first row."""
    batch.validate()
    if batch.num_rows == 0 or sum(map(size_of, batch.columns)) <= MAX_ROW_BYTES:
        return
    if batch.num_rows == 1:
        raise _too_large(f"row {first}")
    half = batch.num_rows // 2
    check_rows(batch.slice(0, half), first)
    check_rows(batch.slice(half), first + half)


def _too_large(rows: str) -> ColumnarError:
    return ColumnarError(
        f"each row may decode to {MAX_ROW_BYTES >> 20} MiB, but this needs more. Leave out the "
        "row, or its large columns",
        rows,
    )


def check_positions(batch: pa.RecordBatch) -> None:
    """Raise ValueError if offsets or indices of a batch point outside its values. Reading such
    values would end the process."""
    batch.validate()
    for column in batch.columns:
        _check_positions(column)


def _check_positions(array: Any) -> None:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind, is_any = array.type, pa.types
    if is_any.is_dictionary(kind):
        ends = pc.min_max(array.indices).as_py()
        if ends["min"] is not None and not 0 <= ends["min"] <= ends["max"] < len(array.dictionary):
            raise ValueError("indices point outside their dictionary")
    elif is_any.is_string_view(kind) or is_any.is_binary_view(kind):
        array.validate(full=True)
    else:
        offsets = _offsets(array)
        if len(offsets) > 1 and pc.min(pc.pairwise_diff(offsets)).as_py() < 0:
            raise ValueError("offsets decrease")
    for child in _children(array):
        _check_positions(child)


def _offsets(array: Any) -> Any:
    """Return the offsets of lists, maps and texts; empty for other types."""
    import pyarrow as pa

    kind, is_any = array.type, pa.types
    if is_any.is_list(kind) or is_any.is_large_list(kind) or is_any.is_map(kind):
        return array.offsets
    widths = (
        (pa.int32(), is_any.is_string, is_any.is_binary),
        (pa.int64(), is_any.is_large_string, is_any.is_large_binary),
    )
    for width, is_text, is_binary in widths:
        if len(array) and (is_text(kind) or is_binary(kind)):
            buffers = [None, array.buffers()[1]]
            return pa.Array.from_buffers(width, len(array) + 1, buffers, offset=array.offset)
    return pa.array([], pa.int32())


def _children(array: Any) -> list[Any]:
    import pyarrow as pa

    kind, is_any = array.type, pa.types
    if is_any.is_dictionary(kind):
        return [array.dictionary]
    if is_any.is_struct(kind):
        return [array.field(i) for i in range(kind.num_fields)]
    if is_any.is_map(kind):
        return [array.keys, array.items]
    return [array.values] if _is_list(kind) else []


def size_of(array: Any) -> int:
    """Return the bytes of an array if each of its values is stored, and 8 more for each value of a
    list."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind, is_any = array.type, pa.types
    if is_any.is_dictionary(kind):
        lengths = _lengths(array.dictionary)
        if lengths is None:  # of other values than texts
            decoded = len(array) * size_of(array.dictionary)
        else:
            decoded = int(pc.sum(lengths.take(array.indices)).as_py() or 0)
        return _VALUE_BYTES * len(array) + decoded
    if is_any.is_struct(kind):
        return int(array.nbytes) + sum(map(size_of, array.flatten()))
    if is_any.is_map(kind) or _is_list(kind):
        values = _values(array)
        return _VALUE_BYTES * (len(array) + len(values)) + size_of(values)
    if is_any.is_string_view(kind) or is_any.is_binary_view(kind):
        array.validate(full=True)
        lengths = pc.binary_length(array.cast(_plain(kind)))
        return _VALUE_BYTES * len(array) + int(pc.sum(lengths).as_py() or 0)
    return int(array.nbytes)


def _is_list(kind: pa.DataType) -> bool:
    import pyarrow as pa

    is_any = pa.types
    return bool(
        is_any.is_list(kind) or is_any.is_large_list(kind) or is_any.is_fixed_size_list(kind)
    )


def _values(array: Any) -> Any:
    """Return the values of a list or map array, also those of null lists. Reads only the first and
    the last offset, because the others may be invalid."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(array.type):
        return array.flatten()
    begin, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
    if not pa.types.is_map(array.type):
        return array.values.slice(begin, end - begin)
    parts = [part.slice(begin, end - begin) for part in (array.keys, array.items)]
    return pa.StructArray.from_arrays(parts, ["key", "value"])


def _plain(view: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    return pa.large_string() if pa.types.is_string_view(view) else pa.large_binary()


def _lengths(values: Any) -> Any:
    """Return the bytes of each text; None for other types."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind, is_any = values.type, pa.types
    if is_any.is_string_view(kind) or is_any.is_binary_view(kind):
        values = values.cast(_plain(kind))
    elif not any(
        check(kind)
        for check in (
            *(is_any.is_string, is_any.is_large_string),
            *(is_any.is_binary, is_any.is_large_binary),
        )
    ):
        return None
    return pc.cast(pc.binary_length(values), pa.int64())


# --- Parquet


def _parquet_batches(
    file: pq.ParquetFile, path: Path, columns: Sequence[str] | None
) -> Iterator[pa.RecordBatch]:
    first = 0
    for group in range(file.metadata.num_row_groups):
        rows = _RowGroup(file, path, group, first)
        if rows.num_rows > 0:
            size = rows.batch_rows()
            yield from file.iter_batches(batch_size=size, row_groups=[group], columns=columns)
        first += rows.num_rows


class _RowGroup:
    """A row group of a Parquet file, which is not decoded. Its footer has the size of what is
    stored; dictionaries and prefixes of texts are stored once and repeated in the rows."""

    def __init__(self, file: pq.ParquetFile, path: Path, group: int, first: int) -> None:
        """``first``: number of the first row."""
        self._file, self._path, self._group, self._first = file, path, group, first
        self._metadata = file.metadata.row_group(group)
        self.num_rows = self._metadata.num_rows

    def batch_rows(self) -> int:
        """Return the number of rows to decode at a time. Raises ColumnarError if a row is too
        large."""
        row_bytes = self._metadata.total_byte_size / self.num_rows
        self._check_average(row_bytes)
        schema, lists_bytes = self._file.schema, 0.0
        leaves = [schema.column(i) for i in range(len(schema))]
        # (The texts come first: pyarrow ends the process if metadata of columns is invalid, but
        # raises if it reads them.)
        longest = self._longest([leaf.path for leaf in leaves if _is_text(leaf)])
        for i, leaf in enumerate(leaves):
            num_values = self.num_rows
            if leaf.max_repetition_level:
                num_values = self._metadata.column(i).num_values
                lists_bytes += _VALUE_BYTES * num_values / self.num_rows
            width = longest[leaf.path] if _is_text(leaf) else max(leaf.length, _VALUE_BYTES)
            row_bytes += width * num_values / self.num_rows
            is_large = width * num_values > max(_LIST_BYTES, MAX_ROW_BYTES)
            if _is_text(leaf) and leaf.max_repetition_level and is_large:
                self._check_lists(leaf.path)
        self._check_average(lists_bytes)
        return max(1, min(_BATCH_ROWS, int(_BATCH_BYTES / max(row_bytes, 1))))

    def _check_average(self, row_bytes: float) -> None:
        if row_bytes > MAX_ROW_BYTES:
            first, last = self._first, self._first + self.num_rows - 1
            raise _too_large(f"row {first}" if last == first else f"rows {first} to {last}")

    def _longest(self, paths: list[str]) -> dict[str, int]:
        """Return path of a column of texts -> bytes of the longest value that it can repeat."""
        try:
            return self._longest_of_dictionaries(paths)
        except OSError as error:  # another encoding, whose values may repeat the one before them
            if _NOT_IMPLEMENTED not in str(error):
                raise
            columns = map(self._metadata.column, range(self._metadata.num_columns))
            sizes = {
                column.path_in_schema: column.total_uncompressed_size
                for column in columns
                if any(name.startswith("DELTA") for name in column.encodings)
            }
            others = [path for path in paths if path not in sizes]
            return sizes | self._longest_of_dictionaries(others)

    def _longest_of_dictionaries(self, paths: list[str]) -> dict[str, int]:
        import pyarrow.compute as pc

        for batch in self._with_dictionaries(paths, 1) if paths else ():
            leaves = [leaf for column in batch.columns for leaf in _dictionary_arrays(column)]
            lengths = [_lengths(leaf.dictionary) for leaf in leaves]
            longest = [int(pc.max(sizes).as_py() or 0) for sizes in lengths]
            return dict(zip(paths, longest, strict=True))
        return dict.fromkeys(paths, 0)

    def _check_lists(self, path: str) -> None:
        """Raise ColumnarError if the lists of one row are too large, without decoding texts."""
        first = self._first
        try:
            for batch in self._with_dictionaries([path], _BATCH_ROWS):
                check_rows(batch, first)
                first += batch.num_rows
        except OSError as error:  # (of other encodings, the batches are small)
            if _NOT_IMPLEMENTED not in str(error):
                raise

    def _with_dictionaries(self, paths: list[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield batches of columns of texts, as dictionary arrays."""
        metadata, rows = self._file.metadata, [self._group]
        with parquet_file(self._path, metadata=metadata, read_dictionary=paths) as file:
            yield from file.iter_batches(batch_size=batch_rows, row_groups=rows, columns=paths)


def _is_text(leaf: Any) -> bool:
    return bool(leaf.physical_type == "BYTE_ARRAY")


def _dictionary_arrays(array: Any) -> Iterator[Any]:
    """Yield the dictionary arrays inside an array, in the order of the columns of Parquet."""
    import pyarrow as pa

    if pa.types.is_dictionary(array.type):
        yield array
        return
    for child in _children(array):
        yield from _dictionary_arrays(child)
