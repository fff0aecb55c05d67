"""fp16 linear layers on a CPU, computed in fp32.

On a CPU without fp16 instructions, PyTorch's fp16 matmuls are 3 to 4 times slower than fp32 ones in
forward, and 15 times in forward plus backward (docs/lab-notebook.md). The cast from fp16 to fp32 is
exact, so an fp32 matmul rounded once at the end equals an fp16 matmul with fp32 accumulation.
Weights stay in fp16 and are cast to fp32 temporarily, one block at a time. Attention still uses
PyTorch's kernels.

For sampling, where every token reads every weight, see ``rollout/local/model.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Entries of a weight cast to fp32 in one block: 16 MiB. Smaller blocks add too much overhead per
# matmul; larger ones take memory (an output projection of 152k x 896 would take 545 MB).
BLOCK_ENTRIES = 1 << 22


def use_fp32_products(model: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Switch the plain fp16 linear layers of ``model`` on the CPU to :class:`WideLinear`, in place.

    ``dtype`` is their compute dtype; None: that of their weights (a sharded model keeps fp32
    weights and gathers fp16 ones). Returns the number of layers switched. Calling it again only
    switches new layers (adapters). A layer moved to another dtype or device later computes as an
    ordinary linear layer.
    """
    layers = [
        module
        for module in model.modules()
        if type(module) is nn.Linear
        and (dtype or module.weight.dtype) == torch.float16
        and module.weight.device.type == "cpu"
    ]
    for layer in layers:
        layer.__class__ = WideLinear  # an instance attribute ``forward`` would be a reference cycle
    return len(layers)


class WideLinear(nn.Linear):
    """A linear layer that computes fp16 products on a CPU in fp32."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply the layer: [..., I] -> [..., O]."""
        return linear(inputs, self.weight, self.bias)


def is_slow_half(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is fp16 on the CPU, so that its products are computed in fp32."""
    return tensor.dtype == torch.float16 and tensor.device.type == "cpu"


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``F.linear`` [..., I] x [O, I] -> [..., O], in fp32 if inputs and weight are slow
    halves (:func:`is_slow_half`).

    The fp16 results (outputs and the gradients of all three arguments) are the fp32 ones rounded
    once; values from 65520 become inf.
    """
    if is_slow_half(inputs) and is_slow_half(weight):
        out: Tensor = _HalfLinear.apply(inputs, weight, bias)
        return out
    return torch.nn.functional.linear(inputs, weight, bias)


def wide_matmul(left: Tensor, weight: Tensor) -> Tensor:
    """Multiply [K, O] x [O, I] -> [K, I] in fp32, without rounding to the operands' fp16. Not
    differentiable."""
    out = torch.zeros(left.shape[0], weight.shape[1])
    for rows in _blocks(weight):
        out.addmm_(left[:, rows].float(), weight[rows].float())
    return out


def _wide_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply [K, I] x [O, I] -> [K, O] in fp32."""
    wide = inputs.float()
    out = torch.empty(inputs.shape[0], weight.shape[0])
    for rows in _blocks(weight):
        torch.mm(wide, weight[rows].float().T, out=out[:, rows])
    return out if bias is None else out.add_(bias)


def _blocks(weight: Tensor) -> Iterator[slice]:
    """Yield slices of rows with at most BLOCK_ENTRIES entries each (at least one row)."""
    size = max(1, BLOCK_ENTRIES // max(1, weight.shape[1]))
    for begin in range(0, weight.shape[0], size):
        yield slice(begin, begin + size)


class _HalfLinear(torch.autograd.Function):
    """Saves the same tensors as a plain layer: the fp16 input and weight, each only if needed."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        want_input, want_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(inputs if want_weight else None, weight if want_input else None)
        flat = inputs.reshape(-1, weight.shape[1])
        out = _wide_linear(flat, weight, bias).view(*inputs.shape[:-1], weight.shape[0])
        return out.half()  # no view, because models may change it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        grad_input = grad_weight = grad_bias = None
        if weight is not None:
            wide = wide_matmul(flat, weight)
            grad_input = wide.half().view(*grad.shape[:-1], weight.shape[1])
        if inputs is not None:
            rows = inputs.reshape(-1, inputs.shape[-1]).float()
            grad_weight = (flat.float().T @ rows).half()
        if ctx.needs_input_grad[2]:
            grad_bias = flat.sum(0, dtype=torch.float32).half()
        return grad_input, grad_weight, grad_bias
