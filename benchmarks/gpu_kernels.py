"""The step ``kernels`` of benchmarks/gpu_session.py: FlashAttention over segment lengths
(``burnish/models/flash.py``), which ``train.attention: flash`` uses, and log-probs
(``gpu_head.py``).

First its operators: their arguments, their results against plain matmuls in fp64 (grouped heads,
windows, unequal lengths, empty segments), the merge of a prefix part and an own part with its
gradients against dense attention, and whether two passes have the same bits. Then its time beside
that of masked scaled-dot-product attention, which ``sdpa`` uses: one layer of Qwen3-0.6B, with all
copies that Burnish makes. TFLOP/s count the needed pairs of tokens, and a backward as 2.5 forwards.
On a CPU (``--tiny``) the operators are the plain matmuls themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpu_checks import about
from gpu_head import head_kernels
from gpu_model import Group, milliseconds
from gpu_report import Report, Setup
from gpu_speed import rl_cases, sft_cases
from torch import Tensor
from torch.nn import attention as torch_attention

import burnish.models.flash_reference as reference
from burnish.models.attention import packed_attention, plan_segments
from burnish.models.attention_kernel import try_newer
from burnish.models.cache_attention import Options
from burnish.models.flash import (
    FlashSwitch,
    flash_attention,
    flash_plan,
    has_kernel,
    schema_problem,
)
from burnish.models.flash_merge import fused_merge
from burnish.models.flash_versions import (
    TITLES,
    Newer,
    activation_problem,
    newer_for,
    registered,
    select,
)
from burnish.models.gpu import set_up_gpu
from burnish.models.sdpa import kernels_of
from burnish.models.segments import Segment
from burnish.train.row_layout import RowSize, place_rows, segments_of

HEADS = (16, 8)
DIM = 128
MOST_ERROR = 0.02
"""Largest error of bf16 results, of the largest result: about four roundings."""
CUDNN = "cuDNN, a call per row, rounded to 512"
BACKWARD = 2.5
"""FLOPs of a backward pass of attention, in forward passes: five matmuls instead of two."""

Tensors = tuple[Tensor, Tensor, Tensor]


def kernels(setup: Setup, report: Report) -> None:
    """Check and measure FlashAttention over segment lengths."""
    set_up_gpu(torch.device(setup.device))
    report.add(
        about=about(setup, torch),
        schema=str(torch.ops.aten._flash_attention_forward.default._schema),
        schema_backward=str(torch.ops.aten._flash_attention_backward.default._schema),
        active=registered() or "torch's own",
        merge=merge_of(torch.device(setup.device)),
    )
    problem = schema_problem()
    if problem is not None:
        report.problem(problem)
    with operators(setup):
        errors = _correctness(setup, report)
        head = head_kernels(setup, report)
        lines = _times(setup, report)
        lines += _newer_flash(setup, report)
        _elementwise(setup, report)
        equal = _repeatability(setup, report)
    said = f"largest error {max(errors, default=0):.1e}; equal bits of two passes: {equal}"
    report.summary("; ".join([said, *head, *lines]))


def operators(setup: Setup) -> AbstractContextManager[None]:
    """Return a context in which the device has the operators."""
    return nullcontext() if has_kernel(setup.device) else reference.on_cpu()


def newer_problem(setup: Setup) -> tuple[str, Newer | None]:
    """Return why torch's own FlashAttention stays, and None; or an empty text, and the name of the
    installed one, which takes its place."""
    if setup.tiny:
        return "FlashAttention 3 or 4 is not active: on a CPU", None
    name = newer_for(kernels_of(torch.device(setup.device)))
    if name is None:
        return "there is no FlashAttention 3 or 4 for this card", None
    problem = activation_problem(name)
    problem = problem or try_newer(name, torch.device(setup.device), "bf16", DIM, 2, window=True)
    select(None)
    return (f"{TITLES[name]} is not active: {problem}", None) if problem else ("", name)


def _newer_flash(setup: Setup, report: Report) -> list[str]:
    """Check and time FlashAttention 3 or 4 if it is installed. Return its lines."""
    problem, name = newer_problem(setup)
    report.add(newer_flash=problem or f"{name} is active")
    if name is None:
        return [problem]
    worst, lines = 0.0, []
    for case, groups, window in merges(tiny=setup.tiny):
        with report.case(f"{name}: {case}"):
            worst = max(worst, *check_merge(setup, groups, window, newer=name).values())
    for case, groups in micro_batches(tiny=setup.tiny):
        with report.case(f"{name}: {case}"):
            both = _time(setup, report, (case, groups), name)
            lines.append(f"{name} {both:.2f} ms")
    select(None)
    if worst > MOST_ERROR:
        report.problem(f"{name}: error {worst:.2g} of shared prefixes")
    return [f"{name} active, largest error {worst:.1e}", *lines]


def merge_of(device: torch.device) -> str:
    """Return what merges attention with shared prefixes."""
    fused = None if device.type == "cpu" else fused_merge(device, torch.bfloat16, HEADS[0], DIM)
    return "PyTorch's operations" if fused is None else "Triton kernel"


# ---- correctness -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call of the operators."""

    name: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: tuple[int, int] = HEADS
    dim: int = DIM
    causal: bool = True
    window: int | None = None


def calls(*, tiny: bool) -> list[Call]:
    """Return calls of every kind that training makes."""
    s = 16 if tiny else 1
    q, k = (tuple(-(-n // s) for n in x) for x in ((130, 300, 1, 257), (200, 300, 64, 700)))
    return [
        Call("causal", q, q),
        Call("causal, equal heads", q, q, heads=(4, 4)),
        Call("causal, 7 heads per key/value head, size 64", q, q, heads=(14, 2), dim=64),
        Call("causal, size 256", q, q, heads=(4, 1), dim=256),
        Call("causal, size 80", q, q, heads=(4, 2), dim=80),
        Call("window of 64", q, q, window=64 // s),
        Call("window of 64, more keys", q, k, window=64 // s),
        Call("no mask", q, k, causal=False),
        Call("no mask, empty segments", (q[0], q[1], 0, 5), (k[0], 0, k[2], 7), causal=False),
    ]


def _correctness(setup: Setup, report: Report) -> list[float]:
    errors = []
    for call in calls(tiny=setup.tiny):
        with report.case(call.name):
            errors.append(_row(report, call.name, check_call(setup, call)))
    for name, groups, window in merges(tiny=setup.tiny):
        with report.case(name):
            errors.append(_row(report, name, check_merge(setup, groups, window)))
    return errors


def _row(report: Report, name: str, found: dict[str, float]) -> float:
    """Report relative errors. Return the largest."""
    report.row("FlashAttention, largest error of the largest value", call=name, **found)
    largest = max(found.values())
    if not largest <= MOST_ERROR:
        report.problem(f"{name}: error {largest:.2g} of the largest value, at most {MOST_ERROR}")
    return largest


def check_call(setup: Setup, call: Call) -> dict[str, float]:
    """Return the error of each result of the operators against plain matmuls in fp64."""
    counts = (sum(call.queries), sum(call.keys))
    *qkv, grad = randoms(setup, counts, call.heads, call.dim)
    ends = [
        torch.tensor([0, *n], device=setup.device).cumsum(0).int()
        for n in (call.queries, call.keys)
    ]
    causal = call.causal and call.window is None
    lengths = (*ends, max(call.queries), max(call.keys), 0.0, causal)
    options: dict[str, Any] = {"scale": call.dim**-0.5}
    if call.window is not None:
        options |= {"window_size_left": call.window - 1, "window_size_right": 0}
    aten = torch.ops.aten
    out, lse, *_ = aten._flash_attention_forward(*qkv, *lengths, False, **options)
    unused = torch.zeros(2, dtype=torch.uint64, device=setup.device), torch.empty(0).to(out)
    # Rows without keys have an infinite log-sum-exp, which merged ones never are.
    finite = torch.where(lse.isinf(), 0.0, lse)
    grads = aten._flash_attention_backward(grad, *qkv, out, finite, *lengths, *unused, **options)
    wide = [x.double() for x in qkv]
    plain: Any = reference
    out64, lse64, *_ = plain.forward(*wide, *lengths, False, **options)
    saved = (*wide, out64, lse64, *lengths, *unused)
    grads64 = plain.backward(grad.double(), *saved, **options)
    has_keys = ~lse64.isinf()
    pairs = [(out, out64), (lse[has_keys], lse64[has_keys]), *zip(grads, grads64, strict=True)]
    return _errors(("output", "lse", "dq", "dk", "dv"), pairs)


def merges(*, tiny: bool) -> list[tuple[str, tuple[Group, ...], int | None]]:
    """Return groups of rows with shared prompts, and windows."""
    s = 16 if tiny else 1
    short = (Group(320 // s, (192 // s, 16, 400 // s)), Group(1, (64, 40)), Group(64, (80,)))
    return [
        ("shared prefixes", short, None),
        ("shared prefixes, window of 128", short, 128 // s),
    ]


def check_merge(
    setup: Setup, groups: Sequence[Group], window: int | None, *, newer: Newer | None = None
) -> dict[str, float]:
    """Return the error of attention with shared prefixes, against dense attention in fp64."""
    segments = segments_for(groups)
    total = segments[-1].q_end
    *qkv, grad = randoms(setup, (total, total), HEADS, DIM)
    switch = FlashSwitch(may_fall_back=False, newer=newer)
    plan = flash_plan(segments, torch.device(setup.device), switch)
    ours = with_gradients(
        lambda x: flash_attention(plan, x, scale=DIM**-0.5, window=window), qkv, grad
    )
    wide = [x.double() for x in qkv]
    expected = with_gradients(lambda x: dense(segments, x, window), wide, grad.double())
    return _errors(("output", "dq", "dk", "dv"), list(zip(ours, expected, strict=True)))


def _errors(names: Sequence[str], pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return the largest difference of each pair, of the largest value; NaN if one is NaN."""
    return {
        name: float((x.double() - y).abs().max() / y.abs().max())
        for name, (x, y) in zip(names, pairs, strict=True)
    }


def dense(segments: Sequence[Segment], qkv: Tensors, window: int | None) -> Tensor:
    """Return the attention of each segment by itself, with copies of its prefix."""
    query, key, value = qkv
    outputs = []
    for s in segments:
        before, own = (s.prefix_start, s.prefix_end), (s.q_start, s.q_end)
        at = torch.cat([torch.arange(*x, device=query.device) for x in (before, own)])
        k, v = (x[at].repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[s.q_start : s.q_end], k) * DIM**-0.5
        q_at = torch.arange(s.q_len, device=query.device)[:, None] + s.prefix_len
        k_at = torch.arange(s.k_len, device=query.device)
        hidden = k_at > q_at
        if window is not None:
            hidden |= k_at <= q_at - window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs)


# ---- inputs ------------------------------------------------------------------------------------


def segments_for(groups: Sequence[Group]) -> list[Segment]:
    """Return the segments of groups, as training lays them out."""
    rows = [
        RowSize(group.prompt + response, group.prompt, number)
        for number, group in enumerate(groups)
        for response in group.responses
    ]
    return segments_of(place_rows(rows, "shared_prefix"))


def randoms(
    setup: Setup, counts: tuple[int, int], heads: tuple[int, int], dim: int
) -> list[Tensor]:
    """Return query, key, value, and the gradient of the output. ``counts``: queries and keys."""
    torch.manual_seed(0)
    dtype = torch.float32 if setup.tiny else torch.bfloat16
    (queries, keys), (q_heads, kv_heads) = counts, heads
    shapes = ((queries, q_heads), (keys, kv_heads), (keys, kv_heads), (queries, q_heads))
    return [torch.randn(*shape, dim, device=setup.device, dtype=dtype) for shape in shapes]


def with_gradients(
    attention: Callable[[Tensors], Tensor], qkv: Sequence[Tensor], grad: Tensor
) -> list[Tensor]:
    """Return the output of ``attention`` and its gradients of query, key and value."""
    query, key, value = (x.detach().clone().requires_grad_() for x in qkv)
    out = attention((query, key, value))
    out.backward(grad)
    found = [query.grad, key.grad, value.grad]
    return [out.detach(), *(x for x in found if x is not None)]


# ---- repeatability and time --------------------------------------------------------------------


def micro_batches(*, tiny: bool) -> list[tuple[str, tuple[Group, ...]]]:
    """Return one micro-batch of each case of the steps ``rl`` and ``sft``."""
    short, long, _ = rl_cases(tiny=tiny)
    ragged = sft_cases(tiny=tiny)[1]
    return [
        ("RL, 1 prompt x 8, rows of 1.5k to 3.3k", short.groups[:1]),
        ("RL, 1 prompt x 4, rows of 4k to 16k", long.groups[:1]),
        ("SFT, rows of 8k, 6k and 2k", ragged.groups[:3]),
    ]


def _repeatability(setup: Setup, report: Report) -> str:
    """Report which results of two passes have equal bits. Return that without settings."""
    _, groups = micro_batches(tiny=setup.tiny)[0]
    found = {}
    for deterministic in (False, True):
        with report.case(f"two passes, deterministic={deterministic}"), fixed(deterministic):
            run = layer(setup, groups, flash=True)
            first, second = run(), run()
            names = ("output", "dq", "dk", "dv")
            equal = {n: torch.equal(x, y) for n, x, y in zip(names, first, second, strict=True)}
            found[deterministic] = ", ".join(n for n, same in equal.items() if same) or "none"
            report.row("Equal bits of two passes", deterministic=deterministic, **equal)
    return found.get(False, "not measured")


@contextmanager
def fixed(deterministic: bool) -> Iterator[None]:
    """Run with or without torch's deterministic algorithms."""
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False  # costs time, and changes nothing here
    torch.use_deterministic_algorithms(deterministic)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def layer(
    setup: Setup,
    groups: Sequence[Group],
    *,
    flash: bool,
    backward: bool = True,
    newer: Newer | None = None,
) -> Callable[[], list[Tensor]]:
    """Return the attention of one layer as a function: output, and gradients if ``backward``."""
    segments = segments_for(groups)
    total = segments[-1].q_end
    *qkv, grad = randoms(setup, (total, total), HEADS, DIM)
    positions = torch.cat(
        [torch.arange(s.prefix_len, s.k_len, device=setup.device) for s in segments]
    )
    switch = FlashSwitch(may_fall_back=False, newer=newer) if flash else None
    plan = plan_segments(segments, positions, flash=switch)
    options = Options(layer=0, scale=DIM**-0.5, window=None, dropout=0.0, softcap=None)
    leaves = tuple(x.requires_grad_(backward) for x in qkv)

    def run() -> list[Tensor]:
        for leaf in leaves:
            leaf.grad = None
        out = packed_attention(plan, (leaves[0], leaves[1], leaves[2]), options)
        if not backward:
            return [out]
        out.backward(grad)
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    return run


def cudnn_rows(
    setup: Setup, groups: Sequence[Group], *, backward: bool
) -> Callable[[], list[Tensor]]:
    """Return the attention of rows that share no prompt by cuDNN. Lengths are rounded up to few
    different ones; padded keys come last, so a causal call needs no mask."""
    step = 8 if setup.tiny else 512
    calls = []
    for group in groups:
        length = -(-group.tokens // step) * step
        tensors = randoms(setup, (length, length), HEADS, DIM)
        *qkv, grad = (x.transpose(0, 1)[None].contiguous() for x in tensors)
        calls.append(([x.requires_grad_(backward) for x in qkv], grad))
    backend = torch_attention.SDPBackend
    used = backend.MATH if setup.tiny else backend.CUDNN_ATTENTION

    def run() -> list[Tensor]:
        outputs = []
        with torch_attention.sdpa_kernel(used):
            for (query, key, value), grad in calls:
                out = torch.nn.functional.scaled_dot_product_attention(
                    query, key, value, is_causal=True, enable_gqa=True
                )
                if backward:
                    torch.autograd.grad(out, [query, key, value], grad)
                outputs.append(out.detach())
        return outputs

    return run


def _elementwise(setup: Setup, report: Report) -> None:
    """Report a layer's norm and SwiGLU, forward and backward, as they are and compiled. (Tiny: as
    they are.)"""
    tokens, hidden, inner = (32, 16, 32) if setup.tiny else (16_384, 1024, 3072)
    dtype = torch.bfloat16
    states, gate, up = (
        torch.randn(tokens, n, device=setup.device, dtype=dtype).requires_grad_()
        for n in (hidden, inner, inner)
    )
    weight = torch.ones(hidden, device=setup.device, dtype=dtype).requires_grad_()

    def operations(states: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        wide = states.float()
        normed = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(
            dtype
        )
        return normed.sum() + (torch.nn.functional.silu(gate) * up).sum()

    ways: dict[str, Callable[..., Tensor]] = {"eager": operations}
    if not setup.tiny:
        ways["compiled"] = torch.compile(operations)
    for name, run in ways.items():
        with report.case(f"element-wise, {name}"):
            ms, peak = milliseconds(
                setup,
                lambda f=run: torch.autograd.grad(f(states, gate, up), [states, gate, up, weight]),  # type: ignore[misc]
            )
            report.row("Norm and SwiGLU of 16k tokens", by=name, both_ms=ms, peak_MB=peak)


def _times(setup: Setup, report: Report) -> list[str]:
    """Report the time of one layer by kernel. Return one line per micro-batch."""
    lines = []
    for name, groups in micro_batches(tiny=setup.tiny):
        taken: dict[str, float] = {}
        kernels = ["flash", "sdpa", "flash, deterministic"]
        if all(len(group.responses) == 1 for group in groups):
            kernels.append(CUDNN)
        for kernel in kernels:
            with report.case(f"{name}: {kernel}"):
                taken[kernel] = _time(setup, report, (name, groups), kernel)
        if {"flash", "sdpa"} <= taken.keys():
            ratio = taken["sdpa"] / taken["flash"]
            lines.append(f"{name}: {taken['flash']:.2f} ms, {ratio:.2f} x sdpa")
            report.summary("; ".join(lines))
    return lines


def _time(setup: Setup, report: Report, rows: tuple[str, Sequence[Group]], kernel: str) -> float:
    """Report forward, forward and backward, and memory of one layer. Return the milliseconds of
    both passes."""
    name, groups = rows
    make = partial(cudnn_rows if kernel == CUDNN else layer, setup, groups)
    if kernel != CUDNN:
        newer = kernel if kernel in TITLES else None
        make = partial(make, flash=kernel != "sdpa", newer=newer)
    with fixed("deterministic" in kernel):
        forward, _ = milliseconds(setup, make(backward=False))
        both, peak = milliseconds(setup, make(backward=True))
    pairs = sum(group.pairs for group in groups)
    flops = 4.0 * HEADS[0] * DIM * pairs * (1 + BACKWARD)
    report.row(
        "One layer's attention",
        rows=name,
        kernel=kernel,
        tokens=sum(group.tokens for group in groups),
        forward_ms=forward,
        both_ms=both,
        TFLOP_per_s=flops / both / 1e9,
        peak_MB=peak,
    )
    return both
