"""The base model that an adapter folder names, against the one that is loaded."""

from __future__ import annotations

from pathlib import Path

from burnish.config.adapters import ADAPTER_CONFIG
from burnish.config.model import ModelConfig
from burnish.models.digest import weights_digest
from burnish.models.lora import adapter_base
from burnish.models.paths import ModelError

_HUB_CACHE = "models--"
_QUANTIZED = ("-bnb-4bit", "-unsloth")
"""Ends of names of quantized copies, on which adapters are trained in place of the original."""


def other_base(config: ModelConfig) -> str | None:
    """Return the base that the adapter of ``config`` names if it is clearly not ``config.path``:
    another folder with other weights, another name, or another revision of it on the hub.

    Names are equal if the last part of one is a part of the other's path, so that copies of a hub
    model in a folder of its name are the same. None: the same, or nothing is known.
    """
    adapter = None if config.lora is None else config.lora.path
    if adapter is None or not (Path(adapter) / ADAPTER_CONFIG).is_file():
        return None
    base, revision = adapter_base(Path(adapter))
    if not isinstance(base, str) or config.path is None or config.gguf_file is not None:
        return None
    if Path(base).is_dir() and Path(config.path).is_dir():
        return None if _same_folders(config.path, base) else base
    ours, theirs = _parts(config.path), _parts(base)
    if ours[-1] not in theirs and theirs[-1] not in ours:
        return base
    has_revision = isinstance(revision, str) and not Path(config.path).is_dir()
    is_same = not has_revision or revision == (config.revision or "main")
    return None if is_same else f"{base} at revision {revision}"


def _same_folders(path: str, base: str) -> bool:
    if Path(path).samefile(base):
        return True
    try:
        return weights_digest([ModelConfig(path=path)]) == weights_digest([ModelConfig(path=base)])
    except ModelError:
        return False


def _parts(name: str) -> list[str]:
    """Return the parts of a path or hub name in lower case. A folder of the hub's cache is the name
    of its model.

    >>> _parts("unsloth/Qwen3-0.6B-bnb-4bit"), _parts("/hub/models--Qwen--Qwen3-0.6B/snapshots/8f")
    (['unsloth', 'qwen3-0.6b'], ['qwen3-0.6b'])
    """
    parts = [part.lower() for part in Path(name).parts]
    cached = [part.rpartition("--")[2] for part in parts if part.startswith(_HUB_CACHE)]
    parts = cached or parts
    for end in _QUANTIZED:
        parts[-1] = parts[-1].removesuffix(end)
    return parts
