"""Linear layers with frozen 4-bit weights: NF4 of QLoRA (arXiv 2305.14314), through bitsandbytes.

A layer keeps packed 4-bit codes and one scale per block of 64 entries. Its ``weight`` is computed
from them on every access, in the compute dtype. Every pass, with or without gradients, multiplies
with that matrix, so log-probs in training and in sampling agree, and a merged weight is the
dequantized weight plus the adapter's delta.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from burnish.models.auto_class import other_parts
from burnish.models.half_linear import linear, wide_matmul
from burnish.models.paths import ModelError

log = logging.getLogger("burnish")

BLOCK = 64
"""Entries that share a scale."""
SCALE_BLOCK = 256
"""Scales that share a scale of their own, with double quantization."""


class Nf4Layer(nn.Module):
    """The packed weight of a layer, and the tensors that its codes are multiplied with."""

    packed: nn.Parameter  # [entries / 2, 1] uint8; [entries / 2 / itemsize, 1] in another dtype
    full_shape: tuple[int, ...]
    compute_dtype: torch.dtype
    scales: Tensor  # [entries / 64] fp32; uint8 with double quantization
    levels: Tensor  # [16] fp32
    scale_offset: Tensor | None
    scale_scales: Tensor | None  # [entries / 64 / 256] fp32
    scale_levels: Tensor | None  # [256] fp32

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dequantized weight [O, I] ([I, O] of a Conv1D), in the compute dtype. Frozen."""
        return self.dequantized(self.packed)

    def dequantized(self, packed: Tensor) -> Tensor:
        """Return the weight of the codes ``packed``, without gradient."""
        from bitsandbytes.functional import QuantState, dequantize_4bit

        nested = None
        if self.scale_scales is not None:
            nested = QuantState(
                absmax=self.scale_scales,
                blocksize=SCALE_BLOCK,
                code=self.scale_levels,
                dtype=torch.float32,
            )
        state = QuantState(
            absmax=self.scales,
            shape=torch.Size(self.full_shape),
            code=self.levels,
            blocksize=BLOCK,
            quant_type="nf4",
            dtype=self.compute_dtype,
            offset=self.scale_offset,
            state2=nested,
        )
        codes = packed.detach().contiguous().view(torch.uint8).view(-1, 1)
        weight: Tensor = dequantize_4bit(codes, state)
        return weight

    def store_as(self, dtype: torch.dtype) -> None:
        """Keep the bytes of the codes as numbers of ``dtype``, in place.

        FSDP2 casts parameters to the compute dtype when it gathers them. Codes that already have
        that dtype are copied bit by bit.
        """
        self.packed.data = self.packed.data.view(-1).view(dtype).view(-1, 1)


class Nf4Linear(Nf4Layer, nn.Linear):  # type: ignore[override]
    """A linear layer with frozen NF4 weights."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply the layer: [..., I] -> [..., O]."""
        out: Tensor = _Product.apply(inputs, self.packed, self)
        return out if self.bias is None else out + self.bias


class Nf4Conv1D(Nf4Layer, Conv1D):  # type: ignore[misc]
    """GPT-2's linear layer, whose weight is [I, O], with frozen NF4 weights."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: [..., I] -> [..., O]."""
        out: Tensor = _Product.apply(x, self.packed, self)
        return out + self.bias


class _Product(torch.autograd.Function):
    """inputs [..., I] x weight -> [..., O]. Saves the packed weight, not the dequantized one."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, packed: Tensor, layer: Nf4Layer) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.layer = layer
        return linear(inputs, _as_linear(layer, layer.dequantized(packed)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        (packed,) = ctx.saved_tensors
        weight = _as_linear(ctx.layer, ctx.layer.dequantized(packed))
        if weight.dtype == torch.float16 and weight.device.type == "cpu":
            flat = wide_matmul(grad.reshape(-1, grad.shape[-1]), weight).to(grad.dtype)
            return flat.view(*grad.shape[:-1], weight.shape[1]), None, None
        return grad @ weight, None, None


def _as_linear(layer: Nf4Layer, weight: Tensor) -> Tensor:
    """Return ``weight`` as [O, I]."""
    return weight.T if isinstance(layer, Nf4Conv1D) else weight


def quantized_layers(model: nn.Module) -> dict[str, Nf4Layer]:
    """Return the layers of ``model`` with NF4 weights, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Nf4Layer)}


def packed_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters that hold 4-bit codes and not numbers."""
    return {f"{name}.packed" if name else "packed" for name in quantized_layers(model)}


def is_quantizable(layer: nn.Module) -> bool:
    """Return whether the weight of ``layer`` alone can be NF4: a plain linear layer whose codes are
    a multiple of four bytes."""
    plain = type(layer) in (nn.Linear, Conv1D)
    return plain and cast(Tensor, layer.weight).numel() % BLOCK == 0


def layers_to_quantize(model: Any) -> list[Any]:
    """Return the layers of ``model`` that :func:`quantize` replaces: in a composite model, those
    of its language model."""
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    head, others = model.get_output_embeddings(), re.compile(other_parts(model) or "(?!)")
    return [
        layer
        for name, layer in model.named_modules()
        if layer is not head and is_quantizable(layer) and uses[id(layer.weight)] == 1
        if others.fullmatch(name) is None
    ]


def num_scale_bytes(entries: int, *, double: bool) -> float:
    """Return the bytes of the scales and levels of a weight with this number of entries."""
    blocks = entries / BLOCK
    if not double:
        return 4 * blocks + 64
    return blocks + 4 * math.ceil(blocks / SCALE_BLOCK) + 64 + 1024 + 4


@torch.no_grad()
def quantize(model: Any, *, double: bool, device: torch.device | str) -> None:
    """Replace the weights of the linear layers of ``model`` by NF4 codes on ``device``, in place.

    The output projection, embeddings, norms, fused experts, layers that share a weight and
    subclasses with a forward of their own keep their weights. ``double`` also quantizes the scales
    to 8 bits. Raises ModelError if bitsandbytes is missing or no layer can be quantized.
    """
    require_bitsandbytes()
    layers = layers_to_quantize(model)
    if not layers:
        raise ModelError(
            f"model.lora.quantization=nf4: {type(model).__name__} has no plain linear layer whose "
            "weights can be quantized; remove model.lora.quantization"
        )
    for layer in layers:
        _quantize_layer(layer, double=double, device=device)
    left = [
        (name, p)
        for name, p in model.named_parameters()
        if p.ndim == 3 and not name.endswith(".packed")
    ]
    if left:
        size = sum(p.numel() for _, p in left) / 1e9
        log.warning(
            "model.lora.quantization=nf4 does not quantize fused expert weights: %d tensors (%.3fe9"
            " entries, e.g. %s) stay in %s",
            *(len(left), size, left[0][0], left[0][1].dtype),
        )


def require_bitsandbytes() -> None:
    """Raise ModelError if bitsandbytes cannot be imported."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise ModelError(
            f"model.lora.quantization=nf4 needs bitsandbytes ({error}); install it with: pip "
            "install 'burnish[quant]', or remove model.lora.quantization"
        ) from error


def _quantize_layer(layer: Any, *, double: bool, device: torch.device | str) -> None:
    from bitsandbytes.functional import quantize_4bit

    weight: Tensor = layer.weight
    codes, state = quantize_4bit(
        weight.detach().to(device).contiguous(),
        blocksize=BLOCK,
        compress_statistics=double,
        quant_type="nf4",
    )
    del layer._parameters["weight"]
    layer.full_shape, layer.compute_dtype = tuple(weight.shape), weight.dtype
    layer.packed = nn.Parameter(codes, requires_grad=False)
    tensors = {"scales": state.absmax, "levels": state.code}
    nested = state.state2
    more = {"scale_offset": None, "scale_scales": None, "scale_levels": None}
    if nested is not None:
        more = {
            "scale_offset": state.offset,
            "scale_scales": nested.absmax,
            "scale_levels": nested.code,
        }
    for name, tensor in (tensors | more).items():
        layer.register_buffer(name, tensor, persistent=False)
    layer.__class__ = Nf4Conv1D if isinstance(layer, Conv1D) else Nf4Linear
