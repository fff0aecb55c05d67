"""The environment interface: numbered tasks, each with a text prompt and a score for the response.

This is Gymnasium's ``reset``/``step`` on text. :meth:`Environment.item` is the reset. The item's
number is the entire state, so a prompt can be scored in another process or after a resume. The data
source and the reward share one environment through ``make.make_environment``. Tokens, engines and
groups are handled in ``rollout/runner.py``.

Environments of several turns have another interface (``multi_turn.py``) and run in worker
processes.

Reading order of this package: base, make, importing, reasoning_gym; for several turns: multi_turn,
worker, worker_set, process, host, pool, tools, call_thread, mcp_servers, mcp_connection,
mcp_guard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from burnish.errors import BurnishError


class EnvironmentSetupError(BurnishError, ValueError):
    """An environment cannot be created. The message contains the wrong name or option and the
    nearest valid one."""


class EpisodeInfraError(BurnishError, RuntimeError):
    """An environment of several turns lost something outside the policy's control, such as a
    server. The episode ends with the status ``infra_error`` and is played again."""


class ToolError(BurnishError, RuntimeError):
    """A call of a tool failed. The message is the answer to the policy, after ``error: ``."""


@dataclass(frozen=True)
class StepResult:
    """Result of one response in an environment. Example: ``StepResult(reward=1.0)``."""

    reward: float
    done: bool = True
    """False if the episode continues with ``observation`` as the next message."""
    observation: str = ""


@runtime_checkable
class Environment(Protocol):
    """A fixed number of tasks. They depend only on options and seed, not on earlier calls."""

    name: str
    """Name in prompt ids and metrics."""

    def __len__(self) -> int:
        """Number of items."""
        ...

    def item(self, i: int) -> Mapping[str, Any]:
        """Return item ``i`` (0 <= i < len) as a data row: ``prompt``, ``label`` and other
        JSON-serializable columns."""
        ...

    def step(self, i: int, response: str) -> StepResult:
        """Score ``response`` to item ``i``. An invalid response gets a low score, not an error."""
        ...
