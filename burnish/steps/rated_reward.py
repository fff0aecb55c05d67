"""Losses and measurements of reward models that predict scores or classes of single responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from burnish.algorithms.rated import (
    class_cross_entropy,
    huber,
    pearson,
    spearman,
    squared_error,
)
from burnish.config import RewardModelConfig
from burnish.config.reward_model import HuberLoss
from burnish.data.rated.config import ClassesDataConfig, class_names
from burnish.tensors import upload
from burnish.train.base import Loss, Outputs, TrainEngine
from burnish.types import Batch, Number, Stats

RowLoss = Callable[[Tensor, Tensor], Tensor]
"""(outputs [N, O], targets) -> loss of each row [N]"""


def scores_objective(config: RewardModelConfig) -> Loss:
    """Return the loss of scores, as a mean over all rows of the step."""
    return _objective(_scores_loss(config), partial(score_errors, names=config.data.output_names))


def classes_objective(config: RewardModelConfig) -> Loss:
    """Return the loss of classes, as a mean over all rows of the step."""
    return _objective(class_cross_entropy, partial(class_accuracies, names=_class_names(config)))


def measure_scores(config: RewardModelConfig) -> Callable[[TrainEngine, Batch], Stats]:
    """Return a function that measures loss, errors, correlations, and the mean and standard
    deviation of the reward over held-out rows."""
    names, row_loss = config.data.output_names, _scores_loss(config)
    weights = config.weight_of_outputs

    def measure(engine: TrainEngine, batch: Batch) -> Stats:
        scores, targets = _held_out(engine, batch)
        stats = score_errors(scores, targets, names=names)
        stats += _loss_and_reward(scores, row_loss(scores, targets), weights)
        return stats + Stats(maxima=dict(correlations(scores, targets, names)))

    return measure


def measure_classes(config: RewardModelConfig) -> Callable[[TrainEngine, Batch], Stats]:
    """Return a function that measures loss, accuracies, and the mean and standard deviation of the
    reward over held-out rows."""
    names, weights = _class_names(config), config.weight_of_outputs

    def measure(engine: TrainEngine, batch: Batch) -> Stats:
        logits, targets = _held_out(engine, batch)
        stats = class_accuracies(logits, targets, names=names)
        return stats + _loss_and_reward(logits, class_cross_entropy(logits, targets), weights)

    return measure


def scores_metadata(config: RewardModelConfig) -> dict[str, Any]:
    """Return transformers' type of the problem, the names of the outputs, and their weights in the
    reward."""
    return _metadata(config, "regression")


def classes_metadata(config: RewardModelConfig) -> dict[str, Any]:
    """Return transformers' type of the problem (of pass or fail: the one with a binary
    cross-entropy), the names of the outputs, and their weights in the reward."""
    binary = len(config.data.output_names) == 1
    return _metadata(
        config, "multi_label_classification" if binary else "single_label_classification"
    )


def _metadata(config: RewardModelConfig, problem: str) -> dict[str, Any]:
    names, weights = config.data.output_names, config.weight_of_outputs
    metadata: dict[str, Any] = {
        "problem_type": problem,
        "id2label": dict(enumerate(names)),
        "label2id": {name: index for index, name in enumerate(names)},
    }
    if weights is not None:
        metadata["reward_weights"] = dict(zip(names, weights, strict=True))
    return metadata


def _class_names(config: RewardModelConfig) -> tuple[str, ...]:
    return class_names(cast(ClassesDataConfig, config.data))


def _scores_loss(config: RewardModelConfig) -> RowLoss:
    loss = config.loss
    return partial(huber, delta=loss.delta) if isinstance(loss, HuberLoss) else squared_error


def _objective(row_loss: RowLoss, row_stats: Callable[[Tensor, Tensor], Stats]) -> Loss:
    def objective(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
        predicted = row_outputs(outputs, batch)
        assert batch.labels is not None
        targets = batch.labels.to(predicted.device)
        loss = row_loss(predicted, targets).sum() / batch.num_sequences
        stats = row_stats(predicted.detach(), targets)
        return loss, stats + Stats(sums={"loss": loss.detach()})

    return objective


def _held_out(engine: TrainEngine, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return outputs and targets of held-out rows."""
    assert batch.labels is not None
    return row_outputs(Outputs(values=engine.values(batch)), batch), batch.labels


def _loss_and_reward(outputs: Tensor, losses: Tensor, weights: Sequence[float] | None) -> Stats:
    """Return the mean loss, and mean and deviation of the reward if its weights are known."""
    stats = Stats(means={"loss": (losses.sum(), len(losses))})
    if weights is None:
        return stats
    rewards = outputs @ torch.tensor(weights)
    spread = rewards.std() if len(rewards) > 1 else torch.zeros(())
    return stats + Stats(maxima={"score_mean": rewards.mean(), "score_std": spread})


def row_outputs(outputs: Outputs, batch: Batch) -> Tensor:
    """Return the outputs of the model for each row: [N, outputs]."""
    assert outputs.values is not None
    values = outputs.values[upload(batch.last_tokens, outputs.values.device)]
    return values if values.ndim == 2 else values[:, None]


def correlations(scores: Tensor, targets: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Return Pearson's and Spearman's correlation, as a mean over the attributes and of each.

    ``scores``, ``targets`` [N, A]. An attribute without variance counts as 0 in the mean.
    """
    metrics: dict[str, Tensor] = {}
    for kind, function in (("pearson", pearson), ("spearman", spearman)):
        each = [function(scores[:, a], targets[:, a]).nan_to_num(0.0) for a in range(len(names))]
        metrics[kind] = torch.stack(each).mean()
        if len(names) > 1:
            metrics |= {f"{kind}_{name}": value for name, value in zip(names, each, strict=True)}
    return metrics


def class_accuracies(logits: Tensor, targets: Tensor, *, names: Sequence[str]) -> Stats:
    """Return the accuracy of all rows and of those of each class. ``logits`` [N, outputs]."""
    best = (logits[:, 0] > 0).long() if logits.shape[1] == 1 else logits.argmax(1)
    is_right = best == targets
    accuracies: dict[str, tuple[Number, Number]] = {
        "accuracy": (is_right.float().sum(), len(logits))
    }
    for index, name in enumerate(names):
        in_class = targets == index
        accuracies[f"accuracy_{name}"] = ((is_right & in_class).float().sum(), in_class.sum())
    return Stats(means=accuracies)


def score_errors(scores: Tensor, targets: Tensor, *, names: Sequence[str]) -> Stats:
    """Return the errors of scores, and those of each attribute if there are several. ``scores``
    [N, attributes]."""
    error, num = scores - targets, len(scores)
    kinds = {"mse": error.square(), "mae": error.abs()}
    means: dict[str, tuple[Number, Number]] = {
        kind: (errors.mean(1).sum(), num) for kind, errors in kinds.items()
    }
    if len(names) > 1:
        for kind, errors in kinds.items():
            means |= {f"{kind}_{name}": (errors[:, a].sum(), num) for a, name in enumerate(names)}
    return Stats(means=means)
