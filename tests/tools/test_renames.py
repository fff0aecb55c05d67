"""The table of renames leads to names that exist."""

from __future__ import annotations

import ast
import json
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
RENAMES = json.loads((ROOT / "tools" / "renames.json").read_text(encoding="utf-8"))


def file_of(module: str) -> Path | None:
    """The file of a module, or None if there is none."""
    path = ROOT / module.replace(".", "/")
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


@cache
def names_in(path: Path) -> frozenset[str]:
    """Top-level names of a module, and the methods and fields of its classes."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        found |= _names(node)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for inner in node.body for name in _names(inner)}
    return frozenset(found)


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    return {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}


def exists(name: str) -> bool:
    """Whether ``name``, dotted with its module, is defined."""
    parts = name.split(".")
    for i in range(len(parts) - 1, 0, -1):
        path = file_of(".".join(parts[:i]))
        if path is not None:
            return ".".join(parts[i:]) in names_in(path)
    return False


def test_every_new_module_exists_and_no_old_one_does() -> None:
    """A value of null marks a module that was removed after its rename."""
    modules = {old: new for old, new in RENAMES["modules"].items() if new is not None}
    assert [module for module in modules.values() if file_of(module) is None] == []
    packages = {old for old, new in modules.items() if new.startswith(f"{old}.")}
    old = RENAMES["modules"].keys() - set(modules.values()) - packages
    assert [module for module in sorted(old) if file_of(module) is not None] == []


def test_every_new_name_exists() -> None:
    """A value of null marks a name that was removed after its rename."""
    assert [n for n in RENAMES["names"].values() if n is not None and not exists(n)] == []
