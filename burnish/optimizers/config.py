"""The contract of an optimizer's config: its settings, and the facts that rules, plans and engines
need. Free of torch.

A kind is a folder with two files. ``config.py``: a subclass of :class:`OptimizerSettings`.
``rule.py``: a function ``make_rules(config, inputs)`` that returns the update rules
(``optimizers/rule.py``).
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from pydantic import Field

from burnish.config.base import Node
from burnish.config.train_engines import TrainEngineFacts


@dataclass(frozen=True)
class WeightShape:
    """Shape and place of one trained parameter."""

    name: str
    shape: tuple[int, ...]
    is_table: bool = False
    """True for an embedding table."""
    in_layer: bool = True
    """True for a parameter of a decoder layer."""

    @property
    def numel(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)


class StepBuffer(NamedTuple):
    """Temporary tensors of a step, of the largest parameter that is stepped at a time."""

    purpose: str
    entries: int
    entry_bytes: float


class StepWork(NamedTuple):
    """Computation of a step in addition to the update of each entry."""

    purpose: str
    flops: float
    half: bool
    """True if it runs in a 16-bit format."""


class OptimizerSettings(Node, ABC):
    """Settings of one kind of optimizer. The defaults of its facts are those of AdamW.

    ``weight_decay``, which all kinds read, is a key of ``train``."""

    kind: str
    state_format: ClassVar[str]
    """Name of the format of the state in checkpoints. Optimizers of one format can continue each
    other's runs."""
    entry_bytes: ClassVar[float | None] = None
    """Bytes of state of every trained entry, if they are the same for all parameters. None: those
    of :meth:`weight_bytes`, which a kind then overrides."""

    def engine_problem(self, engine: TrainEngineFacts) -> str | None:
        """Return why a train engine cannot run the optimizer, or None if it can."""
        return None

    def weight_bytes(self, weight: WeightShape) -> float:
        """Return the bytes of the state of one parameter."""
        assert self.entry_bytes is not None, f"{self.kind} names neither kind of bytes"
        return self.entry_bytes * weight.numel

    def state_bytes(self, weights: Iterable[WeightShape], *, ranks: int = 1) -> float:
        """Return the bytes of the state on the first of ``ranks`` that share the rows of every
        parameter."""
        return sum(self.weight_bytes(weight) for weight in weights) / ranks

    def sharding_problem(self, weight: WeightShape, ranks: int) -> str | None:
        """Return why the state of a parameter cannot be divided over ``ranks``, or None."""
        return None

    def step_buffer(
        self,
        local: Sequence[WeightShape],
        full: Sequence[WeightShape],
        *,
        ranks: int,
        whole_stacks: bool,
    ) -> StepBuffer | None:
        """Return the largest temporary tensor of a step, if there is one.

        ``local``, ``full``: the parameters of this rank's tensor-parallel part, and of the entire
        model. ``ranks``: ranks that share the rows of every parameter. ``whole_stacks``: all
        experts of a layer are gathered together."""
        return None

    def step_work(self, weights: Iterable[WeightShape]) -> StepWork | None:
        """Return the computation of a step of the entire model in addition to the update of each
        entry."""
        return None


class AdamOptimizer(OptimizerSettings, ABC):
    """A kind that trains all or some parameters with AdamW, whose settings are ``betas`` and
    ``eps``."""

    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's beta1, beta2."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
