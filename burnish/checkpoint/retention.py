"""Which checkpoints go and which is best. Pure functions; nothing here touches a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

BestMode = Literal["max", "min"]


@dataclass(frozen=True)
class Entry:
    """One checkpoint, as retention sees it. Example: ``Entry(step=50, metric=0.41, good=True)``."""

    step: int
    """Unique among the checkpoints of a run."""
    metric: float | None
    """The value "best" goes by. None or NaN: never best."""
    good: bool
    """False where the checkpoint is known to be incomplete or corrupted."""


def best_step(checkpoints: Sequence[Entry], best_mode: BestMode) -> int | None:
    """Step of the good checkpoint with the best metric; of equals the newest. None: none has a
    metric."""
    sign = 1.0 if best_mode == "max" else -1.0
    ranked = [
        (sign * entry.metric, entry.step)
        for entry in checkpoints
        if entry.good and entry.metric is not None and not math.isnan(entry.metric)
    ]
    return max(ranked)[1] if ranked else None


def to_delete(checkpoints: Sequence[Entry], *, keep_last: int, best_mode: BestMode) -> list[int]:
    """Steps to delete, oldest first.

    Kept are the last ``keep_last`` good checkpoints, the best good one, and every broken one that
    no good one has followed yet. So the only good checkpoint is never deleted. Raises ValueError
    for ``keep_last`` below 1, which would delete everything.
    """
    if keep_last < 1:
        raise ValueError(
            f"keep_last={keep_last} would delete every checkpoint; the smallest value is 1"
        )
    good = sorted(entry.step for entry in checkpoints if entry.good)
    kept = {*good[-keep_last:], best_step(checkpoints, best_mode)}
    newest_good = good[-1] if good else -math.inf
    return sorted(
        entry.step
        for entry in checkpoints
        if entry.step not in kept and (entry.good or entry.step < newest_good)
    )
