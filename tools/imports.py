"""Follow imports between the project's own modules: cycles, and uses of another module's private
names. ``tools/house.py`` reports both."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOTS = ("burnish", "benchmarks", "tools")


def own_modules(root: Path) -> dict[str, ast.Module]:
    """Return the syntax tree of every module below ``root``, by its dotted name. Scripts in
    benchmarks/ and tools/ import each other without the folder's name."""
    modules = {}
    for folder in ROOTS:
        base = root if folder == "burnish" else root / folder
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules[name] = parse(path.read_text(encoding="utf-8"))
    return modules


@lru_cache(maxsize=1)
def parse(text: str) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(text)


@lru_cache(maxsize=1)
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Return all nodes of a tree."""
    return tuple(ast.walk(tree))


def find_cycle(modules: Mapping[str, ast.Module]) -> list[str]:
    """Return the names along one import cycle, the first repeated at the end, or an empty list.
    Imports inside functions count; imports only for type checkers do not."""
    graph = {name: set(_imported(tree, modules)) - {name} for name, tree in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def _imported(tree: ast.Module, modules: Mapping[str, ast.Module]) -> Iterator[str]:
    for node in _runtime_nodes(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            while name and name not in modules:
                name = name.rpartition(".")[0]
            if name:
                yield name


def _runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes except those below ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from _runtime_nodes(node)


def private_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, message) for every private name of another own module that is imported or read
    through the module."""
    aliases: dict[str, str] = {}
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom) and _is_own(node.module):
            aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            private = [a.name for a in node.names if _is_private(a.name)]
            yield from ((node.lineno, f"{name} is private to {node.module}") for name in private)
        elif isinstance(node, ast.Import):
            aliases |= {a.asname: a.name for a in node.names if a.asname and _is_own(a.name)}
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            source = aliases.get(node.value.id, "")
            if source and not _is_class(source) and _is_private(node.attr):
                yield node.lineno, f"{node.attr} is private to {source}"


def _is_own(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] == "burnish"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_class(name: str) -> bool:
    """Return whether a name is a class, whose private attributes a type checker handles."""
    return name.rpartition(".")[2][:1].isupper()
