"""Places of given weights inside vLLM's tensors.

vLLM merges layers (q, k and v; gate and up) along the rows, pads vocabularies at their end, stacks
experts, and splits tensors evenly over tensor-parallel workers. :func:`places_of` returns the part
of a tensor that must be equal to each weight, value by value. Weights that vLLM's loader stores in
another order are left out. This module does not import vllm; its objects are passed as arguments.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from burnish.rollout.vllm.names import EXPERT, SECOND_PROJECTION, state_of
from burnish.rollout.weights import Shape, as_table

_REORDERED = re.compile(r"query_key_value")
"""Weights that loaders convert (Falcon, BLOOM): q, k and v of each head become those of all."""
_FIRST_HALF = {"gate_proj", "w1"}
_SECOND_HALF = {"up_proj", "w3"}


class Place(NamedTuple):
    """The part of a worker's tensor that stores a given weight, or this worker's part of it."""

    held: str
    """vLLM's name of the tensor."""
    part: Tensor
    """[rows, columns], a view."""
    row: int
    """Row of the weight at which the part begins."""
    column: int
    """Column of the weight at which it begins."""


def places_of(
    model: Any,
    names: Mapping[str, str | None],
    shapes: Mapping[str, Shape],
    *,
    rank: int,
    num_workers: int,
) -> dict[str, Place]:
    """Return the place of each given weight for which it is known. ``names``: given name -> vLLM's
    (:func:`~burnish.rollout.vllm.names.held_names`). ``shapes``: of the given weights."""
    packed = getattr(model, "packed_modules_mapping", None) or {}  # house: ok vLLM's model
    orders = [list(parts) for parts in packed.values()]
    state, by_tensor = dict(state_of(model)), dict[str, list[str]]()
    for name, held in names.items():
        if held is not None and not _REORDERED.search(name):
            by_tensor.setdefault(held, []).append(name)
    located: dict[str, Place] = {}
    for held, many in by_tensor.items():
        tensor = state[held]
        if tensor.ndim == 3 and EXPERT.fullmatch(many[0]):
            places = _experts(held, tensor, many, shapes, rank=rank, num_workers=num_workers)
        else:
            ordered = _in_order(many, orders)
            places = _stacked(held, tensor, ordered, shapes, rank=rank, num_workers=num_workers)
        located |= dict(places)
    return located


def _in_order(names: Sequence[str], orders: Sequence[Sequence[str]]) -> list[str]:
    """Return the weights of one merged tensor in the order in which vLLM merges them; empty if it
    is unknown."""
    if len(names) == 1:
        return list(names)
    for order in orders:
        pieces = {piece: name for name in names for piece in name.split(".") if piece in order}
        if len(pieces) == len(names):
            return [pieces[piece] for piece in order if piece in pieces]
    return []


def _stacked(
    held: str,
    tensor: Tensor,
    names: Sequence[str],
    shapes: Mapping[str, Shape],
    *,
    rank: int,
    num_workers: int,
) -> Iterator[tuple[str, Place]]:
    """Yield the places of weights that are stacked along the rows of ``tensor``."""
    table = as_table(tensor)
    num_rows, num_columns = table.shape
    sizes = [_size(shapes[name]) for name in names]
    rows = [size[0] for size in sizes]
    if len(names) == 1 and sizes[0] == (num_rows, num_workers * num_columns):
        yield names[0], Place(held, table, 0, rank * num_columns)  # split by columns
        return
    if any(size[1] != num_columns for size in sizes):
        return
    if len(names) == 1 and rows[0] <= num_rows * num_workers and rows[0] != num_rows:
        begin = rank * num_rows  # split by rows, and padded at the end
        yield names[0], Place(held, table[: max(0, rows[0] - begin)], begin, 0)
        return
    if sum(rows) == num_rows:
        split = 1
    elif sum(rows) == num_rows * num_workers and not any(n % num_workers for n in rows):
        split = num_workers
    else:
        return
    parts = [n // split for n in rows]
    ends = accumulate(parts)
    for name, count, end in zip(names, parts, ends, strict=True):
        begin = rank * count if split > 1 else 0
        yield name, Place(held, table[end - count : end], begin, 0)


def _experts(
    held: str,
    tensor: Tensor,
    names: Sequence[str],
    shapes: Mapping[str, Shape],
    *,
    rank: int,
    num_workers: int,
) -> Iterator[tuple[str, Place]]:
    """Yield the places of single experts in ``tensor``: [E, 2 I, H] (gate, then up) or [E, H, I],
    where I is split over the workers."""
    for name in names:
        match = EXPERT.fullmatch(name)
        size = _size(shapes[name])
        if match is None or match["expert"] is None or len(shapes[name]) != 2:
            continue
        of_expert = tensor[int(match["expert"])]
        num_rows, num_columns = of_expert.shape
        if match["stem"] in SECOND_PROJECTION:
            if size == (num_rows, num_columns * num_workers):
                yield name, Place(held, of_expert, 0, rank * num_columns)
        elif match["stem"] in _FIRST_HALF | _SECOND_HALF:
            half = num_rows // 2
            begin = half if match["stem"] in _SECOND_HALF else 0
            if size == (half * num_workers, num_columns):
                yield name, Place(held, of_expert[begin : begin + half], rank * half, 0)


def _size(shape: Shape) -> tuple[int, int]:
    """Return rows and columns of a weight, whose axes after the first count as one."""
    return (shape[0] if shape else 1), math.prod(shape[1:])
