"""Recorded rollouts on disk: complete after a kill, and refused with any other content."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import burnish.driver.records as records
from burnish.checkpoint import CheckpointError, load_state, save_state, write_manifest
from burnish.driver.records import (
    drop_records_after,
    log_groups,
    read_group_log,
    read_rollout,
    rollout_folders,
)
from burnish.rollout.runner import Rollout
from burnish.types import Group, Prompt, Sample, Stats


class Killed(BaseException):
    """Ends a write as abruptly as a signal."""


def rollout(step: int) -> Rollout:
    sample = Sample(
        f"p:{step}@0/0", f"p:{step}@0", 0, (5, 9), (7, 1), (-0.1, float("-inf")), (True, True),
        (0, 1), "a\ud800", "stop", reward=float("nan"), reward_parts={"r": 0.1 + 0.2},
    )  # fmt: skip
    prompt = Prompt(sample.prompt_id, sample.prompt_ids, "1+1=", label="2", source="p")
    stats = Stats({"m": (torch.tensor(1.0), 3)}, {"x": float("inf")}, {"s": 2})
    groups = (Group(0, prompt, (sample,)),)
    return Rollout(groups, stats, ages={0: 1, 1: 0}, lost={"p:9@0": "failed"})


def test_a_kill_leaves_complete_steps_and_lines_and_a_resume_drops_the_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(step: int) -> None:
        log_groups(tmp_path, step, rollout(step))
        found = records.RecordedRollout(rollout(step), {"prompts_seen": step})
        records.write_rollout(tmp_path, step, found, {"settings": ""})

    def half(folder: Path, name: str, state: Mapping[str, Any]) -> None:
        save_state(folder, name, state)
        raise Killed

    for step in (1, 2, 3):
        write(step)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(records, "save_state", half)
        write(4)
    with (tmp_path / records.GROUPS_FILE).open("a") as file:
        file.write('{"step": 5, "tra')
    assert list(rollout_folders(tmp_path)) == [1, 2, 3]
    assert [line["step"] for line in read_group_log(tmp_path)] == [1, 2, 3, 4]
    drop_records_after(tmp_path, 2)
    write(3)
    assert [line["step"] for line in read_group_log(tmp_path)] == [1, 2, 3]
    assert read_group_log(tmp_path)[2] == {
        "step": 3, "trained": {"p:3@0": 1}, "lost": {"p:9@0": "failed"},
    }  # fmt: skip
    assert sorted(p.name for p in (tmp_path / records.ROLLOUTS_DIR).iterdir()) == [
        f"step_{step:06d}" for step in (1, 2, 3)
    ]
    found, expected = read_rollout(tmp_path, 3), rollout(3)
    assert repr(found.rollout.groups) == repr(expected.groups)  # repr: NaN differs from itself
    assert found.rollout.stats == expected.stats.plain()
    assert (found.rollout.ages, found.rollout.lost) == (expected.ages, expected.lost)
    assert found.counts == {"prompts_seen": 3}


REMOVED = object()
WRONG: tuple[Any, ...] = (
    None, 5, -1, "x", [], [[1]], {}, {"a": None}, np.zeros(3), np.array([9, -4]),
)  # fmt: skip


def test_a_rollout_of_other_keys_types_or_sizes_is_a_checkpoint_error(tmp_path: Path) -> None:
    """Every value at the first two levels is removed and replaced. A manifest with valid checksums
    does not prove who wrote it."""
    folder = records.write_rollout(tmp_path, 1, records.RecordedRollout(rollout(1), {}), {})
    plain = load_state(folder, "groups")
    places: list[tuple[str, ...]] = [(key,) for key in plain]
    places += [("samples", key) for key in plain["samples"]]
    for path in places:
        for value in (REMOVED, *WRONG):
            state = {**plain, "samples": dict(plain["samples"])}
            parent = state if len(path) == 1 else state["samples"]
            parent[path[-1]] = value
            if value is REMOVED:
                del parent[path[-1]]
            save_state(folder, "groups", state)
            write_manifest(folder, step=1, extra={})
            fits = isinstance(value, np.ndarray) and len(value) == 2 and path[-1][-4:] != "_ids"
            fits |= value is None and path[-1] in ("ages", "turns")
            fits |= isinstance(value, dict) and not value  # no statistics
            with suppress(CheckpointError) if fits else pytest.raises(CheckpointError):
                read_rollout(tmp_path, 1)
