"""Contract of rewards, and :class:`RewardSet`: groups in, scored and checked groups out.

A reward answers with one number per response. It may also be slow, raise, or answer nonsense; what
then happens is the failure policy's choice (``config.rewards.FailurePolicy``) and never a silent 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from numbers import Real
from typing import Any, Literal, Protocol, cast, runtime_checkable

import numpy as np
import torch

from burnish.algorithms.running import RunningMoments
from burnish.config.rewards import FailurePolicy, ShapingConfig
from burnish.rewards.errors import RewardError as RewardError
from burnish.rewards.shaping import clip, shaped
from burnish.train.base import EngineLostError
from burnish.types import Group, Number, Prompt, Sample, Stats

RESERVED_NAMES = (
    *("mean", "std", "trained_mean", "shaping", "truncated_frac", "groups_dropped"),
    *("equal_groups_frac",),
)
"""Names that metrics and samples use beside those of the rewards."""

_LARGEST = torch.finfo(torch.float32).max  # what losses and advantages are computed in
_RETURN_A_NUMBER = "return one finite number for each response (0.0 for a wrong answer)"


@dataclass(frozen=True)
class RewardInput:
    """One response with its prompt: what a reward sees."""

    prompt: Prompt
    sample: Sample


class SampleError(RewardError):
    """Raised by a reward that knows which sample it failed on."""

    def __init__(
        self, reward: Reward, item: RewardInput, what: str, *, advice: str = _RETURN_A_NUMBER
    ) -> None:
        super().__init__(f"{_named(reward)} {what}\n{describe(item)}\n  {_what_to_do(advice)}")


class NoGroupLeftError(RewardError):
    """Every group of a call was dropped. Whoever can draw fresh prompts may try again."""

    def __init__(self, message: str, num_dropped: int) -> None:
        super().__init__(message)
        self.num_dropped = num_dropped


class Reward(Protocol):
    """Scores responses."""

    name: str

    def score(self, items: Sequence[RewardInput]) -> Sequence[float | SampleError]:
        """One finite number per item, in order; in its place, a SampleError where that item alone
        has none. May raise; :class:`RewardSet` checks the answer."""
        ...

    def close(self) -> None:
        """Give back processes, threads and memory. Called once."""
        ...


@runtime_checkable
class HasLocation(Protocol):
    """A reward that knows where its code stands, for error messages."""

    location: str
    """Such as ``function f at rewards.py:12``."""


@runtime_checkable
class HasLabelUse(Protocol):
    """A reward that knows whether it reads the label."""

    takes_label: bool


@runtime_checkable
class HasCounts(Protocol):
    """A reward that counts events of its own (timeouts); they become sums in the stats."""

    def take_counts(self) -> Mapping[str, int]:
        """Counts since the last call."""
        ...


@runtime_checkable
class HasMeans(Protocol):
    """A reward that measures more than its score; what it measures become means in the stats."""

    def take_means(self) -> Mapping[str, tuple[float, float]]:
        """(sum, count) of each measurement since the last call. Names differ from the counts'."""
        ...


@dataclass(frozen=True)
class Scored:
    """Result of :meth:`RewardSet.score`."""

    groups: tuple[Group, ...]
    """Every sample with ``reward`` and ``reward_parts``."""
    dropped: tuple[str, ...]
    """Prompt ids of the groups left out, in order."""
    stats: Stats
    """Over all samples that were scored: means ``reward/<name>`` (before weights), ``reward/mean``
    (after shaping), ``reward/truncated_frac``, with shaping ``reward/shaping``, what a reward
    measures besides as ``reward/<name>/<measurement>``, and of a reward with running_norm
    ``reward/<name>/running_mean`` and ``running_std``; sums ``reward/groups_dropped`` and
    ``reward/<name>/<event>``.
    """


@dataclass(frozen=True)
class _Failure:
    """Why a sample has no reward."""

    message: str
    cause: BaseException | None = None

    def error(self) -> RewardError:
        if isinstance(self.cause, RewardError):
            return self.cause
        error = RewardError(self.message)
        error.__cause__ = self.cause
        return error


_Column = list[float | _Failure]
"""One reward's answer for every item."""


class RewardSet:
    """Several weighted rewards, their failure policy and the shaping of their sum.

    Raises RewardError: no reward, two of one name, or a name that metrics use (RESERVED_NAMES).
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
        """``running``: which rewards, by name, are measured in their own mean and spread."""
        if not rewards:
            raise RewardError("there is no reward; a recipe needs at least one entry in 'rewards'")
        names = [reward.name for reward, _ in rewards]
        for i, name in enumerate(names):
            if name in RESERVED_NAMES or name in names[:i]:
                why = "is used by the metrics" if name in RESERVED_NAMES else "is there twice"
                raise RewardError(f"reward name {name!r} {why}; give the reward another name")
        self._rewards = tuple(rewards)
        self._on_failure = on_failure
        self._shaping = shaping
        self._generate_max_len = generate_max_len
        self._running = {name: (RunningMoments(), how) for name, how in (running or {}).items()}

    def score(self, groups: Sequence[Group]) -> Scored:
        """Score every sample of ``groups``; each reward is called once with all of them.

        Raises RewardError if a reward fails and the policy is ``fail``, NoGroupLeftError if
        it is ``drop_group`` and drops them all.
        """
        items = [RewardInput(group.prompt, sample) for group in groups for sample in group.samples]
        if not items:
            raise RewardError(
                "there is no sample to score: no groups, or only groups without samples"
            )
        ends = list(accumulate(len(group.samples) for group in groups))
        spans = [slice(end - len(g.samples), end) for g, end in zip(groups, ends, strict=True)]
        columns = {reward.name: self._column(reward, items, spans) for reward, _ in self._rewards}
        whole: list[tuple[Group, dict[str, list[float]]]] = []
        dropped: list[str] = []
        failures: list[_Failure] = []
        for group, span in zip(groups, spans, strict=True):
            parts = {name: column[span] for name, column in columns.items()}
            failed = [v for values in parts.values() for v in values if isinstance(v, _Failure)]
            if failed:
                dropped.append(group.prompt.id)
                failures.append(failed[0])
            else:
                whole.append((group, cast("dict[str, list[float]]", parts)))
        for name, (moments, _) in self._running.items():
            try:
                moments.update([value for _, parts in whole for value in parts[name]])
            except ValueError as error:
                raise RewardError(f"running_norm of the reward {name}: {error}") from error
        kept = [self._with_rewards(group, parts) for group, parts in whole]
        if failures and not any(group.samples for group in kept):
            first = failures[0].error()
            raise NoGroupLeftError(
                f"no group is left to train on: a reward failed in all {len(failures)} groups, and "
                "on_reward_failure.then=drop_group dropped them. The first failure:\n"
                f"{_without_drop(str(first))}",
                len(dropped),
            ) from first
        return Scored(tuple(kept), tuple(dropped), self._stats(kept, len(dropped)))

    @property
    def label_takers(self) -> tuple[str, ...]:
        """Names of the rewards that read the label, as far as they know."""
        rewards = [r for r, _ in self._rewards if isinstance(r, HasLabelUse) and r.takes_label]
        return tuple(reward.name for reward in rewards)

    def total(self, parts: Mapping[str, float]) -> float:
        """The weighted sum of a sample's ``reward_parts``, before shaping."""
        return sum(weight * parts[reward.name] for reward, weight in self._rewards)

    def to_pass(self, sample: Sample) -> float:
        """The number that a sample passes by: the plain score of a single reward, whose positive
        weight has no bearing on it; of several, their weighted sum."""
        counted = [(reward.name, weight) for reward, weight in self._rewards if weight]
        if len(counted) == 1 and counted[0][1] > 0:
            return sample.reward_parts[counted[0][0]]
        return sample.reward

    def before_penalties(self, sample: Sample) -> float:
        """Return the reward of a scored sample before the penalties: the weighted sum (of scores
        normalized by their running mean and spread, if the recipe has that), clipped."""
        total = sample.reward - sample.reward_parts.get("shaping", 0.0)
        return clip(total, self._shaping.reward_clip)

    def state_dict(self) -> dict[str, dict[str, float]]:
        """The running statistics, by reward. JSON-able."""
        return {name: moments.state_dict() for name, (moments, _) in self._running.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Continue from ``state``; a reward that it does not have starts without statistics."""
        for name, (moments, _) in self._running.items():
            if name in state:
                moments.load_state_dict(state[name])

    def close(self) -> None:
        """Close every reward."""
        for reward, _ in self._rewards:
            reward.close()

    def _column(
        self, reward: Reward, items: Sequence[RewardInput], spans: Sequence[slice]
    ) -> _Column:
        """Return the score of ``reward`` for every item, or a failure if it gives no usable
        score."""
        answer = self._ask(reward, items)
        if isinstance(answer, list):
            column = answer
        elif self._on_failure.then == "fail" or len(spans) == 1:
            column = [answer] * len(items)
        else:  # some group made the whole call fail: find out which, so that only that one is lost
            column = []
            for part in (items[span] for span in spans):
                found = self._ask(reward, part) if part else []
                column += found if isinstance(found, list) else [found] * len(part)
        if self._on_failure.then == "fail":
            for value in column:
                if isinstance(value, _Failure):
                    raise value.error()
        return column

    def _ask(self, reward: Reward, items: Sequence[RewardInput]) -> _Column | _Failure:
        """One checked call, made again up to ``retries`` times while anything in it fails."""
        answer = _call(reward, items)
        for _ in range(self._on_failure.retries):
            if isinstance(answer, list) and not any(isinstance(v, _Failure) for v in answer):
                break
            answer = _call(reward, items)
        return answer

    def _with_rewards(self, group: Group, parts: Mapping[str, Sequence[float]]) -> Group:
        samples = []
        for i, sample in enumerate(group.samples):
            own = {name: values[i] for name, values in parts.items()}
            total = self.total(self._normalized(own))
            reward = shaped(
                total, sample, config=self._shaping, generate_max_len=self._generate_max_len
            )
            _check_total(reward, own, RewardInput(group.prompt, sample))
            if reward != total:
                own["shaping"] = reward - total
            samples.append(replace(sample, reward=reward, reward_parts=own))
        return replace(group, samples=tuple(samples))

    def _normalized(self, parts: Mapping[str, float]) -> dict[str, float]:
        """``parts`` of one sample, those with running_norm in their mean and spread."""
        return dict(parts) | {
            name: moments.normalized(parts[name], center=how == "mean_std")
            for name, (moments, how) in self._running.items()
        }

    def _stats(self, groups: Sequence[Group], num_dropped: int) -> Stats:
        samples = [sample for group in groups for sample in group.samples]
        totals = {reward.name: sum_of_part(samples, reward.name) for reward, _ in self._rewards}
        if self._shaping != ShapingConfig():
            totals["shaping"] = sum_of_part(samples, "shaping")
        totals["mean"] = sum(sample.reward for sample in samples)
        totals["truncated_frac"] = sum(sample.finish_reason == "length" for sample in samples)
        sums: dict[str, Number] = {"reward/groups_dropped": num_dropped}
        own: dict[str, tuple[Number, Number]] = {}
        for reward, _ in self._rewards:
            counts = reward.take_counts() if isinstance(reward, HasCounts) else {}
            sums.update({f"reward/{reward.name}/{event}": n for event, n in counts.items()})
            means = reward.take_means() if isinstance(reward, HasMeans) else {}
            own.update({f"reward/{reward.name}/{name}": mean for name, mean in means.items()})
        for name, (moments, _) in self._running.items():
            own[f"reward/{name}/running_mean"] = (moments.mean, 1)
            own[f"reward/{name}/running_std"] = (moments.std, 1)
        totalled = {f"reward/{name}": (total, len(samples)) for name, total in totals.items()}
        return Stats(means=own | totalled, sums=sums)


class NoRewards(RewardSet):
    """Where nothing is learned from rewards (distillation, batch inference): groups come back as
    they are, every sample with NaN for a reward."""

    def __init__(self) -> None:
        self._rewards, self._running = (), {}

    def score(self, groups: Sequence[Group]) -> Scored:
        """The groups as they are; which share of their samples was cut off."""
        cut = [s.finish_reason == "length" for group in groups for s in group.samples]
        means: dict[str, tuple[Number, Number]] = {"rollout/truncated_frac": (sum(cut), len(cut))}
        return Scored(tuple(groups), (), Stats(means=means))


def _check_total(reward: float, parts: Mapping[str, float], item: RewardInput) -> None:
    """Raise RewardError if a total is beyond fp32, in which advantages are computed."""
    if not abs(reward) <= _LARGEST:
        raise RewardError(
            f"the total reward {reward:g} is beyond fp32's range, +-{_LARGEST:.1e}: the weighted "
            f"sum of the scores {dict(parts)}\n{describe(item)}\n  What to do: lower the weights "
            "of the rewards, or scale the scores down"
        )


def describe(item: RewardInput) -> str:
    """Which sample, with excerpts of its prompt, response and label, for an error message."""
    return (
        f"  at sample {item.sample.sample_id!r} of prompt {item.prompt.id!r}\n"
        f"  prompt: {_excerpt(item.prompt.text)}\n"
        f"  response: {_excerpt(item.sample.text)}\n"
        f"  label: {_excerpt(item.prompt.label)}"
    )


def sum_of_part(samples: Sequence[Sample], name: str) -> float:
    """The sum of one reward's values over samples, where they have one."""
    return sum(sample.reward_parts.get(name, 0.0) for sample in samples)


def _call(reward: Reward, items: Sequence[RewardInput]) -> _Column | _Failure:
    """Call ``reward`` and check what comes back: a failure for the call, or for each bad entry."""
    try:
        answer = _as_list(reward.score(items), len(items))
    except EngineLostError:
        raise
    except (Exception, SystemExit) as error:  # becomes data: the policy decides
        if isinstance(error, SampleError):
            return _Failure(str(error), error)
        bad = isinstance(error, _BadAnswer)
        what = str(error) if bad else f"raised {type(error).__name__}: {error}"
        many = f" in a call with {len(items)} responses, of which the first is" if items[1:] else ""
        message = f"{_named(reward)} {what}{many}\n{describe(items[0])}\n  {_what_to_do()}"
        return _Failure(message, None if bad else error)
    return [_number(reward, item, value) for item, value in zip(items, answer, strict=True)]


class _BadAnswer(Exception):
    """The whole answer is of the wrong kind or length."""


def _as_list(answer: Any, count: int) -> list[Any]:
    if isinstance(answer, (torch.Tensor, np.ndarray)):
        if answer.ndim != 1:
            shape = f"{type(answer).__name__} of shape {tuple(answer.shape)}"
            raise _BadAnswer(f"returned a {shape} where shape ({count},) is needed")
        answer = answer.tolist()
    if isinstance(answer, (str, bytes)) or not isinstance(answer, Sequence):
        raise _BadAnswer(f"returned {_excerpt(answer)} where a list of {count} numbers is needed")
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
            needed = f"a number within fp32's range, +-{_LARGEST:.1e},"
    what = f"returned {_excerpt(value)} where {needed} is needed"
    return _Failure(f"{_named(reward)} {what}\n{describe(item)}\n  {_what_to_do()}")


_OR_DROP = (
    "; or set on_reward_failure.then=drop_group to leave such groups out, or "
    "on_reward_failure.retries to ask again"
)


def _what_to_do(advice: str = _RETURN_A_NUMBER) -> str:
    return f"What to do: {advice}{_OR_DROP}"


def _without_drop(message: str) -> str:
    """``message`` of a run that drops such groups already."""
    return message.replace(_OR_DROP, "; or raise on_reward_failure.retries to ask again")


def _named(reward: Reward) -> str:
    place = f" ({reward.location})" if isinstance(reward, HasLocation) else ""
    return f"reward {reward.name!r}{place}"


def _excerpt(value: Any, longest: int = 160) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError) as error:  # an int of 5,000 digits, lists in lists
        text = f"<{type(value).__name__} that cannot be shown ({error})>"
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 :]}"
