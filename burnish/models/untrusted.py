"""Model folders from somebody else: which files are read, and errors of unreadable ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import PretrainedConfig

from burnish.config.adapters import ADAPTER_CONFIG
from burnish.models.paths import ModelError

UNREADABLE = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError,
    OSError, RuntimeError, SafetensorError, StrictDataclassError, TypeError, ValueError,
)  # fmt: skip
"""Errors of torch, transformers and safetensors for nonsense in the files of a model."""


_MAX_DEPTH = 8
"""Levels of configs of parts (a text model, its vision tower) that are searched."""


def check_folder(folder: Path) -> None:
    """Raise ModelError if a reader of the model folder would wait for a pipe or a device, read
    weights from outside of it, or load another base model."""
    for path in sorted(folder.iterdir()):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ModelError(f"{path} is neither a file nor a folder; remove it")
    for index in sorted(folder.glob("*.index.json")):
        _check_index(index)
    if (folder / ADAPTER_CONFIG).is_file():
        raise ModelError(
            f"{folder} contains {ADAPTER_CONFIG}: transformers would load adapters, and the base "
            "model that they name, in place of the model. Set model.path to the base model and "
            "model.lora.path to a folder with the adapters, or remove the file"
        )


def _check_index(index: Path) -> None:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        outside = [name for name in names if Path(name).name != name or name in ("", ".", "..")]
    except (*UNREADABLE, RecursionError) as error:
        raise ModelError(
            f"{index} is not an index of weights ({type(error).__name__}: {error}); download or "
            "export the model again"
        ) from error
    if outside:
        raise ModelError(
            f"{index} names a file of weights outside its folder: {min(outside)[:200]!r}; copy the "
            "file into the folder, and correct the index"
        )


def refuse_kernels(config: PretrainedConfig, name: str) -> None:
    """Raise ModelError if a model's config selects an implementation from the hub (OWNER/NAME),
    which is compiled code, and transformers would run it without asking."""
    for key, value in _implementations(vars(config), 0):
        if isinstance(value, str) and "/" in value:
            raise ModelError(
                f"the config of {name} selects code of the hub: {key.lstrip('_')}={value[:100]!r}. "
                "Remove the key from its config.json, or set model.trust_remote_code=true to run it"
            )


def _implementations(fields: dict[str, Any], depth: int) -> Iterator[tuple[str, Any]]:
    """Yield key -> value of the implementations that a config and its parts select."""
    for key, value in fields.items():
        if "_implementation" in str(key):
            values = value.values() if isinstance(value, dict) else [value]
            yield from ((str(key), implementation) for implementation in values)
        elif isinstance(value, dict | PretrainedConfig) and depth < _MAX_DEPTH:
            part = value if isinstance(value, dict) else vars(value)
            yield from _implementations(part, depth + 1)
