"""Rows to JSON lines and Parquet and back through the data sources that the next job reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from burnish.config.sources import FileSource
from burnish.data.sources import open_source
from burnish.data_files.writing import ColumnError, json_line, read_lines, write_parquet


def back(path: Path) -> list[dict[str, Any]]:
    source = open_source(FileSource(path=str(path)))
    return [dict(source[i].values) for i in range(len(source))]


def parquet(path: Path, *parts: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
    write_parquet([lambda part=part: part for part in parts], path, **options)  # type: ignore[misc]
    return back(path)


ROWS = [
    {"prompt": "a\u2028b\n", "n": 1, "talk": [{"role": "user", "content": "é"}], "m": {"x": 0.5}},
    {"prompt": "", "n": None, "talk": [{"role": "user", "content": "\u0000"}], "m": {"x": 1.0}},
]


def test_rows_round_trip(tmp_path: Path) -> None:
    lines = tmp_path / "rows.jsonl"
    lines.write_bytes(b"".join(map(json_line, ROWS)))
    assert back(lines) == ROWS
    assert list(read_lines(lines.read_bytes())) == ROWS
    assert parquet(tmp_path / "rows.parquet", ROWS[:1], ROWS[1:]) == ROWS


def test_json_is_strict_and_utf8_for_any_data() -> None:
    """NaN becomes null, half a surrogate pair stays an escape, a tuple a list, a date its text."""
    row = {"x": float("nan"), "y": "\ud800", "z": (1, 2), "d": Path("p"), 7: True}
    line = json_line(row).decode("utf-8")
    assert json.loads(line, parse_constant=pytest.fail) == {
        "x": None, "y": "\ud800", "z": [1, 2], "d": "p", "7": True,
    }  # fmt: skip


def test_columns_of_several_parts_become_one_type(tmp_path: Path) -> None:
    rows = parquet(
        tmp_path / "rows.parquet",
        [{"n": 1, "late": None}],
        [],
        [{"n": 0.5, "late": "x", "more": [1]}],
    )
    assert rows == [{"n": 1.0, "late": None, "more": None}, {"n": 0.5, "late": "x", "more": [1]}]


def test_a_column_of_mixed_types_is_written_as_json_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = parquet(
        tmp_path / "rows.parquet",
        [{"x": 1, "e": {}, "big": 1}],
        [{"x": "a", "e": {}, "big": 2**80}],
    )
    assert [row["x"] for row in rows] == ["1", '"a"']
    assert [row["e"] for row in rows] == ["{}", "{}"], "Parquet has no struct without a field"
    assert [json.loads(row["big"]) for row in rows] == [1, 2**80]
    assert "big, e, x" in caplog.text


def test_a_mixed_type_output_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ColumnError, match="'prompt' have several types"):
        parquet(
            tmp_path / "rows.parquet",
            [{"prompt": "text"}],
            [{"prompt": [{"role": "user"}]}],
            as_they_are=frozenset({"prompt"}),
        )


def test_no_rows_give_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_parquet([lambda: []], path)
    assert pq.read_table(path).num_rows == 0
