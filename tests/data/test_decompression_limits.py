"""A small compressed file is not decompressed without limit."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pytest

from burnish.config.sources import FileSource
from burnish.data.base import DataError
from burnish.data.files import first_rows, open_files
from burnish.data_files import reading
from burnish.data_files.reading import first_row

MB = 1 << 20
ROW = b'{"a": 1}\n'


def _write(path: Path, content: bytes) -> None:
    compress = {".gz": gzip.compress}.get(path.suffix, lambda data: pa.compress(data, "zstd", True))
    path.write_bytes(compress(content))


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 MiB per line and 1 MiB of blank lines."""
    monkeypatch.setattr(reading, "MAX_LINE_BYTES", 2 * MB)
    monkeypatch.setattr(reading, "MAX_BLANK_BYTES", MB)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize(
    "content",
    [b"\n" * 3 * MB, b"\r\n \t" * MB, ROW + b"\n" * 3 * MB, b'{"a": "' + b"x" * 3 * MB + b'"}\n'],
)
def test_what_exceeds_a_limit_is_refused_by_every_reader(
    content: bytes, suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"rows.jsonl{suffix}"
    _write(path, content)
    config = FileSource(path=str(path))
    with pytest.raises(DataError, match=r"rows\.jsonl.* more than [12] MiB"):
        open_files(config)
    with pytest.raises(DataError, match=r"rows\.jsonl.* more than [12] MiB"):
        first_rows(config, 2)
    assert first_row(str(path)) == ({"a": 1} if content.startswith(ROW) else None)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_many_rows_and_spread_blank_lines_are_read(suffix: str, tmp_path: Path) -> None:
    """Ten rows of 1 MB with 0.5 MiB of blank lines between them."""
    path = tmp_path / f"rows.jsonl{suffix}"
    row = b'{"a": "' + b"x" * 1_000_000 + b'"}\n'
    _write(path, (row + b"\n" * (MB // 2)) * 10)
    config = FileSource(path=str(path))
    rows = open_files(config)
    assert len(rows) == 10 == len(first_rows(config, 20))
    assert all(rows[i].values == {"a": "x" * 1_000_000} for i in range(10))
