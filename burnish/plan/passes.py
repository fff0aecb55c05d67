"""Shape of one micro-batch through a model: its rows, and an attention plan on fake tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from burnish.config.model import Dtype, LoraConfig
from burnish.models.attention import PackedPlan, plan_segments
from burnish.models.logprobs import CHUNK_TOKENS
from burnish.models.sdpa import Kernels
from burnish.train.row_layout import Layout, RowSize, count_tokens, place_rows, segments_of


@dataclass(frozen=True)
class Pass:
    """One micro-batch through one model, with the options of its computation."""

    rows: tuple[RowSize, ...]
    layout: Layout = "packed"
    dtype: Dtype = "fp32"
    train: bool = True
    """False: no gradient (log-probs, values)."""
    accumulates: bool = False
    """True if gradients of an earlier micro-batch exist."""
    checkpointing: bool = False
    with_entropy: bool = False
    kept_ids: int = 0
    """Ids per token over which log-probs are computed. 0: all."""
    chunk_tokens: int = CHUNK_TOKENS["cpu"]
    grad_accum_dtype: Dtype = "fp32"
    lora: LoraConfig | None = None
    states: bool = False
    """True if the pass returns hidden states and runs no head."""
    kernels: Kernels | None = None
    """Attention kernels of the GPU. None: the pass runs on a CPU."""

    @property
    def tokens(self) -> int:
        """Number of computed tokens, including padding."""
        return count_tokens(self.rows, self.layout)

    @property
    def actions(self) -> int:
        """Number of tokens with a log-prob."""
        return sum(r.length - max(r.prompt, 1) for r in self.rows)


def fake_plan(work: Pass) -> PackedPlan | None:
    """Return the attention plan of a pass; None for padded rows. Call it inside a
    FakeTensorMode."""
    if work.layout == "padded":
        return None
    positions = torch.zeros(work.tokens, dtype=torch.int64)
    plan = plan_segments(segments_of(place_rows(work.rows, work.layout)), positions)
    return replace(plan, kernels=work.kernels)
