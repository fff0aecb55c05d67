"""Mistakes for the relations of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

import burnish.config.inference as inference
import burnish.config.job as job
import burnish.driver.digests as digests
from burnish.data.stream import IndexStream
from burnish.rewards.reward_set import RewardSet
from burnish.watch.metric_log import Column, MetricLog

Patch = pytest.MonkeyPatch


def each_spelling_has_a_lock(patch: Patch) -> None:
    """The name of the lock contains the path as the recipe spells it."""

    def lock_of(output: Path) -> Path:
        return output.with_name(f".{hash(str(output))}.lock")

    for module in (inference, job):
        patch.setattr(module, "lock_of", lock_of)


def sizes_are_compared(patch: Patch) -> None:
    """Code is compared by its size in thousands of characters."""
    patch.setattr(digests, "_file_digest", lambda path: str(path.stat().st_size // 1000))


def totals_decide(patch: Patch) -> None:
    """The filter looks at no turn."""
    patch.setattr(RewardSet, "turn_rewards", lambda self, group: [])


def left_out_rows_are_draws(patch: Patch) -> None:
    """The source is drawn again after a row that is left out."""
    patch.setattr(IndexStream, "leave_out", lambda self: None)


def all_values_of_a_step_are_points(patch: Patch) -> None:
    """The page draws each line of a step that has several."""

    def points(log: MetricLog, name: str) -> list[tuple[int, float]]:
        column = log.columns.get(name, Column())
        return list(zip(column.lines, column.values, strict=True))

    patch.setattr(MetricLog, "points", points)


PLANTED = {
    "all_views_of_a_run_have_its_numbers": (all_values_of_a_step_are_points, tuple(range(24))),
    "weights_hold_for_used_rows": (left_out_rows_are_draws, tuple(range(6))),
    "an_output_has_one_writer": (each_spelling_has_a_lock, tuple(range(60))),
    "changed_code_is_named": (sizes_are_compared, tuple(range(12))),
    "turns_that_differ_are_kept": (totals_decide, tuple(range(60))),
}
