"""Ulysses sequence parallelism: one row of tokens sharded over several ranks.

Each rank holds a chunk of the tokens and computes all per-token operations for it. Attention needs
all tokens, so an all-to-all before it exchanges chunks with all heads for all tokens with some of
the heads. A second all-to-all reverses this. Source: DeepSpeed-Ulysses, arXiv:2309.14509.

Not here: how tokens are assigned to ranks (``train/torch/sequence_parallel.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, all_reduce, all_to_all_single

QKV = tuple[Tensor, Tensor, Tensor]


def sequence_parallel_attention(
    qkv: QKV, attend: Callable[[QKV], Tensor], *, num_tokens: int, group: ProcessGroup
) -> Tensor:
    """Compute the attention over all ``num_tokens`` tokens for this rank's tokens.

    ``qkv`` are query, key and value [C, heads, dim] each, of this rank's tokens. The number of
    ranks n must divide the number of query heads. Key/value heads are repeated if n does not divide
    their number, so that every rank has those of its query heads. ``attend`` maps query, key and
    value [M, heads / n, dim] of all tokens to their attention [M, heads / n, dim]. Returns
    [C, heads, dim]; differentiable.
    """
    ranks, count = group.size(), qkv[0].shape[0]
    query, key, value = qkv
    times = math.lcm(key.shape[1], ranks) // key.shape[1]
    if times > 1:
        key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
    dims = [x.shape[2] for x in (query, key, value)]
    parts = [x.reshape(count, ranks, -1) for x in (query, key, value)]
    sent = torch.cat(parts, dim=2).transpose(0, 1)  # [n, C, q + k + v]: the heads for each rank
    got = _Exchange.apply(sent, group).flatten(0, 1)[:num_tokens]
    pieces = got.split([x.shape[2] for x in parts], dim=1)
    q, k, v = (x.unflatten(1, (-1, d)) for x, d in zip(pieces, dims, strict=True))
    out = attend((q, k, v))
    width = out.shape[2]
    padded = F.pad(out.flatten(1), (0, 0, 0, ranks * count - num_tokens))
    back = _Exchange.apply(padded.unflatten(0, (ranks, count)), group)
    return back.transpose(0, 1).reshape(count, -1, width)


def sum_over(group: ProcessGroup, tensor: Tensor) -> Tensor:
    """Sum ``tensor`` over ranks, for outputs from which every rank computes the same loss.

    The gradient of each rank is that of its own term.
    """
    total: Tensor = _Sum.apply(tensor, group)
    return total


class _Exchange(torch.autograd.Function):
    """Differentiable all-to-all: entry i of the first dimension is sent to rank i and replaced by
    the one received from it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchange(grad, ctx.group), None


def _exchange(tensor: Tensor, group: ProcessGroup) -> Tensor:
    sent = tensor.contiguous()
    got = torch.empty_like(sent)
    all_to_all_single(got, sent, group=group)
    return got


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        total = tensor.clone()
        all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
