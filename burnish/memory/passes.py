"""One micro-batch through a model, as sizes: its rows, and an attention plan that holds nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from burnish.config.model import Dtype, LoraConfig
from burnish.models.attention import Segment
from burnish.models.attention import _fits as segments_fit


@dataclass(frozen=True)
class Row:
    """One row of a micro-batch."""

    length: int
    prompt: int
    group: int


@dataclass(frozen=True)
class Pass:
    """One micro-batch through one model, and how it is computed."""

    rows: tuple[Row, ...]
    layout: str = "packed"
    dtype: Dtype = "fp32"
    train: bool = True
    """False: without gradient (log-probs, values)."""
    accumulates: bool = False
    """There are gradients of an earlier micro-batch."""
    checkpointing: bool = False
    with_entropy: bool = False
    chunk_tokens: int = 512
    grad_accum_dtype: Dtype = "fp32"
    lora: LoraConfig | None = None
    states: bool = False
    """The hidden states are what is asked for: there is no head."""
    device: str = "cpu"
    """``cpu`` or ``cuda``: which kernels to suppose."""

    @property
    def tokens(self) -> int:
        """Tokens that are computed, padding included."""
        if self.layout == "padded":
            return max(r.length for r in self.rows) * len(self.rows)
        return sum(s.q_len for s in segments_of(self.rows, self.layout))

    @property
    def actions(self) -> int:
        """Tokens that have a log-prob."""
        return sum(r.length - max(r.prompt, 1) for r in self.rows)


def segments_of(rows: Sequence[Row], layout: str) -> list[Segment]:
    """As ``train/batching.py`` lays rows out: whole rows, or a group's prompt once."""
    segments: list[Segment] = []
    used = 0
    prefix = (0, 0)
    for i, row in enumerate(rows):
        shares = layout == "shared_prefix" and i > 0 and rows[i - 1].group == row.group
        if not shares:
            prefix = (used, row.prompt)
        count = row.length - (prefix[1] if shares else 0)
        if count:
            segments.append(Segment(used, count, *(prefix if shares else (0, 0))))
        used += count
    return segments


@dataclass(frozen=True)
class _FakeBucket:
    q_index: Tensor
    k_index: Tensor
    mask: Tensor | None


class _FakePlan:
    """A PackedPlan of the right sizes whose tensors hold nothing."""

    cache = None

    def __init__(self, buckets: Sequence[_FakeBucket], tokens: int, longest: int) -> None:
        self.buckets, self.longest = tuple(buckets), longest
        self.inverse = torch.zeros(tokens, dtype=torch.int64)
        self._windows: dict[int, tuple[Tensor | None, ...]] = {}

    def masks(self, window: int | None) -> tuple[Tensor | None, ...]:
        """As PackedPlan.masks."""
        if window is None or self.longest - 1 < window:
            return tuple(b.mask for b in self.buckets)
        if window not in self._windows:
            self._windows[window] = tuple(_mask(b.q_index, b.k_index) for b in self.buckets)
        return self._windows[window]


def _mask(q_index: Tensor, k_index: Tensor) -> Tensor:
    shape = (q_index.shape[0], 1, q_index.shape[1], k_index.shape[1])
    return torch.zeros(shape, dtype=torch.bool)


def bucket_sizes(segments: Sequence[Segment]) -> list[tuple[int, int, int, bool]]:
    """(segments, most queries, most keys, with a mask) of each bucket that
    ``attention.plan_segments`` makes."""
    order = sorted(range(len(segments)), key=lambda i: (segments[i].q_len, segments[i].k_len))
    sizes = []
    while order:
        largest, chosen = segments[order[-1]], []
        while order and segments_fit(segments[order[-1]], largest):
            chosen.append(segments[order.pop()])
        widest = max(s.q_len for s in chosen)
        plain = all(s.q_len == widest and not s.prefix_len for s in chosen)
        sizes.append((len(chosen), widest, max(s.k_len for s in chosen), not plain))
    return sizes


def fake_plan(work: Pass) -> _FakePlan | None:
    """The attention plan of a pass; None for padded rows. Inside of a FakeTensorMode."""
    if work.layout == "padded":
        return None
    buckets = []
    for count, queries, keys, masked in bucket_sizes(segments_of(work.rows, work.layout)):
        q_index = torch.zeros(count, queries, dtype=torch.int64)
        k_index = torch.zeros(count, keys, dtype=torch.int64)
        buckets.append(_FakeBucket(q_index, k_index, _mask(q_index, k_index) if masked else None))
    return _FakePlan(buckets, work.tokens, max(r.length for r in work.rows))
