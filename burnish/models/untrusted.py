"""Model folders from somebody else: which files are read, and errors of unreadable ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig

from burnish.config.adapters import ADAPTER_CONFIG
from burnish.messages import library_text
from burnish.models.paths import ModelError
from burnish.small_files import read_small

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
    check_kinds(folder)
    for index in sorted(folder.glob("*.index.json")):
        _check_index(index)
    if (folder / ADAPTER_CONFIG).is_file():
        raise ModelError(
            f"{folder} contains {ADAPTER_CONFIG}: transformers would load adapters, and the base "
            "model that they name, in place of the model. Set model.path to the base model and "
            "model.lora.path to a folder with the adapters, or remove the file"
        )


def check_kinds(folder: Path) -> None:
    """Raise ModelError for a pipe or a device, for a folder or a link to nothing in place of a
    file, which readers would treat as missing, and for text that would exhaust the memory."""
    for path in sorted(folder.iterdir()):
        is_file = path.is_file()
        if not is_file and not path.is_dir():
            raise ModelError(f"{path} is neither a file nor a folder; remove it")
        if path.suffix not in _TEXTS:
            continue
        if not is_file:
            raise ModelError(f"{path} is a folder, not a file; remove it")
        if (size := path.stat().st_size) > _LARGEST_TEXT:
            raise ModelError(
                f"{path} has {size} bytes, more than any file of a model with this suffix; "
                "download or export the model again"
            )


def unloadable(part: str, source: str, error: BaseException) -> ModelError:
    """Return the error of a model or tokenizer that cannot be loaded."""
    broken = _broken_file(Path(source)) if Path(source).is_dir() else None
    reason = _reason(error) if broken is None else f"{broken}; download or export it again"
    return ModelError(f"cannot load the {part} {source}: {reason}")


def _reason(error: BaseException) -> str:
    text = library_text(error)
    if "ignore_mismatched_sizes" in text:
        return "its weights have other shapes than its config says; download or export it again"
    if not isinstance(error, OSError | ValueError):
        text = f"{type(error).__name__}: {text}"
    if "trust_remote_code" in text:
        return f"{text} (model.trust_remote_code=true would run that code)"
    if "offline" in text or "connect" in text.lower() or "not a local folder" in text:
        return (
            f"{text} (it is not a local folder, and the hub does not have it or was not reachable)"
        )
    return text


def _broken_file(folder: Path) -> str | None:
    """Return which file of a model folder is broken, and why; None if all have their form."""
    for path in sorted(folder.iterdir()):
        try:
            if path.suffix == ".jinja":
                path.read_text(encoding="utf-8")
            elif path.suffix == ".safetensors":
                with safe_open(path, "pt"):
                    pass
            elif path.suffix == ".json":
                value = json.loads(path.read_bytes())
                if path.name in _OBJECTS and not isinstance(value, dict):
                    raise ValueError("it is not a JSON object")
        except (OSError, ValueError, RecursionError, SafetensorError) as error:
            return f"{path.name} is broken ({type(error).__name__}: {error})"
    return None


_TEXTS = (".json", ".jinja", ".txt", ".model")
_LARGEST_TEXT = 1 << 30
_OBJECTS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip


def _check_index(index: Path) -> None:
    try:
        names = set(json.loads(read_small(index))["weight_map"].values())
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
