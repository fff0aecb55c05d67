"""Scores that the environment of a multi-turn episode gave in its steps."""

from __future__ import annotations

from collections.abc import Sequence

from burnish.rewards.base import RewardInput, SampleError
from burnish.transcript import Turn


class EpisodeReward:
    """The sum of an environment's rewards over the turns of an episode."""

    def __init__(self, reward: str | None, *, name: str, per_turn: bool = False) -> None:
        """``reward``: name of one of the environment's rewards. None: the sum of all. ``per_turn``:
        credit each turn with its own part."""
        self.reward, self.name, self.per_turn = reward, name, per_turn

    def score(self, items: Sequence[RewardInput]) -> list[float]:
        """Return one score per episode. Raises SampleError for a single-turn response."""
        return [sum(self.of_turns(item)) for item in items]

    def of_turns(self, item: RewardInput) -> tuple[float, ...]:
        """Return the reward of each turn. A turn without this reward has 0."""
        episode = item.sample.episode
        if episode is None:
            raise SampleError(
                self,
                item,
                "found no episode: the response was sampled in a single turn",
                advice="set rollout.episodes, or use another kind of reward",
            )
        return tuple(self._of_turn(turn) for turn in episode.turns)

    def _of_turn(self, turn: Turn) -> float:
        if self.reward is None:
            return sum(turn.rewards.values())
        return turn.rewards.get(self.reward, 0.0)

    def close(self) -> None:
        """Do nothing."""
