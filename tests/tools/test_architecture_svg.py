"""The picture of docs/architecture.md names existing files, and its texts fit their boxes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
_SPEC = importlib.util.spec_from_file_location(
    "architecture_svg", ROOT / "tools/architecture_svg.py"
)
assert _SPEC is not None and _SPEC.loader is not None
tool: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["architecture_svg"] = tool
_SPEC.loader.exec_module(tool)


def test_the_picture_is_up_to_date() -> None:
    assert tool.main([]) == 0
    assert ElementTree.parse(ROOT / tool.PICTURE).getroot().get("width") == "900"


def test_the_files_of_the_picture_exist() -> None:
    """Also those of the first rows of the reading path: types, step, both sources, contracts."""
    assert [name for name in tool.files() if not (ROOT / "burnish" / name).is_file()] == []
    contracts = {"train/base.py", "rollout/base.py", "rewards/base.py"}
    sources = {"rollout/source.py", "rollout/asynchronous/source.py"}
    assert set(tool.files()) >= {"types.py", "steps/rl.py", *contracts, *sources}


def test_texts_fit_and_boxes_lie_in_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A box of 60 pixels holds no name of 20 characters (120 pixels)."""
    assert tool.too_wide() == []
    for box in tool.boxes():
        assert box.x >= 0 and box.x + box.width <= tool.WIDTH, box.title
        assert box.y >= 0 and box.y + box.height <= tool.HEIGHT, box.title
        assert 15 + tool.LINE * len(box.lines) < box.height, box.title
    narrow = tool.Box(0, 0, 60, 40, "move", "narrow", ("sync/collective_x.py",))
    monkeypatch.setattr(tool, "TRANSFER", (narrow,))
    assert tool.too_wide() == ["sync/collective_x.py"]
