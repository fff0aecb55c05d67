"""``run.log`` and the report have every warning of a run, and the terminal has nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish.config import dump_yaml
from burnish.driver.base import attention_lines
from burnish.report.tables import read_warnings

SHARED = "held-out rows have the prompt of a training row"


@pytest.fixture
def repeated_prompts(
    supervised: Callable[..., Any], write_rows: Callable[..., str]
) -> Callable[..., Any]:
    """A recipe of ``sft`` whose held-out rows have the prompts of training rows: the check of the
    data warns about them before the run opens its log."""
    rows = write_rows("rows", [{"prompt": "1+1=", "response": str(i % 10)} for i in range(16)])
    return lambda *overrides: supervised(
        "sft",
        "max_steps=1",
        "max_epochs=null",
        f"data.sources=[{rows}]",
        "data.held_out=4",
        f"eval.data={{sources: [{rows}], held_out: 4, part: held_out, max_len: 64}}",
        "data.max_len=64",
        *overrides,
    )


def test_warnings_of_the_checks_before_a_run_are_in_its_log_and_report(
    repeated_prompts: Callable[..., Any],
) -> None:
    run_dir = burnish.run(repeated_prompts()).run_dir
    assert [w.count for w in read_warnings(run_dir) if SHARED in w.text] == [1]
    assert "rows checked" in (run_dir / "run.log").read_text()
    assert SHARED in (run_dir / "report.html").read_text()


@pytest.mark.slow
def test_a_run_prints_its_warnings_alone_to_stderr(
    repeated_prompts: Callable[..., Any], tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_yaml(repeated_prompts()))
    command = [sys.executable, "-m", "burnish", "sft", str(recipe)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    lines = result.stderr.splitlines()
    assert all(line.startswith("WARNING: ") for line in lines), result.stderr
    assert sum(SHARED in line for line in lines) == 1


def test_a_run_prints_and_logs_the_attention_of_its_models(
    repeated_prompts: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = burnish.run(repeated_prompts()).run_dir
    printed = [line for line in capsys.readouterr().out.splitlines() if "attention (" in line]
    assert len(printed) == 1
    assert printed[0].startswith("attention (policy): torch's scaled-dot-product attention")
    assert printed[0] in (run_dir / "run.log").read_text()


def test_models_with_equal_attention_share_a_line() -> None:
    lines = attention_lines({"policy": "flash", "critic": "sdpa", "reference": "flash"})
    assert lines == ["attention (policy, reference): flash", "attention (critic): sdpa"]


def test_repeated_warnings_are_counted_and_continued_lines_belong_to_them(tmp_path: Path) -> None:
    stamp = "2026-01-01 10:00:00,123"
    (tmp_path / "run.log").write_text(
        f"{stamp} INFO    step 1\n{stamp} WARNING one\n  more\n{stamp} WARNING two\n"
        f"{stamp} INFO    WARNING no\nmore\n{stamp} WARNING one\n  more\n{stamp} ERROR   three"
    )
    counted = [(warning.text, warning.count) for warning in read_warnings(tmp_path)]
    assert counted == [("one\n  more", 2), ("two", 1), ("three", 1)]
    assert read_warnings(tmp_path / "none") == []
