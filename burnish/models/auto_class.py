"""The class of transformers that builds the language model of a config.

It is ``AutoModelForCausalLM`` for language models. A composite checkpoint (text with images or
sound) is built by ``AutoModelForMultimodalLM``, with all of its parts: text-only training computes
and trains the decoder and the output projection, and exports have the layout of the checkpoint with
the other parts unchanged. Some composite types, such as Gemma 3, are mapped by both.
"""

from __future__ import annotations

import re
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from burnish.config.adapters import outside_of


def language_model_class(config: PretrainedConfig | None) -> Any:
    """Return the auto class for ``config``. None: a config that is unknown (GGUF files)."""
    own_code = (config.to_dict().get("auto_map") or {}) if config is not None else {}
    if config is None or "AutoModelForCausalLM" in own_code:
        return AutoModelForCausalLM
    causal: Any = AutoModelForCausalLM._model_mapping
    multimodal: Any = AutoModelForMultimodalLM._model_mapping
    if is_composite(config) and type(config) not in causal and type(config) in multimodal:
        return AutoModelForMultimodalLM
    return AutoModelForCausalLM


def has_language_model(config: PretrainedConfig) -> bool:
    """Return whether transformers maps a language model for ``config``, or ``config`` names its own
    code."""
    mapping: Any = language_model_class(config)._model_mapping
    return type(config) in mapping or "auto_map" in vars(config)


def is_composite(config: PretrainedConfig) -> bool:
    """Return whether ``config`` describes text with images or sound."""
    return config.get_text_config() is not config


def other_parts(model: Any) -> str | None:
    """Return a regular expression that matches the names of the modules of a composite model
    outside of its decoder and output projection. None: ``model`` is only a language model."""
    if not isinstance(model, PreTrainedModel) or not is_composite(model.config):
        return None
    parts = (model.get_decoder(), model.get_output_embeddings())
    names = [re.escape(name) for name, module in model.named_modules() if module in parts]
    return outside_of(names) if "" not in names else None
