"""The FlashAttention operators by plain matmuls per segment, in any floating-point format.

They are the oracle of the kernels on a GPU. Within :func:`on_cpu` they are the operators' CPU
kernels, so that ``models/flash.py`` runs on a CPU in tests and in benchmarks with tiny shapes. No
run of Burnish does that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from burnish.models.flash import has_kernel


def forward(  # house: ok the arguments are those of PyTorch's operator
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    **keywords: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return output [M, heads, dim], log-sum-exp [heads, M] in fp32 or wider, and three tensors
    without meaning. Rows without keys have output 0 and log-sum-exp +inf, as in FlashAttention 2.
    """
    assert not dropout_p and not return_debug_mask
    wide = torch.promote_types(query.dtype, torch.float32)
    out = torch.zeros_like(query)
    lse = torch.full((query.shape[1], query.shape[0]), torch.inf, dtype=wide, device=query.device)
    for q, k in _segments(cum_seq_q, cum_seq_k):
        scores = _scores(query[q].to(wide), key[k].to(wide), is_causal, keywords)
        total = scores.logsumexp(-1)  # [kv_heads, group, Lq]
        reads = total > -torch.inf
        weights = torch.where(reads[..., None], (scores - total[..., None]).exp(), 0.0)
        part = torch.einsum("hgqk,khd->qhgd", weights, value[k].to(wide))
        out[q] = part.flatten(1, 2).to(out.dtype)
        lse[:, q] = torch.where(reads, total, torch.inf).flatten(0, 1)
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return out, lse, state, torch.empty(0), torch.empty(0)


def backward(  # house: ok the arguments are those of PyTorch's operator
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    **keywords: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value. Like FlashAttention, this reads the weights of
    the softmax from ``logsumexp`` and their correction from ``out``."""
    assert not dropout_p
    wide = torch.promote_types(query.dtype, torch.float32)
    grads = [torch.zeros_like(x) for x in (query, key, value)]
    kv_heads = key.shape[1]
    scale = keywords["scale"]
    for q, k in _segments(cum_seq_q, cum_seq_k):
        rows, keys, values = (x.to(wide) for x in (query[q], key[k], value[k]))
        grad = grad_out[q].to(wide).unflatten(1, (kv_heads, -1))  # [Lq, kv_heads, group, dim]
        rest = (grad * out[q].to(wide).unflatten(1, (kv_heads, -1))).sum(-1)
        total = logsumexp[:, q].to(wide).unflatten(0, (kv_heads, -1))
        weights = (_scores(rows, keys, is_causal, keywords) - total[..., None]).exp()
        of_weights = torch.einsum("qhgd,khd->hgqk", grad, values)
        of_scores = weights * (of_weights - rest.permute(1, 2, 0)[..., None]) * scale
        grouped = rows.unflatten(1, (kv_heads, -1))
        grads[0][q] = torch.einsum("hgqk,khd->qhgd", of_scores, keys).flatten(1, 2).to(query.dtype)
        grads[1][k] = torch.einsum("hgqk,qhgd->khd", of_scores, grouped).to(key.dtype)
        grads[2][k] = torch.einsum("hgqk,qhgd->khd", weights, grad).to(value.dtype)
    return grads[0], grads[1], grads[2]


def _segments(cum_seq_q: Tensor, cum_seq_k: Tensor) -> list[tuple[slice, slice]]:
    """Return (queries, keys) of each segment that has both."""
    ends = cum_seq_q.tolist(), cum_seq_k.tolist()
    pieces = [[slice(begin, end) for begin, end in itertools.pairwise(x)] for x in ends]
    both = zip(*pieces, strict=True)
    return [(q, k) for q, k in both if q.stop > q.start and k.stop > k.start]


def _scores(query: Tensor, key: Tensor, is_causal: bool, keywords: dict[str, Any]) -> Tensor:
    """Return [kv_heads, group, Lq, Lk] scores; -inf for keys that a query does not read. The last
    query is at the position of the last key."""
    grouped = query.unflatten(1, (key.shape[1], -1))
    scores = torch.einsum("qhgd,khd->hgqk", grouped, key) * keywords["scale"]
    queries, keys = query.shape[0], key.shape[0]
    left, right = (keywords.get(f"window_size_{side}") for side in ("left", "right"))
    at = torch.arange(queries, device=query.device)[:, None] + (keys - queries)
    key_at = torch.arange(keys, device=query.device)
    if is_causal:
        right = 0
    if right is not None and right >= 0:
        scores = scores.masked_fill(key_at > at + right, -torch.inf)
    if left is not None and left >= 0:
        scores = scores.masked_fill(key_at < at - left, -torch.inf)
    return scores


@contextmanager
def on_cpu() -> Iterator[None]:
    """Make these functions the operators' CPU kernels within the context."""
    assert not has_kernel("cpu"), "the operators have CPU kernels"
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield
