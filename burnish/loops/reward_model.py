"""Reward models from pairs (Bradley-Terry). The loop is ``supervised.py``'s."""

from __future__ import annotations

import torch

from burnish.algorithms import PREFERENCE_LOSSES
from burnish.loops.objectives import pair_scores
from burnish.train.base import Outputs, TrainEngine
from burnish.types import Batch, Stats


def measure_pairs(engine: TrainEngine, batch: Batch) -> Stats:
    """Loss, accuracy (chosen above rejected) and mean margin over held-out pairs."""
    chosen, rejected = pair_scores(Outputs(values=engine.values(batch)), batch)
    margins = None if batch.margins is None else batch.margins[0::2]
    losses = PREFERENCE_LOSSES["bradley_terry"](chosen, rejected, margins=margins)
    gap, count = chosen - rejected, chosen.numel()
    return Stats(
        means={
            "loss": (losses.sum(), count),
            "accuracy": ((gap > 0).float().sum(), count),
            "score_margin": (gap.sum(), count),
            "score_mean": (chosen.sum() + rejected.sum(), 2 * count),
        },
        maxima={"score_std": torch.cat([chosen, rejected]).std()},
    )
