"""Adafactor as the update rule of all parameters."""

from __future__ import annotations

from burnish.models.tensor_files import Rows
from burnish.optimizers.adafactor.config import Adafactor
from burnish.optimizers.adafactor.update import AdafactorOptimizer, AdafactorSettings, Weight
from burnish.optimizers.rule import RuleInputs, StateShard, UpdateRule


def make_rules(config: Adafactor, inputs: RuleInputs) -> list[UpdateRule]:
    """Return the rule that steps every parameter."""
    tp_plan = inputs.tp_plan
    weights = [
        Weight(
            t.master,
            t.shape,
            weight_decay=inputs.train.weight_decay if t.parameter.ndim >= 2 else 0.0,
            tp_dim=None if tp_plan is None else tp_plan.dim(t.name),
        )
        for t in inputs.trained
    ]
    settings = AdafactorSettings(
        decay_rate=config.decay_rate,
        clip_threshold=config.clip_threshold,
        grad_eps=config.grad_eps,
        scale_parameter=config.scale_parameter,
    )
    group = {} if tp_plan is None else {"tensor_parallel": tp_plan.model_parallel}
    kinds = ("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq", "step")
    return [
        UpdateRule(
            AdafactorOptimizer(weights, settings, **group),
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
