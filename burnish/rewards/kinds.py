"""The registry of rewards."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from burnish.rewards.environment.config import EnvironmentReward
from burnish.rewards.episode.config import EpisodeReward
from burnish.rewards.function.config import FunctionReward
from burnish.rewards.math.config import MathReward
from burnish.rewards.model.config import ModelReward
from burnish.rewards.python_code.config import PythonCodeReward
from burnish.rewards.remote.config import RemoteReward

RewardConfig = Annotated[
    FunctionReward
    | ModelReward
    | MathReward
    | PythonCodeReward
    | EnvironmentReward
    | EpisodeReward
    | RemoteReward,
    Field(discriminator="kind"),
]
