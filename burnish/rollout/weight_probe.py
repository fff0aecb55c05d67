"""A comparison of a sampler's log-probs with the trainer's, once, after its first load of weights.

The verification of a load compares values whose places are known. The order in which a library's
loader stores the others, and what its kernels compute with them, shows only in log-probs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from burnish.rollout.base import Completion, Request
from burnish.rollout.weights import StaleWeightsError

NUM_SAMPLES = 8
_PROMPT_TOKENS = 16
_NEW_TOKENS = 8
_EXACT, _HALF = 0.01, 0.3
"""Largest median difference in nats in fp32, and if one of both computes in half precision."""


def probe_requests(vocab_size: int, *, max_len: int, num_samples: int) -> list[Request]:
    """Return requests for one sample each, with a prompt of tokens from the entire vocabulary."""
    length = max(1, min(_PROMPT_TOKENS, max_len - 1))
    new = min(_NEW_TOKENS, max_len - length)
    prompt = tuple(i * vocab_size // length for i in range(length))
    return [
        Request(f"probe-{i}", prompt, seed=i, max_tokens=max(1, new)) for i in range(num_samples)
    ]


def check_logprobs(
    completions: Sequence[Completion],
    expected: Sequence[Tensor],
    *,
    temperature: float,
    dtypes: tuple[str, str],
) -> None:
    """Raise StaleWeightsError if the log-probs of ``completions`` differ from ``expected``, those
    of the trainer for the same tokens. ``dtypes``: number formats of trainer and sampler.

    The median over tokens is compared, because single tokens of a mixture in half precision may
    choose other experts.
    """
    sampled = torch.cat([torch.tensor(list(c.logprobs)) for c in completions])
    gaps = (sampled - torch.cat([e.float().cpu() for e in expected])).abs()
    gap = float(gaps.nan_to_num(nan=torch.inf).median())
    limit = _EXACT if set(dtypes) == {"fp32"} else _HALF
    limit /= min(1.0, temperature or 1.0)  # the temperature divides logits with their rounding
    if gap > limit:
        raise StaleWeightsError(
            f"the log-probs of the rollout engine ({dtypes[1]}) and of the trainer ({dtypes[0]}) "
            f"differ by {gap:.2g} nats per token (median over {len(gaps)} tokens, at most "
            f"{limit:.2g} is rounding), although all weights were transferred: the engine stores "
            "them in another order, or computes another function than transformers does; use "
            "rollout.engine.kind=local, or another version of vLLM"
        )
