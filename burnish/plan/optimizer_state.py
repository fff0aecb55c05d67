"""Memory of an optimizer's state, per trained parameter and in a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from burnish.config.optimizer import Adafactor, AdamW, AdamW8bit, Muon
from burnish.plan.model_state import EngineSetup, Item, Where, entries_text, share_text
from burnish.plan.shapes import ModelShape, PlanError, Weight, rounded_up
from burnish.train.optimizers import (
    BLOCK_8BIT,
    divides_blocks,
    has_8bit_moments,
    is_muon_matrix,
    undivided_blocks,
)


def moments(setup: EngineSetup, where: Where = "device", *, ranks: int = 1) -> list[Item]:
    """Return the state of the optimizer for all trained entries, divided over ``ranks``. Raises
    PlanError if it cannot be divided."""
    n = setup.trained
    _check_blocks(setup, ranks)
    if isinstance(setup.train.optimizer, AdamW):
        text = share_text(setup, n) if ranks > 1 else entries_text(n)
        return [Item("optimizer", rounded_up(n, ranks) * 8, f"moments: {text} x 8 B", where)]
    size = _sharded_bytes(setup, ranks)
    divided = f" / {ranks}" if ranks > 1 else ""
    how = f"moments of {setup.train.optimizer.kind}: {entries_text(n)}{divided} entries"
    return [Item("optimizer", size, f"{how}, {size * ranks / max(1, n):.2f} B each", where)]


def state_bytes(setup: EngineSetup) -> float:
    """Return the bytes of the state for all trained parameters, by their shapes."""
    optimizer, shape = setup.train.optimizer, setup.shape
    if not setup.trainable:
        return 0.0
    if isinstance(optimizer, AdamW):
        return 8.0 * setup.trained
    if isinstance(optimizer, Muon):
        matrices = sum(weight.numel for weight in muon_matrices(shape, optimizer))
        return 8.0 * setup.trained - 4.0 * matrices  # one moment instead of two
    if isinstance(optimizer, Adafactor):
        return sum(_adafactor(weight.shape) for weight in _trained(shape))
    return sum(_quantized(weight) for weight in _trained(shape))


def _trained(shape: ModelShape) -> Iterator[Weight]:
    return (weight for unit in shape.units for weight in unit.trained)


def _sharded_bytes(setup: EngineSetup, ranks: int) -> float:
    """Return the bytes of the state on the first of ``ranks`` that share the rows of every
    parameter. Column means of Adafactor are on all of them."""
    if not isinstance(setup.train.optimizer, Adafactor) or not setup.trainable:
        return state_bytes(setup) / ranks
    shapes = (weight.shape for weight in _trained(setup.shape))
    parts = ((*(rounded_up(rows, ranks) for rows in shape[:1]), *shape[1:]) for shape in shapes)
    return sum(_adafactor(part) for part in parts)


def checkpoint_bytes(setup: EngineSetup, *, frozen: bool = False) -> float:
    """Return the bytes that :meth:`TrainEngine.save` writes: masters, the optimizer's state, and a
    moving average if enabled. ``frozen``: those of the weights of a frozen model instead."""
    whole = replace(setup, shape=setup.model, unsharded=None)
    if frozen:
        return float(whole.shape.parameters * setup.weight_size)
    entries = whole.trained * (4.0 + 4 * (setup.train.ema_decay is not None))
    return entries + state_bytes(whole)


def muon_matrices(shape: ModelShape, optimizer: Muon) -> list[Weight]:
    """Return the parameters that Muon trains."""
    return [
        weight
        for unit in shape.layers
        for weight in unit.trained
        if not weight.is_table and is_muon_matrix(weight.name, weight.shape, optimizer.adamw_params)
    ]


def newton_schulz_flops(setup: EngineSetup) -> float:
    """Return the floating-point operations of the Newton-Schulz iterations of all matrices, in one
    step: 4 m^2 n + 2 m^3 per iteration of an [m, n] matrix with m <= n. 0 with another
    optimizer."""
    optimizer = setup.train.optimizer
    if not isinstance(optimizer, Muon):
        return 0.0
    work = 0.0
    for weight in muon_matrices(setup.model, optimizer):
        shape, is_adapter = weight.shape, "lora_" in weight.name
        halves = 2 if "gate_up_proj" in weight.name and not is_adapter else 1  # two matrices in one
        m, n = sorted((shape[-2] // halves, shape[-1]))
        work += halves * math.prod(shape[:-2]) * (4.0 * m * m * n + 2.0 * m**3)
    return optimizer.ns_steps * work


def _adafactor(shape: Sequence[int]) -> float:
    if len(shape) < 2:
        return 4.0 * math.prod(shape)
    return 4.0 * math.prod(shape[:-2]) * (shape[-2] + shape[-1])


def _quantized(weight: Weight) -> float:
    if weight.is_table or not has_8bit_moments(weight.shape):
        return 8.0 * weight.numel
    return 2.0 * weight.numel + 8.0 * math.ceil(weight.numel / BLOCK_8BIT)


def _check_blocks(setup: EngineSetup, ranks: int) -> None:
    """Raise PlanError if blocks of 8-bit moments cannot be divided over ``ranks``."""
    if not isinstance(setup.train.optimizer, AdamW8bit) or not setup.trainable:
        return
    for weight in _trained(setup.shape):
        if weight.is_table or not has_8bit_moments(weight.shape):
            continue
        if not divides_blocks(weight.shape, ranks):
            raise PlanError(undivided_blocks(weight.name, weight.shape, ranks))


def in_step(setup: EngineSetup, *, ranks: int = 1, whole_stacks: bool = False) -> list[Item]:
    """Return the temporary tensors of a step, of the largest parameter that is stepped at a
    time. ``ranks``: ranks that share the rows of every parameter. ``whole_stacks``: Muon gathers
    all experts of a layer together."""
    optimizer = setup.train.optimizer
    if isinstance(optimizer, Muon):
        skip = 0 if whole_stacks else -2
        matrices = muon_matrices(setup.model, optimizer)
        largest = max((math.prod(weight.shape[skip:]) for weight in matrices), default=0)
        size = 20.0 if optimizer.ns_dtype == "fp32" else 12.0
        how = f"Newton-Schulz of the largest matrix: {entries_text(largest)} x {size:g} B"
        return [Item("optimizer", largest * size, how)] if largest else []
    if isinstance(optimizer, Adafactor):
        largest = rounded_up(setup.largest_trained, ranks)
        how = f"update of the largest parameter: {entries_text(largest)} x 4 B"
        return [Item("optimizer", largest * 4.0, how)]
    return []
