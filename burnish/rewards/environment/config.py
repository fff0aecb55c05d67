"""Config of scores of a prompt's environment."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from burnish.rewards.config import RewardSettings


class EnvironmentReward(RewardSettings):
    """Score computed by the prompt's own environment."""

    kind: Literal["environment"] = "environment"
    timeout_s: float = Field(1800.0, gt=0)
    """Maximum seconds of the environment's steps for all responses of a batch."""
