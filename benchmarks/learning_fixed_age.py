"""A rollout source with samples of an exact age, for ``learning_staleness.py``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from burnish.rollout.runner import Rollout
from burnish.rollout.source import SyncSource


class FixedAge(SyncSource):
    """Samples every rollout ``age`` RL steps before the step that trains it.

    With ``age`` = 2, step 5 trains the groups that were sampled with the weights after step 2. The
    first ``age`` + 1 steps train groups of the initial weights. Not for checkpoints."""

    def __init__(
        self, source: SyncSource, age: int, *, steps: int, version: Callable[[], int]
    ) -> None:
        """``steps``: RL steps of the run. ``version``: number of optimizer steps of the policy."""
        super().__init__(
            source.prompts, source.runner, source.sync, groups_per_step=source.groups_per_step
        )
        self.age, self.steps, self._version = age, steps, version
        self._waiting: deque[Rollout] = deque()
        self._sampled_at: dict[int, int] = {}
        """Version of the policy (optimizer steps) -> RL steps that were done."""

    def next(self, step: int) -> Rollout:
        """Sample with the weights after ``step`` - 1 RL steps, and return the oldest rollout."""
        self._sampled_at[self._version()] = step - 1
        while len(self._waiting) <= min(self.age, self.steps - step):
            self._waiting.append(super().next(step))
        ages = {version: step - 1 - done for version, done in self._sampled_at.items()}
        return replace(self._waiting.popleft(), ages=ages)
