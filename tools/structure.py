"""Measure the structure of a checkout, as the table in docs/architecture.md reports it:

    python tools/structure.py [CHECKOUT]        # Markdown; the default is this checkout
    python tools/structure.py --key train_batch_size [CHECKOUT]   # the files that one key passes

Reads source text only; nothing of the checkout is imported, so it also measures old commits.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from imports import find_cycle, own_modules, private_names
from prose import FILLERS, bindings

KEYS = (
    "tensor_parallel_size",
    "micro_train_batch_size",
    "prompt_max_len",
    "n_samples_per_prompt",
    "sharding",
    "init_kl_coef",
)
"""Keys that different layers read."""
KINDS = ("VllmServers", "Muon")
"""Config classes of two kinds: a rollout engine and an optimizer."""


def is_config(module: str) -> bool:
    """Return whether a module has classes of recipes."""
    return module.startswith("burnish.config") or module.endswith(".config")


def config_classes(modules: Mapping[str, ast.Module]) -> set[str]:
    """Return the names of all classes of recipes: those of burnish.config, and of the folders of
    kinds."""
    return {
        node.name
        for name, tree in modules.items()
        if is_config(name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }


def isinstance_checks(modules: Mapping[str, ast.Module], classes: set[str]) -> int:
    """Count ``isinstance`` calls outside configs on a class of recipes."""
    return sum(
        any(isinstance(n, ast.Name) and n.id in classes for n in ast.walk(call.args[1]))
        for name, tree in modules.items()
        if name.startswith("burnish") and not is_config(name)
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


def private_functions_used_once(modules: Mapping[str, ast.Module]) -> int:
    """Count private functions of burnish that their module names once, after the definition."""
    count = 0
    for name, tree in modules.items():
        if name.startswith("burnish"):
            uses = Counter(_identifiers(tree))
            count += sum(uses[function.name] == 1 for function in _functions(tree, private=True))
    return count


def code_lines_per_function(root: Path) -> float:
    """Return the mean number of lines of functions of burnish, without docstrings, comments and
    blank lines."""
    count = num_functions = 0
    for path in sorted((root / "burnish").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        code = [
            bool(line.strip()) and not line.strip().startswith("#") for line in text.split("\n")
        ]
        for function in _functions(ast.parse(text)):
            first = function.body[0]
            lines = sum(code[function.lineno - 1 : function.end_lineno])
            if ast.get_docstring(function) is not None:
                lines -= sum(code[first.lineno - 1 : first.end_lineno])
            count, num_functions = count + lines, num_functions + 1
    return count / max(1, num_functions)


def _functions(tree: ast.Module, *, private: bool = False) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        if not private or (node.name.startswith("_") and not node.name.endswith("__")):
            yield node


def _module_of(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts)


def lines_per_config_field(root: Path, modules: Mapping[str, ast.Module]) -> float:
    """Return the lines of the modules of configs per annotated field of their classes."""
    fields = sum(
        isinstance(statement, ast.AnnAssign)
        for name, tree in modules.items()
        if is_config(name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
    )
    files = [path for path in (root / "burnish").rglob("*.py") if is_config(_module_of(path, root))]
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in files)
    return lines / max(1, fields)


def hidden_getattrs(modules: Mapping[str, ast.Module]) -> int:
    """Count ``vars(x)[name]`` in burnish."""
    return sum(
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "vars"
        for name, tree in modules.items()
        if name.startswith("burnish")
        for node in ast.walk(tree)
    )


def filler_bindings(modules: Mapping[str, ast.Module]) -> float:
    """Return the share of bindings in burnish with a name that does not name their value."""
    names = [n for m, t in modules.items() if m.startswith("burnish") for n in bindings(t)]
    return sum(name.strip("_") in FILLERS for name in names) / max(1, len(names))


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
        ("`vars(x)[name]`", hidden_getattrs(modules)),
        ("private functions used once", private_functions_used_once(modules)),
        *((f"modules that name `{kind}`", len(passed_by(kind, modules))) for kind in KINDS),
        ("modules in an import cycle", max(0, len(find_cycle(modules)) - 1)),
        ("imports of private names", sum(len(list(private_names(t))) for t in modules.values())),
        *((f"modules that name `{key}`", len(passed_by(key, modules))) for key in KEYS),
    ]
    lines = ["| measure | value |", "| --- | --- |"]
    lines += [f"| {name} | {value:,} |" for name, value in rows]
    lines += [
        f"| code lines per function | {code_lines_per_function(root):.1f} |",
        f"| lines of burnish.config per field | {lines_per_config_field(root, modules):.1f} |",
        f"| filler identifiers | {100 * filler_bindings(modules):.1f}% |",
    ]
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
