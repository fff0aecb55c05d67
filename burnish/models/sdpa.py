"""Torch's scaled-dot-product attention on the kernel that keeps no scores.

On a GPU torch chooses among kernels by the arguments of each call. The flash kernel takes no mask,
and the memory-efficient kernel takes grouped heads (fewer key/value heads than query heads) in some
versions of torch only. If no fused kernel takes a call, torch computes the scores ``[S, heads, Lq,
Lk]`` in fp32 (its "math" kernel), which is gigabytes for long rows. So keys and values are repeated
for every query head when that is what the memory-efficient kernel needs.

The rules were read in torch's ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` (2.9 to
2.14); docs/memory.md lists them. No GPU has confirmed them yet.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Way = Literal["grouped", "repeated", "scores"]
"""The way to compute a call. grouped: a fused kernel takes keys and values as they are. repeated: a
fused kernel takes them after they are repeated for every query head. scores: no kernel does."""

GROUPED_EFFICIENT = (2, 14)
"""First version of torch whose memory-efficient kernel takes grouped heads on CUDA."""


@dataclass(frozen=True)
class Kernels:
    """Facts of a GPU and its torch that decide which attention kernels exist."""

    torch_version: tuple[int, int]
    capability: tuple[int, int]
    """Compute capability, such as (8, 0) for A100."""
    hip: bool = False
    """AMD's build of torch."""


@dataclass(frozen=True)
class Call:
    """Facts of a call that decide which kernel takes it."""

    dtype: torch.dtype
    head_dims: tuple[int, int]
    """Sizes of the heads of queries and keys, and of values."""
    masked: bool
    grouped: bool
    """Fewer key/value heads than query heads."""


def kernels_of(device: torch.device) -> Kernels | None:
    """The kernels of the GPU behind ``device``; None for a CPU, whose kernel takes any call."""
    if device.type != "cuda":
        return None
    return _cuda_kernels(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _cuda_kernels(index: int) -> Kernels:
    capability = torch.cuda.get_device_capability(index)
    return Kernels(installed_torch(), capability, hip=torch.version.hip is not None)


def installed_torch() -> tuple[int, int]:
    """(major, minor) of the torch that is imported."""
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    assert found is not None, f"torch.__version__ is {torch.__version__!r}"
    return int(found[1]), int(found[2])


def way_of(kernels: Kernels | None, call: Call) -> Way:
    """Return how torch computes ``call`` without scores, or that it cannot."""
    if kernels is None:
        return "grouped"
    half = call.dtype in (torch.float16, torch.bfloat16)
    ampere, (dim, value_dim) = kernels.capability >= (8, 0), call.head_dims
    # The flash kernel. For sizes from 193 to 224 it has no backward pass on some GPUs (8.6, 8.9).
    flash = dim == value_dim <= 256 and not 192 < dim <= 224
    if not call.masked and half and ampere and flash:
        return "grouped"
    if not _efficient(kernels, call, half=half, ampere=ampere):
        return "scores"
    takes_groups = kernels.torch_version >= GROUPED_EFFICIENT and not kernels.hip
    return "grouped" if takes_groups or not call.grouped else "repeated"


def _efficient(kernels: Kernels, call: Call, *, half: bool, ampere: bool) -> bool:
    """Return whether the memory-efficient kernel takes format and head sizes of ``call``."""
    if call.dtype == torch.bfloat16 and not ampere:
        return False
    if not half and call.dtype != torch.float32:
        return False
    aligned = 8 if half else 4 if ampere else 1
    return all(dim % aligned == 0 for dim in call.head_dims)


def attend(
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    kernels: Kernels | None,
    **options: Any,
) -> Tensor:
    """[S, heads, Lq, dim] of query [S, heads, Lq, dim], key and value [S, kv_heads, Lk, dim].

    ``mask``: added to the scores, in the queries' format; None: causal. ``kernels``: of the device;
    None: a CPU. ``options``: ``dropout_p`` and ``scale`` of torch's function.
    """
    query, key, value = qkv
    heads, kv_heads = query.shape[1], key.shape[1]
    dims = (query.shape[-1], value.shape[-1])
    call = Call(query.dtype, dims, masked=mask is not None, grouped=heads != kv_heads)
    way = way_of(kernels, call)
    if way == "repeated":
        key, value = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (key, value))
    grouped = call.grouped and way != "repeated"
    # On the GPU torch finds out by itself; elsewhere a plan traces what it would do there.
    traced = way == "scores" and query.device.type != "cuda"
    with sdpa_kernel(SDPBackend.MATH) if traced else nullcontext():
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, enable_gqa=grouped, **options
        )
