"""Config of learning-rate schedules: the kinds, each with its equation, and the warm-up."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from burnish.config.base import Node, OlderKeys, named_kind, switched_by


class _Scheduler(Node, ABC):
    """A schedule after warm-up."""

    short_key = "kind"

    def first_step(self, warmup: int, total_steps: int) -> int:
        """Return the optimizer step at which the rate begins to fall; ``warmup``: steps of it."""
        return warmup

    @abstractmethod
    def factor(self, progress: float) -> float:
        """Return the rate as a fraction of the peak. ``progress``: from 0 at the first step to 1 at
        the end."""


class ConstantLr(_Scheduler):
    """The peak rate."""

    kind: Literal["constant"] = "constant"

    def factor(self, progress: float) -> float:
        return 1.0


class LinearLr(_Scheduler):
    """To 0 on a line."""

    kind: Literal["linear"] = "linear"

    def factor(self, progress: float) -> float:
        return 1.0 - progress


class CosineLr(_Scheduler):
    """To 0 on half of a cosine."""

    kind: Literal["cosine"] = "cosine"

    def factor(self, progress: float) -> float:
        return _cosine(progress)


class _WithMinimum(_Scheduler):
    """A schedule that ends above 0."""

    min_ratio: float = Field(0.1, ge=0, le=1)
    """Final learning rate / peak learning rate."""

    def factor(self, progress: float) -> float:
        return self.min_ratio + (1 - self.min_ratio) * self.shape(progress)

    @abstractmethod
    def shape(self, progress: float) -> float:
        """Return the rate as a fraction of its range, from 1 to 0."""


class CosineWithMinLr(_WithMinimum):
    """To ``min_ratio`` on half of a cosine."""

    kind: Literal["cosine_with_min_lr"] = "cosine_with_min_lr"

    def shape(self, progress: float) -> float:
        return _cosine(progress)


class PolynomialLr(_WithMinimum):
    """To ``min_ratio`` on a power of the line."""

    kind: Literal["polynomial"] = "polynomial"
    power: float = Field(1.0, gt=0)
    """Exponent. 1: linear."""

    def shape(self, progress: float) -> float:
        return float((1.0 - progress) ** self.power)


class WsdLr(_WithMinimum):
    """Warm-up, stable at the peak, and a final decay to ``min_ratio`` (WSD)."""

    kind: Literal["wsd"] = "wsd"
    decay_ratio: float = Field(0.1, gt=0, le=1)
    """Fraction of all optimizer steps in the final decay."""
    decay_shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """sqrt: 1 - sqrt(progress) (arXiv 2405.18392)."""

    def first_step(self, warmup: int, total_steps: int) -> int:
        return max(warmup, total_steps - math.ceil(self.decay_ratio * total_steps))

    def shape(self, progress: float) -> float:
        if self.decay_shape == "sqrt":
            return 1.0 - math.sqrt(progress)
        return _cosine(progress) if self.decay_shape == "cosine" else 1.0 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


Scheduler = Annotated[
    Annotated[
        ConstantLr | LinearLr | CosineLr | CosineWithMinLr | PolynomialLr | WsdLr,
        Field(discriminator="kind"),
    ],
    named_kind(),
]


class ScheduleConfig(Node):
    """Learning-rate schedule of one role, over all of its optimizer steps."""

    older_keys: ClassVar[tuple[OlderKeys, ...]] = (
        OlderKeys(
            "lr_scheduler",
            "lr_scheduler",
            switched_by("kind"),
            {
                "min_lr_ratio": ("min_ratio", 0.1),
                "lr_power": ("power", 1.0),
                "lr_decay_ratio": ("decay_ratio", 0.1),
                "lr_decay_shape": ("decay_shape", "linear"),
            },
        ),
    )

    lr_scheduler: Scheduler = ConstantLr()
    """Schedule of the learning rate after warm-up: a kind, or a mapping."""
    lr_warmup_ratio: float = Field(0.0, ge=0, le=1)
    """Fraction of all optimizer steps with linear warm-up from 0."""
    lr_warmup_steps: int | None = Field(None, ge=0)
    """Optimizer steps with linear warm-up from 0, in place of lr_warmup_ratio."""

    def rules(self) -> Iterator[str]:
        if self.lr_warmup_steps is not None and self.lr_warmup_ratio:
            yield (
                f"lr_warmup_steps={self.lr_warmup_steps} and lr_warmup_ratio="
                f"{self.lr_warmup_ratio:g} both set the length of the warm-up; remove one"
            )
        decays = self.lr_scheduler
        if isinstance(decays, WsdLr) and self.lr_warmup_ratio + decays.decay_ratio > 1:
            yield (
                f"lr_warmup_ratio={self.lr_warmup_ratio:g} and lr_scheduler.decay_ratio="
                f"{decays.decay_ratio:g} are more than all steps; lower one"
            )
