"""Count words that the style guide replaces in the docstrings of each package, and identifiers
that do not name what they hold. A report, not a check.

``python tools/prose.py [ROOT]`` prints a Markdown table for the repository at ROOT (this one by
default). Docstrings are those of modules, classes, functions and fields; code in backquotes is not
counted. Figures are per 1,000 words, except for those of ``WORDS``, which are counts. The last
column is the share of bindings (assigned variables, parameters, loop variables) named with one of
``FILLERS``."""

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
FILLERS = frozenset(
    (
        "found",
        "own",
        "given",
        "made",
        "wanted",
        "kept",
        "one",
        "here",
        "what",
        "how",
        "told",
        "said",
    )
)
"""Names that say nothing about the value."""
_CODE = re.compile(r"``?[^`]*``?")


class Figures(NamedTuple):
    """Counts over the docstrings of one package."""

    package: str
    words: int
    rates: dict[str, float]
    """Per 1,000 words, for each name in ``PER_1000``."""
    counts: dict[str, int]
    """For each of ``WORDS``."""
    bindings: int
    fillers: int
    """Bindings named with one of ``FILLERS``."""


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


def bindings(tree: ast.AST) -> Iterator[str]:
    """Yield the name of each assigned variable and parameter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            yield node.arg


def measure(package: str, trees: list[ast.Module]) -> Figures:
    """Count over the modules of one package."""
    texts = [text for tree in trees for text in docstrings(tree)]
    names = [name for tree in trees for name in bindings(tree)]
    prose = " ".join(_CODE.sub("", text) for text in texts)
    words = len(re.findall(r"[A-Za-z][\w'-]*", prose))
    found = {name: len(pattern.findall(prose)) for name, pattern in PER_1000.items()}
    counts = {word: len(re.findall(rf"\b{word}\b", prose, flags=re.IGNORECASE)) for word in WORDS}
    rates = {name: 1000 * count / max(1, words) for name, count in found.items()}
    fillers = sum(name.strip("_") in FILLERS for name in names)
    return Figures(package, words, rates, counts, len(names), fillers)


def report(root: Path) -> list[Figures]:
    """Return the figures of every package below ``root``/burnish, and of all together."""
    trees: dict[str, list[ast.Module]] = {}
    for file in sorted((root / "burnish").rglob("*.py")):
        parts = file.relative_to(root / "burnish").parts
        package = parts[0] if len(parts) > 1 else "burnish"
        trees.setdefault(package, []).append(ast.parse(file.read_text(encoding="utf-8")))
    rows = [measure(name, package) for name, package in sorted(trees.items())]
    return [*rows, measure("all", [tree for package in trees.values() for tree in package])]


def table(rows: list[Figures]) -> str:
    """Return the figures as a Markdown table."""
    lines = [
        "| package | words | " + " | ".join([*PER_1000, *WORDS]) + " | fillers |",
        "| --- |" + " ---: |" * (2 + len(PER_1000) + len(WORDS)),
    ]
    for row in rows:
        rates = [f"{row.rates[name]:.1f}" for name in PER_1000]
        counts = [str(row.counts[word]) for word in WORDS]
        share = f"{100 * row.fillers / max(1, row.bindings):.1f}%"
        lines.append(f"| {row.package} | {row.words:,} | {' | '.join([*rates, *counts, share])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    here = Path(__file__).resolve().parent.parent
    print(table(report(Path(sys.argv[1]) if len(sys.argv) > 1 else here)))
