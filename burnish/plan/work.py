"""Work of a pass on one device, counted operation by operation: what its time is made of.

The trace of ``activations.py`` runs the real model on fake tensors, so that all kernels of a pass
are known: products of matrices by their shapes, attention, and every other kernel by the bytes that
it reads and writes. A kernel that computes nothing (a view) does not count. FLOPs of attention
depend on the lengths of the rows, which may differ from those of the trace, and are computed here
from the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from burnish.config.train import Checkpointing
from burnish.models.cache_attention import similar_spans
from burnish.plan.shapes import ModelShape, matrix_flops
from burnish.train.row_layout import Layout, RowSize, place_rows, segments_of


@dataclass(frozen=True)
class Work:
    """Operations of a pass, or of a part of it, without those of attention."""

    matmul_flops: float = 0.0
    bytes: float = 0.0
    """Bytes that all kernels but those of attention read and write."""
    kernels: float = 0.0
    """Kernels that the host launches, those of attention included."""

    def __add__(self, other: Work) -> Work:
        return Work(
            self.matmul_flops + other.matmul_flops,
            self.bytes + other.bytes,
            self.kernels + other.kernels,
        )

    def __mul__(self, factor: float) -> Work:
        return Work(self.matmul_flops * factor, self.bytes * factor, self.kernels * factor)


@dataclass(frozen=True)
class PassWork:
    """Work of a traced pass: of the body, which is proportional to the tokens, and of the log-prob
    head, which is proportional to the tokens that have a log-prob."""

    body: Work = Work()
    head: Work = Work()
    compiled: Work = Work()
    """Work of the body with compiled layers (``train.compile: layers``)."""

    def __add__(self, other: PassWork) -> PassWork:
        return PassWork(
            self.body + other.body, self.head + other.head, self.compiled + other.compiled
        )

    def __mul__(self, factor: float) -> PassWork:
        return PassWork(self.body * factor, self.head * factor, self.compiled * factor)


_NO_KERNEL = frozenset(
    {
        "aten::_unsafe_view",
        "aten::detach",
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::lift_fresh",
        "aten::new_empty",
        "prim::device",
    }
)
"""Operations that launch nothing, although they return new tensors."""


class WorkCounter(TorchDispatchMode):
    """Context manager that counts the work of every operation, on real or fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.in_head = False
        """True while operations are those of the log-prob head."""
        self.counted = PassWork()
        self._run = _Run()

    def __exit__(self, *error: Any) -> None:
        self._end_run()
        super().__exit__(*error)

    def _end_run(self) -> None:
        self.counted += PassWork(compiled=self._run.work())
        self._run = _Run()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return func(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if not func.is_view and name not in _NO_KERNEL:
            work = _work_of(func, name, args, kwargs or {}, out)
            if self.in_head:
                self.counted += PassWork(head=work)
            elif _is_fused(func, name):
                self.counted += PassWork(body=work)
                self._run.add((args, kwargs), out)
            else:
                self._end_run()
                self.counted += PassWork(body=work, compiled=work)
        return out


_FUSED = frozenset(
    {
        "aten::_softmax",
        "aten::_softmax_backward_data",
        "aten::_to_copy",
        "aten::cat",
        "aten::clone",
        "aten::copy_",
        "aten::fill_",
        "aten::mean",
        "aten::new_zeros",
        "aten::slice_backward",
        "aten::split_with_sizes_copy",
        "aten::sum",
        "aten::zeros",
        "aten::zeros_like",
    }
)
"""Operations other than pointwise ones that a compiler fuses with their neighbors."""
KERNELS_OF_RUN = 24 / 15
"""Kernels that the compiler makes of a run, on average: 24 of the 15 runs in a layer of Qwen 3,
forward and backward (``benchmarks/compile_layers.py``, on a CPU)."""


def _is_fused(func: Any, name: str) -> bool:
    return torch.Tag.pointwise in func.tags or name in _FUSED


class _Run:
    """Consecutive operations that a compiler fuses: they read what was there before, and write what
    is left of their results when the run ends."""

    def __init__(self) -> None:
        self.read = 0
        self._seen: Any = WeakIdKeyDictionary()  # storage -> bytes
        self._made: Any = WeakIdKeyDictionary()
        self.empty = True

    def add(self, arguments: Any, results: Any) -> None:
        """Add an operation."""
        self.empty = False
        for tensor in (x for x in tree_leaves(arguments) if isinstance(x, Tensor)):
            storage = tensor.untyped_storage()
            if storage not in self._made and storage not in self._seen:
                self._seen[storage] = True
                self.read += num_bytes_of(tensor)
        for tensor in (x for x in tree_leaves(results) if isinstance(x, Tensor)):
            self._made[tensor.untyped_storage()] = num_bytes_of(tensor)

    def work(self) -> Work:
        """Return the work of the run, which ends now."""
        if self.empty:
            return Work()
        return Work(0.0, float(self.read + sum(self._made.values())), KERNELS_OF_RUN)


def num_bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's entries."""
    return tensor.numel() * tensor.element_size()


def _work_of(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> Work:
    if "attention" in name:
        return Work(kernels=1)
    count_flops = flop_registry.get(func._overloadpacket)
    flops = 0 if count_flops is None else count_flops(*args, **kwargs, out_val=out)
    tensors = {id(x): x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)}
    num_bytes = sum(num_bytes_of(x) for x in tensors.values())
    return Work(float(flops), float(num_bytes), kernels=1)


_WITHOUT_PAIRS = ("linear", "mamba", "conv", "recurrent", "mlp")
"""Beginnings of the layer types that compare no query with all keys."""


@dataclass(frozen=True)
class AttentionWork:
    """FLOPs of attention in one forward pass."""

    exact: float
    """FLOPs of kernels that compute only needed pairs."""
    masked: float
    """FLOPs of kernels that take a mask and compute rectangles."""

    @property
    def total(self) -> float:
        return self.exact + self.masked

    def __mul__(self, factor: float) -> AttentionWork:
        return AttentionWork(self.exact * factor, self.masked * factor)


def attention_work(
    shape: ModelShape, rows: Sequence[RowSize], layout: Layout, *, flash: bool
) -> AttentionWork:
    """Return the FLOPs of attention of one micro-batch in a forward pass.

    A pair of a query and a key takes 4 x heads x head size FLOPs. FlashAttention computes the pairs
    that a query reads. Without it, segments of similar size are rectangles, and need a mask unless
    they are equally long and causal, or the layer has a window.
    """
    flops_of_pair = 4.0 * shape.heads * shape.head_dim
    if not flops_of_pair:
        return AttentionWork(0.0, 0.0)
    if layout == "padded":
        longest = max(row.length for row in rows)
        rectangles = [(len(rows), longest, longest, all(r.length == longest for r in rows))]
        segments = [(row.length, 0) for row in rows]
    else:
        placed = segments_of(place_rows(tuple(rows), layout))
        segments = [(segment.q_len, segment.prefix_len) for segment in placed]
        rectangles = []
        for chosen in similar_spans(placed):
            lengths = {(s.q_len, s.prefix_len) for s in chosen}
            queries, keys = max(s.q_len for s in chosen), max(s.k_len for s in chosen)
            rectangles.append(
                (len(chosen), queries, keys, len(lengths) == 1 and not chosen[0].prefix_len)
            )
    exact = masked = 0.0
    kinds = shape.fields.get("layer_types") or ["attention"] * len(shape.windows)
    for kind, window in zip(kinds, shape.windows, strict=False):
        if kind.startswith(_WITHOUT_PAIRS):
            continue
        if flash:
            exact += flops_of_pair * sum(pairs(q, prefix, window) for q, prefix in segments)
            continue
        for count, queries, keys, plain in rectangles:
            if plain and (window is None or window >= keys):
                exact += flops_of_pair * count * pairs(queries, 0, None)
            else:
                masked += flops_of_pair * count * queries * keys
    return AttentionWork(exact, masked)


def pairs(queries: int, prefix: int, window: float | None) -> float:
    """Return the number of (query, key) pairs of a segment whose queries read a prefix and,
    causally, each other. ``window``: keys that a query reads at most.

    >>> pairs(3, 0, None), pairs(2, 5, None), pairs(4, 0, 2)
    (6.0, 13.0, 7.0)
    """
    everything = queries * prefix + queries * (queries + 1) / 2
    if window is None:
        return everything
    beyond = max(0.0, min(queries, queries + prefix - window))  # queries that see a full window
    first = queries + prefix - window - beyond + 1
    return everything - sum_of_range(first, beyond)


def sum_of_range(first: float, count: float) -> float:
    """Return first + (first + 1) + ... of ``count`` terms."""
    return count * first + count * (count - 1) / 2


def work_by_formula(
    shape: ModelShape, *, tokens: int, actions: int, train: bool, checkpointing: Checkpointing
) -> PassWork:
    """Return the work of a pass of a Llama-like model, computed from its sizes, for models that
    cannot be traced. Bytes and kernels are those that a trace of Qwen3 counts, to within a
    third."""
    times = 3.0 + bool(checkpointing) if train else 1.0
    products = 3.0 + (checkpointing is True) if train else 1.0
    head = 0.0 if shape.scalar else 2.0 * shape.vocab_size * shape.hidden_size
    layers = len(shape.layers)
    per_token = 250.0 * shape.hidden_size + 30.0 * shape.inner_size
    body = Work(
        (matrix_flops(shape) - head) * tokens * products,
        per_token * layers * tokens * times,
        60.0 * layers * times,
    )
    sweeps = 20.0 if train else 7.5
    logits = 4.0 * shape.vocab_size * actions * (not shape.scalar)
    return PassWork(body, Work(head * actions * (4.0 if train else 1.0), sweeps * logits, 100.0))
