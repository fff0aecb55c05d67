"""Load a user's function or class, given as ``file.py:name`` or ``package.module:name``.

Used for environments and for function rewards. Modules of this package are imported normally.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from burnish.config.explain import nearest
from burnish.errors import BurnishError


class LoadError(BurnishError, ValueError):
    """A ``file.py:name`` or ``module:name`` cannot be loaded. The message contains the nearest
    valid name."""


def load_object(spec: str) -> Any:
    """Load the object named by ``spec``.

    ``path/to/file.py:name``: the file (relative to the working directory) is executed as a separate
    module, once per modification time. ``package.module:name``: a regular import.

    Raises LoadError if the form is wrong, if the file, module or name does not exist (with the
    nearest one that does), or if the module raises (the original error is the cause).
    """
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise LoadError(f"{spec!r} is not of the form path/to/file.py:name or package.module:name")
    module = _from_file(Path(where), spec) if where.endswith(".py") else _from_name(where, spec)
    members = vars(module)
    if name not in members:
        public = [member for member in members if not member.startswith("_")]
        raise LoadError(f"{spec!r}: {where} has no {name!r}{nearest(name, public)}")
    return members[name]


def check_file(spec: str) -> None:
    """Raise LoadError if ``spec`` names a file that does not exist or is not Python, or a name that
    the file does not define. Executes nothing; modules that are not files are not checked."""
    if spec.startswith("openrlhf:"):
        where, name = spec.removeprefix("openrlhf:"), ""
    else:
        where, _, name = spec.rpartition(":")
    if not where.endswith(".py"):
        return
    path = Path(where)
    _check_is_file(path, spec)
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        raise LoadError(f"{spec!r}: {path} is not valid Python: {error}") from error
    names = list(_module_names(tree.body))
    if name and name not in names and not {"*", "__getattr__", "globals"} & set(names):
        public = [name for name in names if not name.startswith("_")]
        raise LoadError(f"{spec!r}: {where} has no {name!r}{nearest(name, public)}")


def _module_names(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the names that the statements of a module bind: ``*`` for a star import, ``globals`` if
    they may bind names that are not written in them."""
    for statement in body:
        is_definition = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for node in [statement] if is_definition else ast.walk(statement):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    yield node.name
                case ast.Import() | ast.ImportFrom():
                    yield from ((item.asname or item.name).split(".")[0] for item in node.names)
                case ast.Name(id="globals" | "vars" | "exec"):
                    yield "globals"
                case ast.Name(ctx=ast.Store()):
                    yield node.id


def _check_is_file(path: Path, spec: str) -> None:
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise LoadError(
            f"{spec!r}: there is no file {path.absolute()}{nearest(path.name, siblings)}; "
            "relative paths start at the working directory"
        )


def _from_file(path: Path, spec: str) -> ModuleType:
    _check_is_file(path, spec)
    state = abs(hash((path.resolve(), path.stat().st_mtime_ns)))
    module_name = f"burnish_file_{path.stem}_{state:x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    if module_spec is None or module_spec.loader is None:
        raise LoadError(f"{spec!r}: Python cannot load {path} as a module")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # dataclasses look up their module while it is executed
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise LoadError(f"{spec!r}: {path} raised {_short(error)} while it was loaded") from error
    return module


def _from_name(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing != name and not name.startswith(missing + "."):
            raise LoadError(
                f"{spec!r}: module {name} imports {missing!r}, which is not installed"
            ) from error
        raise LoadError(
            f"{spec!r}: there is no module {missing!r}{nearest(missing, _siblings(missing))}; "
            "for a file that is not installed, give its path: path/to/file.py:name"
        ) from error
    except Exception as error:
        raise LoadError(f"{spec!r}: module {name} raised {_short(error)} when imported") from error


def _siblings(missing: str) -> list[str]:
    """Return the full names of the modules in the package of ``missing``, or on ``sys.path``."""
    package, _, _ = missing.rpartition(".")
    if not package:
        return [module.name for module in pkgutil.iter_modules()]
    parent = sys.modules.get(package)
    paths = vars(parent).get("__path__") if parent is not None else None
    return [f"{package}.{module.name}" for module in pkgutil.iter_modules(paths)] if paths else []


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
