"""Losses and measurements of reward models that predict scores or classes of single responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
from burnish.config.rated import ClassesDataConfig, RatedDataConfig, class_names
from burnish.tensors import upload
from burnish.train.base import Loss, Outputs, TrainEngine
from burnish.types import Batch, Number, Stats


def rated_objective(config: RewardModelConfig) -> Loss:
    """Return the loss of a recipe with rated rows, as a mean over all rows of the step."""
    data = config.data
    assert isinstance(data, RatedDataConfig)
    by_row = _loss_by_row(config)

    def objective(outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]:
        found = row_outputs(outputs, batch)
        assert batch.labels is not None
        targets = batch.labels.to(found.device)
        loss = by_row(found, targets).sum() / batch.num_sequences
        stats = rated_stats(found.detach(), targets, data)
        return loss, stats + Stats(sums={"loss": loss.detach()})

    return objective


def measure_rated(config: RewardModelConfig) -> Callable[[TrainEngine, Batch], Stats]:
    """Return a function that measures loss, errors or accuracies, correlations, and the mean and
    standard deviation of the reward over held-out rows."""
    data, weights = config.data, config.weight_of_outputs
    assert isinstance(data, RatedDataConfig)
    by_row = _loss_by_row(config)

    def measure(engine: TrainEngine, batch: Batch) -> Stats:
        found = row_outputs(Outputs(values=engine.values(batch)), batch)
        assert batch.labels is not None
        stats = rated_stats(found, batch.labels, data)
        stats += Stats(means={"loss": (by_row(found, batch.labels).sum(), len(found))})
        more: dict[str, Tensor] = {}
        if not isinstance(data, ClassesDataConfig):
            more |= correlations(found, batch.labels, data.names)
        if weights is not None:
            rewards = found @ torch.tensor(weights)
            spread = rewards.std() if len(rewards) > 1 else torch.zeros(())
            more |= {"score_mean": rewards.mean(), "score_std": spread}
        return stats + Stats(maxima=dict(more))

    return measure


def row_outputs(outputs: Outputs, batch: Batch) -> Tensor:
    """Return the outputs of the model for each row: [N, outputs]."""
    assert outputs.values is not None
    found = outputs.values[upload(batch.last_tokens, outputs.values.device)]
    return found if found.ndim == 2 else found[:, None]


def correlations(scores: Tensor, targets: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Return Pearson's and Spearman's correlation, as a mean over the attributes and of each.

    ``scores``, ``targets`` [N, A]. An attribute without variance counts as 0 in the mean.
    """
    metrics: dict[str, Tensor] = {}
    for what, function in (("pearson", pearson), ("spearman", spearman)):
        each = [function(scores[:, a], targets[:, a]).nan_to_num(0.0) for a in range(len(names))]
        metrics[what] = torch.stack(each).mean()
        if len(names) > 1:
            metrics |= {f"{what}_{name}": value for name, value in zip(names, each, strict=True)}
    return metrics


def rated_stats(found: Tensor, targets: Tensor, data: RatedDataConfig) -> Stats:
    """Return the errors of scores, or the accuracies of classes. ``found`` [N, outputs]."""
    num = len(found)
    if isinstance(data, ClassesDataConfig):
        best = (found[:, 0] > 0).long() if found.shape[1] == 1 else found.argmax(1)
        right = best == targets
        accuracies: dict[str, tuple[Number, Number]] = {"accuracy": (right.float().sum(), num)}
        for index, name in enumerate(class_names(data)):
            own = targets == index
            accuracies[f"accuracy_{name}"] = ((right & own).float().sum(), own.sum())
        return Stats(means=accuracies)
    error = found - targets
    kinds = {"mse": error.square(), "mae": error.abs()}
    means: dict[str, tuple[Number, Number]] = {
        what: (each.mean(1).sum(), num) for what, each in kinds.items()
    }
    if len(data.names) > 1:
        for what, each in kinds.items():
            means |= {
                f"{what}_{name}": (each[:, a].sum(), num) for a, name in enumerate(data.names)
            }
    return Stats(means=means)


def _loss_by_row(config: RewardModelConfig) -> Callable[[Tensor, Tensor], Tensor]:
    if isinstance(config.data, ClassesDataConfig):
        return class_cross_entropy
    if config.loss == "huber":
        return lambda scores, targets: huber(scores, targets, delta=config.huber_delta)
    return squared_error
