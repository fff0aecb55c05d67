"""Composite models (text with images or sound): those that cannot be used, and the files that
exports of the others need. ``auto_class.py`` builds them with all of their parts."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import PretrainedConfig
from transformers import __version__ as transformers_version

from burnish.config.model import ModelConfig
from burnish.models.auto_class import has_language_model, is_composite
from burnish.models.empty import find_file
from burnish.models.paths import ModelError
from burnish.models.support import model_support


def check_class(config: PretrainedConfig, name: str) -> None:
    """Raise ModelError for a composite model that transformers does not build as a language
    model."""
    if not is_composite(config) or has_language_model(config):
        return
    raise ModelError(
        f"{name} is a composite model ({config.model_type}) that transformers "
        f"{transformers_version} does not build as a language model; {other_model(config)}"
    )


def other_model(config: PretrainedConfig) -> str:
    """Return advice for a composite model that cannot be used. Its language model can be saved
    alone if transformers maps it."""
    text = config.get_text_config()
    if has_language_model(text) and not model_support(text).refusal:
        return (
            f"use a text-only model of its family, or save its language model ({text.model_type}) "
            "in a separate folder"
        )
    return "use a text-only model of its family"


PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files next to the tokenizer with which transformers prepares images and sound."""


def copy_processor(config: PretrainedConfig, model: ModelConfig, folder: Path) -> None:
    """Copy the processor files of a composite model with this ``config`` to ``folder``."""
    if not is_composite(config) or model.path is None:
        return
    for name in PROCESSOR_FILES:
        if (file := find_file(model, name)) is not None:
            shutil.copyfile(file, folder / name)
