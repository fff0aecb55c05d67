"""Reward models from pairs (Bradley-Terry), and process reward models from step-labelled solutions.
The loop is ``supervised.py``'s; here is what evaluation measures."""

from __future__ import annotations

from typing import Any

import torch

from burnish.algorithms import PREFERENCE_LOSSES
from burnish.algorithms.process import AGGREGATIONS, aggregate_steps
from burnish.config import RewardModelConfig, SFTConfig
from burnish.config.steps import StepsDataConfig
from burnish.jobs.objectives import pair_scores, process_objective
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


def measure_steps(engine: TrainEngine, batch: Batch) -> Stats:
    """Loss and accuracies over the steps of held-out solutions; mean and spread of the solutions'
    scores, for each way to make one score of a solution's steps."""
    values, mask = engine.values(batch), batch.action_mask
    _, stats = process_objective()(Outputs(values=values), batch)
    rows, probs = batch.row_ids[mask], values[mask].sigmoid()
    scores: dict[str, float] = {}
    for how in AGGREGATIONS:
        found = aggregate_steps(probs, rows, num_rows=batch.num_rows, how=how)
        scores[f"score_{how}_mean"] = float(found.mean())
        scores[f"score_{how}_std"] = float(found.std()) if batch.num_rows > 1 else 0.0
    return stats + Stats(maxima=scores)


def export_metadata(config: SFTConfig | RewardModelConfig) -> dict[str, Any] | None:
    """Return what the exports of a process reward model say of it; None for others."""
    data = config.data
    if not isinstance(data, StepsDataConfig):
        return None
    return {"process_reward": True, "step_separator": data.step_separator}
