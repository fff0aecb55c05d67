"""Faster linear layers for sampling on a CPU in fp32 and fp16.

A decode step multiplies a few rows with every weight of the model. PyTorch's default fp32 kernel is
much slower per row for few rows than for many; oneDNN's kernel is 1.2 to 1.9 times faster up to 64
rows (docs/lab-notebook.md). In PyTorch, oneDNN is available for fp32 through an inference-only
operator, which is used only while sampling.

fp16 layers use the same operator on fp32 copies of their weights (4 bytes per parameter while
sampling). Results are rounded to fp16 at the same points as in the trainer
(``models/half_linear.py``). Without copies, every token would convert every weight, which takes as
long as the matmuls.
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
    """A linear layer with fp32 weights: its own, or copies if the layer is fp16."""

    layer: nn.Linear
    weight: Tensor
    bias: Tensor | None


def onednn_layers(model: nn.Module, *, bf16: bool = False) -> list[nn.Linear]:
    """Return the plain fp32 and fp16 linear layers of ``model`` on the CPU, which oneDNN can
    compute; with ``bf16`` also those in bf16. Empty if PyTorch is built without oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return []
    dtypes = {torch.float32, torch.float16} | ({torch.bfloat16} if bf16 else set())
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear)
        and type(module) in (nn.Linear, WideLinear)
        and module.weight.dtype in dtypes
        and module.weight.device.type == "cpu"
    ]


def fp32_layers(layers: Sequence[nn.Linear]) -> list[Fp32Layer]:
    """Return ``layers`` with fp32 weights for :func:`onednn_linear`.

    fp16 weights are copied. The copies do not reflect later changes of the weights.
    """
    return [
        Fp32Layer(
            layer,
            layer.weight.detach().float(),
            None if layer.bias is None else layer.bias.detach().float(),
        )
        for layer in layers
    ]


@contextmanager
def onednn_linear(layers: Sequence[Fp32Layer]) -> Iterator[None]:
    """Compute ``layers`` with oneDNN, without gradients, inside the ``with`` block.

    Their previous ``forward`` is restored on exit; an engine may have replaced that of the output
    projection.
    """
    before = [vars(wide.layer).get("forward") for wide in layers]
    for wide in layers:
        wide.layer.forward = partial(_forward, wide)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for wide, forward in zip(layers, before, strict=True):
            del wide.layer.forward
            if forward is not None:
                wide.layer.forward = forward  # type: ignore[method-assign]


def _forward(wide: Fp32Layer, inputs: Tensor) -> Tensor:
    """Return the layer's output. A single row is computed as two: oneDNN gives a row the same bits
    in every product of two or more rows, but not in a product of one (docs/lab-notebook.md)."""
    rows = inputs.float()
    single = inputs.numel() == inputs.shape[-1]
    if single:
        rows = rows.reshape(1, -1).expand(2, -1).contiguous()
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, wide.weight, wide.bias, "none", [], "")
    if single:
        out = out[:1].reshape(*inputs.shape[:-1], -1)
    return out.to(inputs.dtype)
