"""Which tokens a student and its teacher share, and the teacher's output projection by itself."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.config.model import ModelConfig, ScratchConfig
from burnish.models import teacher as module
from burnish.models.load import ModelError, load_causal_lm, load_tokenizer
from burnish.models.teacher import load_head, shared_vocabulary, vocabulary_size

DIGITS = "0123456789+="  # and 6 special tokens: 18


def scratch(alphabet: str = DIGITS, **options: Any) -> ModelConfig:
    return ModelConfig(scratch=ScratchConfig(alphabet=alphabet, hidden_size=32, **options))


def saved(config: ModelConfig, folder: Path, *, rows: int | None = None) -> ModelConfig:
    """The model in a folder, its matrices padded to ``rows``."""
    model = load_causal_lm(config)
    if rows is not None:
        model.resize_token_embeddings(rows, mean_resizing=False)
    model.save_pretrained(folder)
    load_tokenizer(config).save_pretrained(folder)
    return ModelConfig(path=str(folder))


def shared(student: ModelConfig, teacher: ModelConfig) -> int:
    return shared_vocabulary(student, teacher, load_tokenizer(student))


def test_one_tokenizer_and_matrices_of_different_sizes_share_the_smaller(tmp_path: Path) -> None:
    small, large = scratch(), saved(scratch(), tmp_path / "a", rows=24)
    assert (vocabulary_size(small), vocabulary_size(large)) == (18, 24)
    assert shared(small, large) == shared(large, small) == shared(small, small) == 18
    larger = saved(scratch(), tmp_path / "b", rows=32)
    assert shared(large, larger) == 24, "padding is compared where both have it"


def test_extra_tokens_at_the_end_of_one_vocabulary_are_excluded_and_logged(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """20 tokens against 18, in matrices of 24: the 18 that both have."""
    student = saved(scratch(DIGITS + "ab"), tmp_path / "a", rows=24)
    teacher = saved(scratch(), tmp_path / "b", rows=24)
    with caplog.at_level(logging.WARNING, logger="burnish"):
        assert shared(student, teacher) == 18
    assert "token 18 ('a') is in the student's tokenizer and not in the teacher's" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="burnish"):
        assert shared(teacher, student) == 18
    assert "is in the teacher's tokenizer" in caplog.text


def test_another_vocabulary_is_refused_with_both_sizes_and_the_first_difference() -> None:
    with pytest.raises(ModelError) as error:
        shared(scratch(), scratch("9876543210+=?"))
    said = str(error.value)
    assert "(19 tokens, 19 logits)" in said and "(18 tokens, 18 logits)" in said
    assert (
        "token 6 is '9' in the teacher and '0' in the student" in said
        and "the student's family" in said
    )


def test_a_model_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the size of its vocabulary"):
        vocabulary_size(ModelConfig(path=str(tmp_path / "nothing")))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("place", ["scratch", "folder"])
def test_the_head_is_the_models_own_and_read_without_the_body(
    tied: bool, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = scratch(tie_word_embeddings=tied)
    whole = load_causal_lm(config).get_output_embeddings().weight
    if place == "folder":
        config = saved(config, tmp_path)
        monkeypatch.delattr(module, "load_causal_lm")  # it is not needed
    head = load_head(config, rows=11, dtype="bf16", device=torch.device("cpu"), chunk_tokens=7)
    assert head.bias is None and head.chunk_tokens == 7 and not head.weight.requires_grad
    assert torch.equal(head.weight, whole[:11].to(torch.bfloat16))
