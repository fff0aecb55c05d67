"""Sampling one row at a time through transformers' own ``generate``.

For models with layer states that :class:`~burnish.models.cache_attention.KVCache` cannot store, or
whose attention does not use the shared interface. It is slow but exact: the model builds its own
cache, or recomputes the row for each token (``use_cache=False``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from burnish.rollout.base import Completion, Request, Sampling, SamplingError
from burnish.rollout.local.model import LocalModel
from burnish.rollout.local.sampling import kept_rows, sample_tokens, uniforms_for
from burnish.rollout.requests import LiveSample, StopRule


class RowQueue:
    """Samples that are sampled one at a time. Same interface as :class:`RunningBatch`."""

    def __init__(self, network: LocalModel, *, use_cache: bool) -> None:
        """``use_cache``: use the model's own cache; otherwise recompute the full row for each
        token."""
        self.network, self.use_cache = network, use_cache
        self.waiting: deque[LiveSample] = deque()

    def add(self, request: Request, sampling: Sampling, stop: StopRule) -> None:
        """Queue the samples of a request."""
        self.waiting += [LiveSample(request, i, sampling, stop) for i in range(request.n)]

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Remove the samples of requests."""
        gone = set(request_ids)
        self.waiting = deque(s for s in self.waiting if s.request.request_id not in gone)

    def release(self, conversations: Iterable[str]) -> None:
        """Do nothing: no cache is kept."""

    def restart(self) -> None:
        """Do nothing: no sample is in progress between two steps."""

    def step(self, version: int) -> list[Completion]:
        """Sample one row to its end. Raises SamplingError if a log-prob is not finite; the sample
        then waits, unchanged."""
        if not self.waiting:
            return []
        self.network.model.eval()
        sample = self.waiting[0]
        try:
            self._sample(sample, version)
        except SamplingError as error:
            raise SamplingError(self.network.what_is_broken(version)) from error
        self.waiting.popleft()
        return [sample.completion()]

    def _sample(self, sample: LiveSample, version: int) -> None:
        """Add tokens to ``sample`` until it is finished."""
        model: Any = self.network.model
        device = self.network.device
        limit = sample.request.limit(sample.sampling)
        draw = _Draw(sample.sampling, uniforms_for(sample.request.seed, sample.index, limit))
        ids = torch.tensor([sample.request.prompt_ids], device=device)
        check = sample.stop.begin()

        def stop(_ids: Tensor, _scores: Tensor, **_: Any) -> Tensor:
            done = check.add(draw.tokens[-1], limit) is not None
            return torch.tensor([done], device=device)

        # without the model's own temperature, penalties and end tokens
        own_settings, model.generation_config = model.generation_config, GenerationConfig()
        try:
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=GenerationConfig(
                        max_new_tokens=len(draw.uniforms),
                        do_sample=False,
                        use_cache=self.use_cache,
                        pad_token_id=0,
                    ),
                    logits_processor=[draw],
                    stopping_criteria=[stop],
                )
        finally:
            model.generation_config = own_settings
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
