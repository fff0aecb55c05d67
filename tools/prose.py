"""Count words in the docstrings of each package that the style guide replaces. A report, not a
check.

``python tools/prose.py [ROOT]`` prints a Markdown table for the repository at ROOT (this one by
default). Docstrings are those of modules, classes, functions and fields; code in backquotes is not
counted. Figures are per 1,000 words, except for those of ``WORDS``, which are counts."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PER_1000 = {
    "where": re.compile(r"\bwhere\b", re.IGNORECASE),
    "what-clauses": re.compile(r"\bwhat(?:ever)?\b(?![^.;:]*\?)", re.IGNORECASE),
    "if + when": re.compile(r"\b(?:if|when)\b", re.IGNORECASE),
}
"""Column -> pattern. A what-clause is a "what" that is not part of a question."""
WORDS = (
    "whole", "cut", "mended", "anew", "beside", "told", "goes on", "all the same", "in line with",
    "stands", "atomic",
)  # fmt: skip
_CODE = re.compile(r"``?[^`]*``?")


class Figures(NamedTuple):
    """Counts over the docstrings of one package."""

    package: str
    words: int
    rates: dict[str, float]
    """Per 1,000 words, for each name in ``PER_1000``."""
    counts: dict[str, int]
    """For each of ``WORDS``."""


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of a module and of all in it, those below fields included."""
    for node in ast.walk(tree):
        body = node.body if isinstance(node, (ast.Module, ast.ClassDef)) else []
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[:1]
        for statement in body:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value


def measure(package: str, texts: list[str]) -> Figures:
    """Count over the docstrings of one package."""
    prose = " ".join(_CODE.sub("", text) for text in texts)
    words = len(re.findall(r"[A-Za-z][\w'-]*", prose))
    found = {name: len(pattern.findall(prose)) for name, pattern in PER_1000.items()}
    counts = {word: len(re.findall(rf"\b{word}\b", prose, flags=re.IGNORECASE)) for word in WORDS}
    rates = {name: 1000 * count / max(1, words) for name, count in found.items()}
    return Figures(package, words, rates, counts)


def report(root: Path) -> list[Figures]:
    """Return the figures of every package below ``root``/burnish, and of all together."""
    texts: dict[str, list[str]] = {}
    for file in sorted((root / "burnish").rglob("*.py")):
        parts = file.relative_to(root / "burnish").parts
        tree = ast.parse(file.read_text(encoding="utf-8"))
        texts.setdefault(parts[0] if len(parts) > 1 else "burnish", []).extend(docstrings(tree))
    rows = [measure(name, found) for name, found in sorted(texts.items())]
    return [*rows, measure("all", [text for found in texts.values() for text in found])]


def table(rows: list[Figures]) -> str:
    """Return the figures as a Markdown table."""
    lines = [
        "| package | words | " + " | ".join([*PER_1000, *WORDS]) + " |",
        "| --- |" + " ---: |" * (1 + len(PER_1000) + len(WORDS)),
    ]
    for row in rows:
        rates = [f"{row.rates[name]:.1f}" for name in PER_1000]
        counts = [str(row.counts[word]) for word in WORDS]
        lines.append(f"| {row.package} | {row.words:,} | {' | '.join([*rates, *counts])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    here = Path(__file__).resolve().parent.parent
    print(table(report(Path(sys.argv[1]) if len(sys.argv) > 1 else here)))
