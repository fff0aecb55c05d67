"""Dropout and router noise from a model's own config: detection, and training passes without it.

Policy ratios and reference KL assume that all log-probs come from the same function. Dropout (0.1
by default in GPT-2 and OPT), layer dropout and router jitter are active only in training mode, so a
training pass would compute a different function.
"""

from __future__ import annotations

import copy
import re
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from burnish.models.lora_layers import adapted_layers

_NOISE = re.compile(r"(?!classifier|summary).*(drop|jitter)")


def noise_of(config: PretrainedConfig) -> dict[str, float]:
    """Return the dropout and jitter settings above 0 in a model's config, by field name."""
    fields = config.get_text_config().to_dict()
    return {name: fields[name] for name in sorted(fields) if _is_noise(name, fields[name])}


def start_training(model: nn.Module, *, dropout: bool) -> None:
    """Put ``model`` in training mode, with or without the dropout of its config.

    Without ``dropout`` it computes the same as in evaluation mode: modules that add noise in
    training mode stay in evaluation mode. Adapters keep ``lora_dropout``, a setting of the recipe.
    """
    model.train()
    if dropout:
        return
    layers = adapted_layers(model).values()
    adapter_ids = {id(m) for layer in layers for m in (layer, *layer.lora_dropout.modules())}
    for module in model.modules():
        recomputed = vars(module).get("gradient_checkpointing") is True
        module.training = recomputed or id(module) in adapter_ids
        if recomputed:  # transformers recomputes layers in training mode only
            _disable(module)


def _disable(module: nn.Module) -> None:
    """Set a module's noise settings to 0, both its attributes and those in its config.

    The config is copied first, because exports write the model's config.
    """
    attributes = vars(module)
    for name in [name for name, value in attributes.items() if _is_noise(name, value)]:
        attributes[name] = 0.0
    config = attributes.get("config")
    if isinstance(config, PretrainedConfig) and not isinstance(module, PreTrainedModel):
        noise_names = [name for name, value in vars(config).items() if _is_noise(name, value)]
        if noise_names:
            attributes["config"] = copy.copy(config)
            vars(attributes["config"]).update(dict.fromkeys(noise_names, 0.0))


def _is_noise(name: str, value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and value > 0 and _NOISE.match(name) is not None
