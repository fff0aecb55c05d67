"""The messages of refused recipes are those of the table, which has a case for each rule, and the
ways out that they name are accepted. Models that cannot be used are refused as well."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path

import pytest
import refusals
from refusals import BASES
from transformers import AutoConfig, PretrainedConfig

import burnish
from burnish.config import load_config
from burnish.config.model import ModelConfig
from burnish.models.load import ModelError, load_tokenizer
from burnish.models.teacher import shared_vocabulary
from burnish.models.tensor_parallel import check_head_counts
from burnish.train.torch.sequence_parallel import check_sequence_parallel

PACKAGE = Path(burnish.__file__).parent
CONFIGS = [*PACKAGE.glob("config/*.py"), *PACKAGE.glob("*/**/config.py")]
TEXT = (ast.Constant, ast.JoinedStr)

WITHOUT_A_CASE = {
    "contradicts": "needs a launcher (test_launch.py)",
    r"argument\ of\ vLLM\ that\ is\ not\ known": "needs the package vllm",
    "so\\ evaluation\\ would\\ use": "recipes inherit the key; configs made in Python do not",
}
"""Part of a pattern -> the reason."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder of the cases."""
    monkeypatch.chdir(tmp_path)
    refusals.write_files(tmp_path)


def patterns() -> Iterator[str]:
    """A pattern for each text that a generator of messages yields in the configs."""
    for file in CONFIGS:
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef) and function.returns is not None:
                yields = (node for node in ast.walk(function) if isinstance(node, ast.Yield))
                texts = (node.value for node in yields if isinstance(node.value, TEXT))
                if ast.unparse(function.returns) == "Iterator[str]":
                    yield from map(pattern_of, texts)


def pattern_of(text: ast.expr) -> str:
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    return "".join(
        re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".*" for part in parts
    )


@pytest.mark.usefixtures("folder")
def test_every_case_has_its_messages() -> None:
    """After a change that is meant: ``python tests/support/refusals.py``."""
    old = refusals.TABLE.read_text(encoding="utf-8").splitlines()
    now = refusals.with_messages().splitlines()
    assert not list(unified_diff(old, now, "table", "now", n=1, lineterm=""))


def test_every_rule_has_a_case() -> None:
    text = refusals.TABLE.read_text(encoding="utf-8")
    left = [pattern for pattern in patterns() if not re.search(pattern, text)]
    unexpected = [rule for rule in left if not any(part in rule for part in WITHOUT_A_CASE)]
    assert not unexpected, "add a case to refusals.txt for each"


@pytest.mark.usefixtures("folder")
def test_the_ways_out_that_a_refusal_names_are_accepted() -> None:
    for case in refusals.cases():
        for overrides in case.recipes_of_ways_out():
            load_config(BASES[case.base], overrides)


def test_every_case_has_a_message() -> None:
    silent = [case.overrides for case in refusals.cases() if not case.messages]
    assert not silent


def test_head_counts_that_are_not_replicated_name_the_sizes_that_work() -> None:
    llama: PretrainedConfig = AutoConfig.for_model(
        "llama", hidden_size=64, num_attention_heads=8, num_key_value_heads=2
    )
    with pytest.raises(ModelError, match="use one of 1, 2, with"):
        check_head_counts(llama, 4)
    check_head_counts(llama, 2)
    with pytest.raises(ModelError, match="use one of 1, 2, 4, 8"):
        check_sequence_parallel(llama, 3)
    check_sequence_parallel(llama, 4)


def test_a_teacher_of_another_tokenizer_is_refused_with_training_on_its_samples() -> None:
    student = ModelConfig.model_validate({"scratch": {"alphabet": "abc"}})
    teacher = ModelConfig.model_validate({"scratch": {"alphabet": "bca"}})
    with pytest.raises(ModelError, match="burnish generate"):
        shared_vocabulary(student, teacher, load_tokenizer(student))
    assert shared_vocabulary(student, student, load_tokenizer(student)) > 3
