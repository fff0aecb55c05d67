"""Contract of environments: numbered tasks, each a question in text and a score for the answer.

Gymnasium's ``reset``/``step`` on text: :meth:`Environment.item` is the reset, and the item's number
is the whole state, so a prompt can be scored in another process or after a resume. The data source
and the reward share one environment through ``make.make_environment``. Not here: tokens, engines,
groups (``rollout/runner.py``).

Reading order of this package: base, make, importing, reasoning_gym.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from burnish.errors import BurnishError


class EnvironmentSetupError(BurnishError, ValueError):
    """An environment that cannot be made: which name or option is wrong, and the nearest."""


@dataclass(frozen=True)
class StepResult:
    """Result of a response in an environment. Example: ``StepResult(reward=1.0)``."""

    reward: float
    done: bool = True
    """False: it goes on and ``observation`` is its next message."""
    observation: str = ""


@runtime_checkable
class Environment(Protocol):
    """``size`` tasks, the same for the same options and seed, whatever was asked before."""

    name: str
    """Name in prompt ids and metrics."""

    def __len__(self) -> int:
        """Number of items."""
        ...

    def item(self, i: int) -> Mapping[str, Any]:
        """Item ``i`` (0 <= i < len) as a data row: ``prompt``, ``label``, more that fits JSON."""
        ...

    def step(self, i: int, response: str) -> StepResult:
        """The score of ``response`` to item ``i``. Nonsense scores low; it is no error."""
        ...
