"""docs/commands.md lists every file that a run leaves in its folder."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import pytest

import burnish
from burnish.config import JobConfig

PAGE = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")


def listed() -> set[str]:
    """Names and patterns in the first column of the table."""
    (section,) = re.findall(r"## The run folder\n(.*)", PAGE, flags=re.DOTALL)
    cells = re.findall(r"^\| (`.*?) \|", section, flags=re.MULTILINE)
    also = re.findall(r"`(parts/|generate\.json)`", section)
    return {name for cell in cells for name in re.findall(r"`(.*?)`", cell)} | set(also)


def left_by(run_dir: Path) -> set[str]:
    files = {str(p.relative_to(run_dir)) for p in run_dir.rglob("*") if p.is_file()}
    return {re.sub(r"^(checkpoints/[^/]*/|tensorboard/|wandb/).*", r"\1", name) for name in files}


def unlisted(run_dir: Path) -> set[str]:
    return {n for n in left_by(run_dir) if not any(fnmatch(n, pattern) for pattern in listed())}


def test_every_file_of_every_kind_of_job_is_listed(
    rl: Callable[..., JobConfig],
    generate: Callable[..., JobConfig],
    reward: Callable[[str], float],
    evaluation: list[str],
    tmp_path: Path,
    sums: str,
) -> None:
    trained = burnish.run(rl(*evaluation), rewards=reward).run_dir
    generated = burnish.run(generate("num_prompts=4", name="made"), rewards=reward).run_dir
    tree = {
        "job": "evaluate",
        "run_dir": str(tmp_path / "measured"),
        "model": {"scratch": {"alphabet": "0123456789+="}},
        "eval": {"data": {"sources": [sums]}, "generate_max_len": 4},
    }
    measured = burnish.run(burnish.load_config(tree), rewards=reward).run_dir
    for run_dir in (trained, generated, measured):
        assert unlisted(run_dir) == set()
    assert {f"samples/{k}_*.parquet" for k in ("step", "eval", "generate")} <= listed()


@pytest.mark.parametrize("name", ["stopped.txt", "oom.txt", "tensorboard/", "wandb/", "wandb.json"])
def test_files_of_runs_that_ended_otherwise_are_listed(name: str) -> None:
    assert name in listed()
