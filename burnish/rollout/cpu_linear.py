"""Faster linear layers for sampling on a CPU in fp32.

A decode step multiplies a few rows with every weight of the model. PyTorch's default fp32 kernel
does that at a fraction of its speed on many rows; oneDNN's does it 1.2 to 1.9 times faster up to
64 rows (docs/lab-notebook.md). PyTorch reaches oneDNN for fp32 through one inference-only
operator, used here and only while sampling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn


def onednn_layers(model: nn.Module) -> list[nn.Linear]:
    """The plain linear layers of ``model`` that can be computed by oneDNN: fp32, on the CPU, and a
    PyTorch built with it. Empty elsewhere."""
    if not torch.backends.mkldnn.is_available():
        return []
    return [
        module
        for module in model.modules()
        if type(module) is nn.Linear
        and module.weight.dtype == torch.float32
        and module.weight.device.type == "cpu"
    ]


@contextmanager
def onednn_linear(layers: Sequence[nn.Linear]) -> Iterator[None]:
    """Inside, ``layers`` compute through oneDNN, without gradients; outside they are as before."""
    for layer in layers:
        layer.forward = partial(_forward, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _forward(layer: nn.Linear, inputs: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(
        inputs, layer.weight, layer.bias, "none", [], ""
    )
    return out
