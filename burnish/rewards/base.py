"""The interface of rewards, and the parts of their error messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from burnish.errors import BurnishError
from burnish.types import Prompt, Sample


class RewardError(BurnishError, RuntimeError):
    """A reward failed or cannot be created.

    The message contains the reward's name, its source location, its result, and what to do.
    """


_RETURN_A_NUMBER = "return one finite number for each response (0.0 for a wrong answer)"


@dataclass(frozen=True)
class RewardInput:
    """Input of a reward: one response with its prompt."""

    prompt: Prompt
    sample: Sample


class SampleError(RewardError):
    """Raised by a reward when it fails on one identified sample."""

    def __init__(
        self, reward: Reward, item: RewardInput, problem: str, *, advice: str = _RETURN_A_NUMBER
    ) -> None:
        super().__init__(f"{named(reward)} {problem}\n{describe(item)}\n  {what_to_do(advice)}")


class LateError(SampleError):
    """A reward that did not return in time. The call is not repeated for parts of its items."""


def late(reward: Reward, item: RewardInput, count: int, error: Exception) -> LateError:
    """Return the error for a call with ``count`` responses, in which ``item`` was the current or
    the first one."""
    many = f" in a call with {count} responses; one of them is" if count > 1 else ""
    advice = (
        "give requests and loops of the function a time limit of their own, or raise the reward's "
        "timeout_s"
    )
    return LateError(reward, item, f"{error}{many}", advice=advice)


class Reward(Protocol):
    """Scores responses."""

    name: str

    def score(self, items: Sequence[RewardInput]) -> Sequence[float | SampleError]:
        """Return one finite number per item, in order.

        If only some items fail, return a SampleError in place of each of their numbers. May raise
        if the whole call fails. :class:`RewardSet` checks the result.
        """
        ...

    def close(self) -> None:
        """Release processes, threads and memory. Called once."""
        ...


@runtime_checkable
class HasLocation(Protocol):
    """A reward with a source location, which error messages include."""

    location: str
    """Such as ``function f at rewards.py:12``."""


@runtime_checkable
class HasLabelUse(Protocol):
    """A reward that declares whether it reads the label."""

    takes_label: bool


@runtime_checkable
class HasCounts(Protocol):
    """A reward that counts events, such as timeouts. The counts become sums in the stats."""

    def take_counts(self) -> Mapping[str, int]:
        """Return the counts since the last call and reset them."""
        ...


@runtime_checkable
class HasMeans(Protocol):
    """A reward with measurements besides its score. They become means in the stats."""

    def take_means(self) -> Mapping[str, tuple[float, float]]:
        """Return (sum, count) of each measurement since the last call and reset them.

        No name may equal a name returned by ``take_counts``.
        """
        ...


@runtime_checkable
class HasTurnRewards(Protocol):
    """A reward of episodes that can be credited turn by turn."""

    per_turn: bool

    def of_turns(self, item: RewardInput) -> tuple[float, ...]:
        """Return the unweighted reward of each turn. Their sum is the score."""
        ...


def describe(item: RewardInput) -> str:
    """Return the sample's id and excerpts of its prompt, response and label, for error messages."""
    return (
        f"  at sample {item.sample.sample_id!r} of prompt {item.prompt.id!r}\n"
        f"  prompt: {excerpt(item.prompt.text)}\n"
        f"  response: {excerpt(item.sample.text)}\n"
        f"  label: {excerpt(item.prompt.label)}"
    )


_OR_DROP = (
    "; or set on_reward_failure.then=drop_group to drop such groups, or on_reward_failure.retries "
    "to retry"
)


def what_to_do(advice: str = _RETURN_A_NUMBER) -> str:
    """Return the last line of the message of a failed reward."""
    return f"What to do: {advice}{_OR_DROP}"


def without_drop(message: str) -> str:
    """Remove the advice to set drop_group, for runs that already do."""
    return message.replace(_OR_DROP, "; or raise on_reward_failure.retries to retry more often")


def named(reward: Reward) -> str:
    """Return the name of a reward with its source location, for error messages."""
    place = f" ({reward.location})" if isinstance(reward, HasLocation) else ""
    return f"reward {reward.name!r}{place}"


def excerpt(value: Any, longest: int = 160) -> str:
    """Return the representation of a value, at most ``longest`` characters of it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError) as error:  # an int of 5,000 digits, lists in lists
        text = f"<{type(value).__name__} that cannot be shown ({error})>"
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 :]}"
