"""Config of rewards that an episode has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from burnish.rewards.config import RewardSettings


class EpisodeReward(RewardSettings):
    """Rewards that the environment of a multi-turn episode gave in its steps
    (``rollout.episodes``)."""

    runs_alone: ClassVar[bool] = False

    kind: Literal["episode"] = "episode"
    reward: str | None = None
    """Name of the environment's reward. None: the sum of all its rewards."""
    per_turn: bool = False
    """Credit each turn with its own reward, at its last token, instead of the episode's sum at the
    end. For advantages on tokens (gae, reinforce_pp)."""

    @property
    def credits_turns(self) -> bool:
        return self.per_turn

    def rules(self) -> Iterator[str]:
        if self.per_turn and self.running_norm is not None:
            yield "per_turn=true and running_norm cannot be combined; remove one"
