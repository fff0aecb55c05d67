"""Measure the structure of a checkout, as the table in docs/architecture.md reports it:

    python tools/structure.py [CHECKOUT]        # Markdown; the default is this checkout
    python tools/structure.py --key train_batch_size [CHECKOUT]   # the files that one key passes

Reads source text only; nothing of the checkout is imported, so it also measures old commits.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from imports import find_cycle, own_modules, private_names

KEYS = (
    "tensor_parallel_size",
    "micro_train_batch_size",
    "prompt_max_len",
    "n_samples_per_prompt",
    "sharding",
    "init_kl_coef",
)
"""Keys that different layers read."""


def config_classes(modules: Mapping[str, ast.Module]) -> set[str]:
    """Return the names of all classes that burnish.config defines."""
    return {
        node.name
        for name, tree in modules.items()
        if name.startswith("burnish.config")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }


def isinstance_checks(modules: Mapping[str, ast.Module], classes: set[str]) -> int:
    """Count ``isinstance`` calls outside burnish.config on a class of burnish.config."""
    return sum(
        any(isinstance(n, ast.Name) and n.id in classes for n in ast.walk(call.args[1]))
        for name, tree in modules.items()
        if name.startswith("burnish") and not name.startswith("burnish.config")
        for call in _calls(tree, "isinstance")
    )


def _calls(tree: ast.AST, function: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name), args=[_, _]) if name == function:
                yield node


def any_configs(modules: Mapping[str, ast.Module]) -> int:
    """Count parameters, variables and fields in burnish named ``config`` of type ``Any``."""
    source = "\n".join(ast.unparse(t) for n, t in modules.items() if n.startswith("burnish"))
    return len(re.findall(r"\bconfig: Any\b", source))


def passed_by(key: str, modules: Mapping[str, ast.Module]) -> list[str]:
    """Return the modules of burnish that define, read or pass ``key``, in order of name."""
    return sorted(
        name
        for name, tree in modules.items()
        if name.startswith("burnish") and key in set(_identifiers(tree))
    )


def _identifiers(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.arg(arg=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name


def sizes(root: Path) -> list[tuple[str, int, int]]:
    """Return (package, files, lines) of each package of burnish, and of its top level."""
    found: dict[str, tuple[int, int]] = {}
    for path in sorted((root / "burnish").rglob("*.py")):
        inside = path.relative_to(root / "burnish").parts
        package = inside[0] if len(inside) > 1 else "(top level)"
        files, lines = found.get(package, (0, 0))
        found[package] = (files + 1, lines + len(path.read_text(encoding="utf-8").splitlines()))
    return [(package, *counts) for package, counts in sorted(found.items())]


def report(root: Path) -> str:
    """Return the Markdown tables."""
    modules = own_modules(root)
    packages = sizes(root)
    rows = [
        ("files of burnish", sum(files for _, files, _ in packages)),
        ("lines of burnish", sum(lines for _, _, lines in packages)),
        ("`config: Any`", any_configs(modules)),
        ("`isinstance` on config classes", isinstance_checks(modules, config_classes(modules))),
        ("modules in an import cycle", max(0, len(find_cycle(modules)) - 1)),
        ("imports of private names", sum(len(list(private_names(t))) for t in modules.values())),
        *((f"modules that name `{key}`", len(passed_by(key, modules))) for key in KEYS),
    ]
    lines = ["| measure | value |", "| --- | --- |"]
    lines += [f"| {name} | {value:,} |" for name, value in rows]
    lines += ["", "| package | files | lines |", "| --- | --- | --- |"]
    lines += [f"| {package} | {files} | {count:,} |" for package, files, count in packages]
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--key", help="list the modules that name this key instead")
    words = parser.parse_args()
    if words.key is None:
        print(report(words.root))
    else:
        print("\n".join(passed_by(words.key, own_modules(words.root))))


if __name__ == "__main__":
    main()
