"""Attention over ragged tokens: packed rows, shared prefixes, and decoding from a cache of
key/value slots.

HuggingFace models look up their attention by name. This module registers one function,
``burnish``. A plan, passed as a keyword through the model's forward, selects its behavior:

* no plan: torch's scaled-dot-product attention, exactly as the model would compute it;
* :class:`PackedPlan`: all tokens are in one row ``[1, M]``. Each query segment attends only to its
  own keys: its row, or the group's shared prompt followed by its own response. Only the attention
  itself computes on padding, in buckets of rows of similar length;
* :class:`~burnish.models.cache_attention.PrefillPlan`: a packed row of new tokens, each of which
  attends to its sequence in a cache;
* :class:`DecodePlan`: one new token per sequence attends to the slots of a cache
  (``models/cache_attention.py``);
* :class:`SequenceParallelPlan`: a packed row whose tokens are sharded over ranks
  (``models/ulysses.py``).

Not here: how rows become plans (``train/batching.py``, ``rollout/local/engine.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from burnish.errors import BurnishError
from burnish.models.cache_attention import (
    KVCache,
    Options,
    PrefillPlan,
    additive_mask,
    prefill_attention,
    similar_spans,
    stable_attention,
)
from burnish.models.family import PACKED
from burnish.models.flash import FlashPlan, FlashSwitch, flash_attention, flash_plan
from burnish.models.sdpa import Kernels, attend, kernels_of
from burnish.models.segments import Segment
from burnish.models.ulysses import sequence_parallel_attention
from burnish.tensors import upload

ATTENTION_NAME = PACKED


@dataclass(frozen=True)
class _Bucket:
    """A rectangle of segments of similar size: S segments, Lq queries, Lk keys."""

    q_index: Tensor  # [S, Lq] into the packed row; padding repeats a real token
    k_index: Tensor  # [S, Lk]
    reach: Tensor  # [S, Lq] index, within its segment's keys, of the last key each query reads
    plain: bool
    """True if all segments are causal and equally long, so that no mask is needed."""


@dataclass(frozen=True)
class PackedPlan:
    """Attention pattern of a packed row of M tokens."""

    segments: tuple[Segment, ...]
    positions: Tensor  # [M] position of each token in its own row (for sliding windows)
    longest: int
    """Keys of the longest segment. A sliding window at least this long masks nothing."""
    kernels: Kernels | None
    """Attention kernels of the GPU. None on a CPU."""
    flash: FlashPlan | None = None
    """The segments for FlashAttention. None: it is not used."""
    cache: KVCache | None = None
    """Cache to which keys and values are also written (prefill), or None."""
    cache_source: Tensor | None = None  # [W] token in the packed row
    cache_slot: Tensor | None = None  # [W] slot it is written to
    cache_position: Tensor | None = None  # [W] position in the slot
    _masks: dict[Any, tuple[Tensor | None, ...]] = field(default_factory=dict, compare=False)

    @cached_property
    def buckets(self) -> tuple[_Bucket, ...]:
        """Rectangles of segments of similar size (:func:`similar_spans`)."""
        return tuple(
            _bucket(chosen, self.positions.device) for chosen in similar_spans(self.segments)
        )

    @cached_property
    def inverse(self) -> Tensor:
        """[M] index of each token in the concatenated outputs of the buckets."""
        inverse = np.empty(self.positions.numel(), dtype=np.int64)
        done = 0
        for chosen in similar_spans(self.segments):
            width = max(s.q_len for s in chosen)
            for row, segment in enumerate(chosen):
                first = done + row * width
                inverse[segment.q_start : segment.q_end] = np.arange(first, first + segment.q_len)
            done += len(chosen) * width
        return upload(torch.tensor(inverse), self.positions.device)

    def masks(self, window: int | None, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """Return one additive mask [S, 1, Lq, Lk] per bucket: 0 or -inf, in ``dtype``.

        The mask is None for plain causal attention. ``window`` is the length of a sliding window in
        tokens, or None.

        Masks are created once, on the device, and shared by all layers. A bool mask would be
        converted in every call of every layer, and each conversion would be kept for backward.
        """
        if window is not None and window >= self.longest:
            window = None
        key = window, dtype
        if key not in self._masks:
            self._masks[key] = tuple(
                None if b.plain and window is None else self._mask(b, window, dtype)
                for b in self.buckets
            )
        return self._masks[key]

    def _mask(self, bucket: _Bucket, window: int | None, dtype: torch.dtype) -> Tensor:
        (rows, queries), keys = bucket.q_index.shape, bucket.k_index.shape[1]
        key = torch.arange(keys, device=bucket.k_index.device)
        hidden = key > bucket.reach[:, None, :, None]
        if window is not None:
            last = self.positions[bucket.q_index] - window
            hidden |= self.positions[bucket.k_index][:, None, None, :] <= last[:, None, :, None]
        # The memory-efficient kernel copies a mask whose rows are not aligned to 16 elements.
        wide = torch.zeros(rows, 1, queries, -(-keys // 16) * 16, dtype=dtype, device=key.device)
        return wide[..., :keys].masked_fill_(hidden, -torch.inf)


@dataclass(frozen=True)
class DecodePlan:
    """Plan for one new token for each sequence in slots ``0 .. B-1``. Rows of the batch after the
    first B are padding."""

    cache: KVCache
    slots: Tensor  # [B] = arange(B)
    positions: Tensor  # [B] position of the new token
    length: int
    """Number of keys to read: the longest active sequence, including its new token."""
    stable: bool = False
    """True if the bits of a row must not depend on the batch (``models/cache_attention.py``). The
    cache then has transposed keys."""
    _added: dict[Any, Tensor] = field(default_factory=dict, compare=False)

    def added_mask(self, window: int | None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the additive mask [B, 1, 1, length] for a sliding window, shared by all layers. (A
        bool mask would be converted in every layer.)"""
        key = window, dtype
        if key not in self._added:
            mask = additive_mask(self.positions[:, None], range(self.length), window)
            self._added[key] = mask.to(dtype)
        return self._added[key]


@dataclass(frozen=True)
class SequenceParallelPlan:
    """Attention plan of a packed row of M tokens sharded over n ranks. Each rank holds
    C = ceil(M / n) tokens; the last ones are padding."""

    whole: PackedPlan
    """Plan over all M tokens."""
    num_tokens: int
    """M."""
    group: ProcessGroup
    layers: set[int] = field(default_factory=set, compare=False)
    """Layers whose attention has used the plan. (An architecture that mixes tokens without it would
    only mix those of one chunk.)"""


def plan_segments(
    segments: Sequence[Segment], positions: Tensor, *, flash: FlashSwitch | None = None
) -> PackedPlan:
    """Return the plan for segments that cover a packed row exactly once.

    ``positions`` [M] holds each token's position in its own row; the plan is built on its device.
    With ``flash`` on, calls that FlashAttention accepts are computed by it (``models/flash.py``).
    """
    device = positions.device
    switch = flash if flash is not None and flash.on and segments else None
    return PackedPlan(
        tuple(segments),
        positions,
        longest=max((s.k_len for s in segments), default=0),
        kernels=kernels_of(device),
        flash=None if switch is None else flash_plan(segments, device, switch),
    )


def _bucket(segments: Sequence[Segment], device: torch.device) -> _Bucket:
    starts = torch.tensor([[s.q_start, s.q_len, s.prefix_start, s.prefix_len] for s in segments])
    q_start, q_len, p_start, p_len = upload(starts, device).T[:, :, None]  # each [S, 1]
    width = max(s.q_len for s in segments)
    q = torch.arange(width, device=device)[None]  # [1, Lq]
    k = torch.arange(max(s.k_len for s in segments), device=device)[None]  # [1, Lk]
    # Padded queries read the keys of the last real query, so that no softmax is empty.
    real = q.minimum(q_len - 1)
    k_index = torch.where(k < p_len, p_start + k, q_start + (k - p_len).minimum(q_len - 1))
    plain = all(s.q_len == width and s.prefix_len == 0 for s in segments)
    return _Bucket(q_start + real, k_index, p_len + real, plain)


def decode_plan(
    cache: KVCache, positions: Tensor, length: int, *, stable: bool = False
) -> DecodePlan:
    """Return the plan for one new token per active sequence, at ``positions`` [B]. ``length`` is
    at least the largest position + 1."""
    slots = torch.arange(positions.numel(), device=positions.device)
    return DecodePlan(cache, slots, positions, length, stable)


class UnsupportedAttention(BurnishError, NotImplementedError):
    """A model uses an attention option that packed and cached attention do not support."""


_IGNORED = frozenset(
    {
        "is_causal",
        "position_ids",
        "use_cache",
        "past_key_values",
        "position_embeddings",
        "logits_to_keep",
    }
)
"""Keywords of HuggingFace models that have no effect under a plan: it contains the positions, and
causality is checked on the module."""


def _options(module: nn.Module, query: Tensor, mask: Tensor | None, keywords: Any) -> Options:
    """Return the options of one attention call under a plan.

    Raises UnsupportedAttention if the model passes its own mask, if the layer is not causal, or
    for a keyword that would be ignored (attention sinks, sparse attention indices, biases).
    """
    name = type(module).__name__
    if mask is not None and mask.numel() != 1:
        raise UnsupportedAttention(f"{name} passes its own attention mask {list(mask.shape)}")
    if vars(module).get("is_causal", True) is False:
        raise UnsupportedAttention(f"{name} is not causal")
    _refuse_unknown(module, keywords)
    layer = vars(module).get("layer_idx")
    if layer is None:
        raise UnsupportedAttention(f"{name} has no layer index (layer_idx)")
    scale = keywords.get("scaling")
    return Options(
        layer=int(layer),
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        window=_window(module, keywords),
        dropout=keywords.get("dropout") or 0.0,
        softcap=keywords.get("softcap"),
    )


_MEANINGS = {"s_aux": "sinks (s_aux)", "indices": "a selection of keys (indices)"}


def _refuse_unknown(module: nn.Module, keywords: Any) -> None:
    known = {"scaling", "sliding_window", "dropout", "softcap"}
    for key, value in keywords.items():
        if key in known or key in _IGNORED or key.startswith("output_"):
            continue
        if value is not None and value is not False:
            name, meaning = type(module).__name__, _MEANINGS.get(key, key)
            raise UnsupportedAttention(f"{name} requires attention with {meaning}")


_WINDOWS: WeakKeyDictionary[nn.Module, int | None] = WeakKeyDictionary()


def _window(module: nn.Module, keywords: Any) -> int | None:
    """Return the layer's sliding window in tokens, or None.

    Most models pass it as a keyword. Some only apply it to the mask, which a plan replaces (PhiMoE,
    Qwen2-MoE); for these it is read from the config. The check of the model family
    (``models/support.py``) detects models for which that is wrong.
    """
    if "sliding_window" in keywords:
        return keywords["sliding_window"] or None
    if module not in _WINDOWS:
        config = vars(module).get("config")
        fields = {} if config is None else config.get_text_config().to_dict()
        types, layer = fields.get("layer_types"), vars(module).get("layer_idx")
        if types:
            applies = types[layer] == "sliding_attention"
        else:
            applies = fields.get("use_sliding_window", True)
        _WINDOWS[module] = (fields.get("sliding_window") or None) if applies else None
    return _WINDOWS[module]


def burnish_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    plan: PackedPlan | PrefillPlan | DecodePlan | SequenceParallelPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # house: ok the signature is HuggingFace's
    """Implement HuggingFace's attention interface: query [B, heads, T, dim] -> output [B, T, heads,
    dim]."""
    if plan is None:
        return _unpacked(module, (query, key, value), attention_mask, **kwargs), None
    options = _options(module, query, attention_mask, kwargs)
    if isinstance(plan, DecodePlan):
        return _decode(plan, (query, key, value), options), None
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [tokens, heads, dim]
    if isinstance(plan, PrefillPlan):
        return prefill_attention(plan, (q, k, v), options)[None], None
    if not isinstance(plan, SequenceParallelPlan):
        return packed_attention(plan, (q, k, v), options)[None], None
    whole = plan.whole
    plan.layers.add(options.layer)
    out = sequence_parallel_attention(
        (q, k, v),
        lambda x: packed_attention(whole, x, options),
        num_tokens=plan.num_tokens,
        group=plan.group,
    )
    return out[None], None


def _unpacked(
    module: nn.Module, qkv: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, **keywords: Any
) -> Tensor:
    """Return the attention [B, T, heads, dim] of a padded batch, as the model would compute it."""
    _refuse_unknown(module, keywords)
    softcap = keywords.pop("softcap", None)
    if softcap is None:
        out, _ = sdpa_attention_forward(module, *qkv, mask, **keywords)
        return out
    query, key, _ = qkv
    if mask is None and query.shape[2] > 1:
        length = key.shape[2]
        mask = torch.ones(query.shape[2], length, dtype=torch.bool, device=query.device)
        mask = mask.tril(length - query.shape[2])
    scale = keywords.get("scaling")
    options = Options(
        layer=0,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        window=None,
        dropout=keywords.get("dropout") or 0.0,
        softcap=softcap,
    )
    return _capped(qkv, mask, options).transpose(1, 2)


def _capped(qkv: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, options: Options) -> Tensor:
    """Return the attention [B, heads, Tq, dim] with scores ``softcap * tanh(score / softcap)``.

    Source: Gemma 2, arXiv 2408.00118. The softmax is in fp32. ``mask`` [..., Tq, Tk] is additive,
    or bool with True = may read.
    """
    query, key, value = qkv
    batch, heads, length, dim = query.shape
    kv_heads = key.shape[1]
    assert options.softcap is not None
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, length, dim)
    scores = torch.matmul(grouped, key[:, :, None].transpose(-1, -2)) * options.scale
    scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        mask = mask[:, :, None] if mask.dim() == 4 else mask
        added = mask.dtype != torch.bool
        scores = scores + mask if added else scores.masked_fill(~mask, -torch.inf)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, options.dropout)
    return torch.matmul(weights, value[:, :, None]).reshape(batch, heads, length, value.shape[-1])


def packed_attention(
    plan: PackedPlan, qkv: tuple[Tensor, Tensor, Tensor], options: Options
) -> Tensor:
    """Return the attention [M, heads, dim] of packed query, key and value, [M, heads, dim] each."""
    query, key, value = qkv
    if plan.cache is not None:
        assert plan.cache_source is not None
        assert plan.cache_slot is not None and plan.cache_position is not None
        kv = key[plan.cache_source], value[plan.cache_source]
        plan.cache.write(options.layer, plan.cache_slot, plan.cache_position, kv)
    if plan.flash is not None and plan.flash.takes(qkv, options):
        try:
            return flash_attention(plan.flash, qkv, scale=options.scale, window=options.window)
        except RuntimeError as error:
            plan.flash.failed(error, qkv, options)
    outputs = []
    masks = plan.masks(options.window, query.dtype)
    for bucket, mask in zip(plan.buckets, masks, strict=True):
        q = query[bucket.q_index].transpose(1, 2)
        k = key[bucket.k_index].transpose(1, 2)
        v = value[bucket.k_index].transpose(1, 2)
        if options.softcap is not None:
            if mask is None:  # causal
                length = q.shape[2]
                mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
            out = _capped((q, k, v), mask, options)
        else:
            dropout, scale = options.dropout, options.scale
            out = attend((q, k, v), mask, plan.kernels, dropout_p=dropout, scale=scale)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return flat[plan.inverse]


def _decode(plan: DecodePlan, qkv: tuple[Tensor, Tensor, Tensor], options: Options) -> Tensor:
    padding, batch = qkv[0].shape[0], plan.slots.numel()
    query, key, value = (x[:batch] for x in qkv)
    heads, dim = query.shape[1], query.shape[3]
    kv_heads, window = key.shape[1], options.window
    kv = (key[:, :, 0], value[:, :, 0])
    plan.cache.write(options.layer, plan.slots, plan.positions, kv)
    keys = plan.cache.keys[options.layer][:batch, :, : plan.length]
    values = plan.cache.values[options.layer][:batch, :, : plan.length]
    if plan.stable:
        added = plan.added_mask(window)
        out = stable_attention(query, (keys, values), added, options).transpose(1, 2)
        return F.pad(out, (0, 0, 0, 0, 0, 0, 0, padding - batch)) if padding > batch else out
    # The query heads that share a key/value head are the rows of one small matmul.
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, dim)
    on_cpu = query.device.type == "cpu" and query.dtype != torch.bfloat16
    if options.softcap is not None or on_cpu:
        # For this few queries, two batched matmuls are faster than torch's fused CPU kernel. The
        # gain is larger in fp16, even with the conversion (docs/lab-notebook.md).
        scores = torch.matmul(grouped.float() * options.scale, keys.float().transpose(-1, -2))
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        weights = scores.add_(plan.added_mask(window)).softmax(-1)
        out = torch.matmul(weights, values.float()).to(query.dtype)
    else:
        mask = plan.added_mask(window, query.dtype)
        out = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask, scale=options.scale
        )
    return out.reshape(batch, 1, heads, values.shape[-1])


AttentionInterface.register(ATTENTION_NAME, burnish_attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def takes_plans(body: PreTrainedModel) -> bool:
    """Return whether ``body`` uses the attention of this module. If so, rows can be packed;
    otherwise they are padded."""
    return str(body.config._attn_implementation) == ATTENTION_NAME


# HuggingFace models build an attention mask unless they receive a 4-D one. A plan contains its own
# masks, so this placeholder is passed with it and never read.
NO_MASK = torch.empty(1, 1, 1, 1)
