"""Merge of two parts of an attention by their log-sum-exps (``flash.py``).

On a GPU one Triton kernel reads both outputs once and writes the merged rows in place. PyTorch's
operations, which convert to fp32 in memory, take as long as a third of the attention itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from burnish.models.gpu import KernelHangsError, limited_trial

log = logging.getLogger("burnish")

_WAY_OUT = "uninstall triton (PyTorch's operations then merge), or set train.attention=sdpa"

Part = tuple[Tensor, Tensor]
"""Output [M, heads, dim] and log-sum-exp [heads, M]."""


def merge(prefix: Part, own: Part, reads_prefix: Tensor) -> Part:
    """Return output and log-sum-exp over both parts, in the rows ``reads_prefix`` [M]; those of the
    own part elsewhere. May overwrite the output of the own part."""
    out = own[0]
    fused = fused_merge(out.device, out.dtype, *out.shape[1:]) if out.is_cuda else None
    return (merge_by_torch if fused is None else fused)(prefix, own, reads_prefix)


def merge_by_torch(prefix: Part, own: Part, reads_prefix: Tensor) -> Part:
    """Merge by PyTorch's operations."""
    (out_a, lse_a), (out_b, lse_b) = prefix, own
    lse = torch.where(reads_prefix, torch.logaddexp(lse_a, lse_b), lse_b)
    weight_a, weight_b = ((x - lse).exp().T[..., None] for x in (lse_a, lse_b))
    out = (out_a * weight_a).addcmul_(out_b, weight_b).to(out_b.dtype)
    return torch.where(reads_prefix[:, None, None], out, out_b), lse


@cache
def fused_merge(
    device: torch.device, dtype: torch.dtype, heads: int, dim: int
) -> Callable[[Part, Part, Tensor], Part] | None:
    """Return the merge by the Triton kernel for outputs [M, heads, dim], or None (with a warning)
    if the kernel cannot be built, or differs from :func:`merge_by_torch`."""
    draw = torch.Generator(device).manual_seed(0)
    outs = torch.randn(2, 5, heads, dim, device=device, generator=draw).to(dtype)
    lses = torch.randn(2, heads, 5, device=device, generator=draw)
    reads = torch.tensor([True, False, True, True, False], device=device)
    parts = [(out, lse) for out, lse in zip(outs, lses, strict=True)]
    expected = merge_by_torch(parts[0], parts[1], reads)
    try:
        fused = triton_merge()
        with limited_trial("a small call of the Triton kernel of merges", _WAY_OUT, device):
            results = fused(parts[0], parts[1], reads)
        for x, y in zip(results, expected, strict=True):
            torch.testing.assert_close(x, y)
    except KernelHangsError:
        raise
    except Exception as error:  # whatever a compiler raises
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
        log.warning(
            "the Triton kernel that merges attention with shared prefixes is not used (%s); "
            "PyTorch's operations take longer",
            reason,
        )
        return None
    return fused


def triton_merge() -> Callable[[Part, Part, Tensor], Part]:
    """Return the merge by a Triton kernel. Raises ImportError without Triton."""
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator, unused-ignore]
    def kernel(  # type: ignore[no-untyped-def] # house: ok pointers, strides and sizes  # pragma: no cover
        out_a, out_b, lse_a, lse_b, lse, reads, stride_token, stride_head, tokens,
        HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(0)
        at = tl.arange(0, BLOCK)
        inside = at < HEADS * DIM
        head = at // DIM
        own = tl.load(lse_b + head * tokens + token, mask=inside, other=0.0)
        merged = own
        if tl.load(reads + token):
            prefix = tl.load(lse_a + head * tokens + token, mask=inside, other=0.0)
            larger = tl.maximum(own, prefix)
            merged = larger + tl.log(tl.exp(own - larger) + tl.exp(prefix - larger))
            place = token.to(tl.int64) * stride_token + head * stride_head + at % DIM
            a = tl.load(out_a + place, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(out_b + place, mask=inside, other=0.0).to(tl.float32)
            value = a * tl.exp(prefix - merged) + b * tl.exp(own - merged)
            tl.store(out_b + place, value.to(out_b.dtype.element_ty), mask=inside)
        tl.store(lse + head * tokens + token, merged, mask=inside & (at % DIM == 0))

    def fused(prefix: Part, own: Part, reads_prefix: Tensor) -> Part:
        (out_a, lse_a), (out_b, lse_b) = prefix, own
        tokens, heads, dim = out_b.shape
        if out_a.stride() != out_b.stride() or out_b.stride(2) != 1 or lse_b.stride(1) != 1:
            return merge_by_torch(prefix, own, reads_prefix)
        lse = torch.empty_like(lse_b)
        strides = out_b.stride(0), out_b.stride(1)
        sizes = {"HEADS": heads, "DIM": dim, "BLOCK": triton.next_power_of_2(heads * dim)}
        kernel[(tokens,)](out_a, out_b, lse_a, lse_b, lse, reads_prefix, *strides, tokens, **sizes)
        return out_b, lse

    return fused
