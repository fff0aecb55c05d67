"""One micro-batch through a model, as sizes: its rows, and an attention plan that holds nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from burnish.config.model import Dtype, LoraConfig
from burnish.models.attention import PackedPlan, Segment, plan_segments
from burnish.models.logprobs import CHUNK_TOKENS
from burnish.models.sdpa import Kernels


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
    chunk_tokens: int = CHUNK_TOKENS["cpu"]
    grad_accum_dtype: Dtype = "fp32"
    lora: LoraConfig | None = None
    states: bool = False
    """The hidden states are what is asked for: there is no head."""
    kernels: Kernels | None = None
    """The GPU's attention kernels. None: computed on a CPU."""

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


def fake_plan(work: Pass) -> PackedPlan | None:
    """The attention plan of a pass; None for padded rows. Inside of a FakeTensorMode."""
    if work.layout == "padded":
        return None
    positions = torch.zeros(work.tokens, dtype=torch.int64)
    plan = plan_segments(segments_of(work.rows, work.layout), positions)
    return replace(plan, kernels=work.kernels)
