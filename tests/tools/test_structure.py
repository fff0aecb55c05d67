"""The structure script counts what its table says, in source text that it does not import."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
_spec = importlib.util.spec_from_file_location("structure", ROOT / "tools" / "structure.py")
assert _spec is not None and _spec.loader is not None
structure = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(structure)
sys.path.pop(0)


def test_a_small_tree_is_counted(tmp_path: Path) -> None:
    """Two of three files name the key ``lr`` (a field's own annotation counts as one of them); one
    of two ``isinstance`` calls is about a config class."""
    for folder in ("burnish/config", "burnish/train"):
        (tmp_path / folder).mkdir(parents=True)
    sources = {
        "burnish/types.py": '"""T."""\n',
        "burnish/config/train.py": "class TrainConfig:\n    lr: float = 1.0\n",
        "burnish/train/engine.py": (
            "from burnish.config.train import TrainConfig\n\n"
            "def build(config: Any) -> None:\n"
            "    if isinstance(config, (TrainConfig, str)) and not isinstance(config, int):\n"
            "        print(config.lr)\n"
        ),
    }
    for name, text in sources.items():
        (tmp_path / name).write_text(text)
    lines = structure.report(tmp_path).splitlines()
    assert lines[2:6] == [
        "| files of burnish | 3 |",
        "| lines of burnish | 8 |",
        "| `config: Any` | 1 |",
        "| `isinstance` on config classes | 1 |",
    ]
    assert lines[-3:] == ["| (top level) | 1 | 1 |", "| config | 1 | 2 |", "| train | 1 | 5 |"]
    modules = structure.own_modules(tmp_path)
    assert structure.passed_by("lr", modules) == ["burnish.config.train", "burnish.train.engine"]
