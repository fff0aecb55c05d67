"""Mean and spread of a stream of numbers, batch by batch, without keeping the numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

MAX_VALUE = 1e150
"""Squares up to 1e300 leave fp64 (1.8e308) room for sums."""


class RunningMoments:
    """Count, mean and sum of squared deviations of all numbers so far.

    Two sets are joined by Chan, Golub and LeVeque's parallel update (Stanford STAN-CS-79-773,
    equations 2.1), of which Welford's is the case of one new number: with delta = mean_b - mean_a::

        mean = mean_a + delta n_b / (n_a + n_b)
        m2   = m2_a + m2_b + delta^2 n_a n_b / (n_a + n_b)

    Numbers are fp64; nothing is subtracted that could cancel, as a sum of squares would.
    """

    def __init__(self) -> None:
        self.count, self.mean, self.m2 = 0, 0.0, 0.0

    @property
    def std(self) -> float:
        """Spread of all numbers so far (their squared deviations over their count); 0 of none."""
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
        """(value - mean) / std, or value / std without ``center``. Where all numbers so far were
        equal (a spread below ``eps``) nothing is divided."""
        spread = self.std if self.std > eps else 1.0
        return (value - (self.mean if center else 0.0)) / spread

    def state_dict(self) -> dict[str, float]:
        """JSON-able."""
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from ``state``, bit by bit."""
        self.count = int(state["count"])
        self.mean, self.m2 = float(state["mean"]), float(state["m2"])
