"""Configs of the models that ``make models`` runs.

There is one row for each type of causal language model that transformers maps, with its default
config, and variants that differ in behavior; and one for each composite type. ``families.yaml``
contains the configs of types whose defaults cannot be built or disable a mechanism (a scale of 1,
no window, one kind of layer)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from burnish.models.auto_class import language_model_class

Fields = dict[str, Any]

_LISTS = ("_types", "short_factor", "long_factor", "_sparsity_pattern")
"""Endings of the fields that ``families.yaml`` writes in a short form."""


def names() -> list[str]:
    """Return all rows: every mapped type, each followed by its variants."""
    variants = [name for name in _written() if " (" in name]
    rows = []
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        rows += [model_type, *(v for v in variants if model_type_of(v) == model_type)]
    return rows


@cache
def composite_names() -> list[str]:
    """Return the types of text with images or sound whose language model is built from the entire
    checkpoint."""
    return [name for name in CONFIG_MAPPING if _is_built_whole(name)]


def _is_built_whole(model_type: str) -> bool:
    transformers_logging.set_verbosity_error()
    try:
        config = CONFIG_MAPPING[model_type]()
        return language_model_class(config) is AutoModelForMultimodalLM
    except Exception:  # a default config that transformers itself does not accept
        return False


def model_type_of(name: str) -> str:
    """Return the model type of a row."""
    return name.split(" (")[0]


def config_of(name: str) -> PretrainedConfig:
    """Return the config of a row, in full size. Raises transformers' error for a type whose default
    is not valid."""
    model_type = model_type_of(name)
    fields = _written().get(name, {})
    if not fields:
        return CONFIG_MAPPING[model_type]()
    return CONFIG_MAPPING[model_type].from_dict({**fields, "model_type": model_type})


@cache
def _written() -> dict[str, Fields]:
    text = Path(__file__).with_name("families.yaml").read_text(encoding="utf-8")
    return {name: _expanded(fields) for name, fields in yaml.safe_load(text).items()}


def _expanded(fields: Fields) -> Fields:
    """Return ``fields`` with lists instead of their short form, such as ``mamba*5 attention``."""
    found = dict(fields)
    for name, value in fields.items():
        if isinstance(value, dict):
            found[name] = _expanded(value)
        elif isinstance(value, str) and name.endswith(_LISTS):
            items = _items(value)
            count = fields.get("num_hidden_layers", 0) if name.endswith("_types") else 0
            found[name] = [items[i % len(items)] for i in range(max(count, len(items)))]
    return found


def _items(text: str) -> list[Any]:
    """Return the list of a short form: ``a*3 b`` -> [a, a, a, b]. Numbers are converted."""
    runs = [part.partition("*") for part in text.split()]
    return [yaml.safe_load(value) for value, _, count in runs for _ in range(int(count or 1))]
