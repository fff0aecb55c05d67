"""Steps after which a run evaluates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EvalTimes:
    """Steps after which a run evaluates, in addition to the last step."""

    every_n_steps: int = 0
    """0: not by steps."""
    delay_steps: int = 0
    """No evaluation before this step; above 0 also none at step 0."""
    rows_per_period: int = 0
    """Rows between evaluations, for those by epochs. 0: not by epochs."""
    rows_per_step: int = 1

    def due(self, step: int) -> bool:
        """Return whether an evaluation follows ``step``; 0 is the start of the run.

        By epochs, it follows the step that draws the last row of a period.

        >>> by_epoch = EvalTimes(rows_per_period=10, rows_per_step=4)
        >>> [step for step in range(9) if by_epoch.due(step)]
        [0, 3, 5, 8]
        """
        if step < self.delay_steps:
            return False
        if step == 0:
            return True
        if self.every_n_steps and step % self.every_n_steps == 0:
            return True
        rows, period = self.rows_per_step, self.rows_per_period
        return bool(period) and step * rows // period > (step - 1) * rows // period
