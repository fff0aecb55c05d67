"""Process reward models: a loss on every step of a solution, and aggregation of step scores.

Sources: Let's Verify Step by Step (arXiv 2305.20050); Math-Shepherd (arXiv 2312.08935), with hard
or soft labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from burnish.algorithms.reduce import sum_by_row


def step_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-(y log p + (1 - y) log(1 - p)) with p = sigmoid(logit), for each step [S].

    ``labels`` [S] in [0, 1]: 1 or 0 is a hard label, anything between a soft one (the probability
    that the step is right), for which the least loss is the label's own entropy.
    """
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none")


def aggregate_steps(probs: Tensor, rows: Tensor, *, num_rows: int, how: str) -> Tensor:
    """One score per response [num_rows] from the probabilities of its steps ``probs`` [S].

    ``rows`` [S]: the response of each step, in order. ``how``: ``min`` (a chain is as strong as its
    weakest step), ``product`` (all steps are right), ``last`` (the last step judges the entire
    response), ``mean``. Every response needs a step. Raises KeyError for another ``how``.
    """
    return AGGREGATIONS[how](probs, rows, num_rows)


def _min(probs: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    out = probs.new_full((num_rows,), float("inf"))
    return out.scatter_reduce(0, rows, probs, reduce="amin")


def _product(probs: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    return probs.new_ones(num_rows).scatter_reduce(0, rows, probs, reduce="prod")


def _last(probs: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    place = torch.arange(rows.numel(), device=rows.device)
    last = place.new_zeros(num_rows).scatter_reduce(0, rows, place, reduce="amax")
    return probs[last]


def _mean(probs: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    mask = torch.ones_like(probs, dtype=torch.bool)
    counts = sum_by_row(torch.ones_like(probs), mask, row_ids=rows, num_rows=num_rows)
    return sum_by_row(probs, mask, row_ids=rows, num_rows=num_rows) / counts


AGGREGATIONS: Mapping[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "min": _min,
    "product": _product,
    "last": _last,
    "mean": _mean,
}
