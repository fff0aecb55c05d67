"""From logits to tokens. Each sequence brings its own uniform number, so no sequence's draw
depends on another's."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from burnish.rollout.base import Sampling

_BLOCK = 256


def sample_tokens(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution at ``uniforms``.

    ``logits`` [B, V] fp32 (overwritten), ``uniforms`` [B] in [0, 1). Returns tokens [B] int64 and
    log-probs [B] fp32 of the FULL distribution at the sampling temperature, whatever top-k and
    top-p cut off. Temperature 0 is argmax, with the log-probs of temperature 1.
    """
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
    if sampling.temperature != 1.0:
        logits.div_(sampling.temperature)
    peak = logits.amax(-1, keepdim=True)
    weights = logits.sub_(peak).exp()  # logits are now relative to the peak
    total = weights.sum(-1)
    if sampling.top_k or sampling.top_p < 1.0:
        tokens = _draw_filtered(weights, uniforms, sampling)
    else:
        tokens = _draw(weights, uniforms)
    return tokens, logits.gather(-1, tokens[:, None])[:, 0] - total.log()


def _draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """First index whose running sum exceeds uniform x total: by blocks, then inside one block."""
    rows, vocab = weights.shape
    blocks = -(-vocab // _BLOCK)
    if blocks * _BLOCK != vocab:
        weights = torch.nn.functional.pad(weights, (0, blocks * _BLOCK - vocab))
    blocked = weights.view(rows, blocks, _BLOCK)
    # (a parallel cumulative sum need not be monotone in its last bits; searchsorted needs it)
    ends = blocked.sum(-1).cumsum(-1).cummax(-1).values  # [B, blocks]
    goal = uniforms[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, goal, right=True).clamp_(max=blocks - 1)
    before = torch.where(block > 0, ends.gather(-1, (block - 1).clamp(min=0)), 0.0)
    inside = blocked.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0]
    running = inside.cumsum(-1)
    offset = torch.searchsorted(running, goal - before, right=True)
    # Rounding may point behind the last token that has any weight: stay on it.
    last = (inside > 0).int().mul(torch.arange(_BLOCK, device=inside.device)).amax(-1, keepdim=True)
    return (block * _BLOCK + torch.minimum(offset, last))[:, 0]


def _draw_filtered(weights: Tensor, uniforms: Tensor, sampling: Sampling) -> Tensor:
    """Like :func:`_draw` among the top-k tokens and the smallest set that reaches probability
    top_p."""
    count = min(sampling.top_k or weights.shape[-1], weights.shape[-1])
    ordered, index = weights.topk(count, dim=-1)
    running = ordered.cumsum(-1)
    # A token stays if what stands before it has not yet reached top_p.
    keep = running - ordered < sampling.top_p * running[:, -1:]
    running = (ordered * keep).cumsum(-1)
    goal = uniforms[:, None] * running[:, -1:]
    place = torch.searchsorted(running, goal, right=True)
    # (no token is kept where the weights are not numbers; the caller looks for that)
    place = torch.minimum(place, keep.sum(-1, keepdim=True) - 1).clamp_(min=0)
    return index.gather(-1, place)[:, 0]


def uniforms_for(seed: int, index: int, count: int) -> Tensor:
    """[count] numbers in [0, 1) that belong to sample ``index`` of the request with ``seed``.

    All 64 bits of the seed count (torch's CPU generator reads only the low 32).
    """
    source = np.random.SeedSequence(seed % (1 << 64), spawn_key=(index,))
    return torch.from_numpy(np.random.default_rng(source).random(count, dtype=np.float32))
