"""Config of a reward model in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from burnish.config.model import ModelConfig
from burnish.rewards.config import RewardSettings

StepAggregation = Literal["min", "product", "last", "mean"]


class ModelReward(RewardSettings):
    """A reward model from ``burnish rm``, or a HuggingFace sequence classifier."""

    runs_alone: ClassVar[bool] = False

    kind: Literal["model"] = "model"
    model: ModelConfig
    """Reward model."""
    micro_batch_size: int = Field(8, ge=1)
    """Rows per forward pass."""
    normalize: bool = False
    """Use (score - mean) / std with ``reward_mean`` and ``reward_std`` of the model's config
    (process reward models: ``process_reward_stats``), from ``burnish rm`` with ``eval.data`` and
    ``burnish export``."""
    output_weights: dict[str, float] | None = None
    """Reward of a classifier with several outputs: their weighted sum, by name (``id2label``), such
    as ``{good: 1, bad: -1}`` for the log-odds. None: ``reward_weights`` of the model's config."""
    step_aggregation: StepAggregation | None = None
    """Score from a process reward model's step probabilities (``process_reward`` in its config):
    minimum, product, last or mean. None: min; required for other models."""
    step_separator: str | None = Field(None, min_length=1)
    """Process reward models: separator of a response's steps. None: that of training."""

    def rules(self) -> Iterator[str]:
        if self.normalize and self.output_weights is not None:
            yield (
                "normalize=true uses the mean and standard deviation of the model's own weights, "
                "but output_weights sets others; use running_norm, or remove one"
            )
        if self.normalize and self.running_norm is not None:
            yield (
                f"normalize=true and running_norm={self.running_norm} would both normalize the "
                "score; remove one (normalize: by the held-out rows of burnish rm)"
            )
