"""Attention of a packed row by FlashAttention, without masks and without copies of keys and values.

PyTorch's operators ``aten::_flash_attention_forward`` and ``_flash_attention_backward`` compute
segments of different lengths in one call: query segment i, of the queries ``[cq[i], cq[i + 1])``,
attends to key segment i. Fewer key/value heads than query heads are read in place. They are the
operators below ``torch.nn.attention.varlen``, whose own arguments changed from release to release.

A response that shares its prompt attends to two places, the prompt and itself. Each is one part:

* own part: every segment attends causally to its own tokens;
* prefix part: all segments that share a prefix are one segment of queries, with the prefix as keys
  and no mask. Tokens between them are segments without keys, or without queries.

With the outputs o_a, o_b and log-sum-exps l_a, l_b of the parts, the attention to both is
``o = e^(l_a - l) o_a + e^(l_b - l) o_b`` with ``l = log(e^l_a + e^l_b)``. The gradient is the sum
of those of the parts, each computed by the operator **from the merged o and l**: then
``e^(score - l)`` are the weights of the entire softmax, and ``grad . o`` its correction. This is
exact. (Differentiating through the merge is not: the operator ignores the gradient of the
log-sum-exp.)

A row without keys has the log-sum-exp +inf in one release of FlashAttention and -inf in another, so
rows are merged by segment, never by value.

A layer with a sliding window that is shorter than a prefix and its response gathers the end of the
prefix that the window can reach, for each response, and computes one part.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from burnish.errors import BurnishError
from burnish.models.cache_attention import Options
from burnish.models.flash_merge import merge
from burnish.models.flash_versions import TITLES, Newer, select
from burnish.models.gpu import KernelHangsError
from burnish.models.kept_results import keep
from burnish.models.sdpa import fits_flash
from burnish.models.segments import Segment
from burnish.oom import is_out_of_memory
from burnish.tensors import upload

log = logging.getLogger("burnish")

QKV = tuple[Tensor, Tensor, Tensor]
T = TypeVar("T")


class FlashError(BurnishError, RuntimeError):
    """FlashAttention operators that do not do what this module relies on, or a call that they
    cannot compute."""


# ---- the operators -----------------------------------------------------------------------------

_LENGTHS = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal")
_KEYWORDS = {"scale", "window_size_left", "window_size_right"}
_SCHEMAS: dict[str, tuple[tuple[str, ...], int]] = {
    "_flash_attention_forward": (
        ("query", "key", "value", *_LENGTHS, "return_debug_mask"),
        5,
    ),
    "_flash_attention_backward": (
        ("grad_out", "query", "key", "value", "out", "logsumexp", *_LENGTHS, "rng_state", "unused"),
        3,
    ),
}
"""Operator -> (its positional arguments, number of results)."""


def schema_problem() -> str | None:
    """Return why this torch's operators cannot be called, or None if they can."""
    for name, (positional, results) in _SCHEMAS.items():
        packet: Any = getattr(torch.ops.aten, name, None)  # house: ok torch makes it at this read
        if packet is None:
            return f"torch {torch.__version__} has no operator aten::{name}"
        schema = packet.default._schema
        names = tuple(a.name for a in schema.arguments if not a.kwarg_only)
        keywords = {a.name for a in schema.arguments if a.kwarg_only}
        required = {
            a.name for a in schema.arguments if a.kwarg_only and not a.has_default_value()
        } - _KEYWORDS
        known = names == positional and keywords >= _KEYWORDS and not required
        if not known or len(schema.returns) != results:
            return f"torch {torch.__version__} has other arguments of aten::{name}: {schema}"
    return None


def has_kernel(device_type: str) -> bool:
    """Return whether the operators have a kernel for devices of this type."""
    key = {"cuda": "CUDA", "cpu": "CPU"}.get(device_type)
    find = torch._C._dispatch_has_kernel_for_dispatch_key
    return key is not None and all(find(f"aten::{name}", key) for name in _SCHEMAS)


@dataclass(frozen=True)
class Lengths:
    """Lengths of the segments of one call."""

    queries: Tensor  # [S + 1] int32: begin of each query segment; the end of the last
    keys: Tensor  # [S + 1] int32
    max_queries: int
    max_keys: int


@dataclass(frozen=True)
class _Part:
    """One call of the operators: its segments and what a query reads of its keys. Without
    ``causal`` it reads all. Causal attention is aligned at the ends of both."""

    lengths: Lengths
    causal: bool
    window: int | None = None

    def options(self, scale: float) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of both operators from ``cum_seq_q`` to ``is_causal``, and their
        keywords."""
        n = self.lengths
        windowed = self.window is not None
        causal = self.causal and not windowed
        keywords: dict[str, Any] = {"scale": scale}
        if windowed:
            assert self.window is not None
            keywords |= {"window_size_left": self.window - 1, "window_size_right": 0}
        return (n.queries, n.keys, n.max_queries, n.max_keys, 0.0, causal), keywords

    def forward(self, qkv: QKV, scale: float) -> tuple[Tensor, Tensor]:
        """Return the attention [M, heads, dim] and the log-sum-exp [heads, M] of the scores."""
        lengths, keywords = self.options(scale)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(*qkv, *lengths, False, **keywords)
        expected = (qkv[0].shape[1], qkv[0].shape[0])
        if tuple(lse.shape) != expected:
            raise FlashError(
                f"aten::_flash_attention_forward returned a log-sum-exp {list(lse.shape)} instead "
                f"of {list(expected)} [heads, tokens]; use train.attention=sdpa"
            )
        return out, lse

    def backward(
        self, grad: Tensor, qkv: QKV, merged: tuple[Tensor, Tensor], scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value. ``merged``: output and log-sum-exp over
        all parts."""
        lengths, keywords = self.options(scale)
        device = grad.device
        no_dropout = (
            torch.zeros(2, dtype=torch.uint64, device=device),
            torch.empty(0, device=device),
        )
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            grad, *qkv, *merged, *lengths, *no_dropout, **keywords
        )
        return grads


@dataclass
class FlashSwitch:
    """Switch of FlashAttention for the passes of one model, shared by all its plans."""

    may_fall_back: bool
    """True if another attention may be used when the operators raise (``train.attention:
    auto``)."""
    newer: Newer | None = None
    """Implementation whose kernels the operators have (``flash_versions.py``). None: torch's own,
    which also replace one that raised."""
    on: bool = True
    """False after the operators raised: later passes do not use them."""
    declined: set[int] = field(default_factory=set)
    """Layers with calls that the operators do not compute."""
    fallbacks: int = 0
    """Number of times that kernels raised and others took their place."""

    def run(self, compute: Callable[[], T], qkv: QKV) -> T:
        """Return the result of calls of the operators with this model's kernels, or with torch's
        own after those of :attr:`newer` raised."""
        select(self.newer)
        if self.newer is None:
            return compute()
        try:
            return compute()
        except Exception as error:  # whatever the package raises
            hangs = isinstance(error, KernelHangsError)  # of the merge, at its first call
            if not self.may_fall_back or is_out_of_memory(error) or hangs:
                raise
            log.warning(
                "%s raised an error, so this model uses torch's own FlashAttention from now on. "
                "The call: %s. The error: %s: %s",
                TITLES[self.newer],
                _shapes(qkv),
                type(error).__name__,
                error,
            )
        self.newer, self.fallbacks = None, self.fallbacks + 1
        select(None)
        return compute()

    def failed(self, error: RuntimeError, layer: int, qkv: QKV) -> None:
        """Switch off after the operators raised ``error`` in a layer, with one warning, or raise it
        again."""
        if not self.may_fall_back or is_out_of_memory(error):
            raise error
        if not self.on:
            return
        self.on, self.fallbacks = False, self.fallbacks + 1
        log.warning(
            "FlashAttention raised an error in layer %d, so this model uses torch's "
            "scaled-dot-product attention from now on. The call: %s. The error: %s",
            layer,
            _shapes(qkv),
            error,
        )

    def decline(self, problem: str, layer: int, qkv: QKV) -> None:
        """Leave a call of a layer to torch's attention, because of a ``problem``. The first one is
        logged; with ``train.attention: flash`` it is an error."""
        where = f"layer {layer} (the call: {_shapes(qkv)})"
        if not self.may_fall_back:
            raise FlashError(f"train.attention=flash: {where}: {problem}; use auto or sdpa")
        if not self.declined:
            log.warning(
                "FlashAttention is not used in %s: %s. Torch's scaled-dot-product attention "
                "computes it, and other layers like it",
                where,
                problem,
            )
        self.declined.add(layer)


def _shapes(qkv: QKV) -> str:
    shapes = ", ".join(str(list(x.shape)) for x in qkv)
    return f"query, key and value {shapes} in {qkv[0].dtype}"


# ---- segments ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calls:
    """How one layer is computed."""

    own: _Part
    prefix: _Part | None = None
    reads_prefix: Tensor | None = None  # [M] bool: rows that the prefix part computes
    k_index: Tensor | None = None  # keys of the own part, if they are gathered


@dataclass(frozen=True)
class FlashPlan:
    """Segments of a packed row as FlashAttention reads them. They cover the row exactly once."""

    segments: tuple[Segment, ...]
    device: torch.device
    switch: FlashSwitch
    _calls: dict[int | None, Calls] = field(default_factory=dict, compare=False)
    _failed: set[int] = field(default_factory=set, compare=False)
    """Layers in which the operators raised. The others keep them for this pass, because a layer
    that is recomputed for backward must save the same tensors again."""

    def calls(self, window: int | None) -> Calls:
        """Return the calls of a layer with a sliding window of that many tokens, or None. All
        layers share them."""
        if window is not None and window >= max(s.k_len for s in self.segments):
            window = None
        if window not in self._calls:
            self._calls[window] = self._make(window)
        return self._calls[window]

    def takes(self, qkv: QKV, options: Options) -> bool:
        """Return whether the operators compute this call. If not, torch's own kernels do."""
        problem = call_problem(qkv, options)
        if problem is not None:
            self.switch.decline(problem, options.layer, qkv)
        takes = problem is None and options.layer not in self._failed
        if not takes:
            select(None)
        return takes

    def failed(self, error: RuntimeError, qkv: QKV, options: Options) -> None:
        """Leave a layer to torch's attention after the operators raised ``error``, or raise it
        again (:meth:`FlashSwitch.failed`)."""
        self.switch.failed(error, options.layer, qkv)
        self._failed.add(options.layer)

    def _make(self, window: int | None) -> Calls:
        shared = [s for s in self.segments if s.prefix_len]
        if window is not None and any(s.k_len > window for s in shared):
            return self._gathered(window)
        lengths = [s.q_len for s in self.segments]
        own = _Part(self._lengths(lengths, lengths), True, window)
        if not shared:
            return Calls(own)
        queries, keys = prefix_lengths(self.segments)
        reads = torch.tensor(np.repeat([k > 0 for k in keys], queries))
        prefix = _Part(self._lengths(queries, keys), False)
        return Calls(own, prefix, upload(reads, self.device))

    def _gathered(self, window: int) -> Calls:
        """Return one call in which each segment has copies of the last ``window - 1`` tokens of its
        prefix before its own."""
        before = [min(s.prefix_len, window - 1) for s in self.segments]
        pieces = []
        for s, count in zip(self.segments, before, strict=True):
            pieces += [torch.arange(s.prefix_end - count, s.prefix_end)]
            pieces += [torch.arange(s.q_start, s.q_end)]
        queries = [s.q_len for s in self.segments]
        keys = [s.q_len + count for s, count in zip(self.segments, before, strict=True)]
        own = _Part(self._lengths(queries, keys), True, window)
        return Calls(own, k_index=upload(torch.cat(pieces), self.device))

    def _lengths(self, queries: Sequence[int], keys: Sequence[int]) -> Lengths:
        begins = torch.tensor([[0, *itertools.accumulate(n)] for n in (queries, keys)])
        both = upload(begins.int(), self.device)
        # If the longest query segment has one token, FlashAttention 2 reads heads as tokens and
        # takes the number of segments for that of tokens.
        return Lengths(both[0], both[1], max(2, *queries), max(keys))


def flash_plan(segments: Sequence[Segment], device: torch.device, switch: FlashSwitch) -> FlashPlan:
    """Return the plan for segments that cover a packed row exactly once."""
    return FlashPlan(tuple(sorted(segments, key=lambda s: s.q_start)), device, switch)


def prefix_lengths(segments: Sequence[Segment]) -> tuple[list[int], list[int]]:
    """Return the lengths of query and key segments of the prefix part.

    Neighbors with the same prefix are one query segment. Prefixes are in the order of their
    queries, and the rest of the row lies between them: queries without keys, and keys without
    queries.

    >>> group = [Segment(0, 5), Segment(5, 3, 0, 2), Segment(8, 4, 0, 2), Segment(12, 1)]
    >>> prefix_lengths(group)  # 5 queries without keys; 7 with 2 keys; 11 keys without queries
    ([5, 7, 1, 0], [0, 2, 0, 11])
    """
    queries: list[int] = []
    keys: list[int] = []
    q_done = k_done = 0

    def add(q: int, k: int) -> None:
        if q or k:
            queries.append(q)
            keys.append(k)

    shared = (s for s in segments if s.prefix_len)
    for (start, end), group in itertools.groupby(shared, lambda s: (s.prefix_start, s.prefix_end)):
        members = list(group)
        gaps = any(a.q_end != b.q_start for a, b in itertools.pairwise(members))
        if gaps or start < k_done:
            raise ValueError("segments that share a prefix are neighbors, in the prefixes' order")
        add(members[0].q_start - q_done, 0)
        add(0, start - k_done)
        add(members[-1].q_end - members[0].q_start, end - start)
        q_done, k_done = members[-1].q_end, end
    total = segments[-1].q_end
    add(total - q_done, 0)
    add(0, total - k_done)
    return queries, keys


# ---- attention ---------------------------------------------------------------------------------


def call_problem(qkv: QKV, options: Options) -> str | None:
    """Return why the operators do not compute a call, or None if they do."""
    query, _, value = qkv
    if options.softcap is not None:
        return f"its scores are capped at {options.softcap:g}"
    if options.dropout:
        return f"it drops attention weights ({options.dropout:g})"
    if problem := size_problem(query.shape[-1], value.shape[-1]):
        return f"its {problem}"
    if query.device.type != "cpu" and query.dtype not in (torch.float16, torch.bfloat16):
        return "FlashAttention computes in bf16 and fp16 only"
    return None


def size_problem(dim: int, value_dim: int) -> str | None:
    """Return why the operators do not compute heads of these sizes (queries and keys; values), or
    None if they do."""
    if dim % 8 == 0 and fits_flash(dim, value_dim):
        return None
    sizes = f"{dim}" if dim == value_dim else f"{dim} (queries) and {value_dim} (values)"
    return (
        f"attention heads have size {sizes}, and FlashAttention takes equal sizes that are "
        "multiples of 8, up to 192 or from 225 to 256"
    )


def flash_attention(plan: FlashPlan, qkv: QKV, *, scale: float, window: int | None) -> Tensor:
    """Return the attention [M, heads, dim] of packed query [M, heads, dim], key and value
    [M, kv_heads, dim]. Differentiable once."""
    out: Tensor = _FlashAttention.apply(*qkv, plan.calls(window), scale, plan.switch)
    return out


class _FlashAttention(torch.autograd.Function):
    """All calls of a layer. Saves query, key, value, output and log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        calls: Calls,
        scale: float,
        switch: FlashSwitch,
    ) -> Tensor:
        ctx.calls, ctx.scale, ctx.switch = calls, scale, switch
        qkv = (query, key, value)
        out, lse = keep(lambda: switch.run(lambda: _forward(calls, qkv, scale), qkv))
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        qkv, merged = (query, key, value), (out, lse)
        try:
            grads = ctx.switch.run(lambda: _backward(ctx.calls, grad, qkv, merged, ctx.scale), qkv)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                error.add_note(
                    "FlashAttention raised this error in a backward pass, where no other attention "
                    "can take its place; use train.attention=sdpa"
                )
            raise
        return *grads, None, None, None


def _forward(calls: Calls, qkv: QKV, scale: float) -> tuple[Tensor, Tensor]:
    """Return the attention and its log-sum-exp [heads, M] over all parts."""
    query, key, value = qkv
    k, v = _gather((key, value), calls.k_index)
    out, lse = calls.own.forward((query, k, v), scale)
    if calls.prefix is not None:
        assert calls.reads_prefix is not None
        part = calls.prefix.forward(qkv, scale)
        out, lse = merge(part, (out, lse), calls.reads_prefix)
    return out, lse


def _backward(
    calls: Calls, grad: Tensor, qkv: QKV, merged: tuple[Tensor, Tensor], scale: float
) -> QKV:
    """Return the gradients of query, key and value from that of the output."""
    query, key, value = qkv
    k, v = _gather((key, value), calls.k_index)
    dq, dk, dv = calls.own.backward(grad, (query, k, v), merged, scale)
    if calls.k_index is not None:
        del k, v
        dk, dv = (_scatter(d, calls.k_index, key) for d in (dk, dv))
    if calls.prefix is not None:
        part = calls.prefix.backward(grad, qkv, merged, scale)
        for total, addend in zip((dq, dk, dv), part, strict=True):
            total += addend
    return dq, dk, dv


def _gather(kv: tuple[Tensor, Tensor], index: Tensor | None) -> tuple[Tensor, Tensor]:
    return kv if index is None else (kv[0][index], kv[1][index])


def _scatter(grad: Tensor, index: Tensor, like: Tensor) -> Tensor:
    """Return the gradient of a tensor from that of ``tensor[index]``, summed in fp32 or wider."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    total = torch.zeros(like.shape, dtype=wide, device=like.device)
    return total.index_add_(0, index, grad.to(wide)).to(like.dtype)
