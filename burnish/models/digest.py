"""Digest of a model's weight files, to detect that weights were replaced."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from burnish.config.model import ModelConfig

_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt")
_ENDS_BYTES = 1 << 22


def weights_digest(models: Sequence[ModelConfig]) -> str:
    """Return a digest of the weight files in the models' local folders.

    It covers name, size, and the first and last 4 MiB of each file, so it detects other weights
    under the same path without reading all of them.
    """
    digest = hashlib.sha256()
    for path in (Path(model.path) for model in models if model.path is not None):
        files = sorted(p for p in path.glob("*") if p.suffix in _WEIGHTS) if path.is_dir() else []
        for file in files:
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as opened:
                digest.update(opened.read(_ENDS_BYTES))
                opened.seek(max(0, size - _ENDS_BYTES))
                digest.update(opened.read(_ENDS_BYTES))
    return digest.hexdigest()
