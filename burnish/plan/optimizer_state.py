"""Memory of an optimizer's state, per trained parameter and in a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from burnish.config.optimizer import Adafactor, AdamW, Muon
from burnish.plan.model_state import EngineSetup, Item, Where, entries_text, share_text
from burnish.plan.shapes import rounded_up
from burnish.train.optimizers import SMALLEST_8BIT

Shape = tuple[int, ...]


def moments(setup: EngineSetup, where: Where = "device", *, ranks: int = 1) -> list[Item]:
    """Return the state of the optimizer for all trained entries, divided over ``ranks``."""
    n = setup.trained
    if isinstance(setup.train.optimizer, AdamW):
        text = share_text(setup, n) if ranks > 1 else entries_text(n)
        return [Item("optimizer", rounded_up(n, ranks) * 8, f"moments: {text} x 8 B", where)]
    size = state_bytes(setup) / ranks
    divided = f" / {ranks}" if ranks > 1 else ""
    how = f"moments of {setup.train.optimizer.kind}: {entries_text(n)}{divided} entries"
    return [Item("optimizer", size, f"{how}, {size * ranks / max(1, n):.2f} B each", where)]


def state_bytes(setup: EngineSetup) -> float:
    """Return the bytes of the state for all trained entries: by the shape of each parameter, or of
    adapters, which are all matrices, by their number of entries."""
    optimizer, shape = setup.train.optimizer, setup.shape
    if not setup.trainable:
        return 0.0
    if isinstance(optimizer, AdamW):
        return 8.0 * setup.trained
    per: Callable[[str, Shape], float] = _quantized
    per_adapter_entry = 2.0 + 8 / 256
    if isinstance(optimizer, Muon):
        per, per_adapter_entry = _muon, 4.0
    elif isinstance(optimizer, Adafactor):
        per, per_adapter_entry = _adafactor, 1.0
    if shape.adapters:
        return per_adapter_entry * shape.adapters
    return sum(per(unit.kind, own) for unit in shape.units for own in unit.shapes)


def checkpoint_bytes(setup: EngineSetup) -> float:
    """Return the bytes that :meth:`TrainEngine.save` writes: masters, the optimizer's state, and a
    moving average if enabled."""
    whole = replace(setup, shape=setup.model, unsharded=None)
    entries = whole.trained * (4.0 + 4 * (setup.train.ema_decay is not None))
    return entries + state_bytes(whole)


def _muon(kind: str, shape: Shape) -> float:
    hidden = kind == "layer" and len(shape) in (2, 3)
    return math.prod(shape) * (4.0 if hidden else 8.0)


def _adafactor(kind: str, shape: Shape) -> float:
    if len(shape) < 2:
        return 4.0 * math.prod(shape)
    return 4.0 * math.prod(shape[:-2]) * (shape[-2] + shape[-1])


def _quantized(kind: str, shape: Shape) -> float:
    entries = math.prod(shape)
    if entries < SMALLEST_8BIT or kind == "embedding":
        return 8.0 * entries
    return entries * (2.0 + 8 / 256)


def in_step(setup: EngineSetup) -> list[Item]:
    """Return the temporary tensors of a step, of the largest parameter that is stepped at a
    time."""
    optimizer = setup.train.optimizer
    layers = [math.prod(own[-2:]) for u in setup.model.layers for own in u.shapes if len(own) > 1]
    if isinstance(optimizer, Muon) and layers:
        size = 20.0 if optimizer.ns_dtype == "fp32" else 12.0
        how = f"Newton-Schulz of the largest matrix: {entries_text(max(layers))} x {size:g} B"
        return [Item("optimizer", max(layers) * size, how)]
    if isinstance(optimizer, Adafactor):
        largest = setup.largest_tensor
        how = f"update of the largest parameter: {entries_text(largest)} x 8 B"
        return [Item("optimizer", largest * 8.0, how)]
    return []
