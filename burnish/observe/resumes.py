"""``resumes.jsonl``: the steps at which a run was resumed, and the settings changed then."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from burnish.config.changes import changed_settings
from burnish.config.job import JobConfig
from burnish.observe.metrics import END_OF_TIME
from burnish.observe.public_recipe import CONFIG_FILE, public_recipe, saved_settings
from burnish.secret import without_secret_values
from burnish.small_files import read_small

RESUMES_FILE = "resumes.jsonl"


@dataclass(frozen=True)
class Resume:
    """A resume of a run."""

    step: int
    """The last step before it."""
    time: float
    """Unix seconds."""
    changes: Mapping[str, str]
    """Key of the recipe -> change, as text; without secrets."""


def changes_since_start(config: JobConfig, run_dir: Path) -> dict[str, str]:
    """Return the settings in which a resumed run differs from the recipe in its folder, as key ->
    change. Raises SavedRecipeError if that recipe cannot be read."""
    if not (run_dir / CONFIG_FILE).is_file():
        return {}
    changes = changed_settings(
        without_secret_values(saved_settings(run_dir)), public_recipe(config)
    )
    return {key: change for key, change in changes.items() if key != "run_dir"}


def record_resume(run_dir: Path, step: int, changes: Mapping[str, str]) -> None:
    """Append a resume after ``step``."""
    record = {"step": step, "time": round(time.time(), 3), "changes": dict(changes)}
    with open(run_dir / RESUMES_FILE, "a", encoding="utf-8", errors="replace") as file:
        file.write(json.dumps(record) + "\n")


def read_resumes(run_dir: Path) -> list[Resume]:
    """Return the resumes of a run, oldest first. Lines that are not such records are left out."""
    path = run_dir / RESUMES_FILE
    try:
        lines = read_small(path).decode(errors="replace").splitlines() if path.is_file() else []
    except (OSError, ValueError):
        return []
    return [resume for resume in map(_parsed, lines) if resume is not None]


def _parsed(line: str) -> Resume | None:
    try:
        record = json.loads(line)
        changes = {str(key): str(change) for key, change in record["changes"].items()}
        step, when = record["step"], float(record["time"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
    is_step = type(step) is int and abs(step) < 2**53
    return Resume(step, when, changes) if is_step and 0 <= when < END_OF_TIME else None
