"""Build the rollout engine of a recipe."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from burnish.config.base import module_of
from burnish.config.model import Dtype
from burnish.rollout.base import RolloutEngine
from burnish.rollout.kinds import RolloutEngineConfig


def make_rollout_engine(
    network: Any,
    tokenizer: PreTrainedTokenizerBase,
    config: RolloutEngineConfig,
    *,
    name: str,
    dtype: Dtype,
    max_len: int | None,
) -> RolloutEngine:
    """Return an engine that samples from a model.

    ``network``: the model; engines with tensors of their own use its names and shapes. ``name``: of
    the model, in messages. ``dtype``: format of the engine's weights. ``max_len``: maximum length
    of a row in tokens (None: the model's limit). Raises ModelError if the engine cannot run the
    model.
    """
    engine: RolloutEngine = module_of(config, "engine").make_engine(
        network, tokenizer, config, name=name, dtype=dtype, max_len=max_len
    )
    return engine


def wait_for_engine(config: RolloutEngineConfig) -> None:
    """Wait until running servers respond, before a job loads models. Other engines: return at once.
    Raises ModelError."""
    if config.on_servers:
        module_of(config, "engine").wait_for_servers(config)
