"""Sampling one row at a time through transformers' own ``generate``.

For models with layer states that :class:`~burnish.models.kv_cache.KVCache` cannot store, or whose
attention does not use the shared interface. It is slow but exact: the model builds its own cache,
or recomputes the row for each token (``use_cache=False``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from burnish.rollout.base import Sampling, SamplingError
from burnish.rollout.live_sample import LiveSample
from burnish.rollout.local.sampling import kept_rows, sample_tokens, uniforms_for


@dataclass(frozen=True)
class RowSampler:
    """Samples from ``model``, one row at a time."""

    model: PreTrainedModel
    use_cache: bool
    """True to use the model's own cache. False: recompute the full row for each token."""

    def sample(self, sample: LiveSample, version: int) -> None:
        """Add tokens to ``sample`` until it is finished. ``version`` is that of the weights.

        Raises SamplingError if a log-prob is not finite; the sample is then unchanged.
        """
        limit = sample.request.limit(sample.sampling)
        draw = _Draw(sample.sampling, uniforms_for(sample.request.seed, sample.index, limit))
        device = next(self.model.parameters()).device
        ids = torch.tensor([sample.request.prompt_ids], device=device)

        def stop(_ids: Tensor, _scores: Tensor, **_: Any) -> Tensor:
            done = sample.stop.finished(draw.tokens, limit) is not None
            return torch.tensor([done], device=device)

        config = GenerationConfig(
            max_new_tokens=len(draw.uniforms),
            do_sample=False,
            use_cache=self.use_cache,
            pad_token_id=0,
        )
        model: Any = self.model
        with _plain_state(device.type), _own_settings(self.model):
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                logits_processor=[draw],
                stopping_criteria=[stop],
            )
        for token, logprob, kept_ids in zip(draw.tokens, draw.logprobs, draw.kept, strict=True):
            sample.add(token, logprob, version, kept_ids=kept_ids)


@dataclass
class _Draw:
    """A logits processor that draws the next token and masks all other tokens."""

    sampling: Sampling
    uniforms: Tensor  # [maximum new tokens]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[Sequence[int] | None] = field(default_factory=list)

    def __call__(self, _ids: Tensor, scores: Tensor) -> Tensor:
        step = len(self.tokens)
        uniform = self.uniforms[step : step + 1].to(scores.device)
        token, logprob, kept_ids = sample_tokens(scores.float().clone(), uniform, self.sampling)
        if not math.isfinite(float(logprob)):
            raise SamplingError("a log-prob is not finite")
        self.tokens.append(int(token))
        self.logprobs.append(float(logprob))
        self.kept += kept_rows(kept_ids, 1)
        return torch.full_like(scores, -torch.inf).index_fill_(1, token, 0.0)


@contextmanager
def _plain_state(kind: str) -> Iterator[None]:
    """Disable gradients and autocast of the calling thread inside the ``with`` block."""
    with torch.no_grad(), torch.autocast(kind, enabled=False):
        yield


@contextmanager
def _own_settings(model: PreTrainedModel) -> Iterator[None]:
    """Disable the model's own generation settings (temperature, penalties, end tokens) inside the
    ``with`` block."""
    generation = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = generation
