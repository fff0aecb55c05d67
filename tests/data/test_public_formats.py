"""Each public format is read as documented, from JSON lines and from Parquet, or refused with a way
out."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from public_formats import FORMATS, Format
from transformers import PreTrainedTokenizerFast

from burnish.data.encoded import encoder_of
from burnish.data.forms import open_rows
from burnish.data.messages import as_messages, without_nulls
from burnish.data.sources import DataError
from burnish.data.steps.config import StepsDataConfig
from burnish.data.stream import RowRef
from burnish.data_files.writing import json_line

CHAT_WITH_TOOLS = (
    "{{ tools or '' }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{{ m['tool_calls'] or '' }}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def read(form: Format, path: Path, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return the values of the only row of a file, which is also encoded."""
    config = form.kind.model_validate({"sources": [str(path)], **form.options})
    if problems := config.broken_rules():
        raise DataError("\n".join(problems))
    sources = open_rows(config)
    assert len(sources[0]) == 1
    row = sources[0][0]
    try:
        encoder_of(config, tokenizer, sources).encode(row, RowRef("rows", 0, 0))
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from error
    return dict(row.values)


def canonical(value: Any) -> Any:
    """Messages in the form that is encoded, without the nulls of a columnar file."""
    value = without_nulls(value)
    is_chat = isinstance(value, list) and value and isinstance(value[0], dict)
    return as_messages(value) if is_chat and "role" in value[0] else value


def cell(value: Any) -> str:
    """The text of a CSV file, with JSON for lists and objects, and an empty cell for null."""
    if isinstance(value, str | None):
        return value or ""
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


def write(row: dict[str, Any], path: Path) -> Path:
    """Write a file with one row. Return the path of the source: for Parquet, a folder in which the
    file is the training split next to a test split."""
    if path.suffix == ".jsonl":
        path.write_bytes(json_line(row))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([list(row), [cell(value) for value in row.values()]])
    else:
        folder = path.with_suffix("") / "data"
        folder.mkdir(parents=True)
        for split in ("test", "train"):
            rows = pa.Table.from_pylist([row] * (1 if split == "train" else 2))
            pq.write_table(rows, folder / f"{split}-00000-of-00001.parquet")
        return folder.parent
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"{form.name} {form.kind.__name__}")
def test_a_public_format_is_read_as_documented(
    form: Format, suffix: str, tmp_path: Path, chars: PreTrainedTokenizerFast
) -> None:
    chars.chat_template = CHAT_WITH_TOOLS
    path = write(form.row, tmp_path / f"rows.{suffix}")
    says = form.expected if isinstance(form.expected, str) else None
    if suffix == "csv" and form.kind is StepsDataConfig:
        says = "are a str, not a list"
    if says is not None:
        with pytest.raises(DataError, match=says):
            read(form, path, chars)
        return
    values = read(form, path, chars)
    assert not isinstance(form.expected, str)
    for key, expected in form.expected.items():
        value = values[key]
        if suffix == "csv" and isinstance(value, str) and not isinstance(expected, str):
            value = json.loads(value.lower() if isinstance(expected, bool) else value)
        assert canonical(value) == canonical(expected), key
