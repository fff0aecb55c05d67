"""Temporary files next to others do not write through planted links."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from burnish.driver.output_shards import OutputShards
from burnish.observe.files import write_text


def _text(folder: Path) -> Path:
    write_text(folder / "out.jsonl", "new")
    return folder / f".out.jsonl.{os.getpid()}.tmp"


def _output(folder: Path) -> Path:
    (folder / "run").mkdir(exist_ok=True)
    OutputShards(folder / "run").publish(folder / "out.jsonl")
    return folder / ".out.jsonl.of-run"


@pytest.mark.parametrize("write", [_text, _output])
def test_a_planted_link_is_replaced_and_its_target_untouched(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    """The first call reveals the name of the temporary file; before the second it is a link."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    name = write(tmp_path)
    (tmp_path / "out.jsonl").unlink()
    name.symlink_to(precious)
    write(tmp_path)
    assert precious.read_text() == "mine"
    assert (tmp_path / "out.jsonl").is_file() and not (tmp_path / "out.jsonl").is_symlink()
    assert not name.is_symlink()
