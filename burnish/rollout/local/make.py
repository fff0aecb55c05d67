"""Build the local engine, with the fastest exact way of decoding."""

from __future__ import annotations

import logging

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from burnish.config.model import Dtype
from burnish.models.load import ModelError
from burnish.models.support import runs_own_code
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.decoding import decoding_support
from burnish.rollout.local.engine import LocalRolloutEngine

log = logging.getLogger("burnish")


def make_engine(
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: LocalEngine,
    *,
    name: str,
    dtype: Dtype | None = None,
    max_len: int | None = None,
) -> LocalRolloutEngine:
    """Return a local engine that samples from ``network``, in its format and up to its limit, with
    the fastest exact method. Raises ModelError if no method is exact. See ``rollout/make.py``."""
    support = decoding_support(network.config, trust=runs_own_code(network))
    if support.decoding is None:
        raise ModelError(f"{name}: {support.sentence()}; use rollout.engine.kind=vllm")
    if support.decoding != "batched":
        log.warning("%s: %s; rollout.engine.kind=vllm may be faster", name, support.sentence())
    return LocalRolloutEngine(network, tokenizer, config, decoding=support.decoding)
