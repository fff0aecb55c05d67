"""Attention of new tokens to keys and values in a cache, with results that do not depend on the
batch.

On a CPU, the output of a token must have the same bits whatever else is computed with it, and
whether the keys before it were computed in the same pass, in earlier passes or token by token. The
matmuls of :func:`stable_attention` therefore have shapes for which PyTorch's CPU kernels give the
same bits (docs/lab-notebook.md, 2026-11-23): at least :data:`_KEY_ROWS` query rows per matmul, key
lengths rounded up to :data:`KEY_MULTIPLE`, and sums over the keys in chunks of :data:`_CHUNK`.
Masked keys have weight 0, which adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from burnish.models.kv_cache import KVCache

KEY_MULTIPLE = 16
_KEY_ROWS = ((128, 8), (1 << 30, 16))
"""(largest head size, least query rows of a matmul with the keys)."""
_VALUE_ROWS = 4
"""Least query rows of a matmul with the values."""
_CHUNK = 256
"""Keys per matmul with the values: longer sums are split by the kernel, depending on the length."""
_SCORES = 1 << 24
"""Maximum scores computed at once: 64 MiB."""
_TILE = 64
"""Queries of a sequence computed at once if all of them would exceed :data:`_SCORES`; otherwise the
minimum."""


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


@dataclass(frozen=True)
class _Bucket:
    """A rectangle of S extensions of similar size, with Lq queries."""

    q_index: Tensor  # [S, Lq] into the packed row; padding repeats the last token
    slots: Tensor  # [S]
    positions: Tensor  # [S, Lq] position of each query
    length: int
    """Keys of the longest one, rounded up."""
    masks: dict[tuple[int, int, int | None], tuple[int, Tensor]] = field(default_factory=dict)
    """(first row, first query, window) -> (number of keys, mask), shared by all layers."""


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
    """Return ``length`` rounded up to :data:`KEY_MULTIPLE`."""
    return -(-length // KEY_MULTIPLE) * KEY_MULTIPLE


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
    for chosen in _grouped(extensions):
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


def _grouped(extensions: Sequence[Extension]) -> list[list[Extension]]:
    """Split extensions into groups whose smallest has at least half the queries and half the keys
    of the largest."""
    left = sorted(extensions, key=lambda e: (e.q_len, e.k_len))
    groups: list[list[Extension]] = []
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
    slots, length = bucket.slots[rows], bucket.length
    keys = cache.keys[options.layer][:, :, :length][slots]
    values = cache.values[options.layer][:, :, :length][slots]
    queries = query.shape[2]
    small = query.shape[0] * query.shape[1] * queries * length <= _SCORES
    tile = max(_TILE, queries // 4) if small else _TILE
    outputs = []
    for begin in range(0, queries, tile):
        key = rows.start, begin, options.window
        if key not in bucket.masks:
            at = bucket.positions[rows, begin : begin + tile]
            reach = min(length, rounded(int(at.max()) + 1))
            bucket.masks[key] = reach, hidden_keys(at, reach, options.window)
        reach, mask = bucket.masks[key]
        kv = keys[:, :, :reach], values[:, :, :reach]
        outputs.append(stable_attention(query[:, :, begin : begin + tile], kv, mask, options))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


def hidden_keys(positions: Tensor, length: int, window: int | None) -> Tensor:
    """Return the mask [S, 1, Lq, length] that is True if the query at ``positions`` [S, Lq] must
    not read a key: keys after its position, or before the sliding window."""
    keys = torch.arange(length, device=positions.device)
    hidden = keys > positions[..., None]
    if window is not None and length > window:
        hidden |= keys <= positions[..., None] - window
    return hidden[:, None]


def stable_attention(
    query: Tensor, kv: tuple[Tensor, Tensor], hidden: Tensor, options: Options
) -> Tensor:
    """Return the attention [S, heads, Lq, dim] in fp32, with bits that do not depend on the batch.

    ``query`` [S, heads, Lq, dim], ``kv`` [S, kv_heads, L, dim], ``hidden`` [S, 1, Lq, L] with True
    = must not read. The query heads that share a key/value head are the rows of one matmul.
    """
    keys, values = kv
    rows, heads, queries, dim = query.shape
    kv_heads, length = keys.shape[1:3]
    group = heads // kv_heads
    q = query.reshape(rows, kv_heads, group * queries, dim).float() * options.scale
    least = next(count for size, count in _KEY_ROWS if dim <= size)
    if group * queries < least:
        q = F.pad(q, (0, 0, 0, least - group * queries))
    scores = torch.matmul(q, keys.float().transpose(-1, -2))  # [S, kv_heads, R, L]
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = scores[:, :, : max(group * queries, _VALUE_ROWS)]
    real = scores[:, :, : group * queries].unflatten(2, (group, queries))
    real.masked_fill_(hidden[:, :, None], -torch.inf)
    weights = scores.softmax(-1)
    wide = values.float()
    out = torch.matmul(weights[..., :_CHUNK], wide[:, :, :_CHUNK])
    for begin in range(_CHUNK, length, _CHUNK):
        end = begin + _CHUNK
        out += torch.matmul(weights[..., begin:end], wide[:, :, begin:end])
    out = out[:, :, : group * queries].to(query.dtype)
    return out.reshape(rows, heads, queries, values.shape[-1])
