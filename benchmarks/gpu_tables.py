"""Turn results of benchmarks/gpu_session.py into the tables of docs/benchmarks.md.

    python benchmarks/gpu_tables.py [RESULTS.json ...]    # print them
    python benchmarks/gpu_tables.py --write [--check]     # into docs/benchmarks.md

Without files it reads docs/gpu/*.json: a results.json of a session that is kept there is part of
the page. Each row, or column of the first table, has the name of its card.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common import markdown_table
from gpu_report import cell, result_cell
from gpu_session import SHORT

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
RECORDS = ROOT / "docs" / "gpu"
BEGIN, END = "<!-- gpu_tables -->", "<!-- end of gpu_tables -->"
SHOWN = {
    "compare": "Settings of 0.6B",
    "larger": "Larger models",
    "mixture": "Mixture of experts",
    "copies": "Copies",
    "rollout": "Local rollout",
    "trl": "TRL",
    "kernels": "Kernels of log-probs, one chunk in bf16",
}
"""Step -> its table on the page."""
HIDDEN = ("loss", "norm", "slowest_s", "first_s")
"""Columns that the page leaves out."""


def card_of(tree: dict[str, Any]) -> str:
    """Return the name of the card of a session."""
    about = tree.get("about") or {}
    card = str(about.get("Device") or "unknown card")
    return f"{card} ({about['Date']})" if "Date" in about else card


def page(trees: Sequence[dict[str, Any]]) -> str:
    """Return the tables of sessions with ``--preset short``."""
    cards = [card_of(tree) for tree in trees]
    rows = []
    for step in SHORT:
        cells = [result_cell(tree["steps"].get(step.name, {})) for tree in trees]
        rows.append((f"`{step.name}`", step.what, f"{step.limit_s:.0f}", *(cells or ["not run"])))
    heads = ("step", "what is measured", "limit, s", *(cards or ["result"]))
    lines = list(markdown_table(heads, rows))
    for step_name, title in SHOWN.items():
        lines += ["", f"{title} (`{step_name}`):", "", *_table(trees, step_name, title)]
    return "\n".join(lines) + "\n"


def _table(trees: Sequence[dict[str, Any]], step: str, title: str) -> Iterator[str]:
    """Yield one table with a row for each row of each session."""
    rows: list[dict[str, Any]] = []
    for tree in trees:
        tables = ((tree["steps"].get(step) or {}).get("found") or {}).get("tables", {})
        own = [row for name, table in tables.items() if name.startswith(title) for row in table]
        rows += [{"card": card_of(tree)} | row for row in own]
    heads = [h for h in dict.fromkeys(name for row in rows for name in row) if h not in HIDDEN]
    if not rows:
        yield "not run"
        return
    texts = ([cell(row.get(head)) for head in heads] for row in rows)
    yield from markdown_table([head.replace("_", " ") for head in heads], texts)


def read(path: Path) -> dict[str, Any]:
    """Return the results of a session. Raises SystemExit if the file is none, or of tiny shapes."""
    try:
        tree = dict(json.loads(path.read_text(encoding="utf-8")))
        tiny, _ = tree["tiny"], tree["steps"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path} has no results of gpu_session.py ({error!r})") from None
    if tiny:
        print(f"{path}: tiny shapes on a CPU, no results for the page", file=sys.stderr)
    return tree


def written(text: str, tables: str) -> str:
    """Return the page ``text`` with ``tables`` between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{PAGE} has no marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{tables}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("results", nargs="*", type=Path)
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the page differs")
    args = parser.parse_args(arguments)
    trees = [read(path) for path in args.results or sorted(RECORDS.glob("*.json"))]
    tables = page(trees)
    if not (args.write or args.check):
        print(tables, end="")
        return 0
    if args.write and any(tree["tiny"] for tree in trees):
        raise SystemExit("results of tiny shapes are not for the page")
    text = PAGE.read_text(encoding="utf-8")
    new = written(text, tables)
    if args.check and new != text:
        print("docs/benchmarks.md is out of date; run: python benchmarks/gpu_tables.py --write")
        return 1
    if args.write:
        PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
