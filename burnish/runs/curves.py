"""Curves of metrics, as :class:`burnish.runs.folder.Run` and the report have them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Curve(NamedTuple):
    """One metric over the run, without steps at which it is missing or not finite."""

    steps: list[int]
    values: list[float]

    @property
    def first(self) -> float:
        return self.values[0]

    @property
    def last(self) -> float:
        return self.values[-1]


def is_finite(value: Any) -> bool:
    """Return whether ``value`` is a number that a float can represent as finite."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        return False


def curves_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """Return metric name -> curve of lines of ``metrics.jsonl``, by step, for metrics with at least
    one finite value. If a step has several, the last one counts."""
    values: dict[str, dict[int, float]] = {}
    for line in lines:
        step = int(line["step"])
        for name, value in line.items():
            if name not in ("step", "time") and is_finite(value):
                values.setdefault(name, {})[step] = float(value)
    ordered = {name: sorted(points.items()) for name, points in values.items()}
    return {
        name: Curve([step for step, _ in points], [value for _, value in points])
        for name, points in ordered.items()
    }
