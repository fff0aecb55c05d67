"""The step ``attention`` of benchmarks/gpu_session.py: the kernel that torch's scaled-dot-product
attention chooses for each kind of call, its time and its memory.

Each call is measured as torch computes it by default and as Burnish makes it: with its settings
(``burnish/models/gpu.py``) and through ``burnish/models/sdpa.py``, whose rules say which calls have
no fused kernel. A rule that the device contradicts is a problem.

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
from typing import Any, Literal

import torch
from gpu_report import Report, Setup
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import burnish.models.sdpa as sdpa
from burnish.config.model import Dtype
from burnish.models.gpu import set_up_gpu
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
class Case:
    """One call: q [rows, heads, queries, dim] of k, v [rows, kv_heads, keys, dim]."""

    kind: str
    mask: Literal["causal", "bool", "additive"]
    dtype: Dtype
    heads: int
    kv_heads: int
    shape: tuple[int, int, int, int]
    """rows, queries, keys, dim"""
    decodes: bool = False
    """A decode step: no gradient, and the query heads of a key/value head are rows."""


def torch_cases(*, tiny: bool) -> list[Case]:
    """Return training passes with and without masks, of grouped and equal heads, and decode
    steps."""
    length, prefix, rows, dim = (16, 8, 2, 16) if tiny else (2048, 1024, 4, 128)
    heads = ((4, 2), (4, 4)) if tiny else ((16, 8), (16, 16))
    dtypes: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")
    found = []
    for dtype, (q, kv) in itertools.product(dtypes, heads):
        equal = Case("equal rows", "causal", dtype, q, kv, (rows, length, length, dim))
        shared = (rows, length, length + prefix, dim)
        found.append(equal)
        for mask in _MASKS:
            found.append(replace(equal, kind="ragged rows", mask=mask))
            found.append(replace(equal, kind="shared prefix", mask=mask, shape=shared))
        one = (4 if tiny else 64, q // kv, length, dim)
        found.append(replace(equal, kind="decode", mask="bool", shape=one, decodes=True))
    return found


_MASKS: tuple[Literal["bool", "additive"], ...] = ("bool", "additive")


def burnish_cases(*, tiny: bool) -> list[Case]:
    """Return the cases that Burnish makes: masks of its training passes are additive."""
    return [case for case in torch_cases(tiny=tiny) if case.mask != "bool" or case.decodes]


def attention(setup: Setup, report: Report) -> None:
    """Measure each case by torch alone, then with Burnish's settings and rules."""
    report.add(settings_of_torch=settings())
    chosen = {"torch": dict[str, int](), "Burnish": dict[str, int]()}
    for case in torch_cases(tiny=setup.tiny):
        with report.case(f"torch: {case}"):
            _count(chosen["torch"], add_row(setup, report, case, by="torch"))
    set_up_gpu(torch.device(setup.device))
    report.add(settings_of_burnish=settings())
    for case in burnish_cases(tiny=setup.tiny):
        with report.case(f"Burnish: {case}"):
            kernel = add_row(setup, report, case, by="Burnish")
            _count(chosen["Burnish"], kernel)
            if not case.decodes and (kernel == "math") != (way_of(case, setup.device) == "scores"):
                report.problem(f"{case}: the kernel is {kernel}, against burnish/models/sdpa.py")
    report.add(chosen=chosen)
    report.summary(
        "; ".join(
            f"{by}: " + ", ".join(f"{count} x {kernel}" for kernel, count in kernels.items())
            for by, kernels in chosen.items()
        )
    )


def _count(kernels: dict[str, int], kernel: str) -> None:
    kernels[kernel] = kernels.get(kernel, 0) + 1


def add_row(setup: Setup, report: Report, case: Case, *, by: str) -> str:
    """Measure and report a case. Return its kernel."""
    found = measure(case, setup.device, by=by)
    row = {"by": by, "call": case.kind, "mask": case.mask, "dtype": case.dtype}
    row["heads"] = f"{case.heads}/{case.kv_heads}"
    row["shape"] = " x ".join(map(str, case.shape))
    report.row("Attention", **row, **found)
    return str(found["kernel"])


def way_of(case: Case, device: str) -> sdpa.Way:
    """Return how ``burnish/models/sdpa.py`` expects the call to be computed."""
    call = sdpa.Call(
        DTYPES[case.dtype],
        (case.shape[3], case.shape[3]),
        masked=case.mask != "causal",
        grouped=case.heads != case.kv_heads,
    )
    return sdpa.way_of(sdpa.kernels_of(torch.device(device)), call)


def settings() -> dict[str, bool]:
    """Return which kernels are enabled."""
    cuda = torch.backends.cuda
    return {
        "flash": cuda.flash_sdp_enabled(),
        "memory-efficient": cuda.mem_efficient_sdp_enabled(),
        "cuDNN": cuda.cudnn_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }


def measure(case: Case, device: str, *, by: str) -> dict[str, Any]:
    """Return kernel, milliseconds, and the peak of memory above the inputs, of forward and
    backward."""
    sync: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    run = prepared(case, device, longer=0, by=by)
    run()  # loads the library
    fresh = prepared(case, device, longer=LONGER, by=by)
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


def prepared(case: Case, device: str, *, longer: int, by: str) -> Callable[[], None]:
    """Return the call as a function, with ``longer`` more tokens than its shape has."""
    dtype, (rows, queries, keys, dim) = DTYPES[case.dtype], case.shape
    queries, keys = queries + (0 if case.decodes else longer), keys + longer
    heads = case.kv_heads if case.decodes else case.heads
    q, k, v = (
        torch.randn(rows, h, n, dim, device=device, dtype=dtype).requires_grad_(not case.decodes)
        for h, n in ((heads, queries), (case.kv_heads, keys), (case.kv_heads, keys))
    )
    mask = mask_of(case, (rows, queries, keys), q)
    kernels = sdpa.kernels_of(q.device)

    def run() -> None:
        for tensor in (q, k, v):
            tensor.grad = None
        if by == "Burnish" and not case.decodes:
            out = sdpa.attend((q, k, v), mask, kernels)
        else:
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, enable_gqa=heads != case.kv_heads
            )
        if not case.decodes:
            out.sum().backward()

    return run


def mask_of(case: Case, shape: tuple[int, int, int], like: Tensor) -> Tensor | None:
    """Return [rows, 1, queries, keys]: True (or 0) if a query may read a key; None if causal.
    Rows get shorter one by one. ``like``: has the device, and the format of an additive mask."""
    if case.mask == "causal":
        return None
    (rows, queries, keys), device = shape, like.device
    if case.decodes:
        reach = torch.arange(keys // 2, keys // 2 + rows, device=device).clamp(max=keys - 1)
        return (torch.arange(keys, device=device) <= reach[:, None])[:, None, None]
    last = torch.arange(queries, device=device)[None] + (keys - queries)
    ends = keys - 1 - torch.arange(rows, device=device)
    reach = last.minimum(ends[:, None])
    mask = (torch.arange(keys, device=device) <= reach[..., None])[:, None]
    if case.mask == "bool":
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(~mask, -torch.inf)


def kernel_of(run: Callable[[], None], device: str) -> str:
    """Return the kernel that ``run`` used, by the operations that the profiler saw."""
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
