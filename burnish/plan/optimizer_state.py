"""Memory of an optimizer's state, and of a step: what its config reports, as items of a plan."""

from __future__ import annotations

from dataclasses import replace

from burnish.optimizers.config import StepWork, WeightShape
from burnish.plan.model_state import EngineSetup, Item, Where, entries_text, share_text
from burnish.plan.shapes import ModelShape, PlanError, rounded_up


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
