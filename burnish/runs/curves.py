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
    """Return metric name -> curve of lines of ``metrics.jsonl``, for metrics with at least one
    finite value."""
    curves: dict[str, Curve] = {}
    for line in lines:
        step = int(line["step"])
        for name, value in line.items():
            if name in ("step", "time") or not is_finite(value):
                continue
            curve = curves.get(name)
            if curve is None:
                curve = curves[name] = Curve([], [])
            curve.steps.append(step)
            curve.values.append(float(value))
    return curves
