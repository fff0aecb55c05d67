"""Each public format is read as documented, from JSON lines and from Parquet, or refused with a way
out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from public_formats import FORMATS, Format
from transformers import PreTrainedTokenizerFast

from burnish.data.encoders import encoder_of
from burnish.data.forms import open_rows
from burnish.data.messages import as_messages, without_nulls
from burnish.data.sources import DataError
from burnish.data.stream import RowRef
from burnish.data.write import json_line

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


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: f"{form.name} {form.kind.__name__}")
def test_a_public_format_is_read_as_documented(
    form: Format, suffix: str, tmp_path: Path, chars: PreTrainedTokenizerFast
) -> None:
    chars.chat_template = CHAT_WITH_TOOLS
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_bytes(json_line(form.row))
    else:
        pq.write_table(pa.Table.from_pylist([form.row]), path)
    if isinstance(form.expected, str):
        with pytest.raises(DataError, match=form.expected):
            read(form, path, chars)
        return
    values = read(form, path, chars)
    for key, expected in form.expected.items():
        assert canonical(values[key]) == canonical(expected), key
