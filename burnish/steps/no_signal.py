"""Detect steps without learning signal. Examples are equal rewards in every group, a reward that
needs labels and gets none, pairs with the same response twice, and labels of one class.

Each step logs ``train/no_signal_frac``, the share of its units (groups, pairs, or the entire step)
without signal. :class:`NoSignalMonitor` counts the steps without signal and warns once with the
cause. It stops the run after ``train.max_steps_without_signal`` of them in a row.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from burnish.config.algorithm import AlgorithmConfig
from burnish.driver.errors import StoppedError
from burnish.rewards.reward_set import RewardSet
from burnish.types import Batch, Group, Prompt, Sample, all_equal

log = logging.getLogger("burnish")

Metrics = dict[str, float]

_WARN_AFTER = 10
"""Consecutive steps before the warning: a single step without signal is normal."""


@dataclass(frozen=True)
class StepSignal:
    """Signal count of one step."""

    num_units: int
    num_empty: int
    """Number of units without signal."""
    description: str = ""
    """Description of a unit without signal, in the plural: ``pairs with identical
    responses``."""
    why: str = ""
    """Possible cause and suggested fix."""
    at_once: bool = False
    """Warn about a single unit without signal, because it is an error in the data."""

    @property
    def frac(self) -> float:
        return self.num_empty / max(1, self.num_units)


class NoSignalMonitor:
    """Counter of the steps of one run without learning signal."""

    def __init__(self, limit: int | None) -> None:
        """``limit``: consecutive steps without signal after which the run stops; None: never."""
        self._limit = limit
        self._streak = self._steps = self._observed = self._units = 0
        self._last = StepSignal(0, 0)
        self._warned = self._warned_of_labels = False

    def observe(self, signal: StepSignal) -> Metrics:
        """Count a step and return its metric."""
        self._observed += 1
        self._units += signal.num_empty
        if signal.num_empty:
            self._last = signal
        if signal.frac < 1.0:
            self._streak = 0
        else:
            self._steps, self._streak = self._steps + 1, self._streak + 1
        soon = _WARN_AFTER if self._limit is None else min(_WARN_AFTER, self._limit)
        if not self._warned and (self._streak >= soon or (signal.at_once and signal.num_empty)):
            self._warned = True
            limit = self._limit
            stops = "" if limit is None else f"; the run stops after {limit} consecutive ones"
            log.warning(
                "%s; steps without any signal so far: %d%s (train.max_steps_without_signal). This "
                "is logged once; the metric train/no_signal_frac has every step",
                *(_description(signal), self._steps, stops),
            )
        return {"train/no_signal_frac": signal.frac}

    def observe_labels(self, prompts: Sequence[Prompt], rewards: RewardSet) -> None:
        """Warn once if rewards take a label and none of a step's prompts has one."""
        if not self._warned_of_labels:
            self._warned_of_labels = warn_without_labels(prompts, rewards)

    def checked(self, metrics: Metrics) -> Metrics:
        """Return ``metrics``. Raises StoppedError with them once ``limit`` consecutive steps had no
        signal."""
        if self._limit is None or self._streak < self._limit:
            return metrics
        raise StoppedError(
            f"{self._streak} consecutive steps had no learning signal "
            f"(train.max_steps_without_signal={self._limit}): {_description(self._last)}",
            metrics,
        )

    def log_total(self) -> None:
        """Log the number of steps without signal, if a warning was issued before."""
        if self._warned:
            log.warning(
                "%d of %d steps of this run had no learning signal (%d %s in total)",
                *(self._steps, self._observed, self._units, self._last.description),
            )


def _description(signal: StepSignal) -> str:
    return f"{signal.num_empty} of {signal.num_units} {signal.description}: {signal.why}"


# ---- signal of a step ----------------------------------------------------------------------------


def reward_signal(
    groups: Sequence[Group], config: AlgorithmConfig, rewards: RewardSet
) -> StepSignal | None:
    """Return the groups whose rewards are equal in fp32, the precision of the update. For
    advantages without a group baseline, the unit is the entire step; rewards of single turns are
    then a signal of their own. Return None if the advantage does not use rewards."""
    advantage = config.advantage
    if not advantage.uses_rewards:
        return None
    sampled = [group for group in groups if group.samples]
    rewards_of = [[sample.reward for sample in group.samples] for group in sampled]
    by_group = advantage.compares_groups
    units = rewards_of if by_group else [[reward for unit in rewards_of for reward in unit]]
    # A single sample has no baseline: its return is the signal.
    empty = [unit for unit in units if len(unit) > 1 and _equal_in_fp32(unit)]
    if advantage.normalizes_each:
        names = rewards.weighted_names
        alike = [
            all(_equal_in_fp32([s.reward_parts[name] for s in group.samples]) for name in names)
            for group in sampled
        ]
        empty = [
            unit for unit, same in zip(rewards_of, alike, strict=True) if same and len(unit) > 1
        ]
    empty_units = (
        "groups whose rewards are all equal" if by_group else "steps whose rewards are all equal"
    )
    by_turn = not by_group and any(any(s.turn_rewards) for g in groups for s in g.samples)
    if not empty or by_turn:
        return StepSignal(len(units), 0, empty_units)
    return StepSignal(len(units), len(empty), empty_units, _why_equal(empty, groups, rewards))


def _equal_in_fp32(rewards: Sequence[float]) -> bool:
    return all_equal(rewards) or len(set(np.asarray(rewards, np.float32).tolist())) == 1


def _why_equal(
    empty: Sequence[Sequence[float]], groups: Sequence[Group], rewards: RewardSet
) -> str:
    readers = without_labels([group.prompt for group in groups], rewards)
    if readers:
        return _no_labels(readers)
    if not all(map(all_equal, empty)):
        return (
            "rewards differ by less than the resolution of fp32 (such as 1e9 and 1e9 + 1); "
            "subtract a constant in the reward, or scale it down"
        )
    if len(groups) > 1 and all(len(set(map(_responses, g.samples))) == 1 for g in groups):
        return "all responses of each group are identical; raise rollout.temperature"
    values = sorted({unit[0] for unit in empty})
    if len(values) == 1:
        return (
            f"every response in them has the reward {values[0]:g}; look at the samples: either the "
            "reward does not find the answer, or the prompts are far too hard or too easy"
        )
    return (
        "the responses to each prompt have the same reward; either the prompts are too hard or too "
        "easy (rollout.dynamic_sampling drops such groups), or the reward ignores the response"
    )


def _responses(sample: Sample) -> object:
    """Return what the policy wrote: the text, or all tokens of an episode."""
    if sample.episode is None:
        return sample.text
    return tuple(row.response_ids for row in sample.rows)


def pair_signal(batch: Batch) -> StepSignal:
    """Return the pairs whose chosen and rejected rows have the same tokens. Rows 2i and 2i + 1 are
    a pair."""
    rows = [batch.tokens[a:b] for a, b in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)]
    same = sum(torch.equal(a, b) for a, b in zip(rows[0::2], rows[1::2], strict=True))
    return StepSignal(
        len(rows) // 2,
        same,
        "pairs with identical responses",
        "chosen and rejected are equal, so the pair has no preference; drop such rows, or correct "
        "chosen_key and rejected_key",
        at_once=True,
    )


def label_signal(batch: Batch) -> StepSignal:
    """Return one unit for the step, without signal if all its responses have the same label."""
    assert batch.labels is not None
    desirable = batch.labels.float().mean().item()
    one_class = desirable in (0.0, 1.0)
    return StepSignal(
        1,
        int(one_class),
        f"steps in which every response was {'desirable' if desirable else 'undesirable'}",
        "kto compares desirable with undesirable responses; use data with both labels, shuffled "
        "(data.shuffle), or run burnish sft on the desirable ones",
    )


# ---- labels --------------------------------------------------------------------------------------


def without_labels(prompts: Iterable[Prompt], rewards: RewardSet) -> tuple[str, ...]:
    """Return the names of the rewards that take a label, if none of ``prompts`` has one."""
    readers = rewards.label_takers
    return readers if readers and all(prompt.label is None for prompt in prompts) else ()


def warn_without_labels(prompts: Sequence[Prompt], rewards: RewardSet) -> bool:
    """Warn if rewards take a label and none of ``prompts`` has one. Return whether it warned."""
    readers = without_labels(prompts, rewards)
    if readers and prompts:
        log.warning("none of %d prompts has a label: %s", len(prompts), _no_labels(readers))
    return bool(readers and prompts)


def _no_labels(readers: Sequence[str]) -> str:
    names = ", ".join(map(repr, readers))
    return (
        f"reward {names} requires a label but receives None; set data.label_key to the column with "
        "the answers, or fill that column"
    )
