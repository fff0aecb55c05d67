"""Sample responses to prompts with an engine and score them: prompts -> scored groups.

A group goes through three stages: *sampled*, *measured* (scored), and finished (rewards
normalized and shaped, statistics computed). Groups are sampled and measured in any portions; those
of one RL step are finished together, in the order of their prompts. Synchronous and asynchronous
runs therefore have the same rewards and metrics for the same groups.
"""

from __future__ import annotations

import asyncio
import logging
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from burnish.compact import BoolRuns
from burnish.config.rollout import DynamicSampling
from burnish.loop_thread import LoopThread
from burnish.rewards.base import RewardError
from burnish.rewards.reward_set import NoGroupLeftError, RewardSet, ScoredGroup, none_left
from burnish.rollout.asynchronous.evaluation_lane import Sampler
from burnish.rollout.asynchronous.schedule import Outcome
from burnish.rollout.asynchronous.service import RolloutService
from burnish.rollout.base import Completion, Request, Sampling
from burnish.transcript import Episode
from burnish.types import Group, Number, Prompt, Sample, Stats, all_equal

log = logging.getLogger("burnish")

_MAX_REFILLS = 10


MAX_DROPPED = 8
"""Groups of :attr:`Rollout.dropped`."""


@dataclass(frozen=True)
class DroppedGroup:
    """A group that was sampled and that no step trains."""

    group: Group
    """Its samples; of episodes without a result, their records. Rewards are NaN if one failed."""
    reason: str


@dataclass(frozen=True)
class Rollout:
    """Scored groups and their statistics."""

    groups: tuple[Group, ...]
    stats: Stats
    ages: Mapping[int, int] | None = None
    """Version of the weights of a token (``Sample.versions``) -> their age in RL steps when the
    groups are trained. None: a synchronous run."""
    lost: Mapping[str, Outcome] = field(default_factory=dict)
    """Prompt id -> reason, for the groups that were sampled for this step or since the step
    before, and that no step trains."""
    dropped: tuple[DroppedGroup, ...] = ()
    """The first of these groups, for inspection."""


@dataclass(frozen=True)
class SampledGroup:
    """Samples of one prompt, not scored."""

    prompt: Prompt
    group: Group | None
    """None: too few episodes have a result."""
    episodes: tuple[Episode, ...] = ()
    """Records of all episodes of the prompt, also of those without a result. Empty: the responses
    are single turns."""
    error: Exception | None = None
    """The first failure of an episode that the policy did not cause."""

    def records(self) -> Group:
        """Return a group of the episodes, with or without a result, without their tokens."""
        samples = tuple(
            Sample(
                sample_id=f"{self.prompt.id}/{k}",
                prompt_id=self.prompt.id,
                group_id=0,
                prompt_ids=self.prompt.token_ids,
                response_ids=(),
                sampler_logprobs=(),
                action_mask=(),
                versions=(),
                text="",
                finish_reason="aborted",
                episode=record,
            )
            for k, record in enumerate(self.episodes)
        )
        return Group(0, self.prompt, samples)


@dataclass(frozen=True)
class GroupResult:
    """A sampled group with its scores."""

    sampled: SampledGroup
    measured: ScoredGroup | None
    """None: there is no group to score."""
    outcome: Outcome
    reason: str = ""
    """Why the outcome is not ``ready``."""

    def dropped(self, group: Group | None) -> DroppedGroup:
        """Return the result as a group that no step trains. ``group``: with final rewards."""
        if group is None and self.measured is not None:
            group = self.measured.group
        return DroppedGroup(group or self.sampled.records(), self.reason)


@dataclass(frozen=True)
class GroupFilter:
    """The rule by which groups without a learning signal are left out of a step."""

    config: DynamicSampling
    each_reward: bool = False
    """True if rewards are normalized one by one, by the advantage or by running statistics, which
    are known only when the step is complete. Any reward that differs within the group is then a
    signal, even if the weighted sums of the plain scores are equal."""

    def keeps(self, measured: ScoredGroup, rewards: RewardSet) -> bool:
        """Return whether a group that has scores is kept."""
        return not self.reason(measured, rewards)

    def reason(self, measured: ScoredGroup, rewards: RewardSet) -> str:
        """Return why a group that has scores is left out; empty if it is kept.

        It is kept if its weighted sums differ after clipping and before penalties (with
        ``each_reward``: if any weighted reward differs; with rewards of turns: also if those of any
        turn differ), and if the mean of the plain sums is between ``above`` and ``below``.
        """
        assert measured.scores is not None
        totals = rewards.totals(measured)
        compared = [[rewards.clipped(total) for total in totals]]
        if self.each_reward:
            compared = [list(measured.scores[name]) for name in rewards.weighted_names]
        of_turns = zip_longest(*rewards.turn_rewards(measured.group), fillvalue=0.0)
        mean, config = sum(totals) / len(totals), self.config
        if all(map(all_equal, (*compared, *of_turns))):
            return f"filtered: all rewards are equal (mean {mean:.4g})"
        if config.above is not None and mean <= config.above:
            return f"filtered: the mean reward {mean:.4g} is not above {config.above:g}"
        if config.below is not None and mean >= config.below:
            return f"filtered: the mean reward {mean:.4g} is not below {config.below:g}"
        return ""


class Runner:
    """Samples n responses to each prompt and scores them."""

    def __init__(
        self,
        engine: Sampler,
        rewards: RewardSet,
        sampling: Sampling,
        *,
        num_samples: int,
        seed: int,
        dynamic: GroupFilter | None = None,
    ) -> None:
        """Configure sampling and scoring. ``dynamic`` selects the groups that are filtered out;
        None: none."""
        self.engine, self.rewards, self.sampling = engine, rewards, sampling
        self.num_samples, self.seed, self.dynamic = num_samples, seed, dynamic

    @property
    def max_refills(self) -> int:
        """Return the maximum number of rounds in which lost groups of a step are replaced."""
        return _MAX_REFILLS if self.dynamic is None else self.dynamic.config.max_refills

    def make_loop(self) -> LoopThread:
        """Return the event loop for :meth:`draw`. The caller closes it, unless
        :attr:`owns_loop`."""
        return LoopThread("rollouts")

    owns_loop = False
    """True if the runner closes its event loop."""

    # ---- entire rollouts ---------------------------------------------------------------------

    def fill(self, next_prompts: Callable[[int], Sequence[Prompt]], count: int) -> Rollout:
        """Return ``count`` scored groups.

        Groups dropped by a failing reward, or filtered out by dynamic sampling, are replaced by
        groups of new prompts. Each refill only takes as many prompts as groups are missing, so
        nothing is left over. Stats include all sampled groups.

        Raises RewardError if groups are still missing after the maximum number of refills.
        """
        sampled: list[SampledGroup] = []
        results: list[GroupResult] = []
        missing = count
        for _ in range(1 + self.max_refills):
            new = self.draw_all(next_prompts(missing))
            sampled += new
            self.check(sampled)
            results += self.measure(new)
            missing = count - sum(result.outcome == "ready" for result in results)
            if not missing:
                break
        return self.finish(results, count)

    def finish(self, results: Sequence[GroupResult], count: int) -> Rollout:
        """Return the rollout of a step from its results, in the order of their prompts.

        Raises RewardError if fewer than ``count`` groups have rewards. With dynamic sampling, the
        newest groups without signal are used to fill the step.
        """
        sampled = [result.sampled for result in results]
        measured = [result.measured for result in results if result.measured is not None]
        scored = self.rewards.finish(measured)
        stats = self.stats(sampled) + scored.stats + _sample_stats(scored.groups)
        outcomes = {result.sampled.prompt.id: result.outcome for result in results}
        groups = [g for g in scored.groups if outcomes[g.prompt.id] == "ready"]
        rejected = [g for g in scored.groups if outcomes[g.prompt.id] == "filtered"]
        missing = count - len(groups)
        if self.dynamic is not None:
            used = min(missing, len(rejected))
            stats += Stats(
                sums={
                    "rollout/groups_filtered": len(rejected) - used,
                    "rollout/groups_kept_anyway": used,
                }
            )
            if used:
                log.warning(
                    "rollout.dynamic_sampling: %d of %d groups have no signal after %d refills "
                    "but are used to fill the step",
                    *(used, count, self.max_refills),
                )
                groups += rejected[len(rejected) - used :]
        if len(groups) < count:
            raise self._too_few(results, len(groups), count)
        for group in groups:
            del outcomes[group.prompt.id]
        finished = {group.prompt.id: group for group in rejected}
        lost = [result for result in results if result.sampled.prompt.id in outcomes]
        dropped = [r.dropped(finished.get(r.sampled.prompt.id)) for r in lost[:MAX_DROPPED]]
        return Rollout(numbered(groups), stats, lost=outcomes, dropped=tuple(dropped))

    def run(self, prompts: Sequence[Prompt], *, by_sample: bool = False) -> Rollout:
        """Sample and score all of ``prompts``, in their order. A group has all samples that did not
        fail, at least one. ``by_sample``: a reward that fails drops its sample, not the group.
        Raises NoGroupLeftError if no group has samples with rewards."""
        sampled = self.draw_all(prompts, least=1)
        self.check(sampled)
        groups = [item.group for item in sampled if item.group is not None]
        stats = self.stats(sampled)
        if not groups:
            raise self.no_group_error(sampled, least=1)
        try:
            score = self.rewards.score_samples if by_sample else self.rewards.score
            scored = score(groups)
        except NoGroupLeftError as error:
            error.stats = stats + error.stats
            raise
        numbers = numbered(scored.groups)
        return Rollout(numbers, stats + scored.stats + _sample_stats(numbers))

    def _too_few(self, results: Sequence[GroupResult], num_groups: int, count: int) -> RewardError:
        """Return the error for a step that cannot be filled. The newest groups explain it."""
        last = results[len(results) - (count - num_groups) :]
        failed = [r.measured for r in last if r.measured is not None and r.outcome == "failed"]
        cause: NoGroupLeftError | None = None
        if not any(result.outcome == "ready" for result in last):
            groupless = [result.sampled for result in last if result.sampled.group is None]
            if failed:
                cause = none_left(failed, Stats())
            elif groupless:
                cause = self.no_group_error(groupless)
        lost = sum(result.sampled.group is None for result in results)
        why = (
            f"{lost:g} groups lost their members, because episodes failed or their first messages "
            "reached episodes.max_tokens (metrics episodes/*)"
            if lost
            else "the reward fails on almost all of them. on_reward_failure.then=fail stops at the "
            "first error"
        )
        error = RewardError(
            f"after {self.max_refills} refills only {num_groups} of {count} groups have a reward; "
            f"{why}" + (f". The last refill: {cause}" if cause else "")
        )
        error.__cause__ = cause
        return error

    # ---- stages ------------------------------------------------------------------------------

    def draw_all(self, prompts: Sequence[Prompt], *, least: int = 2) -> list[SampledGroup]:
        """Sample a group of ``num_samples`` responses for each prompt. ``least``: members that a
        group of several needs (a baseline compares two). Single turns do not fail."""
        completions: dict[tuple[str, int], Completion] = {
            (c.request_id, c.index): c
            for c in self.engine.generate([self._request(p) for p in prompts], self.sampling)
        }
        return [
            self._sampled_group(
                prompt, [completions[prompt.id, k] for k in range(self.num_samples)]
            )
            for prompt in prompts
        ]

    async def draw(self, prompt: Prompt, service: RolloutService) -> SampledGroup:
        """Sample the group of one prompt, as :meth:`draw_all`. Cancelling the wait cancels its
        requests."""
        request = self._request(prompt)
        future = asyncio.wrap_future(service.submit_all(request, self.sampling))
        try:
            completions = await future
        except asyncio.CancelledError:
            service.cancel(request.request_id)
            raise
        return self._sampled_group(prompt, sorted(completions, key=lambda c: c.index))

    def measure(self, sampled: Sequence[SampledGroup]) -> list[GroupResult]:
        """Score groups and decide which can be trained on. Raises RewardError if a reward fails and
        the policy is ``fail``."""
        groups = [item.group for item in sampled if item.group is not None]
        measured = iter(self.rewards.measure(groups) if groups else ())
        results = []
        for item in sampled:
            if item.group is None:
                results.append(GroupResult(item, None, "failed", _no_result(item)))
                continue
            score = next(measured)
            outcome: Outcome = "ready"
            reason = ""
            if score.scores is None:
                outcome, reason = "failed", f"failed reward: {_short(score.failure)}"
            elif self.dynamic is not None and (reason := self.dynamic.reason(score, self.rewards)):
                outcome = "filtered"
            results.append(GroupResult(item, score, outcome, reason))
        return results

    def check(self, sampled: Sequence[SampledGroup]) -> None:
        """Raise an error if too many episodes of a step, or of a call of :meth:`run`, failed.
        Single turns do not fail."""

    def stats(self, sampled: Sequence[SampledGroup]) -> Stats:
        """Return statistics of the sampling."""
        return Stats()

    def no_group_error(
        self, sampled: Sequence[SampledGroup], *, least: int = 2
    ) -> NoGroupLeftError:
        """Return the error for prompts without any group."""
        return NoGroupLeftError(f"none of {len(sampled)} prompts has a group", self.stats(sampled))

    def close(self) -> None:
        """Close the rewards and the engine."""
        self.rewards.close()
        self.engine.close()

    # ---- parts -------------------------------------------------------------------------------

    def _request(self, prompt: Prompt) -> Request:
        seed = prompt_seed(self.seed, prompt.id)
        return Request(prompt.id, prompt.token_ids, self.num_samples, seed)

    def _sampled_group(self, prompt: Prompt, completions: Sequence[Completion]) -> SampledGroup:
        samples = tuple(
            Sample(
                sample_id=f"{prompt.id}/{completion.index}",
                prompt_id=prompt.id,
                group_id=0,
                prompt_ids=prompt.token_ids,
                response_ids=completion.token_ids,
                sampler_logprobs=completion.logprobs,
                action_mask=BoolRuns.repeat(True, len(completion.token_ids)),
                versions=completion.versions,
                kept_ids=completion.kept_ids,
                text=completion.text,
                finish_reason=completion.finish_reason,
            )
            for completion in completions
        )
        return SampledGroup(prompt, Group(0, prompt, samples))


def _no_result(sampled: SampledGroup) -> str:
    """Return why a prompt has no group."""
    statuses = Counter(record.status for record in sampled.episodes)
    ends = ", ".join(f"{count} {status}" for status, count in statuses.most_common())
    first = "" if sampled.error is None else f"; the first failure: {_short(sampled.error)}"
    return f"failed episodes: too few have a result ({ends}){first}"


def _short(error: Exception | None) -> str:
    """Return the first line of an error's message, cut to 300 characters."""
    return str(error).partition("\n")[0][:300]


def numbered(groups: Iterable[Group]) -> tuple[Group, ...]:
    """Return the groups with their positions as group ids."""
    return tuple(
        Group(number, group.prompt, tuple(replace(s, group_id=number) for s in group.samples))
        for number, group in enumerate(groups)
    )


def prompt_seed(seed: int, prompt_id: str) -> int:
    """Return a stable seed for a prompt. Its id contains the epoch, so samples differ between
    epochs."""
    return (seed << 32) + zlib.crc32(prompt_id.encode())


def _sample_stats(groups: Sequence[Group]) -> Stats:
    samples = [s for g in groups for s in g.samples]
    lengths = [s.num_sampled_tokens for s in samples]
    means: dict[str, tuple[Number, Number]] = {"rollout/response_len": (sum(lengths), len(lengths))}
    if not any(math.isnan(s.reward) for s in samples):  # there are rewards
        equal = sum(all_equal([s.reward for s in g.samples]) for g in groups)
        means["reward/equal_groups_frac"] = (equal, len(groups))
    return Stats(
        means=means,
        maxima={"rollout/response_len_max": max(lengths, default=0)},
        sums={"rollout/tokens": sum(lengths), "rollout/samples": len(lengths)},
    )
