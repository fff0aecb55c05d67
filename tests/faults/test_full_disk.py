"""No space for a checkpoint: the run ends with words, and what was saved before still works."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import burnish
from burnish.checkpoint.errors import CheckpointError
from burnish.config import JobConfig
from burnish.train.torch import engine as torch_engine

Recipe = Callable[..., JobConfig]
Measured = Callable[[Path], list[dict[str, Any]]]


class _Usage(NamedTuple):
    total: int
    used: int
    free: int


def _checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def _no_space_from_the_third_save(patch: pytest.MonkeyPatch) -> None:
    """The file system says so before anything is written. Metrics ask for the run folder."""
    answers = iter([1 << 40, 1 << 40])

    def usage(path: Path) -> _Usage:
        is_save = Path(path).name == "checkpoints"
        return _Usage(1 << 40, 0, next(answers, 1000) if is_save else 1 << 40)

    patch.setattr(shutil, "disk_usage", usage)


def _write_fails_in_the_third_save(patch: pytest.MonkeyPatch) -> None:
    """The disk fills up in the middle of writing weights."""
    real, saves = torch_engine.save_tensors, 0

    def save(tensors: Any, path: Path, *args: Any, **kwargs: Any) -> None:
        nonlocal saves
        saves += Path(path).name == "exp_avg.safetensors"
        if saves == 3:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(tensors, path, *args, **kwargs)

    patch.setattr(torch_engine, "save_tensors", save)


@pytest.mark.parametrize("fill", [_no_space_from_the_third_save, _write_fails_in_the_third_save])
def test_a_full_disk_ends_the_run_which_resumes_once_there_is_space(
    fill: Callable[[pytest.MonkeyPatch], None],
    recipe: Recipe,
    measured: Measured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = "max_steps=5"
    whole, starved = recipe("grpo", short, name="whole"), recipe("grpo", short, name="starved")
    burnish.run(whole)
    run_dir = Path(starved.run_dir)
    with monkeypatch.context() as patch:
        fill(patch)
        with pytest.raises(CheckpointError, match=r"step_000003(.|\n)*checkpoint\.keep_last"):
            burnish.run(starved)
    assert _checkpoints(run_dir) == ["step_000001", "step_000002"], "and nothing half-written"
    burnish.run(starved, resume=run_dir)
    assert measured(run_dir) == measured(Path(whole.run_dir))
