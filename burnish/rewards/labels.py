"""Find labels that rewards cannot use, from the data alone: before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from burnish.config.rewards import FailurePolicy
from burnish.errors import BurnishError
from burnish.rewards.config import RewardSettings
from burnish.types import Prompt


class LabelError(BurnishError, ValueError):
    """A label that a reward cannot use. The message continues a sentence about the label."""


def label_readers(rewards: Sequence[RewardSettings], policy: FailurePolicy) -> tuple[str, ...]:
    """Return the kinds of ``rewards`` that fail on a label of another form. Empty if the run drops
    the groups of failed rewards (``on_reward_failure.then=drop_group``)."""
    if policy.then == "drop_group":
        return ()
    return tuple(dict.fromkeys(entry.kind for entry in rewards if entry.reads_label))


def label_problem(kinds: Sequence[str], prompt: Prompt) -> str | None:
    """Return why a reward of one of ``kinds`` cannot use the label of ``prompt``, or None."""
    for kind in kinds:
        try:
            import_module(f"burnish.rewards.{kind}.reward").check_label(prompt)
        except LabelError as error:
            return f"the reward {kind} cannot use the label: it {error}"
    return None
