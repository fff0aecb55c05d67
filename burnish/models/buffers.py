"""Persistent buffers: tensors of a model's state that are not parameters.

The optimizer does not train buffers. Some never change (``layer_scalar`` of Gemma 4,
``e_score_correction_bias`` of DeepSeek-V3); others change in training passes (running statistics).
Both kinds are included in checkpoints, exports and weight transfers. Non-persistent buffers (rotary
frequencies) are computed from the config and included in none of them.

A buffer keeps its dtype everywhere; it may be fp32 in a bf16 model. Iterators over a model's state
yield it as :class:`torch.nn.Buffer`, so that code that casts weights can skip it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from burnish.host_copies import to_host

log = logging.getLogger("burnish")

BUFFERS = "buffer.safetensors"
"""File of persistent buffers in a role's checkpoint. Absent if the model has no buffers."""


def plain_name(name: str) -> str:
    """Return the name of a parameter or buffer in the model without adapters.

    An adapter wraps its module and adds ``base_layer`` to the names inside it. Wrappers around
    parameters (fused experts) are nested, and each adds ``base_layer`` once.
    """
    return ".".join(part for part in name.split(".") if part != "base_layer")


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Buffer]]:
    """Yield (name in the model without adapters, buffer) for every persistent buffer.

    The tensors share the model's memory.
    """
    for prefix, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is None or leaf in module._non_persistent_buffers_set:
                continue
            name = f"{prefix}.{leaf}" if prefix else leaf
            yield plain_name(name), nn.Buffer(buffer.detach())


def wanted_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a weight is sent or written if ``dtype`` is requested.

    Integers and buffers keep their dtype, as does every weight if ``dtype`` is None.
    """
    if dtype is None or isinstance(tensor, nn.Buffer) or not tensor.is_floating_point():
        return tensor.dtype
    return dtype


@torch.no_grad()
def fill_buffers(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Copy ``tensors`` into the persistent buffers of ``model``.

    ``source`` names the origin of the tensors in messages. Raises ValueError if names or shapes
    differ from the model's.
    """
    model_buffers = dict(persistent_buffers(model))
    if odd := sorted(model_buffers.keys() ^ tensors.keys())[:3]:
        raise ValueError(
            f"{source} is of another model: buffer names differ, e.g. {', '.join(odd)}"
        )
    for name, buffer in model_buffers.items():
        if tensors[name].shape != buffer.shape:
            raise ValueError(
                f"{source} is of another model: the buffer {name} has shape "
                f"{list(tensors[name].shape)} in it and {list(buffer.shape)} in this model"
            )
    for name, buffer in model_buffers.items():
        buffer.copy_(tensors[name])


def buffers_now(model: nn.Module) -> dict[str, Tensor]:
    """Return a CPU copy of the model's persistent buffers.

    A checkpoint written while training continues thus contains their current values.
    """
    return {name: to_host(buffer, copy=True) for name, buffer in persistent_buffers(model)}


def num_buffer_bytes(model: nn.Module) -> int:
    """Return the size of the model's persistent buffers in bytes."""
    return sum(buffer.nbytes for _, buffer in persistent_buffers(model))


def load_buffers(model: nn.Module, folder: Path) -> None:
    """Load the persistent buffers of a role from its checkpoint ``folder``.

    Checkpoints of older versions contain no buffers; the model then keeps its own and a message is
    logged. Raises ValueError if the checkpoint belongs to another model.
    """
    path = folder / BUFFERS
    if path.is_file():
        fill_buffers(model, load_file(path), f"the checkpoint {folder}")
    elif names := [name for name, _ in persistent_buffers(model)]:
        log.info(
            "%s has no buffers (it was written by an older version): %d buffers, e.g. %s, keep "
            "their values from the initial model",
            *(folder, len(names), names[0]),
        )


def replace_buffers(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replace buffers of ``model`` by ``tensors`` of the same names, without changing their
    dtype."""
    for name, tensor in tensors.items():
        prefix, _, leaf = name.rpartition(".")
        model.get_submodule(prefix)._buffers[leaf] = tensor
