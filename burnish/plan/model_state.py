"""One model in one train engine on one rank, the items of its memory, and the memory of an
optimizer's state and step, as its config reports it.

The other items are computed by the engine's profile (``engine_profile.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from burnish.config.model import Dtype, PrecisionConfig
from burnish.config.train import TrainConfig
from burnish.models.nf4 import num_scale_bytes
from burnish.optimizers.config import StepWork, WeightShape
from burnish.plan.shapes import ModelShape, PlanError, rounded_up

Where = Literal["device", "host", "disk"]

SIZES: dict[Dtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Item:
    """Bytes for one purpose, with their calculation."""

    name: str
    bytes: float
    how: str
    """Calculation of the bytes, as text."""
    where: Where = "device"


@dataclass(frozen=True)
class EngineSetup:
    """One model in one train engine on one rank. ``ranks`` counts the ranks with different rows."""

    shape: ModelShape
    """Shape on one rank: the model, or its tensor-parallel part."""
    train: TrainConfig
    precision: PrecisionConfig
    ranks: int = 1
    trainable: bool = True
    unreleased_gathers: bool = False
    """Assume that weights gathered by stage 3 are never released, as in DeepSpeed 0.16.0 to
    0.16.7."""
    unsharded: ModelShape | None = None
    """The entire model, if ``shape`` is a part of it."""
    saves_in_background: bool = False
    """``checkpoint.in_background``: keep a copy of the saved tensors until they are written."""

    @property
    def model(self) -> ModelShape:
        """Shape of the entire model."""
        return self.unsharded or self.shape

    @property
    def weight_size(self) -> int:
        """Bytes per weight in the compute format."""
        return SIZES[self.precision.dtype]

    @property
    def half(self) -> bool:
        """True if fp32 masters exist in addition to the weights."""
        return self.precision.dtype != "fp32"

    @property
    def trained(self) -> int:
        """Number of trained entries."""
        if not self.trainable:
            return 0
        return self.shape.trained

    @property
    def frozen(self) -> int:
        """Number of frozen entries."""
        whole = self.shape.parameters + self.shape.adapters
        return whole - self.trained

    @property
    def scale_bytes(self) -> float:
        """Bytes of the scales of 4-bit weights, which every rank holds."""
        double = self.shape.double_quantization
        return sum(num_scale_bytes(n, double=double) for n in self.shape.quantized)

    @property
    def sum_size(self) -> int:
        """Bytes per entry of the gradient sums."""
        return SIZES[self.precision.grad_accum_dtype]

    def largest(self, kind: str) -> int:
        """Return the number of entries of the largest unit of a kind."""
        return max((u.num_gathered for u in self.shape.units if u.kind == kind), default=0)

    @property
    def largest_unit(self) -> int:
        """Number of entries of the largest unit of any kind."""
        return max(self.largest(kind) for kind in ("layer", "rest", "embedding"))

    @property
    def largest_weight(self) -> int:
        """Number of entries of the largest parameter of the model without adapters."""
        return max(w.numel for u in self.shape.units for w in u.base)

    @property
    def largest_trained(self) -> int:
        """Number of entries of the largest trained parameter; 0 for a frozen model."""
        weights = (w for u in self.shape.units for w in u.trained if self.trainable)
        return max((w.numel for w in weights), default=0)


def moving_average(setup: EngineSetup, entries: int, where: Where) -> list[Item]:
    """Return the moving average of ``entries`` trained entries, if the recipe keeps one."""
    if setup.train.ema_decay is None or not setup.trainable:
        return []
    formula = f"moving average: {entries_text(entries)} x 4 B"
    return [Item("optimizer", entries * 4, formula, where)]


def total(items: Iterable[Item], where: Where = "device") -> float:
    """Return the bytes of the items in one place."""
    return sum(i.bytes for i in items if i.where == where)


def share_text(setup: EngineSetup, entries: int) -> str:
    """Format a number of entries that are divided among the ranks."""
    text = entries_text(entries)
    return text if setup.ranks == 1 else f"{text} / {setup.ranks}"


def entries_text(entries: int) -> str:
    """Format a number of entries."""
    if entries >= 1e9:
        return f"{entries / 1e9:.3f}e9"
    return f"{entries / 1e6:.1f}e6" if entries >= 1e5 else str(entries)


def trained_weights(shape: ModelShape) -> list[WeightShape]:
    """Return the trained parameters of a model."""
    return [
        WeightShape(weight.name, weight.shape, weight.is_table, unit.kind == "layer")
        for unit in shape.units
        for weight in unit.trained
    ]


def moments(setup: EngineSetup, where: Where = "device", *, ranks: int = 1) -> list[Item]:
    """Return the state of the optimizer for all trained entries, divided over ``ranks``. Raises
    PlanError if it cannot be divided."""
    n, optimizer = setup.trained, setup.train.optimizer
    if optimizer.entry_bytes is not None:
        text = share_text(setup, n) if ranks > 1 else entries_text(n)
        size = rounded_up(n, ranks) * optimizer.entry_bytes
        return [Item("optimizer", size, f"moments: {text} x {optimizer.entry_bytes:g} B", where)]
    for weight in trained_weights(setup.shape) if setup.trainable else ():
        if problem := optimizer.sharding_problem(weight, ranks):
            raise PlanError(problem)
    size = state_bytes(setup, ranks=ranks)
    divided = f" / {ranks}" if ranks > 1 else ""
    formula = f"moments of {optimizer.kind}: {entries_text(n)}{divided} entries"
    return [Item("optimizer", size, f"{formula}, {size * ranks / max(1, n):.2f} B each", where)]


def state_bytes(setup: EngineSetup, *, ranks: int = 1) -> float:
    """Return the bytes of the state of all trained parameters, on the first of ``ranks`` that share
    the rows of every parameter."""
    if not setup.trainable:
        return 0.0
    return setup.train.optimizer.state_bytes(trained_weights(setup.shape), ranks=ranks)


def checkpoint_bytes(setup: EngineSetup, *, frozen: bool = False) -> float:
    """Return the bytes that :meth:`TrainEngine.save` writes: masters, the optimizer's state, and a
    moving average if enabled. ``frozen``: those of the weights of a frozen model instead."""
    whole = replace(setup, shape=setup.model, unsharded=None)
    if frozen:
        return float(whole.shape.parameters * setup.weight_size)
    entries = whole.trained * (4.0 + 4 * (setup.train.ema_decay is not None))
    return entries + state_bytes(whole)


def step_work(setup: EngineSetup) -> StepWork | None:
    """Return the computation of a step of all ranks, in addition to the update of each
    entry."""
    return setup.train.optimizer.step_work(trained_weights(setup.model))


def in_step(setup: EngineSetup, *, ranks: int = 1, whole_stacks: bool = False) -> list[Item]:
    """Return the temporary tensors of a step, of the largest parameter that is stepped at a
    time. ``ranks``: ranks that share the rows of every parameter. ``whole_stacks``: all experts of
    a layer are gathered together."""
    local = trained_weights(setup.shape) if setup.trainable else []
    buffer = setup.train.optimizer.step_buffer(
        local, trained_weights(setup.model), ranks=ranks, whole_stacks=whole_stacks
    )
    if buffer is None:
        return []
    formula = f"{buffer.purpose}: {entries_text(buffer.entries)} x {buffer.entry_bytes:g} B"
    return [Item("optimizer", buffer.entries * buffer.entry_bytes, formula)]
