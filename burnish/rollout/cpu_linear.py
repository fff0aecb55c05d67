"""Faster linear layers for sampling on a CPU in fp32 and fp16.

A decode step multiplies a few rows with every weight of the model. PyTorch's default fp32 kernel
does that at a fraction of its speed on many rows; oneDNN's does it 1.2 to 1.9 times faster up to
64 rows (docs/lab-notebook.md). PyTorch reaches oneDNN for fp32 through one inference-only
operator, used here and only while sampling.

fp16 layers go the same way over fp32 copies of their weights (4 bytes per parameter while
sampling), and round the result to fp16 where the trainer rounds it (``models/half_linear.py``).
Without copies every token would convert every weight, which takes as long as the products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from burnish.models.half_linear import WideLinear


@dataclass(frozen=True)
class Fp32Layer:
    """A linear layer and its weights in fp32: its own, or copies where it is fp16."""

    layer: nn.Linear
    weight: Tensor
    bias: Tensor | None


def onednn_layers(model: nn.Module) -> list[nn.Linear]:
    """The plain linear layers of ``model`` that can be computed by oneDNN: fp32 or fp16, on the
    CPU, and a PyTorch built with it. Empty elsewhere."""
    if not torch.backends.mkldnn.is_available():
        return []
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear)
        and type(module) in (nn.Linear, WideLinear)
        and module.weight.dtype in (torch.float32, torch.float16)
        and module.weight.device.type == "cpu"
    ]


@contextmanager
def fp32_copies(layers: Sequence[nn.Linear]) -> Iterator[list[Fp32Layer]]:
    """``layers`` with fp32 weights for :func:`onednn_linear`. Copies of fp16 weights are made here
    and freed at the end; changes of the weights meanwhile are not seen in them."""
    made = [
        Fp32Layer(
            layer,
            layer.weight.detach().float(),
            None if layer.bias is None else layer.bias.detach().float(),
        )
        for layer in layers
    ]
    try:
        yield made
    finally:
        made.clear()


@contextmanager
def onednn_linear(layers: Sequence[Fp32Layer]) -> Iterator[None]:
    """Inside, ``layers`` compute through oneDNN, without gradients; outside they are as before (an
    engine may have put a forward of its own into the output projection)."""
    before = [vars(wide.layer).get("forward") for wide in layers]
    for wide in layers:
        wide.layer.forward = partial(_forward, wide)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for wide, own in zip(layers, before, strict=True):
            del wide.layer.forward
            if own is not None:
                wide.layer.forward = own  # type: ignore[method-assign]


def _forward(wide: Fp32Layer, inputs: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(
        inputs.float(), wide.weight, wide.bias, "none", [], ""
    )
    return out.to(inputs.dtype)
