"""Build the vLLM engine."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from burnish.config.model import Dtype
from burnish.rollout.vllm.config import VllmEngine
from burnish.rollout.vllm.engine import VllmRolloutEngine


def make_engine(
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: VllmEngine,
    *,
    name: str,
    dtype: Dtype,
    max_len: int | None,
) -> VllmRolloutEngine:
    """Return the engine (see ``rollout/make.py``)."""
    return VllmRolloutEngine(network, tokenizer, config, dtype=dtype, max_model_len=max_len)
