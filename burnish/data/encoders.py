"""Select the encoder of a data section: the function that converts its rows to training items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from burnish.data.config import DataConfig
from burnish.data.demonstrations.config import SFTDataConfig
from burnish.data.demonstrations.encode import SFTEncoder
from burnish.data.encoded import Encoder
from burnish.data.preferences.config import PreferenceDataConfig
from burnish.data.preferences.encode import PairEncoder
from burnish.data.preferences.unpaired import UnpairedEncoder
from burnish.data.prompts.config import PromptDataConfig
from burnish.data.prompts.encode import PromptEncoder
from burnish.data.rated.config import RatedDataConfig
from burnish.data.rated.encode import RatedEncoder
from burnish.data.responses.config import ResponseDataConfig
from burnish.data.responses.encode import ResponseEncoder
from burnish.data.sources import Source
from burnish.data.steps.config import StepsDataConfig
from burnish.data.steps.encode import StepsEncoder


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
    if isinstance(config, ResponseDataConfig):
        return ResponseEncoder(config, tokenizer)
    if isinstance(config, PromptDataConfig):
        return PromptEncoder(config, tokenizer, in_episodes=in_episodes)
    if isinstance(config, SFTDataConfig):
        return SFTEncoder(config, tokenizer)
    if isinstance(config, StepsDataConfig):
        return StepsEncoder(config, tokenizer)
    if isinstance(config, RatedDataConfig):
        return RatedEncoder(config, tokenizer, sources)
    if not isinstance(config, PreferenceDataConfig):
        raise TypeError(f"{type(config).__name__} has no encoder; add it to encoder_of")
    if config.label_key is not None:
        return UnpairedEncoder(config, tokenizer, sources)
    return PairEncoder(config, tokenizer, sources)
