"""tools/prose.py counts words of docstrings, and only those."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("prose", ROOT / "tools" / "prose.py")
assert _spec is not None and _spec.loader is not None
prose = importlib.util.module_from_spec(_spec)
sys.modules["prose"] = prose
_spec.loader.exec_module(prose)

MODULE = '''"""Say what it is for, where it stands."""

NAME = "where"  # where

class Box:
    """Hold things anew. What for? ``where x`` is code."""

    size: int = 3
    """Whole number if set."""

    def take(self):
        """Take one when asked."""
        "where: not a docstring"
        return "whole"
'''


def test_it_counts_docstrings_and_not_code_comments_or_questions(tmp_path):
    """8 + 7 + 4 + 4 words: one where, one what-clause ("What for?" asks), one if, one when."""
    (tmp_path / "burnish" / "part").mkdir(parents=True)
    (tmp_path / "burnish" / "part" / "module.py").write_text(MODULE)
    (tmp_path / "burnish" / "top.py").write_text('"""Told."""\n')
    top, part, everything = prose.report(tmp_path)
    assert (top.package, top.words, top.counts["told"]) == ("burnish", 1, 1)
    assert (part.package, part.words, everything.words) == ("part", 23, 24)
    per = pytest.approx(1000 / 23)
    assert part.rates == {"where": per, "what-clauses": per, "if + when": 2 * per.expected}
    assert {word for word, count in part.counts.items() if count} == {"whole", "anew", "stands"}
    lines = prose.table([top, part]).splitlines()
    assert len(lines) == 4 and lines[2].startswith("| burnish | 1 | 0.0 | 0.0 | 0.0 |")
