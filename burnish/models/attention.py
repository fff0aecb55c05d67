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
* :class:`SequenceParallelPlan`: a packed row whose tokens are spread over ranks
  (``models/ulysses.py``).

Not here: how rows become plans (``train/batching.py``, ``rollout/local.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
from burnish.models.family import PACKED
from burnish.models.sdpa import Kernels, attend, kernels_of
from burnish.models.ulysses import sequence_parallel_attention
from burnish.tensors import upload

ATTENTION_NAME = PACKED


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
    reach: Tensor  # [S, Lq] the last key that a query reads, of its segment's
    plain: bool
    """All segments are causal and of one length, so that no mask is needed."""


@dataclass(frozen=True)
class PackedPlan:
    """Who reads whom in a packed row of M tokens."""

    buckets: tuple[_Bucket, ...]
    inverse: Tensor  # [M] place of each token in the buckets' outputs put one after another
    positions: Tensor  # [M] position of each token in its own row (for sliding windows)
    longest: int
    """Tokens that a row has at most: a window of as many hides none of them."""
    kernels: Kernels | None
    """The attention kernels that compute it. None: a CPU's."""
    cache: KVCache | None = None
    """Where keys and values are also written (prefill), or None."""
    cache_source: Tensor | None = None  # [W] token in the packed row
    cache_slot: Tensor | None = None  # [W] slot it goes to
    cache_position: Tensor | None = None  # [W] position in the slot
    _masks: dict[Any, tuple[Tensor | None, ...]] = field(default_factory=dict, compare=False)

    def masks(self, window: int | None, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """One mask [S, 1, Lq, Lk] per bucket, to be added to its scores: 0 or -inf, in ``dtype``;
        None: plain causal. ``window``: of a sliding window, in tokens.

        Masks are made once, on the device, and shared by all layers: a bool mask would be
        converted in every call of every layer, and each conversion kept for backward.
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
        # The memory-efficient kernel copies a mask whose rows do not begin at multiples of 16.
        wide = torch.zeros(rows, 1, queries, -(-keys // 16) * 16, dtype=dtype, device=key.device)
        return wide[..., :keys].masked_fill_(hidden, -torch.inf)


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


@dataclass(frozen=True)
class SequenceParallelPlan:
    """Who reads whom in a packed row of M tokens, of which each of n ranks holds C = ceil(M / n);
    the last ones are padding."""

    whole: PackedPlan
    """Among all M tokens."""
    num_tokens: int
    """M."""
    group: ProcessGroup
    layers: set[int] = field(default_factory=set, compare=False)
    """Layers whose attention has asked. (An architecture that mixes tokens without asking would
    mix those of a stretch only.)"""


def plan_segments(segments: Sequence[Segment], positions: Tensor) -> PackedPlan:
    """The plan for segments that cover a packed row exactly once, with ``positions`` [M] on its
    device.

    Segments are sorted into buckets in which the shortest has at least half the keys of the
    longest, so at most half of a bucket's attention is padding, however ragged the rows are.
    """
    device = positions.device
    order = sorted(range(len(segments)), key=lambda i: (segments[i].q_len, segments[i].k_len))
    buckets: list[_Bucket] = []
    inverse = np.empty(positions.numel(), dtype=np.int64)
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
            inverse[tokens] = np.arange(first, first + segment.q_len)
        done += len(chosen) * width
        buckets.append(_bucket(chosen, device))
    return PackedPlan(
        tuple(buckets),
        upload(torch.tensor(inverse), device),
        positions,
        longest=max((s.k_len for s in segments), default=0),
        kernels=kernels_of(device),
    )


def _fits(segment: Segment, largest: Segment) -> bool:
    return 2 * segment.q_len >= largest.q_len and 2 * segment.k_len >= largest.k_len


def _bucket(segments: Sequence[Segment], device: torch.device) -> _Bucket:
    starts = torch.tensor([[s.q_start, s.q_len, s.prefix_start, s.prefix_len] for s in segments])
    q_start, q_len, p_start, p_len = upload(starts, device).T[:, :, None]  # each [S, 1]
    width = max(s.q_len for s in segments)
    q = torch.arange(width, device=device)[None]  # [1, Lq]
    k = torch.arange(max(s.k_len for s in segments), device=device)[None]  # [1, Lk]
    # Padded queries read what the last real one reads, so that no softmax is over nothing.
    real = q.minimum(q_len - 1)
    k_index = torch.where(k < p_len, p_start + k, q_start + (k - p_len).minimum(q_len - 1))
    plain = all(s.q_len == width and s.prefix_len == 0 for s in segments)
    return _Bucket(q_start + real, k_index, p_len + real, plain)


def decode_plan(cache: KVCache, positions: Tensor, length: int) -> DecodePlan:
    """Plan for one new token per active sequence, at ``positions`` [B]; ``length`` = max position
    + 1."""
    slots = torch.arange(positions.numel(), device=positions.device)
    reach = torch.arange(length, device=positions.device)
    mask = (reach[None, :] <= positions[:, None])[:, None, None, :]
    return DecodePlan(cache, slots, positions, length, mask)


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
"""Keywords of HuggingFace models that change nothing here: positions are in the plan, and causality
is checked on the module."""


@dataclass(frozen=True)
class _Options:
    """One layer's call: its number, scale of the scores, window, dropout, and cap of the scores."""

    layer: int
    scale: float
    window: int | None
    dropout: float
    softcap: float | None


def _options(module: nn.Module, query: Tensor, mask: Tensor | None, given: Any) -> _Options:
    """The options of one call under a plan.

    Raises UnsupportedAttention for a mask that the model changed, a layer that is not causal, and
    any keyword that would be ignored (attention sinks, indices of sparse attention, biases).
    """
    name = type(module).__name__
    if mask is not None and mask.numel() != 1:
        raise UnsupportedAttention(f"{name} brings its own attention mask {list(mask.shape)}")
    if vars(module).get("is_causal", True) is False:
        raise UnsupportedAttention(f"{name} is not causal")
    _refuse_unknown(module, given)
    layer = vars(module).get("layer_idx")
    if layer is None:
        raise UnsupportedAttention(f"{name} does not say which layer it is (layer_idx)")
    scale = given.get("scaling")
    return _Options(
        layer=int(layer),
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        window=_window(module, given),
        dropout=given.get("dropout") or 0.0,
        softcap=given.get("softcap"),
    )


_MEANINGS = {"s_aux": "sinks (s_aux)", "indices": "a selection of keys (indices)"}


def _refuse_unknown(module: nn.Module, given: Any) -> None:
    known = {"scaling", "sliding_window", "dropout", "softcap"}
    for key, value in given.items():
        if key in known or key in _IGNORED or key.startswith("output_"):
            continue
        if value is not None and value is not False:
            name, meaning = type(module).__name__, _MEANINGS.get(key, key)
            raise UnsupportedAttention(f"{name} asks for attention with {meaning}")


_WINDOWS: WeakKeyDictionary[nn.Module, int | None] = WeakKeyDictionary()


def _window(module: nn.Module, given: Any) -> int | None:
    """The layer's sliding window in tokens.

    Most models pass it as a keyword. Some put it only into the mask, which a plan replaces: then it
    is read from the config (PhiMoE, Qwen2-MoE). The check of the model family
    (``models/support.py``) finds models for which that is wrong.
    """
    if "sliding_window" in given:
        return given["sliding_window"] or None
    if module not in _WINDOWS:
        _WINDOWS[module] = _window_in_config(module)
    return _WINDOWS[module]


def _window_in_config(module: nn.Module) -> int | None:
    config = vars(module).get("config")
    fields = {} if config is None else config.get_text_config().to_dict()
    types, layer = fields.get("layer_types"), vars(module).get("layer_idx")
    if types:
        applies = types[layer] == "sliding_attention"
    else:
        applies = fields.get("use_sliding_window", True)
    return (fields.get("sliding_window") or None) if applies else None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    plan: PackedPlan | DecodePlan | SequenceParallelPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # house: ok the signature is HuggingFace's
    """HuggingFace attention interface: query [B, heads, T, dim] -> output [B, T, heads, dim]."""
    if plan is None:
        return _unpacked(module, (query, key, value), attention_mask, **kwargs), None
    options = _options(module, query, attention_mask, kwargs)
    if isinstance(plan, DecodePlan):
        return _decode(plan, (query, key, value), options), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [tokens, heads, dim]
    if not isinstance(plan, SequenceParallelPlan):
        return _packed(plan, (q, k, v), options)[None], None
    whole = plan.whole
    plan.layers.add(options.layer)
    out = sequence_parallel_attention(
        (q, k, v),
        lambda x: _packed(whole, x, options),
        num_tokens=plan.num_tokens,
        group=plan.group,
    )
    return out[None], None


def _unpacked(
    module: nn.Module, qkv: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, **given: Any
) -> Tensor:
    """[B, T, heads, dim] of a rectangle of rows, as the model itself would compute it."""
    _refuse_unknown(module, given)
    softcap = given.pop("softcap", None)
    if softcap is None:
        out, _ = sdpa_attention_forward(module, *qkv, mask, **given)
        return out
    query, key, _ = qkv
    if mask is None and query.shape[2] > 1:
        length = key.shape[2]
        mask = torch.ones(query.shape[2], length, dtype=torch.bool, device=query.device)
        mask = mask.tril(length - query.shape[2])
    scale = given.get("scaling")
    options = _Options(
        layer=0,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        window=None,
        dropout=given.get("dropout") or 0.0,
        softcap=softcap,
    )
    return _capped(qkv, mask, options).transpose(1, 2)


def _capped(qkv: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, options: _Options) -> Tensor:
    """[B, heads, Tq, dim] attention whose scores are ``softcap * tanh(score / softcap)`` (Gemma 2,
    arXiv 2408.00118), softmax in fp32. ``mask`` [..., Tq, Tk]: added to the scores, or bool with
    True = may read."""
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


def _packed(plan: PackedPlan, qkv: tuple[Tensor, Tensor, Tensor], options: _Options) -> Tensor:
    """[M, heads, dim] of query, key and value [M, heads, dim] each."""
    query, key, value = qkv
    if plan.cache is not None:
        assert plan.cache_source is not None
        assert plan.cache_slot is not None and plan.cache_position is not None
        kv = key[plan.cache_source], value[plan.cache_source]
        plan.cache.write(options.layer, plan.cache_slot, plan.cache_position, kv)
    outputs = []
    masks = plan.masks(options.window, query.dtype)
    for bucket, mask in zip(plan.buckets, masks, strict=True):
        q = query[bucket.q_index].transpose(1, 2)
        k = key[bucket.k_index].transpose(1, 2)
        v = value[bucket.k_index].transpose(1, 2)
        if options.softcap is not None:
            out = _capped((q, k, v), _causal(q) if mask is None else mask, options)
        else:
            dropout, scale = options.dropout, options.scale
            out = attend((q, k, v), mask, plan.kernels, dropout_p=dropout, scale=scale)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return flat[plan.inverse]


def _causal(query: Tensor) -> Tensor:
    """[T, T] True where query t may read key s, s <= t."""
    length = query.shape[2]
    return torch.ones(length, length, dtype=torch.bool, device=query.device).tril()


def _decode(plan: DecodePlan, qkv: tuple[Tensor, Tensor, Tensor], options: _Options) -> Tensor:
    query, key, value = qkv
    batch, heads, _, dim = query.shape
    kv_heads, window = key.shape[1], options.window
    kv = (key[:, :, 0], value[:, :, 0])
    plan.cache.write(options.layer, plan.slots, plan.positions, kv)
    keys = plan.cache.keys[options.layer][:batch, :, : plan.length]
    values = plan.cache.values[options.layer][:batch, :, : plan.length]
    mask = plan.mask
    if window is not None and plan.length > window:
        reach = torch.arange(plan.length, device=mask.device)
        mask = mask & (reach[None, :] > plan.positions[:, None] - window)[:, None, None, :]
    # The query heads of one key/value head are read together: they are the rows of one small
    # matmul.
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, dim)
    on_cpu = query.device.type == "cpu" and query.dtype != torch.bfloat16
    if options.softcap is not None or on_cpu:
        # For so few queries two batched matmuls beat torch's fused CPU kernel, and in fp16 by
        # more, conversion included (docs/lab-notebook.md).
        scores = torch.matmul(grouped.float() * options.scale, keys.float().transpose(-1, -2))
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        weights = scores.masked_fill_(~mask, -torch.inf).softmax(-1)
        out = torch.matmul(weights, values.float()).to(query.dtype)
    else:
        out = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask, scale=options.scale
        )
    return out.reshape(batch, 1, heads, values.shape[-1])


AttentionInterface.register(ATTENTION_NAME, _attention)
AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


def takes_plans(body: PreTrainedModel) -> bool:
    """Return whether the attention of ``body`` is the one of this module: then rows can be packed,
    and otherwise they are padded."""
    return str(body.config._attn_implementation) == ATTENTION_NAME


# HuggingFace models build an attention mask unless they are given one of four dimensions; with a
# plan the mask is in the plan, so this placeholder is passed and never read.
NO_MASK = torch.empty(1, 1, 1, 1)
