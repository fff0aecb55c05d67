"""The tree in README.md: one line per file, taken from the first sentence of its docstring.

``python tools/tree.py`` checks README.md (exit 1 where it is out of date); ``--write`` writes it.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

BEGIN, END = "<!-- tree: begin (made by tools/tree.py) -->", "<!-- tree: end -->"
FOLDERS = ("burnish", "recipes", "benchmarks", "tools", "docs")
_COMMENT = re.compile(r"^\s*(?:#+|//|/\*+|<!--|\{#)\s*(.+?)\s*(?:\*/|-->|#\})?\s*$")
_SENTENCE_END = re.compile(r"(?<=\.)(?<!\bDr\.)\s")
_WIDTH = 92


def tree(root: Path) -> str:
    """The tree of the repository at ``root`` as text: folders first, then files, by name."""
    lines: list[str] = []
    for name in FOLDERS:
        if (root / name).is_dir():
            lines += _folder(root / name, depth=0)
    return "\n".join(lines)


def updated(readme: str, text: str) -> str:
    """``readme`` with ``text`` between the markers. Raises ValueError where a marker is missing."""
    if BEGIN not in readme or END not in readme:
        raise ValueError(f"README.md has no {BEGIN!r} ... {END!r}")
    before, after = readme.split(BEGIN)[0], readme.split(END)[1]
    return f"{before}{BEGIN}\n```\n{text}\n```\n{END}{after}"


def first_sentence(path: Path) -> str:
    """What a file says about itself: the start of its docstring, heading or first comment."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        said = ast.get_docstring(ast.parse(text)) or ""
    else:
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#!")]
        said = ""
        for match in map(_COMMENT.match, lines):
            if match is None or (path.suffix == ".md" and said):
                break
            said += f" {match[1]}"
    words = " ".join(said.split("\n\n")[0].replace("`", "").split())
    sentence = _SENTENCE_END.split(words)[0].rstrip(".:;")
    return (
        sentence if len(sentence) <= _WIDTH else sentence[: _WIDTH - 3].rsplit(" ", 1)[0] + " ..."
    )


def _folder(folder: Path, depth: int) -> list[str]:
    init = folder / "__init__.py"
    lines = [_line(f"{folder.name}/", first_sentence(init) if init.is_file() else "", depth)]
    entries = [p for p in sorted(folder.iterdir()) if not p.name.startswith((".", "__pycache__"))]
    for entry in (p for p in entries if p.is_dir() and not p.name.endswith(".egg-info")):
        lines += _folder(entry, depth + 1)
    for entry in (p for p in entries if p.is_file() and p.name != "__init__.py"):
        lines.append(_line(entry.name, first_sentence(entry), depth + 1))
    return lines


def _line(name: str, text: str, depth: int) -> str:
    return f"{'  ' * depth + name:<28} {text}".rstrip()


def main(arguments: list[str]) -> int:
    """Check or write; returns the exit code."""
    root = Path(__file__).resolve().parent.parent
    readme = root / "README.md"
    have = readme.read_text(encoding="utf-8")
    want = updated(have, tree(root))
    if "--write" in arguments:
        readme.write_text(want, encoding="utf-8")
    elif want != have:
        print("the tree in README.md is not up to date: run 'make docs'")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
