"""Adafactor over full or sharded weights (arXiv 1804.04235), equal to that of transformers without
relative steps.

Four numbers of an update cover entries of several ranks: the mean of the squared gradient of a row
(if columns are sharded) and of a column (if rows are), the mean of all rows, and the root mean
squares of the update and of the weight. Each is a sum, which the ranks add. A step makes three
rounds of sums (four with ``scale_parameter``), each of all weights together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from burnish.distributed.process_group import SINGLE, RankGroup
from burnish.optimizers.rule import ShardedOptimizer

SMALLEST_RMS = 1e-3
"""Smallest root mean square of a weight with ``scale_parameter`` (the default of transformers)."""


@dataclass(frozen=True)
class Weight:
    """One parameter that Adafactor trains."""

    master: Tensor
    """This rank's part of the fp32 weight."""
    shape: tuple[int, ...]
    """Shape of the full parameter."""
    weight_decay: float = 0.0
    tp_dim: int | None = None
    """Dimension along which tensor parallelism splits the parameter."""

    @property
    def factored(self) -> bool:
        """Return whether squared gradients are stored as means of rows and columns."""
        return len(self.shape) >= 2

    @property
    def columns(self) -> int:
        """Dimension of the columns; the rows are the one before it."""
        return len(self.shape) - 1


@dataclass(frozen=True)
class AdafactorSettings:
    """Settings of the update."""

    decay_rate: float
    clip_threshold: float
    grad_eps: float
    scale_parameter: bool


class AdafactorOptimizer(ShardedOptimizer):
    """Adafactor over weights that may be sharded. Implements torch's interface for its ``state``.

    FSDP2 splits dimension 0 over :attr:`shards`. State of a matrix on a rank: ``exp_avg_sq_row`` of
    its rows, ``exp_avg_sq_col`` of its columns. Of a vector: ``exp_avg_sq`` of its entries.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        settings: AdafactorSettings,
        *,
        tensor_parallel: RankGroup = SINGLE,
    ) -> None:
        super().__init__([w.master for w in weights], {"lr": 0.0})
        self.weights, self.settings = tuple(weights), settings
        self.tensor_parallel = tensor_parallel

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient on any rank. All ranks take part."""
        have = self.shards.any_across([w.master.grad is not None for w in self.weights])
        stepped = [w for w, there in zip(self.weights, have, strict=True) if there]
        for weight in stepped:
            if weight.master.grad is None:
                weight.master.grad = torch.zeros_like(weight.master)
            self._start(weight)
        self._average_squares(stepped)
        means = self._means_of_rows([w for w in stepped if w.factored])
        updates = (self._update(w, means.get(w.master)) for w in stepped)
        clip_rms = self._rms(stepped, [_square_sum(update) for update in updates])
        rms: Sequence[Tensor | None] = [None] * len(stepped)
        if self.settings.scale_parameter:
            rms = self._rms(stepped, [_square_sum(w.master) for w in stepped])
        for weight, update_rms, weight_rms in zip(stepped, clip_rms, rms, strict=True):
            update = self._update(weight, means.get(weight.master))  # not kept: one at a time
            self._apply(weight, update, update_rms, weight_rms)

    def _start(self, weight: Weight) -> None:
        state, master = self.state[weight.master], weight.master
        if not state:
            state["step"] = 0
            if weight.factored:
                state["exp_avg_sq_row"] = master.new_zeros(master.shape[:-1])
                state["exp_avg_sq_col"] = master.new_zeros(*master.shape[:-2], master.shape[-1])
            else:
                state["exp_avg_sq"] = torch.zeros_like(master)
        state["step"] += 1

    def _average_squares(self, weights: Sequence[Weight]) -> None:
        """Add the squared gradients to their moving averages."""
        sums: list[tuple[Weight, int | None, Tensor]] = []
        for weight in weights:
            assert weight.master.grad is not None
            square = weight.master.grad.square().add_(self.settings.grad_eps)
            if not weight.factored:
                self._average(weight, "exp_avg_sq", square)
                continue
            sums.append((weight, weight.columns, square.sum(-1)))
            sums.append((weight, weight.columns - 1, square.sum(-2)))
        self._sum_over_ranks(sums)
        for weight, dim, total in sums:
            assert dim is not None
            kind = "exp_avg_sq_row" if dim == weight.columns else "exp_avg_sq_col"
            self._average(weight, kind, total.div_(weight.shape[dim]))

    def _average(self, weight: Weight, kind: str, new: Tensor) -> None:
        state = self.state[weight.master]
        decay = 1.0 - math.pow(state["step"], self.settings.decay_rate)
        state[kind].mul_(decay).add_(new, alpha=1.0 - decay)

    def _means_of_rows(self, weights: Sequence[Weight]) -> dict[Tensor, Tensor]:
        """Return the mean of ``exp_avg_sq_row`` over all rows of each matrix."""
        sums = [
            (w, w.columns - 1, self.state[w.master]["exp_avg_sq_row"].sum(-1, keepdim=True))
            for w in weights
        ]
        self._sum_over_ranks(sums)
        return {w.master: total.div_(w.shape[dim]) for w, dim, total in sums}

    def _update(self, weight: Weight, mean_of_rows: Tensor | None) -> Tensor:
        """Return the gradient over the root of its estimated mean square: for a matrix
        R C / mean(R), from the averages R of rows and C of columns."""
        state, grad = self.state[weight.master], weight.master.grad
        assert grad is not None
        if mean_of_rows is None:
            return state["exp_avg_sq"].rsqrt().mul_(grad)  # type: ignore[no-any-return]
        row = (state["exp_avg_sq_row"] / mean_of_rows).rsqrt_().unsqueeze(-1)
        return torch.mul(row, state["exp_avg_sq_col"].unsqueeze(-2).rsqrt()).mul_(grad)

    def _rms(self, weights: Sequence[Weight], square_sums: Sequence[Tensor]) -> list[Tensor]:
        """Return root mean squares over full weights, from the sums of squares of local parts."""
        self._sum_over_ranks([(w, None, t) for w, t in zip(weights, square_sums, strict=True)])
        return [
            total.sqrt().float() / math.prod(w.shape) ** 0.5
            for w, total in zip(weights, square_sums, strict=True)
        ]

    def _apply(
        self, weight: Weight, update: Tensor, update_rms: Tensor, weight_rms: Tensor | None
    ) -> None:
        lr = self.param_groups[0]["lr"]
        if weight_rms is not None:
            lr = lr * weight_rms.clamp(min=SMALLEST_RMS)
        update.div_((update_rms / self.settings.clip_threshold).clamp_(min=1.0)).mul_(lr)
        if weight.weight_decay:
            weight.master.add_(weight.master, alpha=-weight.weight_decay * float(lr))
        weight.master.sub_(update)

    def _sum_over_ranks(self, sums: Sequence[tuple[Weight, int | None, Tensor]]) -> None:
        """Add sums over dimension ``dim`` (None: all dimensions) of local parts of weights, in
        place, over the ranks that split that dimension."""
        self.shards.all_reduce_([total for _, dim, total in sums if dim in (None, 0)])
        self.tensor_parallel.all_reduce_(
            [t for w, dim, t in sums if w.tp_dim is not None and dim in (None, w.tp_dim)]
        )


def _square_sum(tensor: Tensor) -> Tensor:
    return tensor.norm(2).double().square()
