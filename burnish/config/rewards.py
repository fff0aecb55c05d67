"""What scores a response."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from burnish.config.base import Node
from burnish.config.model import ModelConfig


class _Reward(Node):
    name: str | None = None
    """Name in metrics and samples. None: made from the kind."""
    weight: float = 1.0
    """The total reward is the weighted sum of all rewards."""


class FunctionReward(_Reward):
    """A Python function, sync or async, for one response or for a batch.

    One: ``def f(prompt, response, label) -> float``. Batch: ``def f(prompts, responses, labels) ->
    list[float]``. A parameter ``metadata`` (batch: ``metadatas``) gets the row's other columns. The
    parameter names decide."""

    kind: Literal["function"] = "function"
    function: str | None = None
    """``path/to/file.py:name`` or ``package.module:name``. None: a callable given to
    ``burnish.run``."""


class ModelReward(_Reward):
    """A reward model made by ``burnish rm``, or a HuggingFace sequence classifier with one
    output."""

    kind: Literal["model"] = "model"
    model: ModelConfig
    """Where it is loaded from."""
    micro_batch_size: int = Field(8, ge=1)
    """Rows per forward pass."""


class MathReward(_Reward):
    """1 if the last answer in the response equals the label as mathematics (math-verify), else
    0."""

    kind: Literal["math"] = "math"
    timeout_s: float = Field(5.0, gt=0)
    """Seconds one comparison may take before it counts as wrong."""
    num_workers: int = Field(1, ge=1)
    """Worker processes."""


class EnvironmentReward(_Reward):
    """The score that the prompt's own environment gives."""

    kind: Literal["environment"] = "environment"


RewardConfig = Annotated[
    FunctionReward | ModelReward | MathReward | EnvironmentReward, Field(discriminator="kind")
]


class FailurePolicy(Node):
    """What happens when a reward raises, answers NaN or infinity, or the wrong count or type."""

    retries: int = Field(0, ge=0)
    """Times the failed call is made again first."""
    then: Literal["fail", "drop_group"] = "fail"
    """``fail`` stops the run with the error; ``drop_group`` leaves the whole group out, counted in
    metrics."""


class ShapingConfig(Node):
    """Changes to the reward after the weighted sum, before any baseline."""

    reward_clip: float | None = Field(None, gt=0)
    """Clip the reward to [-c, c]. None: no clipping."""
    truncation_penalty: float = Field(0.0, ge=0)
    """Taken off where the response hit the length limit."""
    overlong_buffer_len: int = Field(0, ge=0)
    """DAPO's soft length penalty (arXiv 2503.14476): rises linearly from 0 to ``overlong_penalty``
    over the last this many tokens before ``generate_max_len``. 0: off."""
    overlong_penalty: float = Field(1.0, ge=0)
    """The penalty at the limit."""

    def rules(self) -> Iterator[str]:
        if self.overlong_penalty != 1.0 and not self.overlong_buffer_len:
            yield (
                "overlong_penalty does nothing while overlong_buffer_len is 0; set both or neither"
            )
