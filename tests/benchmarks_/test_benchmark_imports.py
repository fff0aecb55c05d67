"""What the benchmarks take from the package and from each other is there: they import late, so
only a run would notice otherwise."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FILES = sorted(BENCHMARKS.glob("*.py"))
SIBLINGS = {file.stem for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_imported_name_exists(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    missing = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        if node.module.split(".")[0] not in {"burnish", *SIBLINGS}:
            continue
        module = importlib.import_module(node.module)
        names = {*vars(module), *(info.name for info in pkgutil.iter_modules(_path(module)))}
        missing += [
            f"line {node.lineno}: {node.module}.{alias.name}"
            for alias in node.names
            if alias.name not in names
        ]
    assert not missing


def _path(module: ModuleType) -> list[str]:
    return list(getattr(module, "__path__", []))
