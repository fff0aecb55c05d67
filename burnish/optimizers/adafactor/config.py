"""Config of Adafactor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from burnish.config.train_engines import TorchEngine, TrainEngineFacts
from burnish.optimizers.config import OptimizerSettings, StepBuffer, WeightShape


class Adafactor(OptimizerSettings):
    """Adafactor (arXiv 1804.04235) as in transformers: row and column means of the squared
    gradient, without momentum; about 4 bytes per row and column of a matrix."""

    kind: Literal["adafactor"] = "adafactor"
    decay_rate: float = Field(-0.8, lt=0)
    """Exponent of the step in the decay of the squared gradient's averages: 1 - step ^
    decay_rate."""
    clip_threshold: float = Field(1.0, gt=0)
    """Largest root mean square of the update of a parameter, before the learning rate."""
    grad_eps: float = Field(1e-30, gt=0)
    """Constant added to squared gradients."""
    scale_parameter: bool = False
    """Multiply the learning rate by the root mean square of each parameter (at least 1e-3)."""

    state_format: ClassVar[str] = "adafactor"

    def engine_problem(self, engine: TrainEngineFacts) -> str | None:
        if isinstance(engine, TorchEngine):
            return None
        return (
            "train.optimizer.kind=adafactor with train.engine.kind=deepspeed: ZeRO steps flat "
            "shards, in which a matrix is divided at any entry, so a rank has no rows and columns "
            "whose means it could take; use train.engine.kind=torch (sharding=full shards "
            "Adafactor exactly), or optimizer kind adamw"
        )

    def weight_bytes(self, weight: WeightShape) -> float:
        """One fp32 mean per row and per column of each matrix, or one number per entry."""
        return _shape_bytes(weight.shape)

    def state_bytes(self, weights: Iterable[WeightShape], *, ranks: int = 1) -> float:
        """Column means are on all ranks."""
        shapes = (weight.shape for weight in weights)
        return sum(_shape_bytes((*(-(-n // ranks) for n in s[:1]), *s[1:])) for s in shapes)

    def step_buffer(
        self,
        local: Sequence[WeightShape],
        full: Sequence[WeightShape],
        *,
        ranks: int,
        whole_stacks: bool,
    ) -> StepBuffer | None:
        """The update of this rank's part of the largest parameter."""
        largest = max((weight.numel for weight in local), default=0)
        return StepBuffer("update of the largest parameter", -(-largest // ranks), 4.0)


def _shape_bytes(shape: Sequence[int]) -> float:
    if len(shape) < 2:
        return 4.0 * math.prod(shape)
    return 4.0 * math.prod(shape[:-2]) * (shape[-2] + shape[-1])
