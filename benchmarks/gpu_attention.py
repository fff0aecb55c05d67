"""The step ``attention`` of benchmarks/gpu_session.py: the kernel that torch's scaled-dot-product
attention chooses for each call that Burnish makes, its time and its memory.

Kernels are read from the names of the operations that the profiler saw. ``first ms`` is a call at a
length that was not seen before, memory allocation included: libraries that build an execution plan
for each shape pay for it with every micro-batch of ragged rows. ``ms`` is the median of repeated
calls.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpu_model import set_up_device
from gpu_report import Report, Setup
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from burnish.config.model import Dtype
from burnish.models.load import DTYPES

KERNELS = {
    "_scaled_dot_product_flash_attention_for_cpu": "flash (CPU)",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "memory-efficient",
    "_scaled_dot_product_cudnn_attention": "cuDNN",
    "_scaled_dot_product_attention_math": "math",
}
"""Operation -> kernel; the longer names first, of which others are the beginning."""
REPEATS = 5
LONGER = 128
"""Tokens: a length that is as well aligned as the one before."""


@dataclass(frozen=True)
class Call:
    """One call: q [rows, heads, queries, dim] of k, v [rows, kv_heads, keys, dim]."""

    kind: str
    mask: str
    """``causal``, ``bool`` or ``additive``."""
    dtype: Dtype
    heads: int
    kv_heads: int
    shape: tuple[int, int, int, int]
    """rows, queries, keys, dim"""
    backward: bool = True


def calls(*, tiny: bool) -> list[Call]:
    """Training passes with and without masks, of grouped and equal heads; and a decode step."""
    length, prefix, rows = (16, 8, 2) if tiny else (2048, 1024, 4)
    heads = ((4, 2), (4, 4)) if tiny else ((16, 8), (16, 16))
    dim, keys = 16 if tiny else 128, length + prefix
    found = []
    dtypes: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")
    for dtype, (q, kv) in itertools.product(dtypes, heads):
        equal = Call("equal rows", "causal", dtype, q, kv, (rows, length, length, dim))
        found.append(equal)
        for mask in ("bool", "additive"):
            found.append(replace(equal, kind="ragged rows", mask=mask))
            shape = (rows, length, keys, dim)
            found.append(replace(equal, kind="shared prefix", mask=mask, shape=shape))
        one = (4 if tiny else 64, q // kv, length, dim)
        found.append(replace(equal, kind="decode", mask="bool", shape=one, backward=False))
    return found


def attention(setup: Setup, report: Report) -> None:
    """Every call of :func:`calls`, under the settings of Burnish's runtime."""
    report.add(torch_default=settings(torch))
    set_up_device(setup)
    report.add(burnish=settings(torch))
    chosen: dict[str, int] = {}
    for call in calls(tiny=setup.tiny):
        with report.case(str(call)):
            found = measure(call, setup.device)
            chosen[found["kernel"]] = chosen.get(found["kernel"], 0) + 1
            row = {"call": call.kind, "mask": call.mask, "dtype": call.dtype}
            row["heads"] = f"{call.heads}/{call.kv_heads}"
            row["shape"] = " x ".join(map(str, call.shape))
            report.row("Attention", **row, **found)
    report.add(chosen=chosen)
    report.summary(", ".join(f"{count} x {kernel}" for kernel, count in chosen.items()))


def settings(torch: Any) -> dict[str, bool]:
    """Which kernels are switched on."""
    cuda = torch.backends.cuda
    return {
        "flash": cuda.flash_sdp_enabled(),
        "memory-efficient": cuda.mem_efficient_sdp_enabled(),
        "cuDNN": cuda.cudnn_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }


def measure(call: Call, device: str) -> dict[str, Any]:
    """Kernel, milliseconds and the peak of memory beside inputs and outputs, forward and
    backward."""
    sync: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    run = prepared(call, device, longer=0)
    run()  # loads the library
    fresh = prepared(call, device, longer=LONGER)
    first = _milliseconds(fresh, sync)
    taken = [_milliseconds(run, sync) for _ in range(REPEATS)]
    kernel = kernel_of(run, device)
    held = None
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        sync()
        held = (torch.cuda.max_memory_allocated() - before) / 1e6
    return {"kernel": kernel, "first_ms": first, "ms": statistics.median(taken), "peak_MB": held}


def prepared(call: Call, device: str, *, longer: int) -> Callable[[], None]:
    """The call as a function, with ``longer`` more tokens than it says."""
    dtype, (rows, queries, keys, dim) = DTYPES[call.dtype], call.shape
    queries, keys = queries + (longer if call.backward else 0), keys + longer
    grouped = call.heads != call.kv_heads
    heads = call.heads if call.backward else call.kv_heads  # decoding reads a group as rows
    q, k, v = (
        torch.randn(rows, h, n, dim, device=device, dtype=dtype).requires_grad_(call.backward)
        for h, n in ((heads, queries), (call.kv_heads, keys), (call.kv_heads, keys))
    )
    mask = mask_of(call, (rows, queries, keys), q)

    def run() -> None:
        for tensor in (q, k, v):
            tensor.grad = None
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped and call.backward
        )
        if call.backward:
            out.sum().backward()

    return run


def mask_of(call: Call, shape: tuple[int, int, int], like: Tensor) -> Tensor | None:
    """[rows, 1, queries, keys]: True (or 0) where a query may read a key; None if causal. Rows get
    shorter one by one. ``like``: has the device, and the format of an additive mask."""
    if call.mask == "causal":
        return None
    (rows, queries, keys), device = shape, like.device
    if not call.backward:
        reach = torch.arange(keys // 2, keys // 2 + rows, device=device).clamp(max=keys - 1)
        return (torch.arange(keys, device=device) <= reach[:, None])[:, None, None]
    last = torch.arange(queries, device=device)[None] + (keys - queries)
    ends = keys - 1 - torch.arange(rows, device=device)
    reach = last.minimum(ends[:, None])
    mask = (torch.arange(keys, device=device) <= reach[..., None])[:, None]
    if call.mask == "bool":
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(~mask, -torch.inf)


def kernel_of(run: Callable[[], None], device: str) -> str:
    """The kernel that ``run`` used, by the operations that the profiler saw."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as profiled:
        run()
    seen = {event.key.removeprefix("aten::") for event in profiled.key_averages()}
    return next((kernel for name, kernel in KERNELS.items() if name in seen), "not recognized")


def _milliseconds(run: Callable[[], None], sync: Callable[[], None]) -> float:
    sync()
    begun = time.perf_counter()
    run()
    sync()
    return 1e3 * (time.perf_counter() - begun)
