"""Config of a reward that is a Python function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from burnish.config.paths import code_problem
from burnish.rewards.config import RewardSettings


class FunctionReward(RewardSettings):
    """A Python function, sync or async, for one response or a batch.

    One: ``def f(prompt, response, label) -> float``. Batch: ``def f(prompts, responses, labels) ->
    list[float]``. ``metadata`` (batch: ``metadatas``) receives the row's other columns. The
    parameter names select the form."""

    kind: Literal["function"] = "function"
    function: str | None = None
    """``path/to/file.py:name`` or ``package.module:name``. None: a callable passed to
    ``burnish.run``. ``openrlhf:path/to/file.py``: the ``reward_func`` of a reward file of
    OpenRLHF."""
    timeout_s: float = Field(1800.0, gt=0)
    """Maximum seconds of a call with all responses of a batch. A longer one is a failure
    (``on_reward_failure``). After 30 s the console names the function."""

    @property
    def needs_callable(self) -> bool:
        return self.function is None

    @property
    def user_code(self) -> list[tuple[str, str]]:
        return [] if self.function is None else [("function", self.function)]

    def rules(self) -> Iterator[str]:
        for key, spec in self.user_code:
            if problem := code_problem(spec):
                yield f"{key}: {problem}"
