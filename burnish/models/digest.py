"""Digest of a model's weight files, to detect that weights were replaced."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from burnish.config.model import ModelConfig

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt")
"""Suffixes of weight files."""
_ENDS_BYTES = 1 << 22


def weights_digest(models: Sequence[ModelConfig]) -> str:
    """Return a digest of the weight files in the models' local folders.

    It covers name, size, and the first and last 4 MiB of each file, so it detects other weights
    under the same path without reading all of them.
    """
    digest = hashlib.sha256()
    for path in (Path(model.path) for model in models if model.path is not None):
        files = path.glob("*") if path.is_dir() else ()
        for file in sorted(file for file in files if file.suffix in WEIGHT_SUFFIXES):
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
            for part in _ends(file):
                digest.update(part)
    return digest.hexdigest()


def file_ends_digest(file: Path) -> str:
    """Return a digest of the first and last 4 MiB of a file."""
    digest = hashlib.sha256()
    for part in _ends(file):
        digest.update(part)
    return digest.hexdigest()


def _ends(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        yield opened.read(_ENDS_BYTES)
        opened.seek(max(0, file.stat().st_size - _ENDS_BYTES))
        yield opened.read(_ENDS_BYTES)
