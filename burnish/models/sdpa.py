"""Torch's scaled-dot-product attention on a fused kernel, which does not materialize the scores.

On a GPU, torch selects a kernel by the arguments of each call. The flash kernel accepts no mask.
The memory-efficient kernel accepts grouped heads (fewer key/value heads than query heads) only in
some versions of torch. If no fused kernel accepts a call, torch computes the scores ``[S, heads,
Lq, Lk]`` in fp32 (its "math" kernel), which takes gigabytes for long rows. Therefore keys and
values are repeated for every query head if the memory-efficient kernel requires it.

The rules come from torch's ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` (2.9 to 2.14);
docs/memory.md lists them. With torch 2.11 on an H200 they hold (tests/gpu/test_gpu_attention.py).
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
"""How a call is computed. ``grouped``: a fused kernel accepts keys and values unchanged.
``repeated``: a fused kernel accepts them after they are repeated for every query head. ``scores``:
no fused kernel accepts the call."""

GROUPED_EFFICIENT = (2, 14)
"""First version of torch whose memory-efficient kernel accepts grouped heads on CUDA."""


@dataclass(frozen=True)
class Kernels:
    """Properties of a GPU and its torch that determine the available attention kernels."""

    torch_version: tuple[int, int]
    capability: tuple[int, int]
    """Compute capability, such as (8, 0) for A100."""
    hip: bool = False
    """True if torch is built for AMD GPUs."""


@dataclass(frozen=True)
class Call:
    """Properties of a call that determine which kernel accepts it."""

    dtype: torch.dtype
    head_dims: tuple[int, int]
    """(head size of queries and keys, head size of values)"""
    masked: bool
    grouped: bool
    """True if there are fewer key/value heads than query heads."""


def kernels_of(device: torch.device) -> Kernels | None:
    """Return the kernels of the GPU ``device``; None for a CPU, whose kernel accepts any call."""
    if device.type != "cuda":
        return None
    return _cuda_kernels(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _cuda_kernels(index: int) -> Kernels:
    capability = torch.cuda.get_device_capability(index)
    return Kernels(installed_torch(), capability, hip=torch.version.hip is not None)


def installed_torch() -> tuple[int, int]:
    """Return the (major, minor) version of the imported torch."""
    match = re.match(r"(\d+)\.(\d+)", torch.__version__)
    assert match is not None, f"torch.__version__ is {torch.__version__!r}"
    return int(match[1]), int(match[2])


def way_of(kernels: Kernels | None, call: Call) -> Way:
    """Return how to compute ``call`` on a fused kernel, or ``scores`` if none accepts it."""
    if kernels is None:
        return "grouped"
    half = call.dtype in (torch.float16, torch.bfloat16)
    ampere = kernels.capability >= (8, 0)
    if not call.masked and half and ampere and fits_flash(*call.head_dims):
        return "grouped"
    if not _efficient(kernels, call, half=half, ampere=ampere):
        return "scores"
    takes_groups = kernels.torch_version >= GROUPED_EFFICIENT and not kernels.hip
    return "grouped" if takes_groups or not call.grouped else "repeated"


def fits_flash(dim: int, value_dim: int) -> bool:
    """Return whether the flash kernel takes heads of these sizes (queries and keys; values)."""
    # It has no backward for head sizes from 193 to 224 on some GPUs (8.6, 8.9).
    return dim == value_dim <= 256 and not 192 < dim <= 224


def _efficient(kernels: Kernels, call: Call, *, half: bool, ampere: bool) -> bool:
    """Return whether the memory-efficient kernel accepts dtype and head sizes of ``call``."""
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
    """Return the attention [S, heads, Lq, dim] of query [S, heads, Lq, dim] and key and value
    [S, kv_heads, Lk, dim].

    ``mask`` is additive, in the queries' dtype; None is causal. ``kernels`` are those of the
    device; None for a CPU. ``options`` are ``dropout_p`` and ``scale`` of torch's function.
    """
    query, key, value = qkv
    heads, kv_heads = query.shape[1], key.shape[1]
    dims = (query.shape[-1], value.shape[-1])
    call = Call(query.dtype, dims, masked=mask is not None, grouped=heads != kv_heads)
    way = way_of(kernels, call)
    if way == "repeated":
        key, value = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (key, value))
    grouped = call.grouped and way != "repeated"
    # On a GPU torch falls back to the math kernel by itself. On other devices (when a memory plan
    # traces a GPU run) the fallback has to be forced.
    traced = way == "scores" and query.device.type != "cuda"
    with sdpa_kernel(SDPBackend.MATH) if traced else nullcontext():
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, enable_gqa=grouped, **options
        )
