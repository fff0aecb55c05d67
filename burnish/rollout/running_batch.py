"""Continuous batching of the local engine: waiting prompts, and the samples that decode in one
batch.

The prompt of a request is prefilled once, packed with other prompts, and its keys and values are
written to n cache slots. The n samples then decode in one batch with all others. A finished sample
is removed immediately: the last active one moves into its slot. Active slots are therefore always
``0 .. B-1``, and nothing is computed for finished samples. Waiting requests use the freed slots.

Reading order: ``step`` -> ``_admit`` (prefill) or ``_decode`` -> ``_retire``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from burnish.models.attention import Segment, decode_plan, plan_segments
from burnish.models.kv_cache import KVCache
from burnish.rollout.base import Completion, Request, Sampling, SamplingError
from burnish.rollout.cuda_graphs import DecodeGraphs
from burnish.rollout.live_sample import LiveSample
from burnish.rollout.local_model import LocalModel
from burnish.rollout.requests import StopRule
from burnish.rollout.sampling import sample_tokens, uniforms_for

_FIRST_ROOM = 64
"""Positions for new tokens in a new cache that can grow."""


class _Row(LiveSample):
    """A sample that decodes in the batch."""

    uniforms: Tensor  # [maximum new tokens]


class RunningBatch:
    """Waiting prompts, active samples in slot order, and their cache."""

    def __init__(self, network: LocalModel) -> None:
        self.network = network
        self.max_slots = network.config.max_batch_size
        self.waiting: deque[list[_Row]] = deque()
        """Samples that share one prefill."""
        self.active: list[_Row] = []
        self.cache: KVCache | None = None
        self.graphs: DecodeGraphs | None = None
        device = network.device
        self.tokens = torch.zeros(0, dtype=torch.int64, device=device)  # [B] last token
        self.positions = torch.zeros(0, dtype=torch.int64, device=device)  # [B] its position

    # ---- the queue -------------------------------------------------------------------------

    def add(self, request: Request, sampling: Sampling, stop: StopRule) -> None:
        """Queue the samples of a request, in parts that fit into the slots."""
        for begin in range(0, request.n, self.max_slots):
            part = range(begin, min(begin + self.max_slots, request.n))
            rows = [_Row(request, index, sampling, stop) for index in part]
            for row in rows:
                row.uniforms = uniforms_for(request.seed, row.index, request.limit(sampling))
            self.waiting.append(rows)

    def cancel(self, request_ids: Collection[str]) -> None:
        """Remove the samples of requests."""
        left = [rows for rows in self.waiting if rows[0].request.request_id not in request_ids]
        self.waiting = deque(left)
        self._remove([i for i, r in enumerate(self.active) if r.request.request_id in request_ids])

    def restart(self) -> None:
        """Drop the cache. Active samples wait again, before all others, and continue after their
        tokens: a prefill recomputes their keys and values."""
        self.waiting.extendleft([row] for row in reversed(self.active))
        self._remove(range(len(self.active)))
        self.cache = self.graphs = None

    # ---- computing -------------------------------------------------------------------------

    def step(self, version: int) -> list[Completion]:
        """Prefill waiting prompts if there are free slots, else decode one token for every active
        sample. Return what finished. ``version`` is that of the weights.

        Raises SamplingError if a log-prob is not finite.
        """
        if not self.waiting and not self.active:
            return []
        with self.network.computing():
            if self._can_admit():
                self._admit(version)
            else:
                self._decode(version)
        done = [row.completion() for row in self.active if row.reason is not None]
        self._remove([i for i, row in enumerate(self.active) if row.reason is not None])
        if not self.waiting and not self.active:
            self.cache = self.graphs = None
            self.network.weights_changed()
        return done

    def _can_admit(self) -> bool:
        """Return whether there are free slots for all samples of the next waiting prompt."""
        return bool(self.waiting) and len(self.active) + len(self.waiting[0]) <= self.max_slots

    def _admit(self, version: int) -> None:
        """Prefill as many waiting prompts as fit, in one packed row, and draw the next token of
        each sample."""
        self._make_room()
        units: list[list[_Row]] = []
        free, budget = self.max_slots - len(self.active), self.network.config.max_prefill_tokens
        while self.waiting and len(self.waiting[0]) <= free:
            cost = self.waiting[0][0].length
            if units and cost > budget:
                break
            units.append(self.waiting.popleft())
            free, budget = free - len(units[-1]), budget - cost
        first, new = len(self.active), [row for unit in units for row in unit]
        self.active += new  # before the prefill: cancel finds them if it fails
        prompts = [unit[0].ids for unit in units]
        last_hidden = self._prefill(prompts, [len(unit) for unit in units], first)
        logits = self.network.head_logits(last_hidden)
        counts = torch.tensor([len(unit) for unit in units], device=logits.device)
        lengths = torch.tensor([len(p) for p in prompts], device=logits.device)
        self.positions = torch.cat([self.positions, lengths.repeat_interleave(counts) - 1])
        self.tokens = torch.cat(
            [self.tokens, torch.zeros(len(new), dtype=torch.int64, device=logits.device)]
        )
        self._draw(logits.repeat_interleave(counts, dim=0), first, version)

    def _make_room(self) -> None:
        """Make a cache with a slot for every sample that can be active now, and with the positions
        of their prompts. Captured graphs need fixed addresses, so they get all positions."""
        rows = [unit[0] for unit in self.waiting]
        slots = len(self.active) + sum(len(unit) for unit in self.waiting)
        slots = min(self.max_slots, slots)
        longest = max(row.length for row in rows)
        most = max(row.request.limit(row.sampling) for row in rows)
        room = most if self.network.uses_graphs else min(most, _FIRST_ROOM)
        have = self.cache
        needed = longest + room if self.network.uses_graphs else longest
        if have is None or have.num_slots < slots or have.capacity < needed:
            self._allocate(slots, longest + room)

    def _allocate(self, slots: int, capacity: int) -> None:
        """Allocate or extend the cache."""
        old = self.cache
        if self.network.uses_graphs:
            if old is not None:
                slots, capacity = max(slots, old.num_slots), max(capacity, old.capacity)
            self.graphs = self.network.graphs_for(DecodeGraphs.padded(slots), capacity)
            self.cache = self.graphs.cache
            if old is not None and old is not self.cache:
                self.cache.copy_from(old)
        elif old is None:
            self.cache = KVCache(slots, capacity)
        else:
            old.grow(capacity)
            old.add_slots(slots)

    def _prefill(
        self, prompts: Sequence[tuple[int, ...]], counts: Sequence[int], slot: int
    ) -> Tensor:
        """Return the last hidden state [P, H] of each prompt; write its keys and values to
        ``counts`` slots, from ``slot`` on."""
        device = self.network.device
        starts, used = [], 0
        for prompt in prompts:
            starts.append(used)
            used += len(prompt)
        flat = torch.tensor([t for p in prompts for t in p], device=device)
        position = torch.cat([torch.arange(len(p)) for p in prompts])
        source, slots = [], []
        for start, prompt, count in zip(starts, prompts, counts, strict=True):
            source.append(torch.arange(start, start + len(prompt)).repeat(count))
            slots.append(torch.arange(slot, slot + count).repeat_interleave(len(prompt)))
            slot += count
        index = torch.cat(source)
        segments = [Segment(s, len(p)) for s, p in zip(starts, prompts, strict=True)]
        plan = replace(
            plan_segments(segments, position.to(device)),
            cache=self.cache,
            cache_source=index.to(device),
            cache_slot=torch.cat(slots).to(device),
            cache_position=position[index].to(device),
        )
        hidden = self.network.body(flat[None], position[None].to(device), plan)[0]
        ends = torch.tensor(
            [s + len(p) - 1 for s, p in zip(starts, prompts, strict=True)], device=device
        )
        return hidden[ends]

    def _decode(self, version: int) -> None:
        """Decode one token for every active sample."""
        assert self.cache is not None
        length = max(row.length for row in self.active)
        if self.graphs is not None:
            logits = self.graphs.step(self.tokens, self.positions, length)
        else:
            if length > self.cache.capacity:
                self.cache.grow(length + length // 2)
            plan = decode_plan(self.cache, self.positions, length)
            hidden = self.network.body(self.tokens[:, None], self.positions[:, None], plan)[:, 0]
            logits = self.network.head_logits(hidden)
        self._draw(logits, 0, version)

    def _draw(self, logits: Tensor, first: int, version: int) -> None:
        """Sample one token for each sample from slot ``first`` on; logits [B - first, V]."""
        rows = self.active[first:]
        uniforms = torch.stack([r.uniforms[len(r.tokens)] for r in rows]).to(logits.device)
        tokens, logprobs = _sample_by_parameters(logits, uniforms, [r.sampling for r in rows])
        self.tokens[first:] = tokens
        self.positions[first:] += 1
        # One copy from the device: fp64 holds token ids and fp32 log-probs exactly.
        ids, found = torch.stack([tokens.double(), logprobs.double()]).tolist()
        if not all(map(math.isfinite, found)):
            raise SamplingError(self.network.what_is_broken(version))
        for row, token, logprob in zip(rows, ids, found, strict=True):
            row.add(int(token), logprob, version)

    def _remove(self, gone: Sequence[int]) -> None:
        """Remove active samples and move the last ones into their slots."""
        if not gone:
            return
        removed = set(gone)
        stay = len(self.active) - len(removed)
        holes = [i for i in gone if i < stay]
        movers = [i for i in range(stay, len(self.active)) if i not in removed]
        order = list(range(stay))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        if movers and self.cache is not None:
            source, target = torch.tensor(movers), torch.tensor(holes)
            length = max(self.active[mover].length for mover in movers) - 1
            device = self.network.device
            self.cache.move(source.to(device), target.to(device), length)
        index = torch.tensor(order, dtype=torch.int64, device=self.tokens.device)
        self.active = [self.active[i] for i in order]
        # If a prefill failed, its samples have no tokens and positions yet.
        have = self.tokens.numel()
        index = index[index < have]
        self.tokens, self.positions = self.tokens[index], self.positions[index]


def _sample_by_parameters(
    logits: Tensor, uniforms: Tensor, samplings: Sequence[Sampling]
) -> tuple[Tensor, Tensor]:
    """Return tokens [B] and log-probs [B], drawn in groups of rows with equal parameters."""
    if all(sampling is samplings[0] for sampling in samplings):
        return sample_tokens(logits, uniforms, samplings[0])
    groups: dict[Sampling, list[int]] = {}
    for row, sampling in enumerate(samplings):
        groups.setdefault(sampling, []).append(row)
    tokens = torch.empty(len(samplings), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(len(samplings), dtype=torch.float32, device=logits.device)
    for sampling, members in groups.items():
        index = torch.tensor(members, device=logits.device)
        tokens[index], logprobs[index] = sample_tokens(logits[index], uniforms[index], sampling)
    return tokens, logprobs
