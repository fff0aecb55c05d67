"""Reduce a checkpoint to its weights: remove the state of its optimizers, and a reference model
that follows the policy.

A reduced checkpoint can be exported and served. A run cannot be resumed from it, because Adam's
moments are missing. Its manifest contains ``extra.contents: weights``.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from burnish.checkpoint.manifest import fsync, read_manifest, rewrite_manifest
from burnish.models.buffers import BUFFERS

WEIGHTS = "weights"
"""Value of ``extra.contents`` in the manifest of a reduced checkpoint."""

REFERENCE = "reference"
"""Folder of a checkpoint with the weights of a reference model that follows the policy."""
_KEPT_SETS = frozenset({"master", "ema", PurePosixPath(BUFFERS).stem})
_PART = re.compile(r"-\d{5}-of-\d{5}")


def has_only_weights(folder: Path) -> bool:
    """Return whether a checkpoint was reduced to its weights. Raises CheckpointError if its
    manifest is missing or corrupted."""
    return read_manifest(folder).extra.get("contents") == WEIGHTS


def reduce_to_weights(folder: Path) -> None:
    """Remove the optimizer state of every engine in a checkpoint, and the weights of a reference.

    Kept are the fp32 master weights, the moving average, the buffers, ``engine.json``, ``hf/`` and
    the state of the run. The manifest is replaced before any file is deleted, so the checkpoint is
    valid if the process is killed at any point; a second call then deletes the remaining files.
    Raises CheckpointError if the manifest is missing or corrupted, OSError if a file cannot be
    written or deleted.
    """
    listed = read_manifest(folder).files
    dropped = {name for name in listed if _is_for_resuming(folder, PurePosixPath(name))}
    if dropped:
        rewrite_manifest(folder, drop=dropped, extra={"contents": WEIGHTS})
        fsync(folder)
    for path in folder.glob("*/*.safetensors"):
        if _is_for_resuming(folder, PurePosixPath(path.relative_to(folder).as_posix())):
            path.unlink()


def _is_for_resuming(folder: Path, name: PurePosixPath) -> bool:
    """Return whether a file contains tensors that only a resumed run needs: those of an engine that
    are neither weights nor buffers, or weights of a reference model."""
    if len(name.parts) != 2 or name.suffix != ".safetensors":
        return False
    if name.parts[0] == REFERENCE:
        return True
    engine, kind = folder / name.parts[0], _PART.sub("", name.stem)
    return kind not in _KEPT_SETS and (engine / "engine.json").is_file()
