"""Rules for rewards and advantages that normalize them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from burnish.config.algorithm import AdvantageConfig
from burnish.config.rewards import RewardConfig, ShapingConfig


def each_reward_rules(
    advantage: AdvantageConfig, rewards: Sequence[RewardConfig], shaping: ShapingConfig
) -> Iterator[str]:
    """Yield an error for each reward that is already normalized, and for shaping of their sum, if
    the advantage normalizes each reward."""
    if not advantage.normalizes_each:
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


def running_norm_advice(
    rewards: Sequence[RewardConfig], watched: Mapping[str, str | None]
) -> Iterator[str]:
    """Yield one sentence for each key of ``watched`` whose metric contains a reward that is
    normalized by its running statistics. ``watched``: key of the recipe -> metric."""
    names = [entry.name or entry.kind for entry in rewards if entry.running_norm]
    for key, metric in watched.items():
        if names and metric in ("reward/mean", "reward/trained_mean", "reward/std"):
            yield (
                f"{key}={metric} is normalized by running statistics (running_norm of "
                f"{', '.join(names)}), which change, so its values are not comparable; set "
                f"{key}=reward/{names[0]} (the raw score)"
            )
