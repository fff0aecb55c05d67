"""Choose one layer of each type from the fields of a config.

Configs distinguish layers in several ways: a list with one entry per layer, a list of layer
numbers, a number of first or last layers, or a period. Each such pattern assigns a mark to every
layer. Layers with the same marks have the same type. The first layer of each type is kept, in
order, and every field is rewritten for the remaining layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

Fields = dict[str, Any]

COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_blocks",
    "num_decoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "encoder_layers",
    "num_layers_per_stack",
)
"""Fields with a number of layers. The first one present in a config is that of its decoder."""
_LISTS = (
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "attention_layers",
    "attn_layers",
    "indexer_types",
    "no_rope_layers",
    "moe_layer_freq",
    "layer_rope_theta",
    "num_attention_heads_per_layer",
    "activation_sparsity_pattern",
    "hybrid_layer_pattern",
)
_NUMBERS = (
    "attn_layer_indices",
    "full_attn_idxs",
    "hybrid_layer_ids",
    "cross_attention_layers",
    "moe_layers",
    "ple_layer_ids",
    "mlp_only_layers",
    "local_layer_ids",
    "mtp_local_layer_ids",
)
_FROM_ONE = ("ple_layer_ids",)
"""Fields that count layers from 1."""
_FIRST = ("first_k_dense_replace", "num_dense_layers", "num_hash_layers", "max_window_layers")
_LAST = ("num_kv_shared_layers",)
_PERIODS = (
    ("attn_layer_period", "attn_layer_offset"),
    ("expert_layer_period", "expert_layer_offset"),
)
_CYCLES = ("block_types",)
MAX_LAYERS = 8
"""If a config has more layer types than this, types without a new value in any pattern are
dropped."""
_MANY = 6  # from this many layers, any list with one entry per layer counts as a pattern


@dataclass(frozen=True)
class _Pattern:
    """A field, or group of fields, by which a config distinguishes its layers."""

    marks: list[Hashable]
    """One mark per layer. Layers of the same type have equal marks."""
    write: Callable[[Fields, list[int]], None]
    """(fields, kept layers) -> None: rewrite the fields for the kept layers, in place."""


def keep_layers(fields: Fields) -> Fields:
    """Return ``fields`` with only the first layer of each type, and at least two layers.

    Fields that describe layers in an unknown way are left unchanged.
    """
    new = dict(fields)
    count = num_layers(fields)
    if count == 0:
        return new
    patterns = _patterns(fields, count)
    layers = _chosen([p.marks for p in patterns], count)
    for name in COUNTS:
        if isinstance(fields.get(name), int) and fields[name] > 0:
            new[name] = len(layers) if fields[name] == count else min(2, fields[name])
    for pattern in patterns:
        pattern.write(new, layers)
    return new


def num_layers(fields: Fields) -> int:
    """Return the number of (decoder) layers in a config's fields, 0 if it has none."""
    for name in COUNTS:
        if isinstance(fields.get(name), int):
            return int(fields[name])
    return len(fields.get("layers_block_type") or ())


def _chosen(marks: list[list[Hashable]], count: int) -> list[int]:
    types: list[tuple[Hashable, ...]] = [tuple(m[i] for m in marks) for i in range(count)]
    layers = [i for i, mark in enumerate(types) if types.index(mark) == i]
    if len(layers) > MAX_LAYERS:  # keep those with a value that no earlier layer has
        seen: set[tuple[int, Hashable]] = set()
        with_new_values = []
        for i in layers:
            values = set(enumerate(types[i]))
            if not values <= seen:
                with_new_values.append(i)
            seen |= values
        layers = with_new_values[:MAX_LAYERS]
    if len(layers) == 1:
        layers = list(range(min(2, count)))
    return layers


def _patterns(fields: Fields, count: int) -> list[_Pattern]:
    patterns = []
    for name, value in fields.items():
        if isinstance(value, list) and _one_per_layer(name, value, count):
            patterns.append(_list(name, value))
        elif name in _NUMBERS and isinstance(value, list):
            patterns.append(_numbers(name, value, count))
        elif name in _FIRST and isinstance(value, int):
            patterns.append(_first(name, value, count))
        elif name in _LAST and isinstance(value, int):
            patterns.append(_last(name, value, count))
        elif name in _CYCLES and isinstance(value, list) and value:
            patterns.append(_list(name, [value[i % len(value)] for i in range(count)]))
    for period, offset in _PERIODS:
        if fields.get(period):
            patterns.append(_period((period, offset), fields, count))
    if fields.get("decoder_sparse_step"):
        patterns.append(_sparse_step(fields, count))
    if fields.get("moe_layer_interval"):
        patterns.append(_interval(fields, count))
    if fields.get("per_layer_config"):
        patterns.append(_overrides(fields["per_layer_config"], count))
    return patterns


def _one_per_layer(name: str, value: list[Any], count: int) -> bool:
    if len(value) != count or any(isinstance(v, (list, dict)) for v in value):
        return False
    return name in _LISTS or (count >= _MANY and name not in _NUMBERS)


def _list(name: str, value: list[Any]) -> _Pattern:
    def write(new: Fields, layers: list[int]) -> None:
        new[name] = [value[i] for i in layers]
        if name == "attention_layers" and "attention_types" in new:  # the short form of the same
            new["attention_types"] = [[new[name], 1]]

    return _Pattern(list(value), write)


def _numbers(name: str, value: list[int], count: int) -> _Pattern:
    first = 1 if name in _FROM_ONE else 0

    def write(new: Fields, layers: list[int]) -> None:
        new[name] = [j for j, i in enumerate(layers, first) if i + first in value]

    return _Pattern([i + first in value for i in range(count)], write)


def _first(name: str, value: int, count: int) -> _Pattern:
    def write(new: Fields, layers: list[int]) -> None:
        new[name] = sum(i < value for i in layers)

    return _Pattern([i < value for i in range(count)], write)


def _last(name: str, value: int, count: int) -> _Pattern:
    def write(new: Fields, layers: list[int]) -> None:
        new[name] = sum(i >= count - value for i in layers)

    return _Pattern([i >= count - value for i in range(count)], write)


def _period(names: tuple[str, str], fields: Fields, count: int) -> _Pattern:
    period, offset = fields[names[0]], fields.get(names[1]) or 0
    marks = [(i - offset) % period == 0 for i in range(count)]

    def write(new: Fields, layers: list[int]) -> None:
        new[names[0]], new[names[1]] = _find_period([marks[i] for i in layers])

    return _Pattern(list(marks), write)


def _find_period(marks: list[bool]) -> tuple[int, int]:
    """Return the (period, offset) that selects exactly the marked layers.

    If no period fits, return one that selects only the first marked layer.
    """
    size = len(marks)
    for period in range(1, size + 2):
        for offset in range(period):
            if [i % period == offset for i in range(size)] == marks:
                return period, offset
    return size, marks.index(True)


def _sparse_step(fields: Fields, count: int) -> _Pattern:
    step = fields["decoder_sparse_step"]
    marks = [(i + 1) % step == 0 for i in range(count)]

    def write(new: Fields, layers: list[int]) -> None:
        dense = [j for j, i in enumerate(layers) if not marks[i]]
        new["decoder_sparse_step"] = 1
        new["mlp_only_layers"] = sorted({*(new.get("mlp_only_layers") or ()), *dense})

    return _Pattern(list(marks), write)


def _interval(fields: Fields, count: int) -> _Pattern:
    step = fields["moe_layer_interval"]
    start, end = fields["moe_layer_start_index"], fields["moe_layer_end_index"]
    end = count - 1 if end is None or end < 0 else end
    marks = [(i + 1) % step == 0 and start <= i <= end for i in range(count)]

    def write(new: Fields, layers: list[int]) -> None:
        sparse = [j for j, i in enumerate(layers) if marks[i]] or [len(layers)]
        new["moe_layer_interval"] = 1
        new["moe_layer_start_index"], new["moe_layer_end_index"] = sparse[0], sparse[-1]

    return _Pattern(list(marks), write)


def _overrides(value: dict[str, Any], count: int) -> _Pattern:
    by_layer = {int(i): overrides for i, overrides in value.items()}

    def write(new: Fields, layers: list[int]) -> None:
        new["per_layer_config"] = {
            str(j): dict(by_layer[i]) for j, i in enumerate(layers) if i in by_layer
        }

    return _Pattern([str(by_layer.get(i)) for i in range(count)], write)
