"""Decode steps recorded as CUDA graphs, several tokens of each sample per read of the host.

A step is two graphs: one computes the logits, one draws tokens, stores them with their log-probs
and moves the rows to their next positions. They are recorded apart, because the first depends on
the length of the rows and the second on the sampling parameters. The host replays both up to
:data:`BLOCK` times, then reads all results at once.

Samples that end within a block are computed to its end, and the host drops their surplus tokens.
They stay at their last position, so surplus tokens need no room in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from burnish.models.attention import DecodePlan, decode_plan
from burnish.models.cache_attention import KVCache
from burnish.rollout.local.sampling import DrawGroup, draw_by_group, kept_of_rows
from burnish.tensors import upload

BLOCK = 8
"""Maximum tokens of each sample between two reads of the host."""
NUM_STOPS = 8
"""Stop tokens of a row that the recorded step compares. The host compares all of them."""
_MAX_RECORDED_DRAWS = 64
"""Draws recorded for a cache. Parameters beyond them are drawn by launched kernels."""


@dataclass(frozen=True)
class RowState:
    """State of a sample before a block."""

    token: int
    """Its last token, the next input."""
    position: int
    """Position of that token."""
    last: int
    """Position of the last input before the length limit."""
    stops: Sequence[int]
    """Its stop tokens."""


@dataclass(frozen=True)
class DecodeBlock:
    """Samples to decode together, in slot order."""

    rows: Sequence[RowState]
    uniforms: Tensor
    """[steps, B] fp32 random numbers, in host memory."""
    groups: Sequence[DrawGroup]

    @property
    def num_keys(self) -> int:
        """Return the number of positions that the longest row has after the block."""
        return 1 + max(min(row.position + len(self.uniforms) - 1, row.last) for row in self.rows)


@dataclass(frozen=True)
class DrawnStep:
    """Tokens of one step, read by the host."""

    tokens: Sequence[float]
    logprobs: Sequence[float]
    kept: Sequence[Sequence[int] | None]
    """Ids that min-p, top-k and top-p kept. None per row: not recorded."""


class DecodeGraphs:
    """Captures and replays decode steps over a cache of one size: two launches per token instead of
    hundreds of small kernels.

    The graph of the logits is captured per (rows, keys read), the next power of two and
    :meth:`keys_read`, over a cache with fixed addresses. Rows beyond the active ones write garbage
    to free slots, which are never read.
    """

    def __init__(
        self,
        body: Callable[[Tensor, Tensor, DecodePlan], Tensor],
        head: Callable[[Tensor], Tensor],
        cache: KVCache,
        device: torch.device,
        *,
        stable: bool = False,
    ) -> None:
        """``stable``: decode plans are those of a batch-invariant network."""
        self.body, self.head, self.cache, self.device = body, head, cache, device
        self.stable = stable
        self._steps: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._draws: dict[tuple[int, object], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._state: _State | None = None

    @staticmethod
    def padded(count: int) -> int:
        """Return the bucket of a count: the next power of two."""
        return 1 << max(0, count - 1).bit_length()

    @staticmethod
    def keys_read(count: int) -> int:
        """Return the number of keys that a step reads for rows of at most ``count``: a multiple of
        64, and one of four between two powers of two.

        >>> [DecodeGraphs.keys_read(n) for n in (1, 64, 65, 300, 512, 513, 1000, 1025)]
        [64, 64, 128, 320, 512, 640, 1024, 1280]
        """
        step = max(64, 1 << max(0, (count - 1).bit_length() - 3))
        return -(-count // step) * step

    @staticmethod
    def largest_bucket(count: int) -> int:
        """Return the largest bucket that is not larger than a count."""
        return 1 << (count.bit_length() - 1)

    def run(self, block: DecodeBlock) -> list[DrawnStep]:
        """Draw ``len(block.uniforms)`` tokens for each row. The host waits once, for the results
        (and with kept ids a second time, when the GPU has nothing left to do)."""
        count, num_steps = len(block.rows), len(block.uniforms)
        batch = self.padded(count)
        reach = min(self.keys_read(block.num_keys), self.cache.capacity)
        with torch.cuda.device(self.device):  # may differ from the current device
            step = self._recorded_step(batch, reach)
            draw = self._recorded_draw(batch, block.groups)
        assert self._state is not None
        self._state.load(block, batch)
        kept: list[list[Tensor | None]] = []
        for _ in range(num_steps):
            step.replay()
            if draw is not None:
                draw.replay()
            else:
                kept.append(self._draw(count, block.groups))
        results = self._state.results[:num_steps, :, :count].tolist()
        ids: Sequence[Sequence[Sequence[int] | None]] = [[None] * count] * num_steps
        if kept:
            ids = kept_of_rows(block.groups, kept, count)
        return [
            DrawnStep(tokens, logprobs, row)
            for (tokens, logprobs), row in zip(results, ids, strict=True)
        ]

    # ---- recording -------------------------------------------------------------------------

    def _recorded_step(self, batch: int, reach: int) -> torch.cuda.CUDAGraph:
        """Return the graph that computes logits. Recording it writes keys and values to the last
        position of the cache, which no row has reached before a block, and uses the rows' state."""
        if (batch, reach) not in self._steps:
            if self._state is None:
                self._state = _State(self.cache.num_slots, self.device)
            state = self._state
            state.tokens.zero_()
            state.positions.fill_(self.cache.capacity - 1)

            def forward() -> None:
                tokens, positions = state.tokens[:batch], state.positions[:batch]
                plan = decode_plan(self.cache, positions, reach, stable=self.stable)
                logits = self.head(self.body(tokens[:, None], positions[:, None], plan)[:, 0])
                state.logits_like(logits)[:batch].copy_(logits)

            self._steps[batch, reach] = self._record(forward)
        return self._steps[batch, reach]

    def _recorded_draw(
        self, batch: int, groups: Sequence[DrawGroup]
    ) -> torch.cuda.CUDAGraph | None:
        """Return the graph that draws for rows with equal parameters. None: the parameters differ,
        kept ids are recorded, or there are too many graphs."""
        if len(groups) > 1 or groups[0].sampling.sampling_mask:
            return None
        key = batch, groups[0].key
        if key not in self._draws and len(self._draws) < _MAX_RECORDED_DRAWS:
            assert self._state is not None
            self._state.step.zero_()  # warm-up and capture take three steps
            self._draws[key] = self._record(lambda: self._draw(batch, groups))
        return self._draws.get(key)

    def _record(self, function: Callable[[], object]) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                function()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # CUDA calls of other threads do not abort this capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            function()
        self._pool = graph.pool()
        return graph

    def _draw(self, count: int, groups: Sequence[DrawGroup]) -> list[Tensor | None]:
        """Draw a token for each of the first ``count`` rows from their logits, store it, and move
        the rows that continue to their next position. Return the kept ids of each group."""
        state = self._state
        assert state is not None
        uniforms = state.uniforms.index_select(0, state.step)[0, :count]
        tokens, logprobs, kept = draw_by_group(state.logits[:count], uniforms, groups)
        # fp64 holds token ids and fp32 log-probs exactly
        drawn = torch.stack([tokens.double(), logprobs.double()])
        state.results[:, :, :count].index_copy_(0, state.step, drawn[None])
        stopped = (state.stops[:, :count] == tokens).any(0)
        positions, last = state.positions[:count], state.last[:count]
        last.copy_(torch.where(stopped, positions, last))
        positions.copy_(torch.minimum(positions + 1, last))
        state.tokens[:count].copy_(tokens)
        state.step.add_(1)
        return kept


class _State:
    """Tensors with fixed addresses, which the graphs read and write, for S slots."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        rows = torch.zeros(3 + NUM_STOPS, num_slots, dtype=torch.int64, device=device)
        self.rows = rows
        self.tokens, self.positions, self.last, self.stops = rows[0], rows[1], rows[2], rows[3:]
        self.uniforms = torch.zeros(BLOCK, num_slots, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.results = torch.zeros(BLOCK, 2, num_slots, dtype=torch.float64, device=device)
        self.logits = torch.empty(0, device=device)  # [S, V], from the first step on

    def logits_like(self, logits: Tensor) -> Tensor:
        """Return the logits of all slots, with memory since the first call."""
        if not self.logits.numel():
            self.logits = logits.new_empty(len(self.tokens), logits.shape[1])
        return self.logits

    def load(self, block: DecodeBlock, batch: int) -> None:
        """Copy the state of a block to the device, without waiting for it. Rows of the batch beyond
        those of the block are at position 0 and remain there."""
        rows = torch.zeros(len(self.rows), batch, dtype=torch.int64)
        rows[3:] = -1  # no token
        values = [(row.token, row.position, row.last, *_stops(row.stops)) for row in block.rows]
        rows[:, : len(values)] = torch.tensor(values).T
        self.rows[:, :batch].copy_(upload(rows, self.rows.device))
        num_steps, count = block.uniforms.shape
        self.uniforms[:num_steps, :count].copy_(upload(block.uniforms, self.rows.device))
        self.step.zero_()


def _stops(tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the stop tokens of a row, padded with -1."""
    compared = tuple(tokens)[:NUM_STOPS]
    return compared + (-1,) * (NUM_STOPS - len(compared))
