"""Score groups: :class:`RewardSet` turns groups into scored, checked groups.

A reward returns one number per response. It may be slow, raise, or return invalid values. The
failure policy (``config.rewards.FailurePolicy``) decides how failures are handled. A failure never
becomes a silent 0.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from numbers import Real
from typing import Any, Literal, cast

import numpy as np
import torch

from burnish.algorithms.running import RunningMoments
from burnish.config.rewards import (
    RESERVED_NAMES,
    FailurePolicy,
    ShapingConfig,
    passes_unweighted,
)
from burnish.rewards.base import (
    HasCounts,
    HasLabelUse,
    HasMeans,
    HasTurnRewards,
    LateError,
    Reward,
    RewardError,
    RewardInput,
    SampleError,
    describe,
    excerpt,
    named,
    what_to_do,
    without_drop,
)
from burnish.rewards.shaping import clip, shaped
from burnish.train.base import EngineLostError
from burnish.types import Group, Number, Sample, Stats
from burnish.user_calls import CallRaisedError

_log = logging.getLogger(__name__)

_LARGEST = torch.finfo(torch.float32).max  # losses and advantages are computed in fp32


class NoGroupLeftError(RewardError):
    """Every group of a call was dropped. The caller may retry with new prompts."""

    def __init__(self, message: str, stats: Stats) -> None:
        """``stats``: statistics of what was sampled, dropped groups included."""
        super().__init__(message)
        self.stats = stats


@dataclass(frozen=True)
class RewardedGroups:
    """Result of :meth:`RewardSet.score`."""

    groups: tuple[Group, ...]
    """The kept groups. Every sample has ``reward`` and ``reward_parts``."""
    dropped: tuple[str, ...]
    """Prompt ids of the dropped groups, in order."""
    stats: Stats
    """Statistics of the samples in ``groups``.

    Means: ``reward/<name>`` (before weights), ``reward/mean`` (after shaping),
    ``reward/truncated_frac``, ``reward/shaping`` (if shaping is configured),
    ``reward/<name>/<measurement>``, and ``reward/<name>/running_mean`` and ``running_std`` for
    rewards with running_norm. Sums: ``reward/groups_dropped`` and ``reward/<name>/<event>``.
    """


@dataclass(frozen=True)
class ScoredGroup:
    """A group with the scores of its samples, before normalization, weights and shaping."""

    group: Group
    scores: Mapping[str, Sequence[float]] | None
    """Reward name -> score of each sample. None: a reward failed on one of them."""
    failure: RewardError | None = None
    """The first failure."""


@dataclass(frozen=True)
class _Failure:
    """Reason why a sample has no reward."""

    message: str
    cause: BaseException | None = None

    def error(self) -> RewardError:
        if isinstance(self.cause, RewardError):
            return self.cause
        error = RewardError(self.message)
        error.__cause__ = self.cause
        return error


_Column = list[float | _Failure]
"""The score or failure of one reward for every item."""


class RewardSet:
    """Weighted rewards with a failure policy and the shaping of their sum.

    Raises RewardError if there is no reward, if two rewards have the same name, or if a name is in
    RESERVED_NAMES.
    """

    def __init__(
        self,
        rewards: Sequence[tuple[Reward, float]],
        *,
        on_failure: FailurePolicy,
        shaping: ShapingConfig,
        generate_max_len: int,
        running: Mapping[str, Literal["mean_std", "std"]] | None = None,
    ) -> None:
        """``running``: reward name -> normalization by its running mean and standard deviation."""
        if not rewards:
            raise RewardError("no reward is given; add at least one entry to 'rewards'")
        names = [reward.name for reward, _ in rewards]
        for i, name in enumerate(names):
            if name in RESERVED_NAMES or name in names[:i]:
                problem = "is reserved for metrics" if name in RESERVED_NAMES else "is used twice"
                raise RewardError(f"reward name {name!r} {problem}; give the reward another name")
        self._rewards = tuple(rewards)
        self._of_turns = [
            (reward, weight)
            for reward, weight in self._rewards
            if isinstance(reward, HasTurnRewards) and reward.per_turn
        ]
        self._on_failure = on_failure
        self._shaping = shaping
        self._generate_max_len = generate_max_len
        self._running = {
            name: (RunningMoments(), normalization)
            for name, normalization in (running or {}).items()
        }

    def score(self, groups: Sequence[Group]) -> RewardedGroups:
        """Score every sample of ``groups``. Each reward is called once with all samples.

        With the policy ``fail``, raises RewardError if a reward fails. With ``drop_group``, raises
        NoGroupLeftError if every group is dropped.
        """
        measured = self.measure(groups)
        rewarded = self.finish(measured)
        if rewarded.dropped and not any(group.samples for group in rewarded.groups):
            raise none_left(measured, rewarded.stats)
        return rewarded

    def score_samples(self, groups: Sequence[Group]) -> RewardedGroups:
        """Score every sample of ``groups`` on its own: with ``drop_group``, a reward that fails on
        a sample drops that sample, and a group only if it has no other. For evaluations.

        Raises as :meth:`score`.
        """
        single = [replace(g, samples=(sample,)) for g in groups for sample in g.samples]
        measured = self.measure(single)
        rewarded = self.finish(measured)
        failures = [group.failure for group in measured if group.failure is not None]
        if failures and not rewarded.groups:
            raise none_left(measured, rewarded.stats)
        if failures:
            _log.warning(
                "%d of %d samples have no score, because a reward failed "
                "(on_reward_failure.then=drop_group); they count as not passed. The first failure: "
                "%s",
                *(len(failures), len(single), without_drop(str(failures[0]))),
            )
        has_score = (group.scores is not None for group in measured)
        results = iter(rewarded.groups)
        merged = []
        for group in groups:
            flags = [next(has_score) for _ in group.samples]
            merged.append(
                replace(group, samples=tuple(next(results).samples[0] for f in flags if f))
            )
        dropped = tuple(group.prompt.id for group in merged if not group.samples)
        return RewardedGroups(tuple(g for g in merged if g.samples), dropped, rewarded.stats)

    def measure(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """Call each reward once with all samples of ``groups``; return the scores of each group.

        :meth:`finish` makes rewards of them, also of groups that were measured in several calls.
        Raises RewardError if a reward fails and the policy is ``fail``.
        """
        items = [RewardInput(group.prompt, sample) for group in groups for sample in group.samples]
        if not items:
            raise RewardError(
                "there are no samples to score: no groups, or only groups without samples"
            )
        ends = list(accumulate(len(group.samples) for group in groups))
        spans = [slice(end - len(g.samples), end) for g, end in zip(groups, ends, strict=True)]
        columns = {reward.name: self._column(reward, items, spans) for reward, _ in self._rewards}
        measured = []
        for group, span in zip(groups, spans, strict=True):
            parts = {name: column[span] for name, column in columns.items()}
            failed = [v for values in parts.values() for v in values if isinstance(v, _Failure)]
            if failed:
                measured.append(ScoredGroup(group, None, failed[0].error()))
            else:
                measured.append(ScoredGroup(group, cast("dict[str, list[float]]", parts)))
        return measured

    def finish(self, measured: Sequence[ScoredGroup]) -> RewardedGroups:
        """Return the groups with rewards: normalized, weighted and shaped, without those that
        failed. Updates the running statistics.

        Raises RewardError if a total or a running statistic is beyond fp32's range.
        """
        complete = [
            (scored.group, scored.scores) for scored in measured if scored.scores is not None
        ]
        dropped = [scored.group.prompt.id for scored in measured if scored.scores is None]
        for name, (moments, _) in self._running.items():
            try:
                moments.update([value for _, scores in complete for value in scores[name]])
            except ValueError as error:
                raise RewardError(f"running_norm of the reward {name}: {error}") from error
        rewarded = [self._with_rewards(group, scores) for group, scores in complete]
        if not rewarded and dropped:
            return RewardedGroups(
                (), tuple(dropped), Stats(sums={"reward/groups_dropped": len(dropped)})
            )
        return RewardedGroups(tuple(rewarded), tuple(dropped), self._stats(rewarded, len(dropped)))

    def turn_rewards(self, group: Group) -> list[tuple[float, ...]]:
        """Return the weighted rewards of the turns of each sample of a group that did not fail.
        Empty tuples if no reward is credited turn by turn."""
        return [self._turn_rewards(RewardInput(group.prompt, sample)) for sample in group.samples]

    def _turn_rewards(self, item: RewardInput) -> tuple[float, ...]:
        """Return the weighted rewards of an episode's turns that are credited turn by turn. Empty
        if there are none."""
        columns = [
            [weight * value for value in reward.of_turns(item)] for reward, weight in self._of_turns
        ]
        return tuple(map(sum, zip(*columns, strict=True))) if columns else ()

    @property
    def label_takers(self) -> tuple[str, ...]:
        """Names of the rewards that declare that they read the label."""
        rewards = [r for r, _ in self._rewards if isinstance(r, HasLabelUse) and r.takes_label]
        return tuple(reward.name for reward in rewards)

    @property
    def weighted_names(self) -> tuple[str, ...]:
        """Names of the rewards with a weight other than 0."""
        return tuple(reward.name for reward, weight in self._rewards if weight)

    def total(self, parts: Mapping[str, float]) -> float:
        """Return the weighted sum of a sample's ``reward_parts``, before shaping."""
        return sum(weight * parts[reward.name] for reward, weight in self._rewards)

    def to_pass(self, sample: Sample) -> float:
        """Return the number that decides whether a sample passes.

        This is the unweighted score of the only weighted reward
        (:func:`burnish.config.rewards.passes_unweighted`), else the weighted sum.
        """
        if passes_unweighted(weight for _, weight in self._rewards):
            return sample.reward_parts[self.weighted_names[0]]
        return sample.reward

    def totals(self, measured: ScoredGroup) -> list[float]:
        """Return the weighted sum of the scores of each sample of a group that did not fail, not
        normalized and not clipped."""
        assert measured.scores is not None
        columns = [measured.scores[reward.name] for reward, _ in self._rewards]
        return [
            self.total({r.name: value for (r, _), value in zip(self._rewards, row, strict=True)})
            for row in zip(*columns, strict=True)
        ]

    def clipped(self, total: float) -> float:
        """Return a weighted sum of plain scores clipped to ``shaping.reward_clip``."""
        return clip(total, self._shaping.reward_clip)

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return the running statistics by reward name. JSON-serializable."""
        return {name: moments.state_dict() for name, (moments, _) in self._running.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Load the running statistics. Rewards missing from ``state`` start without statistics."""
        for name, (moments, _) in self._running.items():
            if name in state:
                moments.load_state_dict(state[name])

    def close(self) -> None:
        for reward, _ in self._rewards:
            reward.close()

    def _column(
        self, reward: Reward, items: Sequence[RewardInput], spans: Sequence[slice]
    ) -> _Column:
        """Return the score of ``reward`` for every item, or a failure if it gives no usable
        score."""
        answer = self._ask(reward, items)
        fails = self._on_failure.then == "fail"
        if isinstance(answer, list):
            column = answer
        elif fails or isinstance(answer.cause, LateError) or len(spans) == 1:
            column = [answer] * len(items)
        else:
            # Call group by group, so that only the groups that fail are lost. After a late call,
            # each repetition may take as long.
            column = []
            for part in (items[span] for span in spans):
                part_scores = self._ask(reward, part) if part else []
                column += (
                    part_scores if isinstance(part_scores, list) else [part_scores] * len(part)
                )
        if fails:
            for value in column:
                if isinstance(value, _Failure):
                    raise value.error()
        return column

    def _ask(self, reward: Reward, items: Sequence[RewardInput]) -> _Column | _Failure:
        """Call ``reward`` and check its result. Retry up to ``retries`` times on any failure."""
        answer = _call(reward, items)
        for _ in range(self._on_failure.retries):
            if isinstance(answer, list) and not any(isinstance(v, _Failure) for v in answer):
                break
            answer = _call(reward, items)
        return answer

    def _with_rewards(self, group: Group, parts: Mapping[str, Sequence[float]]) -> Group:
        samples = []
        for i, sample in enumerate(group.samples):
            sample_parts = {name: values[i] for name, values in parts.items()}
            normalized = {
                name: moments.normalized(sample_parts[name], center=normalization == "mean_std")
                for name, (moments, normalization) in self._running.items()
            }
            total = self.total(sample_parts | normalized)
            reward = shaped(
                total, sample, config=self._shaping, generate_max_len=self._generate_max_len
            )
            item = RewardInput(group.prompt, sample)
            of_turns = self._turn_rewards(item)
            for value in (reward, *of_turns):
                if not abs(value) <= _LARGEST:
                    raise RewardError(
                        f"the total reward {value:g} is beyond fp32's range, +-{_LARGEST:.1e}; it "
                        f"is the weighted sum of the scores {sample_parts}, or of those of one "
                        f"turn\n{describe(item)}\n  What to do: lower the weights of the rewards, "
                        "or scale the scores down"
                    )
            if reward != total:
                sample_parts["shaping"] = reward - total
            samples.append(sample.scored(reward, sample_parts, of_turns))
        return replace(group, samples=tuple(samples))

    def _stats(self, groups: Sequence[Group], num_dropped: int) -> Stats:
        samples = [sample for group in groups for sample in group.samples]
        totals = {reward.name: sum_of_part(samples, reward.name) for reward, _ in self._rewards}
        if self._shaping != ShapingConfig():
            totals["shaping"] = sum_of_part(samples, "shaping")
        totals["mean"] = sum(sample.reward for sample in samples)
        totals["truncated_frac"] = sum(sample.finish_reason == "length" for sample in samples)
        sums: dict[str, Number] = {"reward/groups_dropped": num_dropped}
        means_of_rewards: dict[str, tuple[Number, Number]] = {}
        for reward, _ in self._rewards:
            counts = reward.take_counts() if isinstance(reward, HasCounts) else {}
            sums.update({f"reward/{reward.name}/{event}": n for event, n in counts.items()})
            means = reward.take_means() if isinstance(reward, HasMeans) else {}
            means_of_rewards.update(
                {f"reward/{reward.name}/{name}": mean for name, mean in means.items()}
            )
        for name, (moments, _) in self._running.items():
            means_of_rewards[f"reward/{name}/running_mean"] = (moments.mean, 1)
            means_of_rewards[f"reward/{name}/running_std"] = (moments.std, 1)
        totalled = {f"reward/{name}": (total, len(samples)) for name, total in totals.items()}
        return Stats(means=means_of_rewards | totalled, sums=sums)


class NoRewards(RewardSet):
    """The RewardSet of jobs without rewards (distillation, batch inference).

    Groups are returned unchanged: every sample keeps NaN as its reward.
    """

    def __init__(self) -> None:
        self._rewards, self._running = (), {}

    def measure(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """Return the groups unchanged."""
        return [ScoredGroup(group, {}) for group in groups]

    def finish(self, measured: Sequence[ScoredGroup]) -> RewardedGroups:
        """Return the groups unchanged. The only metric is ``rollout/truncated_frac``."""
        groups = [scored.group for scored in measured]
        ended = [s.finish_reason == "length" for group in groups for s in group.samples]
        means: dict[str, tuple[Number, Number]] = {
            "rollout/truncated_frac": (sum(ended), len(ended))
        }
        return RewardedGroups(tuple(groups), (), Stats(means=means))


def none_left(measured: Sequence[ScoredGroup], stats: Stats) -> NoGroupLeftError:
    """Return the error for groups that all failed. ``stats``: those of all of them."""
    failures = [scored.failure for scored in measured if scored.failure is not None]
    error = NoGroupLeftError(
        f"no group is left to train on: a reward failed in all {len(failures)} groups, and "
        "on_reward_failure.then=drop_group dropped them. The first failure:\n"
        f"{without_drop(str(failures[0]))}",
        stats,
    )
    error.__cause__ = failures[0]
    return error


def sum_of_part(samples: Sequence[Sample], name: str) -> float:
    """Return the sum of one entry of ``reward_parts`` over samples. A missing entry counts as 0."""
    return sum(sample.reward_parts.get(name, 0.0) for sample in samples)


def _call(reward: Reward, items: Sequence[RewardInput]) -> _Column | _Failure:
    """Call ``reward`` and check its result. Return a failure for the call or for each bad entry."""
    try:
        answer = _as_list(reward.score(items), len(items))
    except EngineLostError:
        raise
    except _RAISED as error:  # becomes data: the policy decides
        if isinstance(error, SampleError):
            return _Failure(str(error), error)
        bad = isinstance(error, _BadAnswer)
        is_named = isinstance(error, CallRaisedError)  # (its text has the name of the error)
        raised = str(error) if is_named else f"{type(error).__name__}: {error}"
        problem = str(error) if bad else f"raised {raised}"
        many = f" in a call with {len(items)} responses; the first one is" if items[1:] else ""
        message = f"{named(reward)} {problem}{many}\n{describe(items[0])}\n  {what_to_do()}"
        return _Failure(message, None if bad else error)
    return [_number(reward, item, value) for item, value in zip(items, answer, strict=True)]


_RAISED = (Exception, SystemExit, GeneratorExit, asyncio.CancelledError)
"""Exceptions that a reward may raise. A KeyboardInterrupt is the user's."""


class _BadAnswer(Exception):
    """The result has the wrong type, shape or length."""


def _as_list(answer: Any, count: int) -> list[Any]:
    if isinstance(answer, (torch.Tensor, np.ndarray)):
        if answer.ndim != 1:
            shape = f"{type(answer).__name__} of shape {tuple(answer.shape)}"
            raise _BadAnswer(f"returned a {shape} instead of shape ({count},)")
        answer = answer.tolist()
    if isinstance(answer, (str, bytes)) or not isinstance(answer, Sequence):
        raise _BadAnswer(f"returned {excerpt(answer)} instead of a list of {count} numbers")
    if len(answer) != count:
        raise _BadAnswer(f"returned {len(answer)} values for {count} responses")
    return list(answer)


def _number(reward: Reward, item: RewardInput, value: Any) -> float | _Failure:
    if isinstance(value, SampleError):
        return _Failure(str(value), value)
    if isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim == 0:
        value = value.item()
    needed = "a finite number"
    if isinstance(value, (Real, np.bool_)):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if abs(number) <= _LARGEST:
            return number
        if math.isfinite(number):
            needed = f"a number within fp32's range, +-{_LARGEST:.1e}"
    problem = f"returned {excerpt(value)} instead of {needed}"
    return _Failure(f"{named(reward)} {problem}\n{describe(item)}\n  {what_to_do()}")
