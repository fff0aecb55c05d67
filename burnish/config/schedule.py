"""Config of learning-rate schedules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from burnish.config.base import Node

Scheduler = Literal["constant", "linear", "cosine", "cosine_with_min_lr", "polynomial", "wsd"]


class ScheduleConfig(Node):
    """Learning-rate schedule of one role, over all of its optimizer steps."""

    lr_scheduler: Scheduler = "constant"
    """Schedule of the learning rate after warm-up. polynomial and wsd end at ``min_lr_ratio``."""
    lr_warmup_ratio: float = Field(0.0, ge=0, le=1)
    """Fraction of all optimizer steps with linear warm-up from 0."""
    lr_warmup_steps: int | None = Field(None, ge=0)
    """Optimizer steps with linear warm-up from 0, in place of lr_warmup_ratio."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Final learning rate / peak learning rate (cosine_with_min_lr, polynomial, wsd)."""
    lr_power: float = Field(1.0, gt=0)
    """Exponent of the polynomial schedule. 1: linear."""
    lr_decay_ratio: float = Field(0.1, gt=0, le=1)
    """Fraction of all optimizer steps in the final decay of wsd (warm-up, stable, decay)."""
    lr_decay_shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """Decay of wsd. sqrt: 1 - sqrt(progress) (arXiv 2405.18392)."""

    def rules(self) -> Iterator[str]:
        if self.lr_warmup_steps is not None and self.lr_warmup_ratio:
            yield (
                f"lr_warmup_steps={self.lr_warmup_steps} and lr_warmup_ratio="
                f"{self.lr_warmup_ratio:g} both set the length of the warm-up; remove one"
            )
        for name, schedulers in _SCHEDULERS_OF.items():
            if self.lr_scheduler not in schedulers and self.is_own(name):
                yield (
                    f"{name} has no effect with lr_scheduler={self.lr_scheduler}; remove it, or "
                    f"use lr_scheduler={' or '.join(schedulers)}"
                )
        if self.lr_scheduler == "wsd" and self.lr_warmup_ratio + self.lr_decay_ratio > 1:
            yield (
                f"lr_warmup_ratio={self.lr_warmup_ratio:g} and lr_decay_ratio="
                f"{self.lr_decay_ratio:g} are more than all steps; lower one"
            )


_SCHEDULERS_OF = {
    "min_lr_ratio": ("cosine_with_min_lr", "polynomial", "wsd"),
    "lr_power": ("polynomial",),
    "lr_decay_ratio": ("wsd",),
    "lr_decay_shape": ("wsd",),
}
"""Keys of one schedule or several, which have no effect with the others."""
