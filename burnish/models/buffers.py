"""Persistent buffers: tensors that are part of a model's state and are not parameters.

A buffer is not trained by the optimizer. Some never change (``layer_scalar`` of Gemma 4,
``e_score_correction_bias`` of DeepSeek-V3), some change in training passes (running statistics).
Both kinds belong to checkpoints, exports and weight transfers. Buffers that a model marks as not
persistent (rotary frequencies) are computed from its config and belong to none of them.

A buffer keeps its number format everywhere: it may be fp32 in a bf16 model. Iterators over a
model's state yield it as :class:`torch.nn.Buffer`, so that what casts weights can leave it alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

log = logging.getLogger("burnish")

BUFFERS = "buffer.safetensors"
"""File of persistent buffers in the checkpoint of one role. A model without buffers has none."""


def plain_name(name: str) -> str:
    """Return the name that a parameter or buffer has in the model without adapters.

    An adapter wraps its module and adds ``base_layer`` to the names inside; wrappers around
    parameters (fused experts) are nested and add it once each.
    """
    return ".".join(part for part in name.split(".") if part != "base_layer")


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Buffer]]:
    """Yield (name in the model without adapters, buffer) of every persistent buffer; the tensors
    share the model's memory."""
    for prefix, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            if buffer is None or leaf in module._non_persistent_buffers_set:
                continue
            name = f"{prefix}.{leaf}" if prefix else leaf
            yield plain_name(name), nn.Buffer(buffer.detach())


def wanted_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the format of a weight that is sent or written in ``dtype`` (None: as it is): integers
    and buffers keep theirs."""
    if dtype is None or isinstance(tensor, nn.Buffer) or not tensor.is_floating_point():
        return tensor.dtype
    return dtype


@torch.no_grad()
def fill_buffers(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Copy ``tensors`` into the persistent buffers of ``model``.

    ``source``: of the tensors, for messages. Raises ValueError if names or shapes differ from the
    model's.
    """
    own = dict(persistent_buffers(model))
    if odd := sorted(own.keys() ^ tensors.keys())[:3]:
        raise ValueError(f"{source} is of another model: buffers differ, e.g. {', '.join(odd)}")
    for name, buffer in own.items():
        if tensors[name].shape != buffer.shape:
            raise ValueError(
                f"{source} is of another model: the buffer {name} is {list(tensors[name].shape)} "
                f"there and {list(buffer.shape)} here"
            )
    for name, buffer in own.items():
        buffer.copy_(tensors[name])


def buffers_now(model: nn.Module) -> dict[str, Tensor]:
    """Copy the model's persistent buffers to the CPU, so that a checkpoint that is written while
    training continues holds them as of now."""
    return {
        name: buffer.detach().to("cpu", copy=True).contiguous()
        for name, buffer in persistent_buffers(model)
    }


def num_buffer_bytes(model: nn.Module) -> int:
    """Return the size of a checkpoint's buffers."""
    return sum(buffer.nbytes for _, buffer in persistent_buffers(model))


def load_buffers(model: nn.Module, folder: Path) -> None:
    """Load the persistent buffers of a checkpoint's role. A checkpoint of an older version has
    none: then they stay as they were loaded with the model, and a log line says so.

    Raises ValueError for a checkpoint of another model.
    """
    path = folder / BUFFERS
    if path.is_file():
        fill_buffers(model, load_file(path), f"the checkpoint {folder}")
    elif own := [name for name, _ in persistent_buffers(model)]:
        log.info(
            "%s has no buffers (it was written by an older version): %d buffers, e.g. %s, come "
            "from the model that the run began with",
            *(folder, len(own), own[0]),
        )


def replace_buffers(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Make ``tensors`` the buffers of these names in ``model``, in the format that they have."""
    for name, tensor in tensors.items():
        prefix, _, leaf = name.rpartition(".")
        model.get_submodule(prefix)._buffers[leaf] = tensor
