"""The engines' parts of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from burnish.train.base import TrainEngine
from burnish.types import PendingSave


def save_engines(
    engines: Mapping[Path, TrainEngine], *, in_background: bool
) -> Sequence[PendingSave]:
    """Save each into its folder; ``in_background``: what is returned may still be written."""
    if in_background:
        return [engine.save_async(folder) for folder, engine in engines.items()]
    for folder, engine in engines.items():
        engine.save(folder)
    return []
