"""Time of a step of an asynchronous run, and the age of its groups.

Notation: a step trains P groups. R = ``run_ahead``, o = ``oversample``, S = ``max_staleness``.
R + o rollouts are started and not yet trained. A slot of the admission is freed when the weights of
the step that trained its group have been announced. From this follow lower bounds of a step's time:

- rollout side: an engine that is always full samples P groups in ``rollout_s``.
- trainer side: ``trainer_s``, and, if R + o < 2, the part of P groups that cannot be started before
  the announcement: (2 - R - o) ``rollout_s``. (R + o = 1: one side after the other.)
- bound: a group that was started with version v is trained at version v + S at the latest, so
  S + 1 steps contain its longest response and one update: (``longest_s`` + ``trainer_s``)/(S + 1).
  If R + o = 1, every step waits for all groups, as if S were 0.
- admission, by Little's law: R + o rollouts each last at least a mean response and an update:
  (``response_s`` + ``trainer_s``)/(R + o).

The estimate is the largest of them. It assumes that every step has a response of maximum length,
and is exact if all steps are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from burnish.config.rollout import AsynchronousRollout


@dataclass(frozen=True)
class Sides:
    """Seconds that each side of a run needs for one step."""

    trainer_s: float
    """From the groups of a step to its announced weights."""
    rollout_s: float
    """Sampling the groups of a step with all slots in use, and loading weights."""
    longest_s: float
    """One response of maximum length."""
    response_s: float
    """One response of mean length."""
    running_groups: float
    """Groups that the engines sample at once, divided by P. By Little's law also the steps that the
    sampling of a group takes, if the engines are always full."""
    scoring_s: float = 0.0
    """Reward models on places of their own; they score while others sample and train."""
    busiest_s: float = 0.0
    """All work of the busiest place, whose roles take turns."""


@dataclass(frozen=True)
class Overlap:
    """Estimated step of an asynchronous run."""

    seconds: float
    limit: str
    """Largest bound."""
    sides: Sides
    mean_age: float
    """Mean age of a group at consumption, in RL steps."""
    max_age: int
    """``max_staleness``."""
    bounds: Mapping[str, float] = field(default_factory=dict)
    """Description -> lower bound of the step's seconds, for each of them."""

    @property
    def trainer_idle_frac(self) -> float:
        """Share of the step in which the trainer waits for groups."""
        return 1.0 - self.sides.trainer_s / self.seconds if self.seconds else 0.0

    @property
    def rollout_idle_frac(self) -> float:
        """Share of the step that the engines would not need with all slots in use."""
        return 1.0 - self.sides.rollout_s / self.seconds if self.seconds else 0.0

    def lines(self) -> list[str]:
        """Return the estimate as lines of text."""
        return [
            f"trainer side: {seconds_text(self.sides.trainer_s)} s, idle "
            f"{self.trainer_idle_frac:.0%} of the step",
            f"rollout side: {seconds_text(self.sides.rollout_s)} s, idle or not full "
            f"{self.rollout_idle_frac:.0%} of the step",
            f"limited by {self.limit}",
            f"age of groups: {self.mean_age:.1f} RL steps on average, never above {self.max_age}",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate for JSON."""
        return {
            "limit": self.limit,
            "trainer_s": self.sides.trainer_s,
            "rollout_s": self.sides.rollout_s,
            "trainer_idle_frac": self.trainer_idle_frac,
            "rollout_idle_frac": self.rollout_idle_frac,
            "mean_age": self.mean_age,
            "max_age": self.max_age,
            "bounds_s": dict(self.bounds),
        }


def seconds_text(seconds: float) -> str:
    """Format seconds with one decimal, or two digits below 1.

    >>> [seconds_text(s) for s in (123.4, 1.0, 0.01234, 0.0)]
    ['123.4', '1.0', '0.012', '0']
    """
    return f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2g}"


def overlap(sides: Sides, rollout: AsynchronousRollout) -> Overlap:
    """Estimate a step whose sampling overlaps with training, or is only paused by it
    (``partial``)."""
    bounds = _paused(sides, rollout) if rollout.partial else _overlapping(sides, rollout)
    limit = max(bounds, key=lambda name: bounds[name])
    return Overlap(
        seconds=bounds[limit],
        limit=limit,
        sides=sides,
        mean_age=mean_age(sides, rollout, step_s=bounds[limit] if limit == _SAMPLING else None),
        max_age=rollout.max_staleness,
        bounds=bounds,
    )


_SAMPLING, _TRAINING = "sampling", "training"
_LONGEST = "the longest responses, which max_staleness waits for"


def _overlapping(sides: Sides, rollout: AsynchronousRollout) -> dict[str, float]:
    started = rollout.rollouts_ahead + rollout.oversample
    late = max(0.0, 2.0 - started) * sides.rollout_s
    stale = rollout.max_staleness if started > 1 else 0
    return {
        _SAMPLING: sides.rollout_s,
        _TRAINING: sides.trainer_s + late,
        _LONGEST: (sides.longest_s + sides.trainer_s) / (stale + 1),
        "admission (run_ahead, oversample)": (sides.response_s + sides.trainer_s) / started,
        "reward models": sides.scoring_s,
        "roles that share a device and take turns": sides.busiest_s,
    }


def _paused(sides: Sides, rollout: AsynchronousRollout) -> dict[str, float]:
    """Sampling stops while the policy is trained, and S + 1 sampling phases contain the longest
    response."""
    longest = sides.longest_s / (rollout.max_staleness + 1)
    return {
        _SAMPLING: sides.trainer_s + max(sides.rollout_s, sides.scoring_s),
        _LONGEST: sides.trainer_s + longest,
    }


def mean_age(sides: Sides, rollout: AsynchronousRollout, *, step_s: float | None) -> float:
    """Return the expected age of a group at consumption, in RL steps. ``step_s``: seconds of a step
    that is limited by sampling; None: by something else.

    In general R + o rollouts are always in progress, with tokens. By Little's law a group then
    stays for R + o steps, and its age is one less. If the engines are always full, groups that wait
    in their queue have no tokens yet, and the age may be less: new weights arrive once in
    ``step_s`` while a group is sampled; and between its end and the next consumption they arrive if
    it ended during an update, which has the probability ``trainer_s``/``step_s``. (``partial``:
    nothing ends during an update.)
    """
    full = rollout.rollouts_ahead + rollout.oversample - 1.0
    if not step_s:
        return full
    ended = 0.0 if rollout.partial else sides.trainer_s / step_s
    return min(full, sides.running_groups + ended)
