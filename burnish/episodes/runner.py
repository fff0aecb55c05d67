"""Run episodes and score them: prompts -> scored groups of multi-turn samples."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, get_args
from weakref import WeakKeyDictionary

from burnish.config.columns import without_fraction
from burnish.config.episodes import EpisodesConfig
from burnish.episodes.loop import EpisodeLimits, EpisodeProgram, EpisodeResult, Policy, Task
from burnish.episodes.renderer import ChatRenderer
from burnish.episodes.rows import episode_rows
from burnish.episodes.tool_calls import tool_functions
from burnish.errors import BurnishError
from burnish.json_text import json_types
from burnish.loop_thread import LoopThread
from burnish.rewards.reward_set import NoGroupLeftError, RewardSet
from burnish.rollout.asynchronous.evaluation_lane import RequestSink, Sampler, ServiceEngine
from burnish.rollout.asynchronous.service import RolloutService
from burnish.rollout.base import Sampling
from burnish.rollout.runner import GroupFilter, Runner, SampledGroup, prompt_seed
from burnish.transcript import CUT, Episode, EpisodeStatus
from burnish.types import Group, Prompt, Sample, Stats

log = logging.getLogger("burnish")

FAILED = ("env_error", "infra_error", "timeout", "cancelled")
"""Statuses that the policy did not cause. Their episodes are not scored."""

_DRAIN_S = 60.0
_UNLIMITED = 1 << 30


class EpisodesFailedError(BurnishError, RuntimeError):
    """Too many episodes of a rollout failed for reasons other than the policy."""


class EpisodePool:
    """The components that run episodes: environment or agent, chat format and limits."""

    def __init__(
        self,
        config: EpisodesConfig,
        program: EpisodeProgram,
        renderer: ChatRenderer,
        loop: LoopThread,
    ) -> None:
        self.config, self.program = config, program
        self.renderer, self.loop = renderer, loop
        self._rendering = ThreadPoolExecutor(1, thread_name_prefix="renderer")
        self._concurrency: WeakKeyDictionary[RequestSink, asyncio.Semaphore] = WeakKeyDictionary()
        self.limits = EpisodeLimits(
            max_turns=config.max_turns,
            max_tokens=config.max_tokens,
            timeout_s=config.timeout_s,
            **config.step_limits,
        )

    def run(
        self, engine: Sampler, sampling: Sampling, tasks: Sequence[Task]
    ) -> list[EpisodeResult]:
        """Run episodes that share ``engine``, and return them in the order of ``tasks``."""
        if isinstance(engine, ServiceEngine):
            return self.loop.run(self.run_on, engine.lane, sampling, tasks)
        with closing(RolloutService(engine)) as service:
            results = self.loop.run(self.run_on, service, sampling, tasks)
            service.drain(_DRAIN_S)  # the engine frees what it kept of the conversations
            return results

    async def run_on(
        self, service: RequestSink, sampling: Sampling, tasks: Sequence[Task]
    ) -> list[EpisodeResult]:
        """Run episodes in the pool's event loop. Calls may overlap; each runs at most
        ``max_concurrent`` episodes at once for every service."""
        policy = Policy(
            service, self.renderer, sampling, self._rendering, stopped_s=service.stopped_s
        )
        limit = self._concurrency.get(service)
        if limit is None:
            limit = asyncio.Semaphore(self.config.max_concurrent or _UNLIMITED)
            self._concurrency[service] = limit

        async def run_task(task: Task) -> EpisodeResult:
            async with limit:
                for _ in range(self.config.infra_retries):
                    result = await self.program.run_episode(task, policy, self.limits)
                    if result.record.status != "infra_error":
                        return result
                return await self.program.run_episode(task, policy, self.limits)

        started = [asyncio.create_task(run_task(task)) for task in tasks]
        try:
            return await asyncio.gather(*started)
        finally:  # after an error: end the others before the engine is handed back
            for waiting in started:
                waiting.cancel()
            await asyncio.gather(*started, return_exceptions=True)

    def close(self) -> None:
        """End the environments' processes and the event loop's thread."""
        try:
            self.loop.run(self.program.close)
        finally:
            self.loop.close()
            self._rendering.shutdown()


def integer_seed(value: Any) -> int | None:
    """Return the integer of a column ``seed``, which is text in CSV files; None for other values.

    >>> [integer_seed(value) for value in (7, "-7", 5.0, "x", True, None)]
    [7, -7, 5, None, None, None]
    """
    value = without_fraction(value)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class EpisodeRunner(Runner):
    """Runs n episodes of each prompt and scores them.

    All episodes of a call share the engine. A new turn joins the running batch at once, and no
    episode waits for the turns of others. Failed episodes leave their group; a group with fewer
    than two members (one, if ``num_samples`` is 1) is dropped, and :meth:`fill` replaces it.
    Groups of :meth:`run`, which are not trained against each other, keep a single member.
    """

    owns_loop = True

    def __init__(  # house: ok the parameters of a Runner, and the pool of episodes
        self,
        engine: Sampler,
        rewards: RewardSet,
        sampling: Sampling,
        pool: EpisodePool,
        *,
        num_samples: int,
        seed: int,
        dynamic: GroupFilter | None = None,
    ) -> None:
        super().__init__(
            engine, rewards, sampling, num_samples=num_samples, seed=seed, dynamic=dynamic
        )
        self.pool = pool
        self._warned_of_tools = self._warned_of_seed = False

    def make_loop(self) -> LoopThread:
        """Return the pool's event loop, which the pool closes."""
        return self.pool.loop

    def close(self) -> None:
        """Close the rewards, the engine and the environments."""
        try:
            super().close()
        finally:
            self.pool.close()

    def draw_all(self, prompts: Sequence[Prompt], *, least: int = 2) -> list[SampledGroup]:
        """Run the episodes of all prompts."""
        tasks = [task for prompt in prompts for task in self._tasks(prompt)]
        results = self.pool.run(self.engine, self.sampling, tasks)
        size = self.num_samples
        groups = [results[i : i + size] for i in range(0, len(results), size)]
        return [
            self._group_of(prompt, group, least=least)
            for prompt, group in zip(prompts, groups, strict=True)
        ]

    async def draw(self, prompt: Prompt, service: RolloutService) -> SampledGroup:
        """Run the episodes of one prompt, in the pool's event loop."""
        tasks = self._tasks(prompt)
        return self._group_of(prompt, await self.pool.run_on(service, self.sampling, tasks))

    def check(self, sampled: Sequence[SampledGroup]) -> None:
        """Raise EpisodesFailedError if more than ``max_failed_frac`` of the episodes failed. The
        share is that of a step: a refill of one prompt may lose all of its own."""
        statuses: Counter[str] = Counter(r.status for group in sampled for r in group.episodes)
        failed = Counter({status: statuses[status] for status in FAILED if statuses[status]})
        if not failed:
            return
        first = next((group.error for group in sampled if group.error is not None), None)
        count = f"{failed.total()} of {statuses.total()} episodes failed"
        failures = f"{count} ({_listed(failed)}). The first: {first}"
        frac = self.pool.config.max_failed_frac
        if failed.total() > frac * statuses.total():
            raise EpisodesFailedError(
                f"{failures}\nMore than episodes.max_failed_frac={frac:g} of the episodes must not "
                f"fail; {_advice(failed)}, or raise the limit"
            ) from first
        log.warning("%s", failures)

    def stats(self, sampled: Sequence[SampledGroup]) -> Stats:
        """Return statistics of all episodes, and ``episodes/groups_dropped``."""
        records = [record for group in sampled for record in group.episodes]
        sums = {"episodes/groups_dropped": sum(group.group is None for group in sampled)}
        unseen = [tools for group in sampled if (tools := unseen_tools(group))]
        if unseen:
            sums["episodes/groups_with_unseen_tools"] = len(unseen)
            if not self._warned_of_tools:
                self._warned_of_tools = True
                log.warning(
                    "the policy does not see tools of rows (data.tools_key), such as %s, because "
                    "the tools of an episode are those of episodes.tools, the environment or the "
                    "agent, which gets the column with its row; offer them there, or set "
                    "data.tools_key: null (episodes/groups_with_unseen_tools counts such prompts)",
                    ", ".join(sorted(unseen[0]))[:200],
                )
        return episode_stats(records) + Stats(sums=sums)

    def no_group_error(
        self, sampled: Sequence[SampledGroup], *, least: int = 2
    ) -> NoGroupLeftError:
        """Return the error for prompts whose groups all lost their members."""
        reason = no_group_reason(sampled, self.num_samples, least=least)
        return NoGroupLeftError(reason, self.stats(sampled))

    def _tasks(self, prompt: Prompt) -> list[Task]:
        content: Any = prompt.text if prompt.messages is None else list(prompt.messages)
        row = json_types({**prompt.metadata, "prompt": content, "label": prompt.label})
        seed = prompt_seed(self.seed, prompt.id)
        row_seed = self._row_seed(prompt)
        names = [f"{prompt.id}/{member}" for member in range(self.num_samples)]
        return [
            Task(
                name,
                row,
                environment_seed=seed % (1 << 53) if row_seed is None else row_seed,
                sampling_seed=(seed << 20) + zlib.crc32(name.encode()),
                prompt_text=prompt.text,
            )
            for name in names
        ]

    def _row_seed(self, prompt: Prompt) -> int | None:
        column = prompt.metadata.get("seed")
        seed = integer_seed(column)
        if seed is None and column is not None and not self._warned_of_seed:
            self._warned_of_seed = True
            log.warning(
                "prompt %s: its column seed is %s, which is no integer, so environments and agents "
                "get a seed that is derived from the run's; rename the column to keep it",
                *(prompt.id, repr(column)[:40]),
            )
        return seed

    def _group_of(
        self, prompt: Prompt, results: Sequence[EpisodeResult], *, least: int = 2
    ) -> SampledGroup:
        """Return the group of a prompt's episodes; without it if too few have a result."""
        members = [
            episode_sample(prompt, f"{prompt.id}/{k}", result)
            for k, result in enumerate(results)
            if result.record.status not in FAILED and result.calls
        ]
        enough = len(members) >= min(self.num_samples, least)
        return SampledGroup(
            prompt,
            Group(0, prompt, tuple(members)) if enough else None,
            tuple(result.record for result in results),
            next((result.error for result in results if result.error is not None), None),
        )


def unseen_tools(sampled: SampledGroup) -> set[str]:
    """Return the names of the tools of a row that the policy saw in none of its episodes."""
    seen = {
        name
        for record in sampled.episodes
        for number in range(len(record.turns))
        for name in tool_functions(record.tools_of(number))
    }
    acted = any(record.turns for record in sampled.episodes)
    return set(tool_functions(sampled.prompt.tools or ())) - seen if acted else set()


def no_group_reason(sampled: Sequence[SampledGroup], num_samples: int, *, least: int) -> str:
    """Return the reason why no prompt has a group left, and what to change."""
    records = [record for group in sampled for record in group.episodes]
    lost = [record for record in records if record.status in FAILED or not record.turns]
    ends: Counter[str] = Counter(record.status for record in lost)
    first = next((group.error for group in sampled if group.error is not None), None)
    first_failure = "" if first is None else f"\nThe first failure: {first}"
    return (
        f"none of {len(sampled)} groups has {min(num_samples, least)} of its "
        f"{num_samples} episodes left: {len(lost)} of {len(records)} episodes have no result "
        f"({_listed(ends)}); {_advice(ends)}{first_failure}"
    )


_ADVICE = {
    "env_error": "correct the environment",
    "timeout": "raise episodes.step_timeout_s or timeout_s, or make the environment faster",
    "infra_error": "correct what ends the environment's worker processes",
    "prompt_too_long": "raise episodes.max_tokens, or shorten the first messages",
}
"""Status -> what to change."""


def _advice(statuses: Counter[str]) -> str:
    return "; ".join(_ADVICE[name] for name, _ in statuses.most_common() if name in _ADVICE)


def _listed(statuses: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in statuses.most_common())


def episode_sample(prompt: Prompt, sample_id: str, result: EpisodeResult) -> Sample:
    """Return an episode as a training sample. Its text is that of the last turn. Its finish reason
    is ``length`` if a token limit ended the episode, also if that was reached by an observation. A
    response of an agent's call that was cut at the call's own limit does not end an episode: the
    finish reasons of responses are those of the turns."""
    rows = episode_rows(result.calls)
    last = rows[-1]
    final = result.calls[-1].completion
    return Sample(
        sample_id=sample_id,
        prompt_id=prompt.id,
        group_id=0,
        prompt_ids=last.prompt_ids,
        response_ids=last.response_ids,
        sampler_logprobs=last.sampler_logprobs,
        action_mask=last.action_mask,
        versions=last.versions,
        turns=last.turns,
        kept_ids=last.kept_ids,
        earlier_rows=rows[:-1],
        text=final.text,
        finish_reason="length" if result.record.status in CUT else "stop",
        episode=result.record,
    )


def episode_stats(records: Sequence[Episode]) -> Stats:
    """Return statistics of finished episodes: turns, statuses, tokens, cache use, times, and the
    environment's counts under ``episodes/counts/``, where they cannot replace others."""
    turns = [turn for record in records for turn in record.turns]
    later = [turn for record in records for turn in record.turns[1:]]
    num = len(records)
    statuses = Counter(record.status for record in records)
    counts: dict[str, float] = {}
    for turn in turns:
        for name, count in turn.counts.items():
            counts[name] = counts.get(name, 0.0) + count
    sums: dict[str, float] = {f"episodes/{status}": count for status, count in statuses.items()}
    sums |= {f"episodes/counts/{name}": count for name, count in counts.items()}
    sums["episodes/parse_problems"] = sum(bool(turn.problem) for turn in turns)
    prompts = sum(turn.num_prompt_tokens for turn in later)
    engine_s = sum(turn.engine_s for turn in turns)
    environment_s = sum(turn.environment_s for turn in turns)
    means: dict[str, tuple[float, float]] = {
        "episodes/turns": (len(turns), num),
        "episodes/tokens": (sum(turn.num_tokens for turn in turns), num),
        "episodes/seconds": (sum(record.seconds for record in records), num),
        "episodes/engine_s": (engine_s, num),
        "episodes/environment_s": (environment_s, num),
        "episodes/environment_frac": (environment_s, engine_s + environment_s),
        "episodes/cached_prefix_frac": (sum(turn.cached_tokens for turn in later), prompts),
    }
    means |= {f"episodes/{name}_frac": (statuses[name], num) for name in get_args(EpisodeStatus)}
    if "tool_calls" in counts:
        failed = counts.get("tool_errors", 0.0)
        means["episodes/tool_error_frac"] = (failed, counts["tool_calls"])
    return Stats(
        means=means,
        maxima={"episodes/turns_max": max((len(record.turns) for record in records), default=0)},
        sums=sums,
    )
