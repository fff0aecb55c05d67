"""Sections and rules of all rewards of a recipe together. The settings of each kind are in its
folder in ``burnish/rewards``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from pydantic import Field

from burnish.config.algorithm import AdvantageConfig
from burnish.config.base import Node, OlderKeys, switched_by
from burnish.rewards.config import RewardSettings
from burnish.rewards.kinds import RewardConfig

RESERVED_NAMES = (
    *("mean", "std", "trained_mean", "shaping", "truncated_frac", "groups_dropped"),
    *("equal_groups_frac",),
)
"""Names used by metrics and samples, which no reward may have."""


def weigh_nothing(rewards: Sequence[RewardSettings]) -> bool:
    """Return whether there are rewards and all of their weights are 0, so that the weighted sum is
    always 0."""
    return bool(rewards) and all(reward.weight == 0 for reward in rewards)


def no_weight_advice(rewards: Sequence[RewardSettings]) -> Iterator[str]:
    """Yield advice if all scores are 0 because no reward has a weight."""
    if weigh_nothing(rewards):
        yield (
            "every entry of rewards has weight 0, so every response would have the score 0; set "
            "a weight above 0"
        )


def running_norm_rules(rewards: Sequence[RewardSettings]) -> Iterator[str]:
    """Yield an error for each reward with ``running_norm``, which rows of data cannot have."""
    for i, reward in enumerate(rewards):
        if reward.running_norm is not None:
            yield (
                f"rewards[{i}].running_norm={reward.running_norm} normalizes each score by the "
                "statistics of all previous scores, so a response's score would depend on its "
                "position, but rows need the raw score; remove it"
            )


class FailurePolicy(Node):
    """Treatment of a reward that raises, or returns NaN, infinity, a number beyond fp32, or a wrong
    count or type."""

    retries: int = Field(0, ge=0)
    """Retries of the failed call before ``then`` applies."""
    then: Literal["fail", "drop_group"] = "fail"
    """``fail``: stop the run with the error. ``drop_group``: drop the group, counted in metrics."""


class OverlongPenalty(Node):
    """DAPO's soft length penalty (arXiv 2503.14476): rises linearly from 0 to ``penalty`` over the
    last ``buffer_len`` sampled tokens before ``generate_max_len`` (episodes: before
    ``episodes.max_tokens`` - ``prompt_max_len``)."""

    buffer_len: int = Field(ge=1)
    """Sampled tokens over which the penalty rises."""
    penalty: float = Field(1.0, ge=0)
    """Penalty at the limit."""


class ShapingConfig(Node):
    """Changes to the reward after the weighted sum, before any baseline.

    Order: each reward's score, ``normalize`` (reward models), ``running_norm``, ``weight``; the
    sum; ``reward_clip``; the penalties, which are not clipped."""

    older_keys = (
        OlderKeys(
            "overlong",
            "overlong_buffer_len",
            switched_by("buffer_len", 0),
            {"overlong_penalty": ("penalty", 1.0)},
        ),
    )

    reward_clip: float | None = Field(None, gt=0)
    """Clip the weighted sum to [-c, c]. None: no clipping."""
    length_penalty: float = Field(0.0, ge=0)
    """Penalty per sampled token of a response or episode (end tokens included). 0: none."""
    truncation_penalty: float = Field(0.0, ge=0)
    """Penalty for reaching the length limit (episodes: status max_tokens or max_turn_tokens)."""
    overlong: OverlongPenalty | None = None
    """DAPO's soft length penalty. None: none."""


def reward_names(rewards: Sequence[RewardSettings]) -> list[str]:
    """Return the name of each reward: its own, else its kind. A repeated name gets a number."""
    names: list[str] = []
    for entry in rewards:
        base = name = entry.name or entry.kind
        n = 1
        while name in names:
            n += 1
            name = f"{base}_{n}"
        names.append(name)
    return names


def passes_unweighted(weights: Iterable[float]) -> bool:
    """Return whether responses pass by the unweighted score of a reward: only one has a nonzero
    weight, and that is positive. With a negative weight, a lower score is better."""
    counted = [weight for weight in weights if weight]
    return len(counted) == 1 and counted[0] > 0


class Scoring(NamedTuple):
    """Rewards of the responses of a job."""

    rewards: tuple[RewardConfig, ...] = ()
    in_episodes: bool = False
    """True if responses are conversations of episodes."""
    on_failure: FailurePolicy = FailurePolicy()


def each_reward_rules(
    advantage: AdvantageConfig, rewards: Sequence[RewardSettings], shaping: ShapingConfig
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
    rewards: Sequence[RewardSettings], watched: Mapping[str, str | None]
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
