"""A cache of keys and values, and attention of new tokens to it, with results that do not depend
on the batch.

On a CPU, the output of a token must have the same bits whatever else is computed with it, and
whether the keys before it were computed in the same pass, in earlier passes or token by token. The
matmuls of :func:`stable_attention` therefore have shapes for which PyTorch's CPU kernels give the
same bits (docs/lab-notebook.md, 2026-11-23 and 2026-11-25): at least :func:`least_rows` query rows
per matmul, keys whose positions are contiguous in memory, and sums over the keys in chunks of at
least :data:`_LEAST_KEYS` and at most :data:`_CHUNK`. Masked keys have weight 0, which adds nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from burnish.models.segments import Segment

_KEY_MULTIPLE = 4
"""Key lengths are rounded up to this, so that the rows of the scores are aligned."""
_SMALL = 400
"""PyTorch computes matmuls with fewer multiplications than this in a loop, with other bits."""
_VECTOR = 32
"""Numbers that PyTorch's CPU kernels compute at once: two vectors of 16 fp32 numbers."""
_THREAD = 1 << 15
"""PyTorch uses at most one more thread for each of these many numbers."""
_CHUNK = 192
"""Keys per matmul with the values. Kernels split longer sums, depending on the length: MKL over 192
keys with AVX2, and over 256 with AVX-512."""
_LEAST_KEYS = 16
"""Least keys of a chunk. Sums over fewer have other bits."""
_SCORES = 1 << 24
"""Maximum scores computed at once: 64 MiB."""
_TILE = 64
"""Queries of a sequence computed at once if all of them would exceed :data:`_SCORES`; otherwise the
minimum."""


class KVCache:
    """KV cache of the sequences being decoded: ``[slots, kv_heads, capacity, head_dim]`` per layer.

    Slots ``0 .. B-1`` hold the B active sequences, so a decode step reads a plain slice. A layer is
    allocated on its first write, in the shape and dtype of the keys and values.

    With ``transposed_keys`` the keys have the same shape, but their positions are contiguous in
    memory, which batch-invariant matmuls need.
    """

    def __init__(
        self,
        num_slots: int,
        capacity: int,
        *,
        transposed_keys: bool = False,
        check: Callable[[KVCache, int], None] = lambda cache, layer_bytes: None,
    ) -> None:
        """``check`` is called with the bytes of a layer before the first one is allocated. It
        raises an error if the cache does not fit."""
        self.num_slots = num_slots
        self.capacity = capacity
        self.transposed_keys = transposed_keys
        self.check = check
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def write(
        self, layer: int, slots: Tensor, positions: Tensor, kv: tuple[Tensor, Tensor]
    ) -> None:
        """Store keys and values [W, kv_heads, head_dim] at (slot, position) pairs."""
        key, value = kv
        if layer not in self.keys:
            if not self.keys:
                of_token = (key.nbytes + value.nbytes) // len(key)
                self.check(self, self.num_slots * self.capacity * of_token)
            self.keys[layer] = self._zeros(key, transposed=self.transposed_keys)
            self.values[layer] = self._zeros(value, transposed=False)
        self.keys[layer][slots, :, positions] = key
        self.values[layer][slots, :, positions] = value

    def read(self, layer: int, slots: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return copies of the first ``length`` keys and values [S, kv_heads, length, head_dim] of
        some slots, in the memory order of the cache."""
        keys, values = self.keys[layer][:, :, :length], self.values[layer][:, :, :length]
        if self.transposed_keys:
            keys = keys.transpose(2, 3).index_select(0, slots).transpose(2, 3)
        else:
            keys = keys.index_select(0, slots)
        return keys, values.index_select(0, slots)

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first ``length`` positions of slots ``source`` into slots ``target``."""
        for store in (self.keys, self.values):
            for tensor in store.values():
                tensor[target, :, :length] = tensor[source, :, :length]

    def resize(self, num_slots: int, capacity: int) -> None:
        """Change the size, one tensor at a time. Slots and positions that remain keep their
        contents."""
        slots, length = min(num_slots, self.num_slots), min(capacity, self.capacity)
        self.num_slots, self.capacity = num_slots, capacity
        stores = ((self.keys, self.transposed_keys), (self.values, False))
        for store, transposed in stores:
            for layer, old in store.items():
                store[layer] = self._zeros(old[:, :, 0], transposed=transposed)
                store[layer][:slots, :, :length] = old[:slots, :, :length]

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for store in (self.keys, self.values) for t in store.values())

    def _zeros(self, like: Tensor, *, transposed: bool) -> Tensor:
        """Return the tensor of a layer for keys or values like those given, [W, kv_heads, dim]."""
        _, heads, dim = like.shape
        if transposed:
            return like.new_zeros(self.num_slots, heads, dim, self.capacity).transpose(2, 3)
        return like.new_zeros(self.num_slots, heads, self.capacity, dim)


@dataclass(frozen=True)
class Options:
    """Options of one layer's attention call. ``scale`` and ``softcap`` apply to the scores."""

    layer: int
    scale: float
    window: int | None
    dropout: float
    softcap: float | None


@dataclass(frozen=True)
class Extension:
    """New tokens ``[q_start, q_start + q_len)`` of a packed row that continue the sequence in cache
    slot ``slot``, which has ``cached`` tokens."""

    q_start: int
    q_len: int
    slot: int
    cached: int = 0

    @property
    def k_len(self) -> int:
        return self.cached + self.q_len


Span = TypeVar("Span", Segment, Extension)


@dataclass(frozen=True)
class _Bucket:
    """A rectangle of S extensions of similar size, with Lq queries."""

    q_index: Tensor  # [S, Lq] into the packed row; padding repeats the last token
    slots: Tensor  # [S]
    positions: Tensor  # [S, Lq] position of each query
    length: int
    """Keys of the longest one, rounded up."""
    masks: dict[tuple[int, int, int | None], tuple[int, Tensor]] = field(default_factory=dict)
    """(first row, first query, window) -> (number of keys, mask of the last ones), shared by all
    layers."""


@dataclass(frozen=True)
class PrefillPlan:
    """Attention pattern of a packed row of new tokens, whose keys and values are written to a cache
    and read from there."""

    cache: KVCache
    source: Tensor  # [W] token of the packed row
    slots: Tensor  # [W] slot it is written to
    positions: Tensor  # [W] position in the slot
    buckets: tuple[_Bucket, ...]
    inverse: Tensor  # [M] index of each token in the concatenated outputs of the buckets
    num_tokens: int
    """Tokens of the row without padding."""


def rounded(length: int) -> int:
    """Return the least number of keys from ``length`` on whose sums are stable."""
    chunks, rest = divmod(length, _CHUNK)
    keys = max(_LEAST_KEYS, -(-rest // _KEY_MULTIPLE) * _KEY_MULTIPLE) if rest else 0
    return chunks * _CHUNK + keys


@cache
def least_rows(threads: int) -> int | None:
    """Return the least number of rows from which this machine's batched matmuls with ``threads``
    threads give a row the same bits, as :func:`stable_attention` requires: 2 with MKL's kernels for
    AVX-512, 4 with those for AVX2. None: the bits depend on the number of rows or of masked
    keys."""
    return next((least for least in (2, 4) if _stable_from(least, threads)), None)


def _stable_from(least: int, threads: int) -> bool:
    draw = torch.Generator().manual_seed(threads)
    drawn = torch.rand(2, 16, _CHUNK, generator=draw)
    values = torch.randn(2, _CHUNK, 64, generator=draw)
    for keys in (_LEAST_KEYS, 100, 132, 188):
        weights = drawn * (torch.arange(_CHUNK) < keys)
        sums = torch.bmm(drawn[..., :keys].contiguous(), values[:, :keys])
        if not torch.equal(torch.bmm(weights, values), sums):
            return False
    shapes = [(dim, 96) for dim in (16, 64, 128)]  # with the keys; reversed: with the values
    for inner, columns in shapes + [shape[::-1] for shape in shapes]:
        left = torch.randn(2, 64, inner, generator=draw)
        right = torch.randn(2, inner, columns, generator=draw)
        expected = torch.bmm(left, right)
        for rows in (least, least + 1, 6, 7, 8, 15, 33):
            if not torch.equal(torch.bmm(left[:, :rows], right), expected[:, :rows]):
                return False
    return True


def prefill_plan(
    cache: KVCache, extensions: Sequence[Extension], copies: Sequence[int], width: int
) -> PrefillPlan:
    """Return the plan for a row of ``width`` tokens; those after the last extension are padding.
    The keys and values of extension i are written to ``copies[i]`` slots, from its own on."""
    source, slots, positions = [], [], []
    for e, count in zip(extensions, copies, strict=True):
        source.append(np.tile(np.arange(e.q_start, e.q_start + e.q_len), count))
        slots.append(np.repeat(np.arange(e.slot, e.slot + count), e.q_len))
        positions.append(np.tile(np.arange(e.cached, e.k_len), count))
    inverse = np.zeros(width, dtype=np.int64)
    buckets, done = [], 0
    for chosen in similar_spans(extensions):
        width = max(e.q_len for e in chosen)
        for row, e in enumerate(chosen):
            first = done + row * width
            inverse[e.q_start : e.q_start + e.q_len] = np.arange(first, first + e.q_len)
        done += len(chosen) * width
        real = np.minimum(np.arange(width)[None], np.array([[e.q_len - 1] for e in chosen]))
        buckets.append(
            _Bucket(
                torch.from_numpy(real + np.array([[e.q_start] for e in chosen])),
                torch.tensor([e.slot for e in chosen]),
                torch.from_numpy(real + np.array([[e.cached] for e in chosen])),
                rounded(max(e.k_len for e in chosen)),
            )
        )
    return PrefillPlan(
        cache,
        source=torch.from_numpy(np.concatenate(source)),
        slots=torch.from_numpy(np.concatenate(slots)),
        positions=torch.from_numpy(np.concatenate(positions)),
        buckets=tuple(buckets),
        inverse=torch.from_numpy(inverse),
        num_tokens=sum(e.q_len for e in extensions),
    )


def similar_spans(spans: Sequence[Span]) -> list[list[Span]]:
    """Split spans into groups whose smallest has at least half the queries and half the keys of the
    largest, the largest first. That bounds the padding of a rectangle, however ragged the rows
    are."""
    left = sorted(spans, key=lambda e: (e.q_len, e.k_len))
    groups: list[list[Span]] = []
    while left:
        largest, chosen = left[-1], []
        while left and 2 * left[-1].q_len >= largest.q_len and 2 * left[-1].k_len >= largest.k_len:
            chosen.append(left.pop())
        groups.append(chosen)
    return groups


def prefill_attention(
    plan: PrefillPlan, qkv: tuple[Tensor, Tensor, Tensor], options: Options
) -> Tensor:
    """Write keys and values [M, kv_heads, dim] to the cache; return the attention [M, heads, dim]
    of the queries [M, heads, dim]."""
    query, key, value = qkv
    kv = key[plan.source], value[plan.source]
    plan.cache.write(options.layer, plan.slots, plan.positions, kv)
    outputs = []
    for bucket in plan.buckets:
        q = query[bucket.q_index].transpose(1, 2)  # [S, heads, Lq, dim]
        most = max(1, _SCORES // (q.shape[1] * min(q.shape[2], _TILE) * bucket.length))
        parts = [
            _attend(plan.cache, bucket, q[i : i + most], slice(i, i + most), options)
            for i in range(0, q.shape[0], most)
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return flat[plan.inverse]


def _attend(
    cache: KVCache, bucket: _Bucket, query: Tensor, rows: slice, options: Options
) -> Tensor:
    """Return the attention of some rows of a bucket, [S, heads, Lq, dim]."""
    length, queries = bucket.length, query.shape[2]
    keys, values = cache.read(options.layer, bucket.slots[rows], length)
    small = query.shape[0] * query.shape[1] * queries * length <= _SCORES
    tile = max(_TILE, queries // 4) if small else _TILE
    outputs = []
    for begin in range(0, queries, tile):
        key = rows.start, begin, options.window
        if key not in bucket.masks:
            at = bucket.positions[rows, begin : begin + tile]
            reach = min(length, rounded(int(at.max()) + 1))
            masked = options.window is not None and reach > options.window
            first = 0 if masked else int(at.min())  # all queries read the keys before it
            bucket.masks[key] = reach, additive_mask(at, range(first, reach), options.window)
        reach, mask = bucket.masks[key]
        kv = keys[:, :, :reach], values[:, :, :reach]
        outputs.append(stable_attention(query[:, :, begin : begin + tile], kv, mask, options))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


def additive_mask(positions: Tensor, keys: range, window: int | None) -> Tensor:
    """Return the mask [S, 1, Lq, M] of M keys: 0 if the query at ``positions`` [S, Lq] reads the
    key; -inf for keys after its position, or before the sliding window."""
    at = torch.arange(keys.start, keys.stop, device=positions.device)
    hidden = at > positions[..., None]
    if window is not None and keys.stop > window:
        hidden |= at <= positions[..., None] - window
    return torch.zeros(hidden.shape, device=at.device).masked_fill_(hidden, -torch.inf)[:, None]


def stable_attention(
    query: Tensor, kv: tuple[Tensor, Tensor], mask: Tensor, options: Options
) -> Tensor:
    """Return the attention [S, heads, Lq, dim] in fp32, with bits that do not depend on the batch.

    ``query`` [S, heads, Lq, dim], ``kv`` [S, kv_heads, L, dim] with transposed keys
    (``KVCache``), ``mask`` [S, 1, Lq, M] added to the scores of the last M keys. The query heads
    that share a key/value head are the rows of one matmul.
    """
    keys, values = kv
    rows, heads, queries, dim = query.shape
    kv_heads, length = keys.shape[1:3]
    group = heads // kv_heads
    count = group * queries
    q = query.reshape(rows, kv_heads, count, dim).float() * options.scale
    scores_per_row = rows * kv_heads * length
    padding = _padded_rows(count, min(dim, values.shape[-1]), scores_per_row, options) - count
    if padding:
        q = F.pad(q, (0, 0, 0, padding))
    scores = torch.matmul(q, keys.float().transpose(-1, -2))  # [S, kv_heads, R, L]
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    read = scores if mask.shape[-1] == length else scores[..., length - mask.shape[-1] :]
    if queries == 1:
        read.add_(mask)
    else:
        read[:, :, :count].unflatten(2, (group, queries)).add_(mask[:, :, None])
    weights = scores.softmax(-1)
    wide = values.float()
    if length <= _CHUNK:
        out = torch.matmul(weights, wide)
    else:
        parts = zip(weights.split(_CHUNK, -1), wide.split(_CHUNK, 2), strict=True)
        out = reduce(Tensor.add_, (torch.matmul(*part) for part in parts))
    out = (out[:, :, :count] if padding else out).to(query.dtype)
    return out.reshape(rows, heads, queries, values.shape[-1])


def _padded_rows(count: int, dim: int, scores: int, options: Options) -> int:
    """Return the number of rows of a matmul for ``count`` queries of ``dim`` numbers. ``scores``:
    scores per row, of all matmuls together."""
    threads = torch.get_num_threads()
    least = max(count, least_rows(threads) or 2, -(-_SMALL // (_LEAST_KEYS * dim)))
    if options.softcap is None:
        return least
    return full_vectors(least, [scores], threads=threads)


def full_vectors(rows: int, widths: Collection[int], *, threads: int) -> int:
    """Return the least number of rows, at least ``rows``, for which an elementwise function of
    [rows, width] ends at a full vector in the part of every thread, for each of ``widths``."""

    def ends(elements: int) -> bool:
        part = -(-elements // min(threads, -(-elements // _THREAD)))  # of one thread
        return elements % _VECTOR == 0 and part % _VECTOR == 0

    counts = itertools.count(rows)
    return next(count for count in counts if all(ends(count * width) for width in widths))
