"""Reward models from pairs (Bradley-Terry), process reward models from step-labeled solutions, and
regression and classification from single responses. The loop is in ``steps/supervised.py``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from burnish.algorithms import PREFERENCE_LOSSES
from burnish.algorithms.process import AGGREGATIONS, aggregate_steps
from burnish.config import RewardModelConfig
from burnish.config.rated import ClassesDataConfig, RatedDataConfig
from burnish.config.steps import PairsDataConfig, RewardRows, StepsDataConfig
from burnish.data.preference import PreferenceStream, load_pairs
from burnish.data.rated import RatedStream, load_rated
from burnish.data.steps import StepsStream, load_solutions
from burnish.jobs.build import engine_specs
from burnish.observe.timeline import timed
from burnish.preflight.positions import eval_place, held_out_sets, within_positions
from burnish.preflight.usable import usable_rows
from burnish.runtime.base import Runtime
from burnish.steps.no_signal import NoSignalMonitor, pair_signal
from burnish.steps.objectives import (
    pair_scores,
    process_objective,
    reward_model_objective,
    with_expert_balance,
)
from burnish.steps.rated_reward import measure_rated, rated_objective
from burnish.steps.supervised import Supervised, SupervisedTraining
from burnish.train.base import Loss, Outputs, TrainEngine
from burnish.types import Batch, Stats


def build_reward_model(config: RewardModelConfig, runtime: Runtime, run_dir: Path) -> Supervised:
    """Return the components of a reward-model run."""
    stream, held_out = _stream(config, runtime.tokenizer), _held_out(config, runtime.tokenizer)
    usable = usable_rows(config, stream.num_rows)
    total = config.steps_for(usable.num_rows)
    spans = {"forward_backward": "train", "optim_step": "optim", "values": "eval"}
    spec = engine_specs(config, total_steps=total)["reward"]
    return Supervised(
        stream=timed(stream, runtime.timeline, {"next": "data"}),
        usable=usable,
        engine=runtime.scalar_model(spec, seed=config.seed, spans=spans),
        loss=with_expert_balance(_objective(config), config.train.moe_aux_loss_coef),
        total_steps=total,
        batch_size_at=partial(config.batch_size_at, num_rows=usable.num_rows),
        measure=_measure(config),
        eval_batches=held_out,
        signal=NoSignalMonitor(config.train.max_steps_without_signal),
        look=pair_signal if isinstance(config.data, PairsDataConfig) else None,
        export_metadata=export_metadata(config),
    )


def _objective(config: RewardModelConfig) -> Loss:
    if config.process:
        return process_objective()
    if isinstance(config.data, RatedDataConfig):
        return rated_objective(config)
    return reward_model_objective(config.loss or "bradley_terry", center_coef=config.center_coef)


def _measure(config: RewardModelConfig) -> Callable[[TrainEngine, Batch], Stats]:
    if isinstance(config.data, RatedDataConfig):
        return measure_rated(config)
    return measure_steps if config.process else measure_pairs


def _stream(
    config: RewardModelConfig, tokenizer: PreTrainedTokenizerBase
) -> PreferenceStream | StepsStream | RatedStream:
    if isinstance(config.data, RatedDataConfig):
        data: RatedDataConfig = config.data
        return RatedStream(within_positions(data, config.model), tokenizer, seed=config.seed)
    if isinstance(config.data, StepsDataConfig):
        steps = within_positions(config.data, config.model)
        return StepsStream(steps, tokenizer, seed=config.seed)
    own = within_positions(config.data, config.model)
    return PreferenceStream(own, tokenizer, seed=config.seed)


def _held_out(config: RewardModelConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Batch]:
    """Return all held-out rows by the name of their set."""
    given: dict[str, RewardRows] = {} if config.eval_data is None else {"": config.eval_data}
    found: dict[str, Batch] = {}
    for name, rows in {**given, **config.eval_sets}.items():
        if isinstance(rows, RatedDataConfig):
            rated: RatedDataConfig = rows
            limited = held_out_sets(None, {name: rated}, config.model)
            found[name] = load_rated(limited[name], tokenizer, section=eval_place(name))
        elif isinstance(rows, StepsDataConfig):
            steps = held_out_sets(None, {name: rows}, config.model)
            found[name] = load_solutions(steps[name], tokenizer, section=eval_place(name))
        else:
            pairs = held_out_sets(None, {name: rows}, config.model)
            found[name] = load_pairs(pairs[name], tokenizer, section=eval_place(name))
    return found


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
    for how in AGGREGATIONS:
        found = aggregate_steps(probs, rows, num_rows=batch.num_rows, how=how)
        scores[f"score_{how}_mean"] = float(found.mean())
        scores[f"score_{how}_std"] = float(found.std()) if batch.num_rows > 1 else 0.0
    return stats + Stats(maxima=scores)


def export_metadata(config: RewardModelConfig) -> dict[str, Any] | None:
    """Return the metadata that exports of a process reward model and of a regression or
    classification contain; None for other models."""
    data = config.data
    if isinstance(data, RatedDataConfig):
        return _rated_metadata(config, data)
    if not isinstance(data, StepsDataConfig):
        return None
    return {"process_reward": True, "step_separator": data.step_separator}


def _rated_metadata(config: RewardModelConfig, data: RatedDataConfig) -> dict[str, Any]:
    """Return transformers' type of the problem, the names of the outputs, and their weights in the
    reward."""
    problem = "regression"
    if isinstance(data, ClassesDataConfig):  # transformers' type with a binary cross-entropy
        binary = "multi_label_classification"
        problem = binary if data.classes is None else "single_label_classification"
    weights = config.weight_of_outputs
    found: dict[str, Any] = {
        "problem_type": problem,
        "id2label": dict(enumerate(data.names)),
        "label2id": {name: index for index, name in enumerate(data.names)},
    }
    if weights is not None:
        found["reward_weights"] = dict(zip(data.names, weights, strict=True))
    return found


JOB = SupervisedTraining(RewardModelConfig, build_reward_model)
