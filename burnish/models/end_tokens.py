"""End tokens of a model: read from its files, and set for its sampling and its exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import cached_file

from burnish.config.model import ModelConfig
from burnish.models.paths import ModelError
from burnish.models.untrusted import UNREADABLE
from burnish.special_tokens import EndTokens, end_token_ids, turn_end_ids
from burnish.templates import TemplateLimitError


def add_end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the tokenizer's end token and the chat template's end-of-turn tokens end tokens of the
    model: its sampling stops at them, and its exports contain them."""
    if model.generation_config is not None:
        model.generation_config = with_end_tokens(model.generation_config, tokenizer)


def with_end_tokens(
    config: GenerationConfig, tokenizer: PreTrainedTokenizerBase
) -> GenerationConfig:
    """Return ``config`` with all tokens that end a response of a model with this tokenizer."""
    try:
        turn_ends = turn_end_ids(tokenizer)
    except TemplateLimitError as error:
        raise ModelError(f"the chat template: {error}; use another model.chat_template") from error
    ends = sorted(end_token_ids(tokenizer, config.eos_token_id) | turn_ends)
    config.eos_token_id = ends[0] if len(ends) == 1 else ends or None
    return config


def configured_end_tokens(model: ModelConfig, config: PretrainedConfig | None) -> EndTokens:
    """Return the end tokens that the loaded model has in its generation config, without loading it.
    ``config``: the model's config, if it has one.

    They are in ``generation_config.json`` of its folder, else in its config, or in the GGUF file.
    None: only its tokenizer has one (a model from scratch, a GGUF file).
    """
    if model.path is None:
        return None
    written: GenerationConfig | None
    try:
        written = GenerationConfig.from_pretrained(model.path, revision=model.revision or "main")
    except UNREADABLE:  # loading the model raises the reason, or there is no such file
        written = None if config is None else GenerationConfig.from_model_config(config)
    if written is not None:
        return written.eos_token_id
    if model.gguf_file and model.tokenizer_override is not None:
        return gguf_entry(Path(model.path) / model.gguf_file, "tokenizer.ggml.eos_token_id")
    return None


def gguf_entry(file: Path, key: str) -> Any | None:
    """Return the metadata ``key`` of a GGUF file in a folder or of the hub; None if it is not
    there."""
    from gguf import GGUFReader

    if not file.is_file():
        cached = cached_file(
            str(file.parent), file.name, _raise_exceptions_for_missing_entries=False
        )
        if cached is None:
            return None
        file = Path(cached)
    entry = GGUFReader(str(file)).get_field(key)
    return None if entry is None else entry.contents()
