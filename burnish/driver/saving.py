"""Save the train engines of a run into a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from burnish.checkpoint.save import PendingSave
from burnish.train.base import TrainEngine


def save_engines(
    engines: Mapping[Path, TrainEngine], *, in_background: bool
) -> Sequence[PendingSave]:
    """Save each engine into its folder. If ``in_background`` is set, the returned saves may still
    be running; otherwise the result is empty."""
    if in_background:
        return [engine.save_async(folder) for folder, engine in engines.items()]
    for folder, engine in engines.items():
        engine.save(folder)
    return []
