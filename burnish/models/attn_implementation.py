"""``model.attn_implementation``: attention of transformers by name, for training passes."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from burnish.messages import library_text
from burnish.models.paths import ModelError

log = logging.getLogger("burnish")


def require_flash_attention() -> None:
    """Raise ModelError if this machine lacks the package flash-attn or a CUDA device."""
    if find_spec("flash_attn") is None:
        raise ModelError(
            "model.attn_implementation=flash_attention_2 needs the package flash-attn, which is "
            "not installed; pip install flash-attn --no-build-isolation (on a machine with CUDA's "
            "compiler), or use auto (PyTorch has FlashAttention kernels, too)"
        )
    if not torch.cuda.is_available():
        raise ModelError(
            "model.attn_implementation=flash_attention_2 needs a CUDA device; use auto, sdpa or "
            "eager"
        )


def check_attention(pretrained_config: PretrainedConfig, implementation: str) -> None:
    """Raise ModelError if the class of the model does not have the attention ``implementation``."""
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    flags = {"sdpa": "_supports_sdpa", "flash_attention_2": "_supports_flash_attn"}
    if implementation not in flags or type(pretrained_config) not in classes:
        return
    kind = classes[type(pretrained_config)]
    if not getattr(kind, flags[implementation], True):  # house: ok transformers' own flags
        raise ModelError(
            f"model.attn_implementation={implementation}: {kind.__name__} of transformers "
            "does not support it; use auto or eager"
        )


def use_attention(model: Any, implementation: str, name: str) -> None:
    """Set the attention of a model to an implementation of transformers, for which rows are padded.
    ``auto`` changes nothing. ``name``: the model's name in messages. Raises ModelError if the model
    does not accept it."""
    if implementation == "auto":
        return
    try:
        model.set_attn_implementation(implementation)
    except (ValueError, ImportError) as error:
        raise ModelError(
            f"model.attn_implementation={implementation} of {name}: {library_text(error)}; use auto"
        ) from error
    log.info("%s: rows are padded and computed by transformers' %s", name, implementation)
