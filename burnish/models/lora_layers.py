"""Adapted layers of a model: which there are, what they compute, and their merged weights.

peft is imported where a model has adapters, because its import takes as long as that of torch.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from burnish.models.buffers import persistent_buffers, plain_name
from burnish.models.nf4 import quantized_layers

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

ADAPTER = "default"
"""Name of the adapter in peft's modules."""


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter or to the copy of a saved module."""
    return ".lora_" in name or SAVED_PART in name


def has_adapters(module: nn.Module) -> bool:
    """Return whether ``module`` is, or contains, an adapted layer or a saved module."""
    return any(is_adapter(f".{name}") for name, _ in module.named_parameters())


def adapted_layers(module: nn.Module) -> dict[str, LoraLayer]:
    """Return the adapted layers in ``module`` (itself included, as ``""``), by name."""
    if not has_adapters(module):
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: m for name, m in module.named_modules() if isinstance(m, LoraLayer)}


def saved_modules(module: nn.Module) -> dict[str, ModulesToSaveWrapper]:
    """Return the modules in ``module`` that peft trains and saves in full, by name."""
    if not has_adapters(module):
        return {}
    from peft.utils.other import ModulesToSaveWrapper

    return {name: m for name, m in module.named_modules() if isinstance(m, ModulesToSaveWrapper)}


SAVED_PART = f".modules_to_save.{ADAPTER}."
_ORIGINAL_PART = ".original_module."


def with_dropout(layer: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (inputs [K, I'], weight [O, I'], bias [O] or None) whose product is the output of
    ``layer`` for ``hidden`` [K, I] now.

    An adapter with ``lora_dropout`` in training mode reads other inputs than its base layer: its
    inputs, projected to the rank, are appended to ``hidden``. Otherwise these are ``hidden`` and
    :func:`effective_weight`.
    """
    adapter: Any = adapted_layers(layer).get("")
    dropout: Any = None if adapter is None else adapter.lora_dropout[ADAPTER]
    acts = isinstance(dropout, nn.Dropout) and dropout.training and dropout.p > 0
    if adapter is None or adapter.disable_adapters or not acts:
        return hidden, *effective_weight(layer)
    weight, bias = effective_weight(adapter.get_base_layer())
    down, up = adapter.lora_A[ADAPTER].weight, adapter.lora_B[ADAPTER].weight
    low = nn.functional.linear(dropout(hidden.to(down.dtype)), down) * adapter.scaling[ADAPTER]
    inputs = torch.cat([hidden, low.to(hidden.dtype)], dim=1)
    return inputs, torch.cat([weight, up.to(weight.dtype)], dim=1), bias


def effective_weight(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return (weight [O, I], bias [O] or None) that ``layer`` computes with now, differentiable
    with respect to its adapter or its saved copy.

    Adapters that are disabled do not count. The delta of an adapter [O, I] is materialized.
    """
    if (wrapper := saved_modules(layer).get("")) is not None:
        saved = wrapper.modules_to_save[ADAPTER]
        return effective_weight(wrapper.original_module if wrapper.disable_adapters else saved)
    if (adapted := adapted_layers(layer).get("")) is not None:
        weight, bias = effective_weight(adapted.get_base_layer())
        if adapted.disable_adapters:
            return weight, bias
        delta: Tensor = cast(Any, adapted).get_delta_weight(ADAPTER)
        return weight + delta.to(weight.dtype), bias
    return cast(Tensor, layer.weight), cast(Tensor | None, layer.bias)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapters of ``model`` inside the ``with`` block."""
    layers: list[Any] = [*adapted_layers(model).values(), *saved_modules(model).values()]
    trainable = [p for p in model.parameters() if p.requires_grad]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter in trainable:  # peft's switch also touches requires_grad
            parameter.requires_grad_(True)


def merged_weights(
    model: nn.Module, only: Container[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (HuggingFace name, tensor) for every parameter, then for every persistent buffer.

    Adapters are merged into their base weights in fp32; 4-bit weights are dequantized first. Saved
    modules replace their originals. ``only`` restricts the parameters to these names in ``model``
    (base weights; adapters follow theirs) and skips buffers. None: all.
    """
    adapters, quantized = adapters_by_parameter(model), quantized_layers(model)
    for name, parameter in model.named_parameters():
        if ".lora_" in name or _ORIGINAL_PART in name or (only is not None and name not in only):
            continue
        owner, _, leaf = name.rpartition(".")
        base: Tensor = parameter.detach()
        if leaf == "packed" and owner in quantized:
            name, base = f"{owner}.weight", quantized[owner].weight
        plain = plain_name(name.replace(SAVED_PART, "."))
        if plain not in adapters:
            yield plain, base
            continue
        with torch.no_grad():
            merged = base.float()
            for layer in adapters[plain]:
                merged = _merged(layer, merged)
            yield plain, merged.to(base.dtype)
    if only is None:
        yield from persistent_buffers(model)


def _merged(layer: Any, base: Tensor) -> Tensor:
    """Return the fp32 weight ``base`` with the adapter of ``layer``.

    DoRA scales every output's weights to a trained norm: magnitude x (W + D) / |W + D|.
    """
    merged = base + layer.get_delta_weight(ADAPTER).float()
    if ADAPTER not in (layer.lora_magnitude_vector or ()):
        return merged
    inputs = 0 if layer.fan_in_fan_out else 1
    factor = layer.lora_magnitude_vector[ADAPTER].weight.float() / merged.norm(dim=inputs)
    return merged * factor.unsqueeze(inputs)


def adapters_by_parameter(model: nn.Module) -> dict[str, list[LoraLayer]]:
    """Return the adapters of each adapted parameter, by the parameter's plain name.

    A wrapper around a module adapts the module's ``weight``. A :class:`ParamWrapper` adapts the
    parameter that it names; several of these may be nested around one module.
    """
    adapters: dict[str, list[LoraLayer]] = {}
    if not (layers := adapted_layers(model)):
        return adapters
    from peft.tuners.lora.layer import ParamWrapper

    for name, layer in layers.items():
        leaf = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
        adapters.setdefault(f"{plain_name(name)}.{leaf}", []).append(layer)
    return adapters
