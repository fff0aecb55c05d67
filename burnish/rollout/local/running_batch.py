"""Continuous batching of the local engine: waiting prompts, and the samples that decode in one
batch.

The prompt of a request is prefilled once, packed with other prompts, and its keys and values are
written to n cache slots. The n samples then decode in one batch with all others. A finished sample
is removed immediately: the last active one moves into its slot. Active slots are therefore always
``0 .. B-1``, and nothing is computed for finished samples. Waiting requests use the freed slots.

Keys and values of a finished conversation stay in a slot from B on, until a waiting request needs
the slot; the least recently used one is dropped first. A follow-up only prefills its new tokens.
If the network is batch invariant, kept and prefilled keys have the same bits, so when a
conversation is dropped has no effect on results. Conversations are kept on CPUs only.

Reading order: ``step`` -> ``_admit`` (prefill) or ``_decode`` -> ``_retire``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from burnish.models.attention import PackedPlan, decode_plan, plan_segments
from burnish.models.cache_attention import Extension, KVCache, PrefillPlan, prefill_plan, rounded
from burnish.models.segments import Segment
from burnish.rollout.base import Completion, Request, Sampling, SamplingError
from burnish.rollout.local.decode_graphs import (
    BLOCK,
    DecodeBlock,
    DecodeGraphs,
    DrawnStep,
    RowState,
)
from burnish.rollout.local.model import LocalModel
from burnish.rollout.local.sampling import (
    draw_by_group,
    draw_groups,
    keeps_many,
    kept_of_rows,
    uniforms_for,
)
from burnish.rollout.requests import LiveSample, StopRule
from burnish.tensors import upload

POSITIONS = 64
"""Positions of a block of the cache."""
_LEAST_ROOM = 256
"""Positions by which a cache grows at least, if rows can become as long."""


def blocks_of(length: int) -> int:
    """Return the positions of the blocks that hold a row of ``length`` tokens."""
    return -(-length // POSITIONS) * POSITIONS


class _Row(LiveSample):
    """A sample that decodes in the batch."""

    uniforms: Tensor  # [maximum new tokens]
    released = False
    """True if the conversation was released while the sample was open: its cache is not kept."""

    @property
    def longest(self) -> int:
        """Return the length of prompt and response at the length limit."""
        return len(self.request.prompt_ids) + self.request.limit(self.sampling)


@dataclass
class _Kept:
    """Cache of a conversation without open request."""

    slot: int
    ids: tuple[int, ...]
    """Tokens whose keys and values are in the slot."""


class RunningBatch:
    """Waiting prompts, active samples in slot order, and their cache."""

    def __init__(self, network: LocalModel) -> None:
        self.network = network
        self.max_slots = network.config.max_batch_size
        self.waiting: deque[list[_Row]] = deque()
        """Samples that share one prefill."""
        self.active: list[_Row] = []
        self.kept: dict[str | None, _Kept] = {}
        """Conversation -> its cache, the least recently used first. None is never a key."""
        self.cache: KVCache | None = None

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
        self._free_if_idle()

    def release(self, conversations: Iterable[str]) -> None:
        """Drop the cache of conversations. That of an open request is dropped when it finishes."""
        names = set(conversations)
        for name in names:
            self.kept.pop(name, None)
        for row in [*self.active, *(row for rows in self.waiting for row in rows)]:
            row.released |= row.request.conversation in names
        self._free_if_idle()

    def restart(self) -> None:
        """Drop the cache. Active samples wait again, before all others, and continue after their
        tokens: a prefill recomputes their keys and values."""
        self.waiting.extendleft([row] for row in reversed(self.active))
        self.active, self.kept, self.cache = [], {}, None

    # ---- computing -------------------------------------------------------------------------

    def step(self, version: int) -> list[Completion]:
        """Prefill waiting prompts if there are free slots, else decode every active sample: one
        token, or with CUDA graphs a block of tokens. Return what finished. ``version`` is that of
        the weights.

        Raises SamplingError if a log-prob is not finite. After any error all samples wait again.
        """
        if not self.waiting and not self.active:
            return []
        try:
            with self.network.computing():
                # slots for all samples of the next waiting prompt
                if self.waiting and len(self.active) + len(self.waiting[0]) <= self.max_slots:
                    self._admit(version)
                else:
                    self._decode(version)
        except BaseException:
            self.restart()  # the step may have changed a part of the state
            raise
        done = [row.completion() for row in self.active if row.reason is not None]
        self._remove([i for i, row in enumerate(self.active) if row.reason is not None])
        self._free_if_idle()
        return done

    def _free_if_idle(self) -> None:
        """Free copies of weights if nothing is open, and the cache if it keeps nothing."""
        if self.waiting or self.active:
            return
        self.network.weights_changed()
        if not self.kept:
            self.cache = None

    def _admit(self, version: int) -> None:
        """Prefill as many waiting prompts as fit, in one packed row, and draw the next token of
        each sample."""
        self._make_room()
        units: list[list[_Row]] = []
        free, budget = self.max_slots - len(self.active), self.network.config.max_prefill_tokens
        while self.waiting and len(self.waiting[0]) <= free:
            row = self.waiting[0][0]
            cost = row.length - self._reusable(row)
            if units and cost > budget:
                break
            units.append(self.waiting.popleft())
            free, budget = free - len(units[-1]), budget - cost
        first, new = len(self.active), [row for unit in units for row in unit]
        self.active += new  # before anything that can fail: restart finds them
        cached = self._place(units, first)
        logits = self.network.head_logits(self._prefill(units, cached, first))
        of_row = [i for i, unit in enumerate(units) for _ in unit]
        self._draw(logits[upload(torch.tensor(of_row), logits.device)], new, version)

    def _make_room(self) -> None:
        """Make the cache large enough for the samples that can be active now and the prompts."""
        slots, longest = self._slots(), max(row.length for row in self._all_rows())
        if self.cache is None and self.network.graphs is not None:
            self.cache = self.network.graphs.cache
        if self.cache is None:
            self.cache = self.network.new_cache(slots, self._capacity(longest))
        elif self.cache.num_slots < slots or self.cache.capacity < longest:
            self._resize(self.cache, longest)

    def _resize(self, cache: KVCache, length: int) -> None:
        """Give the cache the slots that are needed from now on, and the positions of rows of
        ``length`` tokens. It shrinks if samples have finished, unless it keeps conversations."""
        slots, capacity = self._slots(), self._capacity(length)
        if self.network.keeps_conversations:
            slots, capacity = max(slots, cache.num_slots), max(capacity, cache.capacity)
        self.network.resize(cache, slots, capacity)

    def _room_for(self, num_keys: int) -> KVCache:
        """Return the cache with at least ``num_keys`` positions."""
        assert self.cache is not None
        if num_keys > self.cache.capacity:
            self._resize(self.cache, num_keys)
        return self.cache

    def _all_rows(self) -> Iterator[_Row]:
        yield from self.active
        for rows in self.waiting:
            yield from rows

    def _slots(self) -> int:
        """Return the number of samples that can be active at once, from those that are open."""
        waiting = sum(len(rows) for rows in self.waiting)
        slots = min(self.max_slots, len(self.active) + len(self.kept) + waiting)
        return DecodeGraphs.padded(slots) if self.network.uses_graphs else slots

    def _capacity(self, length: int) -> int:
        """Return the positions of a cache whose longest row has ``length`` tokens now: blocks, with
        room to grow as far as a row can."""
        longest = max(row.longest for row in self._all_rows())
        return blocks_of(max(length, min(length + max(_LEAST_ROOM, length // 4), longest)))

    def _reusable(self, row: _Row) -> int:
        """Return the number of tokens of ``row`` that the kept cache of its conversation has. The
        last token is always computed."""
        conversation = self.kept.get(row.request.conversation)
        if conversation is None:
            return 0
        most = min(len(conversation.ids), row.length - 1)
        pairs = enumerate(zip(conversation.ids[:most], row.ids, strict=False))
        return next((i for i, (have, want) in pairs if have != want), most)

    def _place(self, units: Sequence[Sequence[_Row]], slot: int) -> list[int]:
        """Move kept caches that ``units`` continue into their slots, from ``slot`` on, and others
        out of the way. Return the number of cached tokens of each unit."""
        assert self.cache is not None
        moves: list[tuple[int, int]] = []
        cached, length = [], 0
        for unit in units:
            cached.append(self._reusable(unit[0]))
            conversation = self.kept.pop(unit[0].request.conversation, None)
            if conversation is not None and cached[-1]:
                moves.append((conversation.slot, slot))
                length = max(length, cached[-1])
            for row in unit:
                row.cached_tokens = min(cached[-1], len(row.request.prompt_ids))
            slot += len(unit)
        displaced = [
            conversation for conversation in self.kept.values() if conversation.slot < slot
        ]
        used = {conversation.slot for conversation in self.kept.values()}
        free = [i for i in range(slot, self.cache.num_slots) if i not in used]
        while len(displaced) > len(free):
            dropped = self.kept.pop(next(iter(self.kept)))
            if dropped in displaced:
                displaced.remove(dropped)
            else:
                free.append(dropped.slot)
        for conversation, target in zip(displaced, free, strict=False):
            moves.append((conversation.slot, target))
            conversation.slot = target
            length = max(length, len(conversation.ids))
        self._move(moves, length)
        return cached

    def _move(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        """Copy slots to others, all at once; ``moves``: (source, target)."""
        moves = [(source, target) for source, target in moves if source != target]
        if moves and self.cache is not None:
            source, target = upload(torch.tensor(moves).T.contiguous(), self.network.device)
            self.cache.move(source, target, length)

    def _prefill(self, units: Sequence[Sequence[_Row]], cached: Sequence[int], slot: int) -> Tensor:
        """Return the last hidden state [P, H] of each unit's prompt; write its keys and values to a
        slot per sample, from ``slot`` on. The first ``cached`` tokens of each are there already."""
        assert self.cache is not None
        device = self.network.device
        extensions, tokens, used = [], list[int](), 0
        for unit, begin in zip(units, cached, strict=True):
            ids = unit[0].ids[begin:]
            extensions.append(Extension(used, len(ids), slot, begin))
            tokens += ids
            slot, used = slot + len(unit), used + len(ids)
        rows = self.network.padded(used)
        positions = torch.zeros(rows, dtype=torch.int64)
        for e in extensions:
            positions[e.q_start : e.q_start + e.q_len] = torch.arange(e.cached, e.k_len)
        flat = torch.tensor(tokens + [0] * (rows - used), device=device)
        plan: PrefillPlan | PackedPlan
        plan = prefill_plan(self.cache, extensions, [len(unit) for unit in units], rows)
        if not self.network.stable and not any(cached):
            segments = [Segment(e.q_start, e.q_len) for e in extensions]
            plan = replace(
                plan_segments(segments, positions.to(device), flash=self.network.flash),
                cache=self.cache,
                cache_source=plan.source.to(device),
                cache_slot=plan.slots.to(device),
                cache_position=plan.positions.to(device),
            )
        hidden = self.network.body(flat[None], positions[None].to(device), plan)[0]
        return hidden[torch.tensor([e.q_start + e.q_len - 1 for e in extensions], device=device)]

    def _decode(self, version: int) -> None:
        """Decode one token for every active sample, or with CUDA graphs a block of tokens."""
        if self.network.uses_graphs:
            self._decode_block(version)
            return
        length = max(row.length for row in self.active)
        cache, count = self._room_for(length), len(self.active)
        rows = [[row.tokens[-1] for row in self.active], [row.length - 1 for row in self.active]]
        tokens, positions = upload(torch.tensor(rows), self.network.device)
        plan = decode_plan(cache, positions, self._rounded(length), stable=self.network.stable)
        padding = self.network.padded(count) - count
        if padding:
            tokens, positions = F.pad(tokens, (0, padding)), F.pad(positions, (0, padding))
        hidden = self.network.body(tokens[:, None], positions[:, None], plan)[:count, 0]
        self._draw(self.network.head_logits(hidden), self.active, version)

    def _decode_block(self, version: int) -> None:
        """Decode up to :data:`~burnish.rollout.local.decode_graphs.BLOCK` tokens for every active
        sample with recorded steps, and read them at once."""
        num_steps = min(BLOCK, max(row.longest - row.length for row in self.active))
        if any(keeps_many(row.sampling) for row in self.active):
            num_steps = 1  # the recorded ids of a step may have the size of its logits
        uniforms = torch.zeros(num_steps, len(self.active))
        states = []
        for i, row in enumerate(self.active):
            begin = len(row.tokens)
            numbers = row.uniforms[begin : begin + num_steps]
            uniforms[: len(numbers), i] = numbers
            last = row.longest - 2  # the last token is never an input
            states.append(RowState(row.tokens[-1], row.length - 1, last, tuple(row.stop.tokens)))
        groups = draw_groups([row.sampling for row in self.active], self.network.device)
        block = DecodeBlock(states, uniforms, groups)
        graphs = self.network.graphs_over(self._room_for(block.num_keys))
        self._add(self.active, graphs.run(block), version)

    def _rounded(self, length: int) -> int:
        """Return a number of keys of at least ``length``, whose sums are stable."""
        return rounded(length) if self.network.keeps_conversations else length

    def _draw(self, logits: Tensor, rows: Sequence[_Row], version: int) -> None:
        """Sample one token for each of ``rows``; logits [B, V]."""
        uniforms = upload(torch.stack([r.uniforms[len(r.tokens)] for r in rows]), logits.device)
        groups = draw_groups([r.sampling for r in rows], logits.device)
        tokens, logprobs, kept = draw_by_group(logits, uniforms, groups)
        # One copy from the device: fp64 holds token ids and fp32 log-probs exactly.
        ids, values = torch.stack([tokens.double(), logprobs.double()]).tolist()
        (kept_ids,) = kept_of_rows(groups, [kept], len(rows))
        self._add(rows, [DrawnStep(ids, values, kept_ids)], version)

    def _add(self, rows: Sequence[_Row], steps: Sequence[DrawnStep], version: int) -> None:
        """Append the tokens of each step to ``rows``, up to the token that ends a row. Steps from
        the first log-prob on that is not finite are dropped. Raises SamplingError if that is the
        first step."""
        for number, step in enumerate(steps):
            drawn = zip(rows, step.tokens, step.logprobs, step.kept, strict=True)
            values = [value for value in drawn if value[0].reason is None]
            if not all(math.isfinite(logprob) for _, _, logprob, _ in values):
                if number:
                    return
                raise SamplingError(self.network.what_is_broken(version))
            for row, token, logprob, ids in values:
                row.add(int(token), logprob, version, kept_ids=ids)

    def _remove(self, gone: Sequence[int]) -> None:
        """Remove active samples and move the last ones into their slots."""
        if not gone:
            return
        removed = set(gone)
        stay = len(self.active) - len(removed)
        holes = [i for i in gone if i < stay]
        movers = [i for i in range(stay, len(self.active)) if i not in removed]
        order = list(range(stay))
        swapped = dict(zip(holes, movers, strict=True))
        for hole, mover in swapped.items():
            order[hole] = mover
        moves = [(mover, hole) for hole, mover in swapped.items()]
        length = max((self.active[mover].length - 1 for mover in movers), default=0)
        for i in gone:
            row = self.active[i]
            ends = row.reason is None or row.request.conversation is None or row.released
            if ends or not self.network.keeps_conversations:
                continue
            conversation = _Kept(
                swapped.get(i, i), row.ids[:-1]
            )  # the last token was never an input
            self.kept[row.request.conversation] = conversation
            moves.append((i, conversation.slot))
            length = max(length, len(conversation.ids))
        self._move(moves, length)
        self.active = [self.active[i] for i in order]
