"""Reward models from pairs (Bradley-Terry), process reward models from step-labeled solutions, and
regression and classification from single responses. The loop is in ``steps/supervised.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from burnish.algorithms import PREFERENCE_LOSSES
from burnish.algorithms.process import AGGREGATIONS, aggregate_steps
from burnish.config import RewardModelConfig
from burnish.config.eval_section import eval_place
from burnish.data.batches import BatchStream, load_batch
from burnish.data.steps.config import StepsDataConfig
from burnish.jobs.build import engine_specs
from burnish.observe.timeline import timed
from burnish.preflight.limits import held_out_sets, limited
from burnish.preflight.usable import usable_rows
from burnish.runtime.base import Runtime
from burnish.steps.no_signal import NoSignalMonitor, StepSignal, pair_signal
from burnish.steps.objectives import (
    pair_scores,
    process_objective,
    reward_model_objective,
    with_expert_balance,
)
from burnish.steps.rated_reward import (
    classes_metadata,
    classes_objective,
    measure_classes,
    measure_scores,
    scores_metadata,
    scores_objective,
)
from burnish.steps.supervised import Supervised, SupervisedTraining
from burnish.train.base import Loss, Outputs, TrainEngine
from burnish.types import Batch, Stats


@dataclass(frozen=True)
class RewardModelKind:
    """A kind of training rows (``data.kind``): how rows are trained and measured."""

    objective: Callable[[RewardModelConfig], Loss]
    measure: Callable[[RewardModelConfig], Callable[[TrainEngine, Batch], Stats]]
    """Recipe -> a function that measures held-out rows."""
    metadata: Callable[[RewardModelConfig], dict[str, Any] | None] = lambda config: None
    """Recipe -> entries that exports add to their config."""
    signal_of: Callable[[Batch], StepSignal] | None = None
    """Detects batches without learning signal."""


def build_reward_model(config: RewardModelConfig, runtime: Runtime, run_dir: Path) -> Supervised:
    """Return the components of a reward-model run."""
    kind, tokenizer = KINDS[config.data.kind], runtime.tokenizer
    data = limited(config, config.data)
    stream = BatchStream(data, tokenizer, seed=config.seed)
    usable = usable_rows(config, stream.num_rows)
    total = config.steps_for(usable.num_rows)
    spans = {"forward_backward": "train", "optim_step": "optim", "values": "eval"}
    spec = engine_specs(config, total_steps=total)["reward"]
    held_out = held_out_sets(config, config.eval)
    return Supervised(
        stream=timed(stream, runtime.timeline, {"next": "data"}),
        usable=usable,
        engine=runtime.scalar_model(spec, seed=config.seed, spans=spans),
        loss=with_expert_balance(kind.objective(config), config.train.moe_aux_loss_coef),
        total_steps=total,
        batch_size_at=partial(config.batch_size_at, num_rows=usable.num_rows),
        measure=kind.measure(config),
        eval_batches={
            name: load_batch(rows, tokenizer, section=eval_place(name))
            for name, rows in held_out.items()
        },
        signal=NoSignalMonitor(config.train.max_steps_without_signal),
        signal_of=kind.signal_of,
        export_metadata=kind.metadata(config),
    )


def _pair_objective(config: RewardModelConfig) -> Loss:
    kind = "bradley_terry" if config.loss is None else config.loss.kind
    return reward_model_objective(kind, center_coef=config.center_coef)


def measure_pairs(engine: TrainEngine, batch: Batch) -> Stats:
    """Measure loss, accuracy (chosen above rejected) and mean margin over held-out pairs."""
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
    """Measure loss and accuracies over the steps of held-out solutions. Also measure the mean and
    standard deviation of the solutions' scores, for each way to aggregate step scores."""
    values, mask = engine.values(batch), batch.action_mask
    _, stats = process_objective()(Outputs(values=values), batch)
    rows, probs = batch.row_ids[mask], values[mask].sigmoid()
    scores: dict[str, float] = {}
    for aggregation in AGGREGATIONS:
        solutions = aggregate_steps(probs, rows, num_rows=batch.num_rows, how=aggregation)
        scores[f"score_{aggregation}_mean"] = float(solutions.mean())
        scores[f"score_{aggregation}_std"] = float(solutions.std()) if batch.num_rows > 1 else 0.0
    return stats + Stats(maxima=scores)


def _steps_metadata(config: RewardModelConfig) -> dict[str, Any]:
    data = config.data
    assert isinstance(data, StepsDataConfig)
    return {"process_reward": True, "step_separator": data.step_separator}


KINDS: Mapping[str, RewardModelKind] = {
    "pairs": RewardModelKind(_pair_objective, lambda _: measure_pairs, signal_of=pair_signal),
    "steps": RewardModelKind(
        lambda _: process_objective(), lambda _: measure_steps, _steps_metadata
    ),
    "scores": RewardModelKind(scores_objective, measure_scores, scores_metadata),
    "classes": RewardModelKind(classes_objective, measure_classes, classes_metadata),
}
"""``data.kind`` -> kind."""

JOB = SupervisedTraining(RewardModelConfig, build_reward_model)
