"""Running mean and standard deviation of a stream of numbers, batch by batch, without storing
them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

MAX_VALUE = 1e150
"""Squares up to 1e300 leave fp64 (1.8e308) room for sums."""


class RunningMoments:
    """Count, mean and sum of squared deviations of all numbers so far.

    Two sets are merged by Chan, Golub and LeVeque's parallel update (Stanford STAN-CS-79-773,
    equations 2.1), of which Welford's is the case of one new number: with delta = mean_b - mean_a::

        mean = mean_a + delta n_b / (n_a + n_b)
        m2   = m2_a + m2_b + delta^2 n_a n_b / (n_a + n_b)

    Numbers are fp64; nothing is subtracted that could cancel, as a sum of squares would.
    """

    def __init__(self) -> None:
        self.count, self.mean, self.m2 = 0, 0.0, 0.0

    @property
    def std(self) -> float:
        """Return the population standard deviation of all numbers so far; 0 if there are none."""
        return math.sqrt(self.m2 / self.count) if self.count else 0.0

    def update(self, values: Sequence[float]) -> None:
        """Add one batch. Raises ValueError for numbers whose squares overflow fp64, or that are
        not finite."""
        if not values:
            return
        for value in values:
            if not abs(value) <= MAX_VALUE:
                raise ValueError(
                    f"a value of {value:.3g} cannot be normalized: beyond {MAX_VALUE:.0e} its "
                    "square overflows"
                )
        count = len(values)
        mean = math.fsum(values) / count
        m2 = math.fsum((value - mean) ** 2 for value in values)
        total, delta = self.count + count, mean - self.mean
        self.m2 += m2 + delta * delta * self.count * count / total
        self.mean += delta * count / total
        self.count = total

    def normalized(self, value: float, *, center: bool, eps: float = 1e-8) -> float:
        """Return (value - mean) / std, or value / std without ``center``.

        If all numbers so far are equal (a standard deviation below ``eps``), it does not divide.
        """
        spread = self.std if self.std > eps else 1.0
        return (value - (self.mean if center else 0.0)) / spread

    def state_dict(self) -> dict[str, float]:
        """Return the state as JSON values."""
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore ``state`` exactly."""
        self.count = int(state["count"])
        self.mean, self.m2 = float(state["mean"]), float(state["m2"])
