"""Folders whose config ties the output projection to the embedding, but whose files have two
different ones (an adapter with its own head merged by peft, merges of several models).

transformers keeps both, and says so. A model that is built from the config alone would have one of
them, so the config of such a model is changed: its shards, its checkpoint's config and its export
then have both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

log = logging.getLogger("burnish")


def untie_as_stored(
    config: PretrainedConfig,
    auto_class: Any,
    stored: Iterable[str],
    read: Callable[[str], Tensor],
    *,
    name: str,
) -> bool:
    """Return whether a folder has different tensors for weights that its ``config`` ties, which
    then says that they are not tied.

    ``stored``: names of its tensors. ``auto_class``: of :func:`language_model_class`. ``name``: the
    model's name in a warning. transformers compares loaded weights, but not while DeepSpeed shards
    them.
    """
    text = config.get_text_config().to_dict()
    if not text.get("tie_word_embeddings", config.to_dict().get("tie_word_embeddings")):
        return False
    kind = auto_class._model_mapping.get(type(config), PreTrainedModel)
    for target, source in dict(kind._tied_weights_keys or {}).items():
        ends = _names_of((target, source), stored)
        if ends and not _equal(*map(read, ends)):
            _untie(config, name)
            return True
    return False


def untie_as_loaded(model: PreTrainedModel, name: str) -> None:
    """Let the config of a loaded model say that its ends are not tied, if they are not."""
    pairs = model.get_expanded_tied_weights_keys(all_submodels=True)
    weights = dict(model.named_parameters(remove_duplicate=False))
    if any(weights[target] is not weights[source] for target, source in pairs.items()):
        _untie(model.config, name)


def _names_of(names: Sequence[str], stored: Iterable[str]) -> list[str]:
    """Return the stored names of two weights: these, or those with another beginning (transformers
    renames some) if there is one of each. Empty if one is missing."""
    stored = list(stored)
    if any(name in stored for name in names):
        return list(names) if all(name in stored for name in names) else []
    endings = [".".join(name.split(".")[-2:]) for name in names]
    matches = [[name for name in stored if f".{name}".endswith(f".{end}")] for end in endings]
    return [first for first, *_ in matches] if all(len(each) == 1 for each in matches) else []


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _untie(config: PretrainedConfig, name: str) -> None:
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = False
    if name not in _SAID:
        _SAID.add(name)
        log.warning(
            "the config of %s ties the output projection to the embedding (tie_word_embeddings), "
            "but its files have two different ones: both are used, trained and exported. Programs "
            "that read the config alone (vLLM) have one of them; set tie_word_embeddings: false in "
            "its config.json",
            name,
        )


_SAID: set[str] = set()
