"""Dropout and router noise of a model's own config: which there is, and training passes without it.

A ratio of two policies, or a distance from a reference, compares log-probs of the same function.
Dropout (GPT-2 and OPT have 0.1 by default), layer dropout and the jitter of routers are active in
training mode only, so a training pass would compare two functions.
"""

from __future__ import annotations

import copy
import re
from typing import Any

from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

_NOISE = re.compile(r"(?!classifier|summary).*(drop|jitter)")


def noise_of(config: PretrainedConfig) -> dict[str, float]:
    """Dropout and jitter of a model's config that are above 0, by their names there."""
    told = config.get_text_config().to_dict()
    return {name: told[name] for name in sorted(told) if _is_noise(name, told[name])}


def start_training(model: nn.Module, *, dropout: bool) -> None:
    """Put ``model`` in training mode. Without ``dropout`` it computes what it computes in
    evaluation mode: the modules that look at their mode in order to add noise stay in that mode.

    Adapters keep ``lora_dropout``, which is a setting of the recipe.
    """
    model.train()
    if dropout:
        return
    kept = _adapters(model)
    for module in model.modules():
        recomputed = vars(module).get("gradient_checkpointing") is True
        module.training = recomputed or id(module) in kept
        if recomputed:  # transformers recomputes layers in training mode only
            _disable(module)


def _adapters(model: nn.Module) -> set[int]:
    """Ids of the modules that adapters consist of, without the layers they adapt."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    inside = {id(m) for layer in layers for m in layer.lora_dropout.modules()}
    return inside | {id(layer) for layer in layers}


def _disable(module: nn.Module) -> None:
    """Set the noise that a module in training mode adds by itself to 0: what it holds, and what it
    reads from its config. (The config of the whole model, which exports write, is left as it is.)
    """
    own = vars(module)
    for name in [name for name, value in own.items() if _is_noise(name, value)]:
        own[name] = 0.0
    config = own.get("config")
    if isinstance(config, PretrainedConfig) and not isinstance(module, PreTrainedModel):
        found = [name for name, value in vars(config).items() if _is_noise(name, value)]
        if found:
            own["config"] = copy.copy(config)
            vars(own["config"]).update(dict.fromkeys(found, 0.0))


def _is_noise(name: str, value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and value > 0 and _NOISE.match(name) is not None
