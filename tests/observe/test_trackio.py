"""Errors of the Trackio tracker. tests/clients/test_trackio.py has runs with Trackio itself."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from burnish.config import load_config
from burnish.config.observe import TrackioConfig
from burnish.observe.errors import TrackerError
from burnish.observe.make_trackers import check_trackers
from burnish.observe.trackio import STATE_FILE, TrackioTracker

RECIPE: dict[str, Any] = {
    "job": "sft",
    "model": {"scratch": {}},
    "data": {"sources": ["rows.jsonl"]},
    "train": {"train_batch_size": 4},
    "observe": {"trackio": {}},
}


def stand_in(monkeypatch: pytest.MonkeyPatch, version: str | None, storage: Any = None) -> None:
    def version_of(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", version_of)
    for module in ("utils", "fragments"):
        monkeypatch.setitem(sys.modules, f"trackio.{module}", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "trackio.sqlite_storage", storage)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, r"not installed; pip install 'burnish\[trackio\]'"),
        ("0.9.2", r"0\.9\.2 is older than 0\.43"),
        ("0.43.0", "importing trackio 0.43.0 failed"),
    ],
)
def test_a_package_that_cannot_be_used_is_refused(
    version: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, version)
    with pytest.raises(TrackerError, match=said):
        check_trackers(load_config(RECIPE))


@pytest.mark.parametrize(
    "state", ["no json", "[" * 100_000, "[]", '{"run_id": "a"}', '{"run_id": 5, "project": 5}']
)
def test_a_state_that_cannot_be_continued_names_its_file(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = SimpleNamespace(validate_project_name=lambda name: None)
    stand_in(monkeypatch, "0.43.0", SimpleNamespace(SQLiteStorage=storage))
    (tmp_path / STATE_FILE).write_text(state)
    tracker = TrackioTracker(TrackioConfig(), tmp_path, {})
    with pytest.raises(TrackerError, match=r"trackio\.json cannot be read .* start a new run"):
        tracker.start()
