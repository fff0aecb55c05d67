"""AdamW of torch, as the update rule of all parameters or of those that another kind leaves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from burnish.optimizers.adamw.config import AdamW
from burnish.optimizers.config import AdamOptimizer
from burnish.optimizers.rule import RuleInputs, Trained, UpdateRule, decay_groups

STATE = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "step": "step"}


def make_rules(config: AdamW, inputs: RuleInputs) -> list[UpdateRule]:
    """Return the rule that steps every parameter."""
    return adamw_rules(config, inputs.trained, inputs)


def adamw_rules(
    config: AdamOptimizer, trained: Sequence[Trained], inputs: RuleInputs
) -> list[UpdateRule]:
    """Return the rule that steps ``trained``, or none if there are none."""
    if not trained:
        return []
    adamw = torch.optim.AdamW(
        decay_groups(trained, inputs.train.weight_decay),
        lr=inputs.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )
    return [UpdateRule(adamw, STATE)]
