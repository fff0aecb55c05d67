"""Errors of other libraries, shortened: the lines that matter are kept."""

from pathlib import Path

import pytest

from burnish.config.model import ModelConfig
from burnish.messages import library_text
from burnish.models.load import ModelError, load_tokenizer


def test_a_short_text_is_unchanged_and_a_long_one_keeps_both_ends():
    assert library_text(OSError("one\n\n  two\nthree")) == "one two three"
    assert library_text(KeyError()) == "KeyError" and library_text("") == ""
    lines = [f"line {n}" for n in range(100)]
    said = library_text("\n".join(lines))
    assert said.startswith("line 0 line 1 ") and said.endswith("line 98 line 99")
    assert "[... 88 lines ...]" in said
    assert library_text("a" * 300 + "b" * 300) == f"{'a' * 240}[... 120 characters ...]{'b' * 240}"


def test_tokenizer_error_keeps_the_lines_that_list_alternatives(tmp_path: Path):
    """transformers names the ways in lines after the first, which ends with a colon."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    with pytest.raises(ModelError) as caught:
        load_tokenizer(ModelConfig(path=str(tmp_path)))
    assert "instantiate the backend tokenizer from one of: (1) a" in str(caught.value)
    assert "sentencepiece" in str(caught.value)
