"""burnish does not pickle: no pickle or similar modules, no torch.save, no unrestricted
torch.load."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import burnish.checkpoint

BURNISH = Path(burnish.checkpoint.__file__).parents[1]
MODULES = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
FORBIDDEN = {
    "torch.save", "torch.serialization.save", "numpy.save", "numpy.savez", "pandas.read_pickle",
}  # fmt: skip
NEEDS = {
    "torch.load": ("weights_only", True),
    "torch.serialization.load": ("weights_only", True),
    "numpy.load": ("allow_pickle", False),
}


def imported_names(tree: ast.AST) -> dict[str, str]:
    """The module of each imported name: ``import torch as t`` gives ``{"t": "torch"}``."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def full_name(node: ast.AST, names: dict[str, str]) -> str:
    """``t.load`` as ``torch.load``; "" if it is not a dotted name of an import."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        base = full_name(node.value, names)
        return f"{base}.{node.attr}" if base else ""
    return ""


def is_safe_call(node: ast.AST, names: dict[str, str]) -> bool:
    if not isinstance(node, ast.Call) or full_name(node.func, names) not in NEEDS:
        return False
    keyword, wanted = NEEDS[full_name(node.func, names)]
    given = {k.arg: k.value for k in node.keywords}.get(keyword)
    return isinstance(given, ast.Constant) and given.value is wanted


def violations(source: str) -> list[str]:
    """Line and name of every use of pickle in ``source``."""
    tree = ast.parse(source)
    names = imported_names(tree)
    safe = {id(node.func) for node in ast.walk(tree) if is_safe_call(node, names)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            used = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            used = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            used = [full_name(node, names)]
            if used[0] in FORBIDDEN or (used[0] in NEEDS and id(node) not in safe):
                found.append(f"line {node.lineno}: {used[0]}")
            continue
        found += [f"line {node.lineno}: {u}" for u in used if u.split(".")[0] in MODULES]
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import cloudpickle as c",
        "from pickle import loads",
        "def f():\n    import dill",
        "import torch\ntorch.save(x, p)",
        "import torch\ntorch.load(p)",
        "import torch\ntorch.load(p, weights_only=False)",
        "import torch\ntorch.load(p, weights_only=flag)",
        "import torch as t\nt.load(p)",
        "from torch import load as read\nread(p)",
        "import torch.serialization\ntorch.serialization.load(p)",
        "import torch\nread = torch.load",
        "import numpy as np\nnp.load(p, allow_pickle=True)",
        "import numpy as np\nnp.load(p)",
    ],
)
def test_the_check_sees_every_way_to_pickle(source):
    assert len(violations(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(p, weights_only=True)",
        "import torch as t\nt.load(p, map_location='cpu', weights_only=True)",
        "import numpy as np\nnp.load(p, allow_pickle=False)",
        "import json\njson.load(f)",
        "engine.load(folder)\nengine.save(folder)",
    ],
)
def test_the_check_lets_safe_loading_through(source):
    assert violations(source) == []


def test_no_module_of_burnish_pickles():
    modules = sorted(BURNISH.rglob("*.py"))
    assert BURNISH / "checkpoint" / "state.py" in modules
    found = {
        str(path.relative_to(BURNISH)): lines
        for path in modules
        if (lines := violations(path.read_text(encoding="utf-8")))
    }
    assert found == {}
