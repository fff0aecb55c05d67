"""Log-probs by Triton kernels (``burnish/models/fused_head.py``), for the step ``kernels`` of
benchmarks/gpu_session.py: errors against fp64, time and rate of each kernel, and the head of a
micro-batch beside PyTorch's operations. On a CPU (``--tiny``) PyTorch's operations take the place
of the kernels.

Rates count each logit once in forward and twice in backward (read, written).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from gpu_model import milliseconds
from gpu_report import Report, Setup
from torch import Tensor

from burnish.models.fused_head import (
    BLOCK,
    BY_TORCH,
    WARPS,
    FusedHead,
    HeadKernels,
    Softmax,
    Transform,
    Upstream,
    accumulates,
    choose_head,
    fused_chunk_tokens,
    triton_kernels,
)
from burnish.models.logit_scaling import UNSCALED, LogitScaling
from burnish.models.logprobs import Head, chunk_tokens, token_logprobs

MOST_ERROR = 1e-5
"""Largest error of log-probs and entropies in nats, and of fp32 gradients, of the largest one."""
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Relative error of a gradient by one rounding."""
SIZES = ((BLOCK, WARPS), (4096, 4), (8192, 8), (8192, 16), (2048, 4))
"""(entries per step, warps) of the kernels that are timed, the ones in use first."""


def head_kernels(setup: Setup, report: Report) -> list[str]:
    """Check and measure the kernels. Return lines for the summary."""
    device = torch.device(setup.device)
    vocabulary, width, tokens = (300, 16, 40) if setup.tiny else (151_936, 1024, 14_336)
    choice = choose_head(device, torch.bfloat16, vocabulary, UNSCALED)
    report.add(head=choice.sentence, addmm_out_dtype=accumulates(device, torch.bfloat16))
    if choice.kernels is None and not setup.tiny:
        report.problem(f"log-probs by {choice.sentence}")
        return []
    kernels = BY_TORCH if choice.kernels is None else choice.kernels
    worst = _errors(setup, report, kernels, vocabulary)
    lines = [f"log-probs, largest error {worst:.1e} nats"]
    _kernel_times(setup, report, kernels, vocabulary)
    with report.case("the head of a micro-batch"):
        lines += _head_times(setup, report, kernels, (tokens, width, vocabulary))
    return lines


def _errors(setup: Setup, report: Report, kernels: HeadKernels, vocabulary: int) -> float:
    """Report the errors of each format, with and without a cap. Return the largest in nats."""
    worst = 0.0
    for dtype, rounding in ROUNDING.items():
        for softcap in (None, 30.0):
            name = f"{str(dtype).removeprefix('torch.')}, softcap {softcap}"
            with report.case(name):
                nats, gradient = _error(setup, kernels, dtype, (vocabulary, softcap))
                good = nats <= MOST_ERROR and gradient <= MOST_ERROR + rounding
                report.row(
                    "Errors of log-probs against fp64",
                    **{"format": name, "nats": nats, "gradient": gradient, "within": good},
                )
                worst = max(worst, nats)
                if not good:
                    report.problem(f"log-probs, {name}: {nats} nats, gradient {gradient}")
    return worst


def _error(
    setup: Setup, kernels: HeadKernels, dtype: torch.dtype, size: tuple[int, float | None]
) -> tuple[float, float]:
    """Return (largest error of log-probs and entropies in nats, of gradients, of the largest)."""
    vocabulary, softcap = size
    torch.manual_seed(0)
    outputs = (3 * torch.randn(16, vocabulary, device=setup.device)).to(dtype)
    targets = torch.randint(0, vocabulary, (16,), device=setup.device)
    upstream = Upstream(*torch.randn(2, 16, device=setup.device))
    leaf = outputs.double().requires_grad_()
    logits = leaf if softcap is None else softcap * (leaf / softcap).tanh()
    log_p = (logits / 0.7).log_softmax(-1)
    logprobs, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    assert upstream.entropy is not None
    loss = (logprobs * upstream.logprobs + entropy * upstream.entropy).sum()
    (expected,) = torch.autograd.grad(loss, leaf)
    softmax, transform = (
        Softmax.empty(outputs, with_entropy=True),
        Transform(LogitScaling(1.0, softcap), 0.7),
    )
    kernels.reduce(outputs, targets, transform, softmax)
    kernels.backward_(outputs, targets, transform, softmax, upstream)
    assert softmax.entropy is not None
    nats = max(
        float((x - y).abs().max())
        for x, y in ((softmax.logprobs, logprobs), (softmax.entropy, entropy))
    )
    return nats, float((outputs.double() - expected).abs().max() / expected.abs().max())


def _kernel_times(setup: Setup, report: Report, kernels: HeadKernels, vocabulary: int) -> None:
    """Report the milliseconds of both kernels on one chunk, by their sizes."""
    rows = 8 if setup.tiny else fused_chunk_tokens(None, vocabulary, 2)
    outputs = torch.randn(rows, vocabulary, device=setup.device, dtype=torch.bfloat16)
    targets = torch.randint(0, vocabulary, (rows,), device=setup.device)
    ones = torch.ones(rows, device=setup.device)
    for block, warps in SIZES[:1] if setup.tiny else SIZES:
        sized = kernels if setup.tiny else triton_kernels(block, warps)
        in_use = (block, warps) == SIZES[0]
        for with_entropy in (True, False) if in_use else (True,):  # each is compiled
            with report.case(f"kernels of {block} entries, {warps} warps"):
                softmax = Softmax.empty(outputs, with_entropy=with_entropy)
                upstream = Upstream(ones, ones if with_entropy else None)
                args = (outputs, targets, Transform(), softmax)
                forward = _time(setup, lambda k=sized, a=args: k.reduce(*a))  # type: ignore[misc]
                backward = _time(
                    setup,
                    lambda k=sized, a=args, u=upstream: k.backward_(*a, u),  # type: ignore[misc]
                )
                report.row(
                    "Kernels of log-probs, one chunk in bf16",
                    **{"entries": block, "warps": warps, "entropies": with_entropy},
                    forward_ms=forward,
                    forward_GB_per_s=outputs.nbytes / forward / 1e6,
                    backward_ms=backward,
                    backward_GB_per_s=2 * outputs.nbytes / backward / 1e6,
                )


def _time(setup: Setup, run: Callable[[], object]) -> float:
    """Return the milliseconds of one of ten calls, which hides the host's share of a launch."""
    return milliseconds(setup, lambda: [run() for _ in range(10)])[0] / 10


def _head_times(
    setup: Setup, report: Report, kernels: HeadKernels, size: tuple[int, int, int]
) -> list[str]:
    """Report forward and backward of the head of a micro-batch, by both paths. Return a line."""
    tokens, width, vocabulary = size
    torch.manual_seed(0)
    dtype = torch.bfloat16
    hidden = torch.randn(tokens, width, device=setup.device, dtype=dtype).requires_grad_()
    weight = (0.02 * torch.randn(vocabulary, width, device=setup.device)).to(dtype)
    weight.requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), device=setup.device)
    plain = Head(weight, chunk_tokens=chunk_tokens(None, setup.device))
    fused = replace(plain, fused=FusedHead(kernels, fused_chunk_tokens(None, vocabulary, 2)))
    taken = {}
    for in_loss in (False, True):
        for name, head in (("PyTorch", plain), ("kernels", fused)):

            def run(head: Head = head, in_loss: bool = in_loss) -> list[Tensor]:
                logprobs, entropy = token_logprobs(hidden, targets, head, with_entropy=True)
                assert entropy is not None
                loss = logprobs.sum() + 0.1 * entropy.sum() if in_loss else logprobs.sum()
                return list(torch.autograd.grad(loss, [hidden, weight]))

            ms, peak = milliseconds(setup, run)
            taken[name, in_loss] = ms
            report.row(
                f"Head of {tokens:,} tokens, forward and backward",
                **{"by": name, "entropies in the loss": in_loss, "ms": ms, "peak_MB": peak},
            )
    if fused.fused is not None and not fused.fused.on:
        report.problem("a kernel raised; the log has its call")
    liger = _liger()
    report.add(liger="not installed (liger_kernel.ops)" if liger is None else "compared")
    for in_loss in () if liger is None else (False, True):

        def run_liger(apply: Any = liger, in_loss: bool = in_loss) -> list[Tensor]:
            result = apply(hidden, weight, targets, 1.0, -100, 1, in_loss)
            nll, entropy = result if in_loss else (result, None)
            loss = -nll.sum() if entropy is None else -nll.sum() + 0.1 * entropy.sum()
            return list(torch.autograd.grad(loss, [hidden, weight]))

        with report.case("the head of Liger"):
            ms, peak = milliseconds(setup, run_liger)
            report.row(
                f"Head of {tokens:,} tokens, forward and backward",
                **{"by": "Liger", "entropies in the loss": in_loss, "ms": ms, "peak_MB": peak},
            )
    ratio = taken["PyTorch", False] / taken["kernels", False]
    return [f"head {taken['kernels', False]:.1f} ms, {ratio:.2f} x PyTorch's operations"]


def _liger() -> Callable[..., Any] | None:
    """Return Liger's function of log-probs and entropies, or None if it is not installed."""
    try:
        ops = import_module("liger_kernel.ops")
    except ImportError:
        return None
    function = vars(ops).get("LigerFusedLinearScaledCrossEntropyFunction")
    return None if function is None else function.apply
