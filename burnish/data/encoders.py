"""The encoder of a data section, from the folder of its kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from burnish.config.base import module_of
from burnish.data.config import DataConfig
from burnish.data.encoded import Encoder
from burnish.data.sources import Source


def encoder_of(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[Source],
    *,
    in_episodes: bool = False,
) -> Encoder[Any]:
    """Return the encoder that jobs use for the rows of ``config``. ``sources``: its open sources.
    ``in_episodes``: prompts start episodes.

    Raises DataError if the tokenizer cannot be used.
    """
    encoder: Encoder[Any] = module_of(config, "encode").make_encoder(
        config, tokenizer, sources, in_episodes=in_episodes
    )
    return encoder
