"""Where vLLM stores the weights that a trainer sends: names and places.

A trainer sends a model's state under transformers' names. :class:`HubNames` converts it to the
names and shapes of the model's files on the hub, which vLLM's loaders expect. :func:`held_names`
finds the tensor in which vLLM stores each weight: vLLM merges layers (q, k and v; gate and up)
along the rows, fuses experts and renames prefixes. :func:`places_of` returns the part of a tensor
that must be equal to each weight, value by value: vLLM also pads vocabularies at their end, and
splits tensors evenly over tensor-parallel workers. Weights that vLLM's loader stores in another
order have no known place. This module does not import vllm; its objects are passed as arguments.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, revert_weight_conversion

from burnish.rollout.weights import Shape, as_table

_EXPERT = re.compile(
    r"(?P<layer>.*\.experts)\.(?:(?P<expert>\d+)\.)?"
    r"(?P<stem>gate_up_proj|gate_proj|up_proj|down_proj|w13|w1|w2|w3)"
    r"(?:[._](?P<leaf>weight|bias))?"
)
"""Names of the weights of experts: of one, or of all of a layer."""
_SECOND_PROJECTION = {"down_proj", "w2"}
_LAYER = re.compile(r"^(.*?\.\d+)\.")
_REORDERED = re.compile(r"query_key_value")
"""Weights that loaders convert (Falcon, BLOOM): q, k and v of each head become those of all."""
_FIRST_HALF = {"gate_proj", "w1"}
_SECOND_HALF = {"up_proj", "w3"}


class HubNames:
    """Converts weights of ``model`` to those of its files on the hub.

    For example, fused experts become one weight per expert and projection. For most models the two
    are identical.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        changes = [change for change in conversions if not isinstance(change, PrefixChange)]
        reverse = [change.reverse_transform() for change in changes]
        joins = [
            c for c in reverse if isinstance(c, WeightConverter) and len(c.source_patterns) > 1
        ]
        self._model = model if changes and not joins else None
        model._weight_conversions = changes  # type: ignore[assignment]

    def of(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights in the hub's files that make up ``tensor``."""
        if self._model is None:
            yield name, tensor
        else:
            yield from revert_weight_conversion(self._model, {name: tensor}).items()


def held_names(model: Any, names: Iterable[str]) -> dict[str, str | None]:
    """Return the name of vLLM's tensor that stores each weight in ``names``.

    None: the model drops the weight. Weights without a matching tensor are omitted. ``model`` is
    vLLM's model in a worker.
    """
    first = {id(tensor): name for name, tensor in reversed(list(state_of(model)))}
    state = {name: first[id(t)] for name, t in state_of(model, repeated=True)}
    mappers = [
        (prefix, mapper)
        for prefix, module in model.named_modules()
        if (mapper := getattr(module, "hf_to_vllm_mapper", None)) is not None  # house: ok vLLM's
    ]
    packed = getattr(model, "packed_modules_mapping", None) or {}  # house: ok vLLM's model
    parts = {part: merged for merged, many in packed.items() for part in many}
    held_by_name: dict[str, str | None] = {}
    for name in names:
        candidates = _candidates(name, mappers, parts)
        if not candidates:
            held_by_name[name] = None
        elif (held := next((c for c in candidates if c in state), None)) is not None:
            held_by_name[name] = state[held]
    return held_by_name


def state_of(model: Any, *, repeated: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, then floating-point buffers, of vLLM's model."""
    yield from model.named_parameters(remove_duplicate=not repeated)
    for name, buffer in model.named_buffers(remove_duplicate=not repeated):
        if buffer.is_floating_point():
            yield name, buffer


def _candidates(name: str, mappers: Sequence[tuple[str, Any]], parts: dict[str, str]) -> list[str]:
    """Return the names that vLLM's tensor may have, most likely first; none if a mapper drops the
    weight."""
    names = [name]
    for prefix, mapper in mappers:  # the model's mapper first, then those of its submodules
        start = f"{prefix}." if prefix else ""
        inside = [known.removeprefix(start) for known in names if known.startswith(start)]
        mapped = [mapper.map_name(known) for known in inside]
        if None in mapped:
            return []
        names += [start + known for known in mapped]
    names = list(dict.fromkeys(reversed(names)))
    names += [".".join(parts.get(piece, piece) for piece in known.split(".")) for known in names]
    for known in list(names):
        if match := _EXPERT.fullmatch(known):
            which = "w2" if match["stem"] in _SECOND_PROJECTION else "w13"
            leaf = f"{which}_{match['leaf'] or 'weight'}"
            names += [f"{match['layer']}.{leaf}", f"{match['layer']}.routed_experts.{leaf}"]
    return names


def layer_of(name: str) -> str:
    """Return the part of a name that identifies its layer ('' outside of layers)."""
    match = _LAYER.match(name)
    return match[1] if match else ""


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
    (:func:`held_names`). ``shapes``: of the given weights."""
    packed = getattr(model, "packed_modules_mapping", None) or {}  # house: ok vLLM's model
    orders = [list(parts) for parts in packed.values()]
    state, by_tensor = dict(state_of(model)), dict[str, list[str]]()
    for name, held in names.items():
        if held is not None and not _REORDERED.search(name):
            by_tensor.setdefault(held, []).append(name)
    located: dict[str, Place] = {}
    for held, many in by_tensor.items():
        tensor = state[held]
        if tensor.ndim == 3 and _EXPERT.fullmatch(many[0]):
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
        match = _EXPERT.fullmatch(name)
        size = _size(shapes[name])
        if match is None or match["expert"] is None or len(shapes[name]) != 2:
            continue
        of_expert = tensor[int(match["expert"])]
        num_rows, num_columns = of_expert.shape
        if match["stem"] in _SECOND_PROJECTION:
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
