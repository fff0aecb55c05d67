"""Rules for advantages of several rewards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from burnish.config.algorithm import AdvantageConfig, GroupAdvantage
from burnish.config.rewards import RewardConfig, ShapingConfig


def each_reward_rules(
    advantage: AdvantageConfig, rewards: Sequence[RewardConfig], shaping: ShapingConfig
) -> Iterator[str]:
    """Yield an error for each reward that is already normalized, and for shaping of their sum, if
    the advantage normalizes each reward."""
    if not isinstance(advantage, GroupAdvantage) or not advantage.normalize_each:
        return
    if shaping != ShapingConfig():
        yield (
            "shaping changes the sum of the rewards, but algorithm.advantage.normalize_each uses "
            "each reward by itself; remove shaping, or express it as a reward with a weight"
        )
    for i, reward in enumerate(rewards):
        if reward.running_norm is not None:
            yield (
                f"rewards[{i}].running_norm={reward.running_norm} has no effect with "
                "algorithm.advantage.normalize_each, which normalizes the raw scores in each "
                "group; remove one of them"
            )
