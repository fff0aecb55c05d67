"""Decode steps captured as CUDA graphs: one launch per token instead of hundreds of small kernels.

One graph is captured per (batch bucket, length bucket), both powers of two, over a cache with fixed
addresses. Rows beyond the active ones write garbage to free slots, which are never read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from burnish.models.attention import DecodePlan
from burnish.models.kv_cache import KVCache


@dataclass
class _Recorded:
    """A graph and all tensors that it reads and writes by address. A tensor that is freed may be
    replaced by another one there."""

    graph: torch.cuda.CUDAGraph
    tokens: Tensor  # [B]
    plan: DecodePlan
    mask: Tensor  # [B, 1, 1, length], that of the plan
    logits: Tensor  # [B, V]


class DecodeGraphs:
    """Captures and replays ``logits = head(body(tokens))`` for decode plans over one cache."""

    def __init__(
        self,
        body: Callable[[Tensor, Tensor, DecodePlan], Tensor],
        head: Callable[[Tensor], Tensor],
        cache: KVCache,
        device: torch.device,
    ) -> None:
        self.body, self.head, self.cache, self.device = body, head, cache, device
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        self._pool: Any = None

    @staticmethod
    def padded(count: int) -> int:
        """Return the bucket of a count: the next power of two."""
        return 1 << max(0, count - 1).bit_length()

    def step(self, tokens: Tensor, positions: Tensor, length: int) -> Tensor:
        """Compute the fp32 logits [B, V] for one new token per active sequence."""
        count = tokens.numel()
        batch = self.padded(count)
        reach = min(self.padded(max(length, 64)), self.cache.capacity)
        if (batch, reach) not in self._recorded:
            with torch.cuda.device(self.device):  # may differ from the current device
                self._recorded[batch, reach] = self._record(batch, reach)
        recorded = self._recorded[batch, reach]
        recorded.tokens[:count].copy_(tokens)
        places = recorded.plan.positions
        places.zero_()
        places[:count].copy_(positions)
        keys = torch.arange(reach, device=self.device)
        recorded.mask.copy_((keys[None] <= places[:, None])[:, None, None])
        recorded.graph.replay()
        return recorded.logits[:count].clone()

    def _record(self, batch: int, reach: int) -> _Recorded:
        tokens = torch.zeros(batch, dtype=torch.int64, device=self.device)
        # Warm-up and capture write to the last position, which no active sequence has reached.
        positions = torch.full_like(tokens, self.cache.capacity - 1)
        mask = torch.ones(batch, 1, 1, reach, dtype=torch.bool, device=self.device)
        slots = torch.arange(batch, device=self.device)
        plan = DecodePlan(self.cache, slots, positions, reach, mask)

        def forward() -> Tensor:
            return self.head(self.body(tokens[:, None], positions[:, None], plan)[:, 0])

        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                forward()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # CUDA calls of other threads do not abort this capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = forward()
        self._pool = graph.pool()
        return _Recorded(graph, tokens, plan, mask, logits)
