"""Sample responses to prompts with an engine and score them: prompts -> scored groups."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from burnish.config.rollout import DynamicSampling
from burnish.rewards.base import NoGroupLeftError, RewardError, RewardSet
from burnish.rollout.base import Completion, Request, RolloutEngine, Sampling
from burnish.types import Group, Number, Prompt, Sample, Stats, all_equal

log = logging.getLogger("burnish")

_MAX_REFILLS = 10


@dataclass(frozen=True)
class Rollout:
    """Scored groups and their statistics."""

    groups: tuple[Group, ...]
    stats: Stats


class Runner:
    """Samples n responses to each prompt and scores them."""

    def __init__(
        self,
        engine: RolloutEngine,
        rewards: RewardSet,
        sampling: Sampling,
        *,
        num_samples: int,
        seed: int,
        dynamic: DynamicSampling | None = None,
    ) -> None:
        """Configure sampling and scoring. ``dynamic`` selects the groups that :meth:`fill` filters
        out; None: none."""
        self.engine, self.rewards, self.sampling = engine, rewards, sampling
        self.num_samples, self.seed, self.dynamic = num_samples, seed, dynamic

    def fill(self, next_prompts: Callable[[int], Sequence[Prompt]], count: int) -> Rollout:
        """Return ``count`` scored groups.

        Groups dropped by a failing reward, or filtered out by dynamic sampling, are replaced by
        groups of new prompts. Each refill only takes as many prompts as groups are missing, so
        nothing is left over. Stats include all sampled groups.

        Raises RewardError if groups are still missing after the maximum number of refills.
        """
        groups: list[Group] = []
        rejected: list[Group] = []
        stats = Stats()
        failure: NoGroupLeftError | None = None
        refills = _MAX_REFILLS if self.dynamic is None else self.dynamic.max_refills
        for _ in range(1 + refills):
            try:
                rollout = self.run(next_prompts(count - len(groups)))
            except NoGroupLeftError as error:
                failure = error
                stats += error.stats
                continue
            for group in rollout.groups:
                (groups if self._has_signal(group) else rejected).append(group)
            stats += rollout.stats
            if len(groups) == count:
                break
        missing = count - len(groups)
        if self.dynamic is not None:
            used = min(missing, len(rejected))
            stats += _filter_stats(len(rejected), used)
            if used:
                log.warning(
                    "rollout.dynamic_sampling: %d of %d groups have no signal after %d refills "
                    "but are used to fill the step",
                    *(used, count, refills),
                )
                groups += rejected[len(rejected) - used :]
        if len(groups) == count:
            return Rollout(tuple(_numbered(g, i) for i, g in enumerate(groups)), stats)
        lost = stats.sums.get("episodes/groups_dropped", 0)
        why = (
            f"{lost:g} groups lost their members, because episodes failed or their first messages "
            "reached episodes.max_tokens (metrics episodes/*)"
            if lost
            else "the reward fails on almost all of them. on_reward_failure.then=fail stops at the "
            "first error"
        )
        raise RewardError(
            f"after {refills} refills only {len(groups)} of {count} groups have a reward; {why}"
            + (f". The last refill: {failure}" if failure else "")
        ) from failure

    def _has_signal(self, group: Group) -> bool:
        """Return whether dynamic sampling keeps a group.

        Its scores must differ after clipping and before penalties, and the mean of the plain scores
        must be between ``above`` and ``below``.
        """
        if self.dynamic is None:
            return True
        if all_equal([self.rewards.before_penalties(sample) for sample in group.samples]):
            return False
        scores = [self.rewards.total(sample.reward_parts) for sample in group.samples]
        mean = sum(scores) / len(scores)
        above_min = self.dynamic.above is None or mean > self.dynamic.above
        below_max = self.dynamic.below is None or mean < self.dynamic.below
        return above_min and below_max

    def run(self, prompts: Sequence[Prompt]) -> Rollout:
        """Sample and score all of ``prompts``, in their order. Raises NoGroupLeftError if no group
        has samples with rewards."""
        groups, stats = self.sample(prompts)
        try:
            scored = self.rewards.score(groups)
        except NoGroupLeftError as error:
            error.stats = stats + error.stats
            raise
        return Rollout(scored.groups, stats + scored.stats + _sample_stats(scored.groups))

    def close(self) -> None:
        """Close the rewards and the engine."""
        self.rewards.close()
        self.engine.close()

    def sample(self, prompts: Sequence[Prompt]) -> tuple[list[Group], Stats]:
        """Return unscored groups of ``num_samples`` responses, in prompt order, and statistics of
        the sampling."""
        requests = [
            Request(p.id, p.token_ids, self.num_samples, prompt_seed(self.seed, p.id))
            for p in prompts
        ]
        found: dict[tuple[str, int], Completion] = {
            (c.request_id, c.index): c for c in self.engine.generate(requests, self.sampling)
        }
        groups = [
            Group(i, p, tuple(_sample(p, i, found[p.id, k]) for k in range(self.num_samples)))
            for i, p in enumerate(prompts)
        ]
        return groups, Stats()


def _filter_stats(left_out: int, used: int) -> Stats:
    return Stats(
        sums={"rollout/groups_filtered": left_out - used, "rollout/groups_kept_anyway": used}
    )


def _numbered(group: Group, group_id: int) -> Group:
    samples = tuple(replace(s, group_id=group_id) for s in group.samples)
    return Group(group_id, group.prompt, samples)


def prompt_seed(seed: int, prompt_id: str) -> int:
    """Return a stable seed for a prompt. Its id contains the epoch, so samples differ between
    epochs."""
    return (seed << 32) + zlib.crc32(prompt_id.encode())


def _sample(prompt: Prompt, group_id: int, completion: Completion) -> Sample:
    length = len(completion.token_ids)
    return Sample(
        sample_id=f"{prompt.id}/{completion.index}",
        prompt_id=prompt.id,
        group_id=group_id,
        prompt_ids=prompt.token_ids,
        response_ids=completion.token_ids,
        sampler_logprobs=completion.logprobs,
        action_mask=(True,) * length,
        versions=completion.versions,
        text=completion.text,
        finish_reason=completion.finish_reason,
    )


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
