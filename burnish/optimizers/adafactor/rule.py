"""Adafactor over full or sharded weights (arXiv 1804.04235), as the update rule of all parameters;
equal to that of transformers without relative steps.

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
from burnish.models.tensor_files import Rows
from burnish.optimizers.adafactor.config import Adafactor
from burnish.optimizers.rule import RuleInputs, ShardedRule, StateShard, UpdateRule


def make_rules(config: Adafactor, inputs: RuleInputs) -> list[UpdateRule]:
    """Return the rule that steps every parameter."""
    tp_plan = inputs.tp_plan
    weights = [
        FactoredWeight(
            t.master,
            t.shape,
            weight_decay=inputs.train.weight_decay if t.parameter.ndim >= 2 else 0.0,
            tp_dim=None if tp_plan is None else tp_plan.dim(t.name),
        )
        for t in inputs.trained
    ]

    group = {} if tp_plan is None else {"tensor_parallel": tp_plan.model_parallel}
    kinds = ("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq", "step")
    return [
        UpdateRule(
            AdafactorOptimizer(weights, config, **group),
            {kind: kind for kind in kinds},
            layouts={"exp_avg_sq_row": _of_rows, "exp_avg_sq_col": _of_columns},
        )
    ]


def _of_rows(shape: tuple[int, ...], rows: Rows, columns: Rows) -> StateShard:
    """Return the part of a state with one number per row."""
    return StateShard(shape[:-1], rows, dims=tuple(range(len(shape) - 1)))


def _of_columns(shape: tuple[int, ...], rows: Rows, columns: Rows) -> StateShard:
    """Return the part of a state with one number per column, of each matrix of a stack."""
    stack = range(len(shape) - 2)
    dims = (*stack, len(shape) - 1)
    return StateShard(tuple(shape[d] for d in dims), rows if stack else columns, dims)


SMALLEST_RMS = 1e-3
"""Smallest root mean square of a weight with ``scale_parameter`` (the default of transformers)."""


@dataclass(frozen=True)
class FactoredWeight:
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


class AdafactorOptimizer(ShardedRule):
    """Adafactor over weights that may be sharded. Implements torch's interface for its ``state``.

    FSDP2 splits dimension 0 over :attr:`shards`. State of a matrix on a rank: ``exp_avg_sq_row`` of
    its rows, ``exp_avg_sq_col`` of its columns. Of a vector: ``exp_avg_sq`` of its entries.
    """

    def __init__(
        self,
        weights: Sequence[FactoredWeight],
        settings: Adafactor,
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
            state, master = self.state[weight.master], weight.master
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            if not state and weight.factored:
                state["exp_avg_sq_row"] = master.new_zeros(master.shape[:-1])
                state["exp_avg_sq_col"] = master.new_zeros(*master.shape[:-2], master.shape[-1])
            elif not state:
                state["exp_avg_sq"] = torch.zeros_like(master)
            state["step"] = state.get("step", 0) + 1
        self._average_squares(stepped)
        means = self._means_of_rows([w for w in stepped if w.factored])
        updates = (self._update(w, means.get(w.master)) for w in stepped)
        clip_rms = self._rms(stepped, [_square_sum(update) for update in updates])
        rms: Sequence[Tensor | None] = [None] * len(stepped)
        if self.settings.scale_parameter:
            rms = self._rms(stepped, [_square_sum(w.master) for w in stepped])
        for weight, update_rms, weight_rms in zip(stepped, clip_rms, rms, strict=True):
            update = self._update(weight, means.get(weight.master))  # not kept: one at a time
            lr = self.param_groups[0]["lr"]
            if weight_rms is not None:
                lr = lr * weight_rms.clamp(min=SMALLEST_RMS)
            update.div_((update_rms / self.settings.clip_threshold).clamp_(min=1.0)).mul_(lr)
            if weight.weight_decay:
                weight.master.add_(weight.master, alpha=-weight.weight_decay * float(lr))
            weight.master.sub_(update)

    def _average_squares(self, weights: Sequence[FactoredWeight]) -> None:
        """Add the squared gradients to their moving averages."""
        sums: list[tuple[FactoredWeight, int | None, Tensor]] = []
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

    def _average(self, weight: FactoredWeight, kind: str, new: Tensor) -> None:
        state = self.state[weight.master]
        decay = 1.0 - math.pow(state["step"], self.settings.decay_rate)
        state[kind].mul_(decay).add_(new, alpha=1.0 - decay)

    def _means_of_rows(self, weights: Sequence[FactoredWeight]) -> dict[Tensor, Tensor]:
        """Return the mean of ``exp_avg_sq_row`` over all rows of each matrix."""
        sums = [
            (w, w.columns - 1, self.state[w.master]["exp_avg_sq_row"].sum(-1, keepdim=True))
            for w in weights
        ]
        self._sum_over_ranks(sums)
        return {w.master: total.div_(w.shape[dim]) for w, dim, total in sums}

    def _update(self, weight: FactoredWeight, mean_of_rows: Tensor | None) -> Tensor:
        """Return the gradient over the root of its estimated mean square: for a matrix
        R C / mean(R), from the averages R of rows and C of columns."""
        state, grad = self.state[weight.master], weight.master.grad
        assert grad is not None
        if mean_of_rows is None:
            return state["exp_avg_sq"].rsqrt().mul_(grad)  # type: ignore[no-any-return]
        row = (state["exp_avg_sq_row"] / mean_of_rows).rsqrt_().unsqueeze(-1)
        return torch.mul(row, state["exp_avg_sq_col"].unsqueeze(-2).rsqrt()).mul_(grad)

    def _rms(
        self, weights: Sequence[FactoredWeight], square_sums: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return root mean squares over full weights, from the sums of squares of local parts."""
        self._sum_over_ranks([(w, None, t) for w, t in zip(weights, square_sums, strict=True)])
        return [
            total.sqrt().float() / math.prod(w.shape) ** 0.5
            for w, total in zip(weights, square_sums, strict=True)
        ]

    def _sum_over_ranks(self, sums: Sequence[tuple[FactoredWeight, int | None, Tensor]]) -> None:
        """Add sums over dimension ``dim`` (None: all dimensions) of local parts of weights, in
        place, over the ranks that split that dimension."""
        self.shards.all_reduce_([total for _, dim, total in sums if dim in (None, 0)])
        self.tensor_parallel.all_reduce_(
            [t for w, dim, t in sums if w.tp_dim is not None and dim in (None, w.tp_dim)]
        )


def _square_sum(tensor: Tensor) -> Tensor:
    return tensor.norm(2).double().square()
