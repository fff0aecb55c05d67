"""Find labels that rewards cannot use, from the data alone: before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from burnish.config.rewards import FailurePolicy, RewardConfig
from burnish.rewards.code_tests import TestsError, read_tests
from burnish.rewards.math_text import LabelError, read_label
from burnish.types import Prompt


def label_readers(rewards: Sequence[RewardConfig], policy: FailurePolicy) -> tuple[str, ...]:
    """Return the kinds of ``rewards`` that fail on a label of another form. Empty if the run drops
    the groups of failed rewards (``on_reward_failure.then=drop_group``)."""
    if policy.then == "drop_group":
        return ()
    return tuple(dict.fromkeys(entry.kind for entry in rewards if entry.kind in _READERS))


def label_problem(kinds: Sequence[str], prompt: Prompt) -> str | None:
    """Return why a reward of one of ``kinds`` cannot use the label of ``prompt``, or None."""
    for kind in kinds:
        try:
            _READERS[kind](prompt)
        except (LabelError, TestsError) as error:
            return f"the reward {kind} cannot use the label: it {error}"
    return None


def _read_math(prompt: Prompt) -> None:
    if prompt.label is None:
        raise LabelError("is missing; set data.label_key to the column with the answers")
    read_label(prompt.label)


def _read_tests(prompt: Prompt) -> None:
    read_tests(prompt.label, prompt.metadata.get("entry_point"))


_READERS: dict[str, Callable[[Prompt], None]] = {"math": _read_math, "python_code": _read_tests}
"""Function by the kind of a reward, which raises LabelError or TestsError."""
