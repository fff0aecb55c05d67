"""Config of mathematical equality."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from burnish.rewards.config import RewardSettings


class MathReward(RewardSettings):
    """1 if the response's last answer equals the label mathematically (math-verify), else 0.
    Answers are searched for after the last closing tag of reasoning, such as ``</think>``: the
    last box, ``<answer>``, ``####`` or text after "answer is"; else the last formula or number.
    Labels that are words, names (``Tom``, ``USA``, ``IV``) or dates are compared as text; of a few
    letters, ``x``, ``ab``, ``mgh`` and ``AB`` are also products. Missing labels, lists of several
    and sentences are data errors. All rules: docs/rewards.md."""

    reads_label: ClassVar[bool] = True

    kind: Literal["math"] = "math"
    timeout_s: float = Field(5.0, gt=0)
    """Maximum seconds per comparison; a longer one counts as wrong."""
    num_workers: int = Field(1, ge=1)
    """Worker processes."""
