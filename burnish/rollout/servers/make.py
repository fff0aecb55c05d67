"""Build the engine of running vLLM servers."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from burnish.config.model import Dtype
from burnish.rollout.servers.config import VllmServers
from burnish.rollout.servers.engine import VllmServerEngine


def make_engine(
    network: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: VllmServers,
    *,
    name: str,
    dtype: Dtype,
    max_len: int | None,
) -> VllmServerEngine:
    """Return the engine (see ``rollout/make.py``)."""
    return VllmServerEngine(network, tokenizer, config, dtype=dtype, max_model_len=max_len)
