"""docs/precision.md: the tests and figures that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "precision.md").read_text(encoding="utf-8")


def test_every_statement_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| ([PB]\d+) \|(.*)\|$", PAGE, flags=re.MULTILINE)
    expected = [f"P{i}" for i in range(1, 16)] + [f"B{i}" for i in range(1, 8)]
    assert [name for name, _ in rows] == expected
    for name, row in rows:
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", row)
        assert named, f"{name} names no test"
        for file, test in named:
            text = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert f"def {test}(" in text, f"{name}: {file} has no {test}"


def test_every_figure_exists() -> None:
    figures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", PAGE)
    assert figures
    assert all((ROOT / "docs" / figure).is_file() for figure in figures)


def test_no_result_is_pending() -> None:
    assert "RESULTS_" not in PAGE
