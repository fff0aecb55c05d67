"""Sampling with vLLM, in this process or on a server: parameters of a request, and tokens with
log-probs of its output. Nothing here imports vllm."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np

from burnish.config.vllm_arguments import vllm_sampling_problems
from burnish.rollout.base import Sampling
from burnish.rollout.requests import LiveSample


def check_sampling(sampling: Sampling, *, max_recorded: int) -> None:
    """Raise ValueError if vLLM would not use ``sampling`` exactly. ``max_recorded``: maximum kept
    tokens that it returns per position."""
    num_recorded = sampling.top_k if _records_mask(sampling) else 0
    problems = vllm_sampling_problems(
        sampling.temperature, num_recorded=num_recorded, max_recorded=max_recorded
    )
    if text := "; ".join(problem for _, problem in problems):
        raise ValueError(text)


def sampling_fields(sample: LiveSample, *, vocab_size: int) -> dict[str, Any]:
    """Return the fields of vLLM's ``SamplingParams`` for one sample. Raises ValueError if its kept
    tokens cannot be recorded."""
    sampling = sample.sampling
    return {
        "max_tokens": sample.request.limit(sampling),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sample_seed(sample.request.seed, sample.index),
        # vLLM refuses ids beyond the vocabulary, which are never sampled
        "stop_token_ids": sorted(token for token in sample.stop.tokens if token < vocab_size),
        "ignore_eos": True,  # the end tokens are among the stop tokens
        # of the sampled token, and of those that may be kept
        "logprobs": sampling.top_k if _records_mask(sampling) else 0,
        "detokenize": False,
    }


def add_token(sample: LiveSample, token: int, logprobs: Mapping[int, float], version: int) -> None:
    """Append a token. ``logprobs``: those that vLLM returned at its position, -inf for tokens that
    top-k, top-p and min-p do not keep."""
    logprob, kept_ids = logprobs[token], None
    if _records_mask(sample.sampling):
        kept_ids = array("i", [i for i, value in logprobs.items() if value > -math.inf])
        peak = max(logprobs[i] for i in kept_ids)
        logprob -= peak + math.log(math.fsum(math.exp(logprobs[i] - peak) for i in kept_ids))
    sample.add(token, min(logprob, 0.0), version, kept_ids=kept_ids)


def _records_mask(sampling: Sampling) -> bool:
    """Return whether the tokens that the sampling keeps are recorded. Raises ValueError without a
    bound on their number."""
    if not sampling.sampling_mask or not sampling.is_cut:
        return False
    if not sampling.top_k:
        raise ValueError("vLLM records the kept tokens among the top_k most probable; set top_k")
    return sampling.temperature > 0


def sample_seed(seed: int, index: int) -> int:
    """Return the vLLM seed of sample ``index`` of a request. vLLM on CPU only uses the low 32 bits,
    so they are derived from all bits of ``seed``."""
    state = np.random.SeedSequence(seed % (1 << 64), spawn_key=(index,))
    return int(state.generate_state(1, np.uint64)[0] >> np.uint64(1))
