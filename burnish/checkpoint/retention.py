"""Checkpoint retention: select the best checkpoint and those to delete. Pure functions without
I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

BestMode = Literal["max", "min"]


@dataclass(frozen=True)
class Entry:
    """Properties of a checkpoint that retention uses.

    Example: ``Entry(step=50, metric=0.41, good=True)``.
    """

    step: int
    """Unique among the checkpoints of a run."""
    metric: float | None
    """Value by which the best checkpoint is selected. With None or NaN it is never the best."""
    good: bool
    """False if the checkpoint is known to be incomplete or corrupted."""


def best_step(checkpoints: Sequence[Entry], best_mode: BestMode) -> int | None:
    """Return the step of the good checkpoint with the best metric; None if none has a metric.

    Ties are resolved in favor of the newest.
    """
    sign = 1.0 if best_mode == "max" else -1.0
    ranked = [
        (sign * entry.metric, entry.step)
        for entry in checkpoints
        if entry.good and entry.metric is not None and not math.isnan(entry.metric)
    ]
    return max(ranked)[1] if ranked else None


def to_delete(checkpoints: Sequence[Entry], *, keep_last: int, best_mode: BestMode) -> list[int]:
    """Return the steps to delete, oldest first.

    Kept are the last ``keep_last`` good checkpoints, the best good one, and every bad one that is
    newer than all good ones. The only good checkpoint is therefore never deleted. Raises ValueError
    if ``keep_last`` is below 1, which would delete everything.
    """
    if keep_last < 1:
        raise ValueError(
            f"keep_last={keep_last} would delete every checkpoint; the smallest value is 1"
        )
    good = sorted(entry.step for entry in checkpoints if entry.good)
    to_keep = {*good[-keep_last:], best_step(checkpoints, best_mode)}
    newest_good = good[-1] if good else -math.inf
    return sorted(
        entry.step
        for entry in checkpoints
        if entry.step not in to_keep and (entry.good or entry.step < newest_good)
    )
