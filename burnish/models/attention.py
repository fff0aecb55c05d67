"""Attention over ragged tokens: packed rows, shared prefixes, and decoding from a cache of
key/value slots.

HuggingFace models look their attention up by name. This module registers one function,
``burnish``, that takes its instructions from a plan passed as a keyword through the model's
forward. Four plans:

* no plan: torch's scaled-dot-product attention, exactly as the model would have done;
* :class:`PackedPlan`: all tokens stand in one row ``[1, M]``; each query segment reads only its
own keys
  (its row, or the group's shared prompt followed by its own response). Nothing is computed on
  padding outside the attention itself, and rows of like length are padded together inside it;
* :class:`DecodePlan`: one new token per sequence reads the slots of a :class:`KVCache`;
* :class:`SpreadPlan`: a packed row whose tokens are spread over ranks (``models/ulysses.py``).

Not here: how rows become plans (``train/batching.py``, ``rollout/local.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from burnish.models.ulysses import SpreadPlan, spread_attention

ATTENTION_NAME = "burnish"


@dataclass(frozen=True)
class Segment:
    """Queries ``[q_start, q_start + q_len)`` that read a prefix and then themselves, causally.

    Positions are indices into the packed row. ``prefix_len`` 0 is an ordinary causal row.
    """

    q_start: int
    q_len: int
    prefix_start: int = 0
    prefix_len: int = 0

    @property
    def k_len(self) -> int:
        return self.prefix_len + self.q_len


@dataclass(frozen=True)
class _Bucket:
    """Segments of like size as one rectangle. S segments, Lq queries, Lk keys."""

    q_index: Tensor  # [S, Lq] into the packed row; padding repeats a real token
    k_index: Tensor  # [S, Lk]
    mask: Tensor | None  # [S, 1, Lq, Lk] True = may read; None = plain causal without padding


@dataclass(frozen=True)
class PackedPlan:
    """Who reads whom in a packed row of M tokens."""

    buckets: tuple[_Bucket, ...]
    inverse: Tensor  # [M] place of each token in the buckets' outputs put one after another
    positions: Tensor  # [M] position of each token in its own row (for sliding windows)
    cache: KVCache | None = None
    """Where keys and values are also written (prefill), or None."""
    cache_source: Tensor | None = None  # [W] token in the packed row
    cache_slot: Tensor | None = None  # [W] slot it goes to
    cache_position: Tensor | None = None  # [W] position in the slot
    _windows: dict[int, tuple[Tensor, ...]] = field(default_factory=dict, compare=False)

    def masks(self, window: int | None) -> tuple[Tensor | None, ...]:
        """One mask per bucket, limited to a sliding window of ``window`` tokens if there is one."""
        if window is None or int(self.positions.max()) < window:
            return tuple(b.mask for b in self.buckets)
        if window not in self._windows:
            self._windows[window] = tuple(self._limit(b, window) for b in self.buckets)
        return self._windows[window]

    def _limit(self, bucket: _Bucket, window: int) -> Tensor:
        distance = (
            self.positions[bucket.q_index][:, None, :, None]
            - self.positions[bucket.k_index][:, None, None, :]
        )
        near = (distance >= 0) & (distance < window)
        return near if bucket.mask is None else near & bucket.mask


class KVCache:
    """Keys and values of sequences being decoded: per layer ``[slots, kv_heads, capacity,
    head_dim]``.

    Slots ``0 .. B-1`` hold the B active sequences, so a decode step reads a plain slice. Layers are
    allocated when first written, in the shape and dtype the model gives.
    """

    def __init__(self, num_slots: int, capacity: int) -> None:
        self.num_slots = num_slots
        self.capacity = capacity
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def write(
        self, layer: int, slots: Tensor, positions: Tensor, kv: tuple[Tensor, Tensor]
    ) -> None:
        """Store keys and values [W, kv_heads, head_dim] at (slot, position) pairs."""
        key, value = kv
        if layer not in self.keys:
            _, heads, dim = key.shape
            shape = (self.num_slots, heads, self.capacity, dim)
            self.keys[layer] = key.new_zeros(shape)
            self.values[layer] = value.new_zeros((*shape[:3], value.shape[-1]))
        self.keys[layer][slots, :, positions] = key
        self.values[layer][slots, :, positions] = value

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first ``length`` positions of slots ``source`` into slots ``target``."""
        for store in (self.keys, self.values):
            for tensor in store.values():
                tensor[target, :, :length] = tensor[source, :, :length]

    def grow(self, capacity: int) -> None:
        """Make room for longer sequences, keeping what is stored."""
        extra = capacity - self.capacity
        if extra <= 0:
            return
        for store in (self.keys, self.values):
            for layer, tensor in store.items():
                store[layer] = F.pad(tensor, (0, 0, 0, extra))
        self.capacity = capacity

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for store in (self.keys, self.values) for t in store.values())


@dataclass(frozen=True)
class DecodePlan:
    """One new token for each of the sequences in slots ``0 .. B-1``."""

    cache: KVCache
    slots: Tensor  # [B] = arange(B)
    positions: Tensor  # [B] where the new token goes
    length: int
    """Keys to read: the longest active sequence, new token included."""
    mask: Tensor  # [B, 1, 1, length] True = may read


def plan_segments(segments: Sequence[Segment], positions: Tensor) -> PackedPlan:
    """The plan for segments that cover a packed row exactly once, with ``positions`` [M] on its
    device.

    Segments are sorted into buckets in which the shortest has at least half the keys of the
    longest, so at most half of a bucket's attention is padding, however ragged the rows are.
    """
    device = positions.device
    order = sorted(range(len(segments)), key=lambda i: (segments[i].q_len, segments[i].k_len))
    buckets: list[_Bucket] = []
    inverse = torch.empty(positions.numel(), dtype=torch.int64)
    done = 0
    while order:
        largest = segments[order[-1]]
        chosen: list[Segment] = []
        while order and _fits(segments[order[-1]], largest):
            chosen.append(segments[order.pop()])
        width = max(s.q_len for s in chosen)
        for row, segment in enumerate(chosen):
            first = done + row * width
            tokens = slice(segment.q_start, segment.q_start + segment.q_len)
            inverse[tokens] = torch.arange(first, first + segment.q_len)
        done += len(chosen) * width
        buckets.append(_bucket(chosen, device))
    return PackedPlan(tuple(buckets), inverse.to(device), positions)


def _fits(segment: Segment, largest: Segment) -> bool:
    return 2 * segment.q_len >= largest.q_len and 2 * segment.k_len >= largest.k_len


def _bucket(segments: Sequence[Segment], device: torch.device) -> _Bucket:
    starts = torch.tensor([[s.q_start, s.q_len, s.prefix_start, s.prefix_len] for s in segments])
    q_start, q_len, p_start, p_len = starts.T[:, :, None]  # each [S, 1]
    q = torch.arange(int(q_len.max()))[None]  # [1, Lq]
    k = torch.arange(int((p_len + q_len).max()))[None]  # [1, Lk]
    q_index = q_start + q.minimum(q_len - 1)
    k_index = torch.where(k < p_len, p_start + k, q_start + (k - p_len).minimum(q_len - 1))
    plain = bool((q_len == q_len[0]).all() and (p_len == 0).all())
    mask = None
    if not plain:
        # Padded queries read what the last real one reads, so that no softmax is over nothing.
        reach = p_len + q.minimum(q_len - 1)  # [S, Lq] last key that query q reads
        mask = (k[:, None, :] <= reach[:, :, None])[:, None].to(device)
    return _Bucket(q_index.to(device), k_index.to(device), mask)


def decode_plan(cache: KVCache, positions: Tensor, length: int) -> DecodePlan:
    """Plan for one new token per active sequence, at ``positions`` [B]; ``length`` = max position
    + 1."""
    slots = torch.arange(positions.numel(), device=positions.device)
    reach = torch.arange(length, device=positions.device)
    mask = (reach[None, :] <= positions[:, None])[:, None, None, :]
    return DecodePlan(cache, slots, positions, length, mask)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    plan: PackedPlan | DecodePlan | SpreadPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # house: ok the signature is HuggingFace's
    """HuggingFace attention interface: query [B, heads, T, dim] -> output [B, T, heads, dim]."""
    for unsupported in ("softcap", "s_aux"):
        if kwargs.get(unsupported) is not None:
            raise NotImplementedError(
                f"{type(module).__name__} asks for attention with {unsupported}, which packed and "
                "cached "
                "attention here does not have; such models cannot be trained with this version"
            )
    if plan is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    scale, window = kwargs["scaling"], kwargs.get("sliding_window")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if isinstance(plan, DecodePlan):
        return _decode(plan, (query, key, value), layer=layer, scale=scale, window=window), None
    options = (scale, window, kwargs.get("dropout", 0.0))
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [tokens, heads, dim]
    if not isinstance(plan, SpreadPlan):
        return _packed(plan, (q, k, v), layer, options)[None], None
    whole = plan.whole
    plan.layers.add(layer)
    out = spread_attention(plan, (q, k, v), lambda x: _packed(whole, x, layer, options))
    return out[None], None


def _packed(
    plan: PackedPlan,
    qkv: tuple[Tensor, Tensor, Tensor],
    layer: int,
    options: tuple[float, int | None, float],
) -> Tensor:
    """[M, heads, dim] of query, key and value [M, heads, dim] each."""
    scale, window, dropout = options
    query, key, value = qkv
    if plan.cache is not None:
        assert plan.cache_source is not None
        assert plan.cache_slot is not None and plan.cache_position is not None
        kv = key[plan.cache_source], value[plan.cache_source]
        plan.cache.write(layer, plan.cache_slot, plan.cache_position, kv)
    grouped = query.shape[1] != key.shape[1]
    outputs = []
    for bucket, mask in zip(plan.buckets, plan.masks(window), strict=True):
        out = F.scaled_dot_product_attention(
            query[bucket.q_index].transpose(1, 2),
            key[bucket.k_index].transpose(1, 2),
            value[bucket.k_index].transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=dropout,
            scale=scale,
            enable_gqa=grouped,
        )  # [S, heads, Lq, dim]
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return flat[plan.inverse]


def _decode(
    plan: DecodePlan,
    qkv: tuple[Tensor, Tensor, Tensor],
    *,
    layer: int,
    scale: float,
    window: int | None,
) -> Tensor:
    query, key, value = qkv
    batch, heads, _, dim = query.shape
    kv_heads = key.shape[1]
    plan.cache.write(layer, plan.slots, plan.positions, (key[:, :, 0], value[:, :, 0]))
    keys = plan.cache.keys[layer][:batch, :, : plan.length]
    values = plan.cache.values[layer][:batch, :, : plan.length]
    mask = plan.mask
    if window is not None and plan.length > window:
        reach = torch.arange(plan.length, device=mask.device)
        mask = mask & (reach[None, :] > plan.positions[:, None] - window)[:, None, None, :]
    # The query heads of one key/value head are read together: they are the rows of one small
    # matmul.
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, dim)
    if query.device.type == "cpu" and query.dtype != torch.bfloat16:
        # For so few queries two batched matmuls beat torch's fused CPU kernel, and in fp16 by
        # more, conversion included (docs/lab-notebook.md).
        scores = torch.matmul(grouped.float() * scale, keys.float().transpose(-1, -2))
        weights = scores.masked_fill_(~mask, -torch.inf).softmax(-1)
        out = torch.matmul(weights, values.float()).to(query.dtype)
    else:
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(batch, 1, heads, values.shape[-1])


AttentionInterface.register(ATTENTION_NAME, _attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)

# HuggingFace models build an attention mask unless they are given one of four dimensions; with a
# plan the mask is in the plan, so this placeholder is passed and never read.
NO_MASK = torch.empty(1, 1, 1, 1)
