"""Determine how the local engine samples from a model family, by an experiment like that of
``models/support.py``.

The fastest method is used whose greedy tokens and log-probs equal those of transformers' forward of
the full row.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from burnish.models.family import PACKED, Decoding, DecodingSupport, words
from burnish.models.family_check import TOLERANCE, failure_text, largest_difference
from burnish.models.shrink import build, shrink
from burnish.models.support import (
    below_rope_border,
    cached_result,
    model_support,
)
from burnish.rollout.base import Request, Sampling
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.engine import LocalRolloutEngine

log = logging.getLogger("burnish")

NEW_TOKENS = 12
_PROMPTS = ((5, 17, 3, 60, 41, 8, 29), (9, 2, 71, 33, 12, 50, 6, 24, 80, 15, 37))


def decoding_support(
    config: PretrainedConfig, *, trust: bool = False, use_disk: bool = True
) -> DecodingSupport:
    """Return how the local engine samples from models with this config.

    Takes up to three seconds the first time. Caching and keywords are those of ``model_support``.
    """
    tiny = below_rope_border(shrink(config))

    def run() -> DecodingSupport:
        return _check(tiny, trust=trust, use_disk=use_disk)

    return cached_result(DecodingSupport, tiny, run, use_disk=use_disk, trust=trust)


@torch.no_grad()
def _check(tiny: PretrainedConfig, *, trust: bool, use_disk: bool) -> DecodingSupport:
    support = model_support(tiny, trust=trust, use_disk=use_disk)
    if support.refusal:
        return DecodingSupport(None, reason=support.refusal)
    model = build(tiny, trust=trust)
    model.generation_config = GenerationConfig()
    model.set_attn_implementation("eager")
    size = int(tiny.get_text_config().vocab_size)
    prompts = [tuple(token % size for token in prompt) for prompt in _PROMPTS]
    expected = [_greedy(model, prompt) for prompt in prompts]
    model.set_attn_implementation(support.attention)
    ways: tuple[Decoding, ...] = ("batched", "cached", "recomputed")
    reason = "" if support.attention == PACKED else support.reason
    for decoding in ways if support.attention == PACKED else ways[1:]:
        try:
            decoded = _engine_greedy(model, decoding, prompts)
        except Exception as error:  # any failure of a model is a result of the experiment
            reason = f"sampling {words(decoding)} failed ({failure_text(error)})"
            continue
        if [tokens for tokens, _ in decoded] != [tokens for tokens, _ in expected]:
            reason = f"greedy tokens sampled {words(decoding)} differ from transformers'"
            continue
        difference = largest_difference([b for _, b in decoded], [b for _, b in expected])
        if difference <= TOLERANCE:
            return DecodingSupport(decoding, difference, reason)
        reason = f"log-probs sampled {words(decoding)} differ by {difference:.1e} nats"
    return DecodingSupport(None, reason=reason)


def _greedy(model: PreTrainedModel, prompt: tuple[int, ...]) -> tuple[list[int], torch.Tensor]:
    """Return greedy tokens and their log-probs, with a forward of the full row for each."""
    row, logprobs = list(prompt), []
    for _ in range(NEW_TOKENS):
        logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1].float()
        row.append(int(logits.argmax()))
        logprobs.append(float(logits.log_softmax(-1)[row[-1]]))
    return row[len(prompt) :], torch.tensor(logprobs)


def _engine_greedy(
    model: PreTrainedModel, decoding: Decoding, prompts: Sequence[tuple[int, ...]]
) -> list[tuple[list[int], torch.Tensor]]:
    """Return greedy tokens and their log-probs for each prompt, sampled by the local engine."""
    tokenizer: Any = _NoTokenizer()
    engine = LocalRolloutEngine(model, tokenizer, LocalEngine(), decoding=decoding)
    requests = [Request(str(i), prompt) for i, prompt in enumerate(prompts)]
    sampling = Sampling(max_tokens=NEW_TOKENS, temperature=0.0)
    completions = {int(c.request_id): c for c in engine.generate(requests, sampling)}
    return [
        (list(completions[i].token_ids), torch.tensor(completions[i].logprobs))
        for i in range(len(requests))
    ]


class _NoTokenizer:
    """A stand-in for a tokenizer, without texts and end tokens."""

    eos_token_id = None

    def decode(self, _ids: list[int], **_: Any) -> str:
        return ""
