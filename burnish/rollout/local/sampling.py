"""Sample tokens from logits. Each sequence has its own uniform random number, so its draw does not
depend on other sequences."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from burnish.rollout.base import Sampling
from burnish.tensors import upload

_BLOCK = 256


class Drawn(NamedTuple):
    """One sampled token per row."""

    tokens: Tensor
    """[B] int64"""
    logprobs: Tensor
    """[B] fp32"""
    kept: Tensor | None
    """[B, K] int64: ids that min-p, top-k and top-p kept, padded with -1. None: not requested."""


def sample_tokens(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> Drawn:
    """Draw one token per row by inverting the cumulative distribution at ``uniforms``.

    ``logits`` [B, V] fp32 (overwritten), ``uniforms`` [B] in [0, 1). The log-probs are those of the
    FULL distribution at the sampling temperature, before min-p, top-k and top-p; with
    ``sampling.sampling_mask``, those of the distribution over the kept tokens. Temperature 0 is
    argmax, with the log-probs of temperature 1.
    """
    if len(logits) == 1 and logits.device.type == "cpu":
        # PyTorch divides the sum of a single long row among the threads, with other bits.
        drawn = sample_tokens(logits.repeat(2, 1), uniforms.repeat(2), sampling)
        kept_ids = None if drawn.kept is None else drawn.kept[:1]
        return Drawn(drawn.tokens[:1], drawn.logprobs[:1], kept_ids)
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
        return Drawn(tokens, logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1), None)
    if sampling.temperature != 1.0:
        logits.div_(sampling.temperature)
    peak = logits.amax(-1, keepdim=True)
    weights = logits.sub_(peak).exp()  # logits are now relative to the peak
    total, kept_ids = weights.sum(-1), None
    if sampling.min_p:  # the largest weight is 1
        weights = weights.masked_fill(weights < sampling.min_p, 0.0)
    if sampling.top_k or sampling.top_p < 1.0 or (sampling.min_p and sampling.sampling_mask):
        tokens, ids, mass = _draw_filtered(weights, uniforms, sampling)
        if sampling.sampling_mask:
            total, kept_ids = mass, ids
    else:
        tokens = _draw(weights, uniforms)
    return Drawn(tokens, logits.gather(-1, tokens[:, None])[:, 0] - total.log(), kept_ids)


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first index whose cumulative sum exceeds uniform x total.

    The search is over blocks first, then inside one block.
    """
    rows, vocab = weights.shape
    blocks = -(-vocab // _BLOCK)
    if blocks * _BLOCK != vocab:
        weights = torch.nn.functional.pad(weights, (0, blocks * _BLOCK - vocab))
    blocked = weights.view(rows, blocks, _BLOCK)
    # searchsorted needs sorted input; a parallel cumsum may not be monotone in its last bits
    ends = blocked.sum(-1).cumsum(-1).cummax(-1).values  # [B, blocks]
    goal = uniforms[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, goal, right=True).clamp_(max=blocks - 1)
    before = torch.where(block > 0, ends.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inside = blocked.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0]
    running = inside.cumsum(-1)
    offset = torch.searchsorted(running, goal - before, right=True)
    # Rounding may select an index after the last token with positive weight: use that token.
    last = (inside > 0).int().mul(torch.arange(_BLOCK, device=inside.device)).amax(-1, keepdim=True)
    return (block * _BLOCK + torch.minimum(offset, last))[:, 0]


def _draw_filtered(
    weights: Tensor, uniforms: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw like :func:`_draw`, from the smallest set of the top-k tokens that reaches probability
    top_p. Return the tokens [B], the ids of the set [B, K] padded with -1, and the sum of its
    weights [B]."""
    count = min(sampling.top_k or weights.shape[-1], weights.shape[-1])
    ordered, index = weights.topk(count, dim=-1)
    running = ordered.cumsum(-1)
    # A token is kept if the tokens before it do not reach top_p.
    keep = running - ordered < sampling.top_p * running[:, -1:]
    if sampling.min_p:
        keep &= ordered > 0
    running = (ordered * keep).cumsum(-1)
    goal = uniforms[:, None] * running[:, -1:]
    place = torch.searchsorted(running, goal, right=True)
    # with NaN weights no token is kept; the caller checks the log-probs
    place = torch.minimum(place, keep.sum(-1, keepdim=True) - 1).clamp_(min=0)
    return index.gather(-1, place)[:, 0], index.masked_fill(~keep, -1), running[:, -1]


@dataclass(frozen=True)
class DrawGroup:
    """Rows of a batch that are drawn together, because their parameters are equal."""

    sampling: Sampling
    members: Sequence[int] | None
    """Rows of the batch. None: all."""
    index: Tensor | None
    """``members`` on the device."""

    @property
    def key(self) -> tuple[object, ...]:
        """Return the parameters of a draw."""
        return _draw_key(self.sampling)


def _draw_key(sampling: Sampling) -> tuple[object, ...]:
    cut = sampling.top_p, sampling.top_k, sampling.min_p
    return sampling.temperature, *cut, sampling.sampling_mask


def draw_groups(samplings: Sequence[Sampling], device: torch.device) -> list[DrawGroup]:
    """Return the rows of a batch in groups with equal parameters of a draw."""
    if all(sampling is samplings[0] for sampling in samplings):
        return [DrawGroup(samplings[0], None, None)]
    members: dict[tuple[object, ...], list[int]] = {}
    for row, sampling in enumerate(samplings):
        members.setdefault(_draw_key(sampling), []).append(row)
    if len(members) == 1:
        return [DrawGroup(samplings[0], None, None)]
    return [
        DrawGroup(samplings[rows[0]], rows, upload(torch.tensor(rows), device))
        for rows in members.values()
    ]


def draw_by_group(
    logits: Tensor, uniforms: Tensor, groups: Sequence[DrawGroup]
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Return tokens [B], log-probs [B] and the kept ids of each group (:class:`Drawn`). ``logits``
    [B, V] fp32 are overwritten."""
    if groups[0].index is None:
        drawn = sample_tokens(logits, uniforms, groups[0].sampling)
        return drawn.tokens, drawn.logprobs, [drawn.kept]
    tokens = torch.empty(len(uniforms), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(len(uniforms), dtype=torch.float32, device=logits.device)
    kept: list[Tensor | None] = []
    for group in groups:
        drawn = sample_tokens(logits[group.index], uniforms[group.index], group.sampling)
        tokens[group.index], logprobs[group.index] = drawn.tokens, drawn.logprobs
        kept.append(drawn.kept)
    return tokens, logprobs, kept


def kept_of_rows(
    groups: Sequence[DrawGroup], kept: Sequence[Sequence[Tensor | None]], num_rows: int
) -> list[list[Sequence[int] | None]]:
    """Return the kept ids of each step and row, from those of each step and group. None: they are
    not recorded."""
    steps: list[list[Sequence[int] | None]] = [[None] * num_rows for _ in kept]
    for number, group in enumerate(groups):
        of_group = [step[number] for step in kept]
        if of_group[0] is None:
            continue
        members = range(num_rows) if group.members is None else group.members
        joined = torch.cat([ids for ids in of_group if ids is not None])
        for i, ids in enumerate(kept_rows(joined, len(joined))):
            steps[i // len(members)][members[i % len(members)]] = ids
    return steps


def keeps_many(sampling: Sampling) -> bool:
    """Return whether recorded ids of a draw have the width of the vocabulary."""
    return sampling.sampling_mask and sampling.is_cut and not sampling.top_k


def kept_rows(kept_ids: Tensor | None, num_rows: int) -> list[Sequence[int] | None]:
    """Return the ids in each row of ``kept_ids`` (:class:`Drawn`), without padding; None per row if
    they are not recorded."""
    if kept_ids is None:
        return [None] * num_rows
    rows = kept_ids.int().cpu().numpy()
    return [array("i", row[row >= 0].tobytes()) for row in rows]


def uniforms_for(seed: int, index: int, count: int) -> Tensor:
    """Return [count] uniform numbers in [0, 1) for sample ``index`` of the request with ``seed``.

    All 64 bits of the seed are used (torch's CPU generator only uses the low 32).
    """
    source = np.random.SeedSequence(seed % (1 << 64), spawn_key=(index,))
    return torch.from_numpy(np.random.default_rng(source).random(count, dtype=np.float32))
