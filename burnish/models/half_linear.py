"""fp16 linear layers on a CPU, computed through fp32.

PyTorch's own fp16 matrix products on a CPU without fp16 instructions are 3 to 4 times slower than
its fp32 ones forward, and 15 times forward and backward together (docs/lab-notebook.md). fp16 to
fp32 is exact, so a product of the fp32 forms, rounded once at the end, is what an fp16 product
with fp32 accumulation is. Weights stay in fp16; their fp32 form exists for a moment, a block at a
time. Attention is not here: it stays PyTorch's.

For sampling, where every token reads every weight, see ``rollout/cpu_linear.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Entries of a weight that are fp32 at one time: 16 MiB. Smaller blocks repeat too much work of
# the product, larger ones take memory (an output projection of 152k x 896 would take 545 MB).
BLOCK_ENTRIES = 1 << 22


def use_fp32_products(model: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Let the plain fp16 linear layers of ``model`` on the CPU compute through fp32, for good.

    ``dtype``: what they compute in; None: what their weights are in now (a sharded model keeps
    fp32 weights and gathers fp16 ones). Returns how many were switched; a second call only takes
    new layers (adapters). A layer that is moved to another dtype or device later computes as ever.
    """
    layers = [
        module
        for module in model.modules()
        if type(module) is nn.Linear
        and (dtype or module.weight.dtype) == torch.float16
        and module.weight.device.type == "cpu"
    ]
    for layer in layers:
        layer.__class__ = WideLinear  # (a forward of its own would be a reference to itself)
    return len(layers)


class WideLinear(nn.Linear):
    """A linear layer that computes fp16 on a CPU through fp32."""

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., I] -> [..., O]"""
        return linear(inputs, self.weight, self.bias)


def is_slow_half(tensor: Tensor) -> bool:
    """Return whether products of this tensor go through fp32: it is fp16 and on the CPU."""
    return tensor.dtype == torch.float16 and tensor.device.type == "cpu"


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` [..., I] x [O, I] -> [..., O], through fp32 where that is faster.

    The fp16 results (forward, and the gradients of all three) are the fp32 ones rounded once; from
    65520 they are inf.
    """
    if is_slow_half(inputs) and is_slow_half(weight):
        out: Tensor = _HalfLinear.apply(inputs, weight, bias)
        return out
    return torch.nn.functional.linear(inputs, weight, bias)


def wide_matmul(left: Tensor, weight: Tensor) -> Tensor:
    """[K, O] x [O, I] -> [K, I] in fp32, not rounded to the operands' fp16. Without gradient."""
    out = torch.zeros(left.shape[0], weight.shape[1])
    for rows in _blocks(weight):
        out.addmm_(left[:, rows].float(), weight[rows].float())
    return out


def _wide_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[K, I] x [O, I] -> [K, O] in fp32."""
    wide = inputs.float()
    out = torch.empty(inputs.shape[0], weight.shape[0])
    for rows in _blocks(weight):
        torch.mm(wide, weight[rows].float().T, out=out[:, rows])
    return out if bias is None else out.add_(bias)


def _blocks(weight: Tensor) -> Iterator[slice]:
    """Slices of rows of at most BLOCK_ENTRIES entries (at least one row)."""
    size = max(1, BLOCK_ENTRIES // max(1, weight.shape[1]))
    for begin in range(0, weight.shape[0], size):
        yield slice(begin, begin + size)


class _HalfLinear(torch.autograd.Function):
    """Saves what the plain layer would save: the fp16 input and weight, each only if needed."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        want_input, want_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(inputs if want_weight else None, weight if want_input else None)
        flat = inputs.reshape(-1, weight.shape[1])
        out = _wide_linear(flat, weight, bias).half()
        return out.view(*inputs.shape[:-1], weight.shape[0])

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
