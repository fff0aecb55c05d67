"""A source of groups that samples all the time: see ``source.py`` for the interface, and
``schedule.py`` for the rules by which groups start and are taken.

Threads: the trainer's calls :meth:`AsyncSource.next` and :meth:`AsyncSource.update_weights`. One
event loop draws the groups, with a task per group. The engine thread (``service.py``) samples and
loads weights between two polls. One thread scores. The schedule and all that belongs to a group are
guarded by one lock.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from burnish.config.rollout import InFlight
from burnish.data.prompts.encode import PromptStream
from burnish.rewards.reward_set import RewardSet, ScoredGroup
from burnish.rollout.asynchronous.schedule import ScheduleLimits, StalenessSchedule, Taken
from burnish.rollout.asynchronous.service import RolloutService
from burnish.rollout.base import Sync
from burnish.rollout.runner import GroupResult, Rollout, Runner, SampledGroup
from burnish.rollout.sample_state import (
    episode_from_plain,
    episode_to_plain,
    samples_from_plain,
    samples_to_plain,
)
from burnish.rollout.source import Metrics
from burnish.types import Group, Prompt

log = logging.getLogger("burnish")

_POLL_S = 1.0
"""Seconds between two looks at the state while a step waits, so that signals are handled."""


@dataclass(frozen=True)
class AsyncOptions:
    """Options of an asynchronous source."""

    limits: ScheduleLimits
    in_flight: InFlight = "recompute"
    overlaps: bool = True
    """False: sampling pauses from the moment a step has its groups until the weights are
    updated."""
    evaluation: Literal["continue", "wait"] = "continue"
    """Groups for training during an evaluation."""
    vocab_size: int | None = None
    """Number of token ids of the policy; None: unknown. Groups of a checkpoint are checked."""


class AsyncSource:
    """Samples groups ahead of the steps that train them. Implements
    :class:`burnish.rollout.source.RolloutSource`."""

    def __init__(  # house: ok the components of a source
        self,
        prompts: PromptStream,
        runner: Runner,
        service: RolloutService,
        sync: Sync,
        policy_version: Callable[[], int],
        options: AsyncOptions,
    ) -> None:
        """``service``: of the runner's engine, without ``after_poll``. ``policy_version``: number
        of optimizer steps of the policy."""
        self.prompts, self.runner, self.service, self.sync = prompts, runner, service, sync
        self.options = options
        self._policy_version = policy_version
        self._schedule = StalenessSchedule(options.limits)
        self._changed = threading.Condition()
        self._prompt_of: dict[int, Prompt] = {}
        """Group that is not used up -> its prompt."""
        self._before: dict[int, Mapping[str, Any]] = {}
        """The same groups -> the state of the prompt stream before their prompts."""
        self._counts_after: dict[int, Mapping[str, int]] = {}
        self._counts: Mapping[str, int] = prompts.counts
        self._newest_used = -1
        self._next_prompt = 0
        """Group of the next prompt of the stream."""
        self._results: dict[int, GroupResult] = {}
        self._weights: dict[int, int] = {}
        """Version of the policy (optimizer steps) -> version of the schedule (RL steps)."""
        self._error: BaseException | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._loading: list[Future[None]] = []
        self._started = self._stopping = False
        self._scoring = ThreadPoolExecutor(1, thread_name_prefix="rewards")
        self._unscored: deque[tuple[SampledGroup, asyncio.Future[GroupResult]]] = deque()
        self._loop = runner.make_loop()
        self._weights[policy_version()] = 0
        service.after_poll = self._after_poll

    # ---- the interface ---------------------------------------------------------------------

    @property
    def rewards(self) -> RewardSet:
        return self.runner.rewards

    @property
    def counts(self) -> Mapping[str, int]:
        return self._counts

    def next(self, step: int) -> Rollout:
        """Wait until the schedule has the groups of a step, and return them scored."""
        with self._changed:
            if not self._started:
                self._schedule.rebase(step - 1)
                self._weights = {self._policy_version(): step - 1}
                self._started = True
        self.service.resume()
        self._loop.run(self._start_groups)
        with self.sync.policy_idle(), self._changed:
            while (taken := self._schedule.take()) is None:
                self._check()
                if self._schedule.is_exhausted:
                    break
                self._changed.wait(_POLL_S)
            self._check()
            results = self._use_up(taken)
            trained = self._schedule.taken - 1
            ages = {policy: trained - version for policy, version in self._weights.items()}
        if not self.options.overlaps:
            self.service.pause()
        rollout = self.runner.finish(results, self.options.limits.groups_per_step)
        self.runner.check([result.sampled for result in results])
        return replace(rollout, ages=ages)

    def update_weights(self) -> Metrics:
        """Stage the policy's weights for the engine, and go on as soon as the trainer may change
        them."""
        if not self.options.overlaps:  # the service is paused: it polls for no answers
            self.service.call(lambda engine: self.sync.settle()).result()
        staged = self.sync.stage(self.options.in_flight)
        with self._changed:
            self._weights[staged.version] = self._schedule.taken
        loading = self.service.call(staged.load, when_idle=staged.needs_idle)
        if staged.waits or not self.options.overlaps:
            loading.result()
        else:
            left = [f for f in self._loading if not f.done() or _error_of(f) is not None]
            self._loading = [*left, loading]
        if not self.options.overlaps:
            self.service.resume()  # workers report the load to polls
            self._wait_for_weights()
        return {**staged.metrics, "time/rollout_idle_frac": self.service.idle_frac()}

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Wait until the engine has the policy's weights. Groups for training continue, or new
        requests of theirs wait and those in the engine are finished first."""
        self.service.resume()
        with self.sync.policy_idle():
            self._wait_for_weights()
            if self.options.evaluation == "continue":
                yield
                return
            self.service.hold()
            try:
                self.service.wait_for_training()
                yield
            finally:
                self.service.release_held()

    def position(self) -> dict[str, Any]:
        """Return the position in the data at the first group that is not used up, and the groups
        that are finished and not trained."""
        with self._changed:
            first = self._schedule.frontier
            prompts = self._before.get(first) or self.prompts.state_dict()
            ready = {group: self._results[group] for group in self._schedule.ready}
            state = self._schedule.state_dict()
            unused = len(state["again"]) + len(ready)
            rollouts = {
                "schedule": state,
                "weights": dict(self._weights),
                "counts": self._counts,
                "newest_used": self._newest_used,
                # used groups whose prompts come after one that is not used up
                "ahead": self._schedule.next_new - first - unused,
                "results": ready,
            }
        return {"prompts": prompts, "rollouts": rollouts}

    def plain(self, position: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state from :meth:`position` for a file: of each finished group the samples and
        scores; its prompt is read from the data again."""
        rollouts = position["rollouts"]
        ready = {group: _result_to_plain(result) for group, result in rollouts["results"].items()}
        return {**position, "rollouts": {**rollouts, "results": ready}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state, and transfer the policy's weights. Running groups are dropped; the next
        step starts them again."""
        self._stop_all()
        saved = state.get("rollouts")
        with self._changed:
            self.prompts.load_state_dict(state["prompts"])
            self._schedule = StalenessSchedule(self.options.limits)
            self._results, self._prompt_of, self._before = {}, {}, {}
            self._counts_after, self._counts = {}, self.prompts.counts
            self._newest_used, self._next_prompt = -1, 0
            self._weights, self._started = {}, saved is not None
            if saved is not None:
                self._load_groups(saved)
        self.restart()

    def restart(self) -> None:
        """Transfer the policy's weights, and sample again if the loss of a worker had ended
        sampling."""
        self._stop_all()
        with suppress(Exception):  # without open requests the engine cannot fail after this
            self.service.call(lambda engine: None).result()
        self.service.restart()
        with self._changed:
            self._error, self._loading = None, []
        self.service.call(lambda engine: self.sync.push()).result()
        self._stopping = False

    def _load_groups(self, saved: Mapping[str, Any]) -> None:
        """Restore schedule and finished groups, and read the prompts of all that are not used up
        again."""
        schedule = self._schedule
        restored = schedule.load_state_dict(saved["schedule"])
        self._weights = {int(p): int(v) for p, v in saved["weights"].items()}
        self._weights[self._policy_version()] = schedule.taken
        self._counts, self._newest_used = saved["counts"], int(saved["newest_used"])
        self._next_prompt = schedule.frontier
        needed = {*schedule.state_dict()["again"], *schedule.ready}
        while self._next_prompt < schedule.next_new:
            group = self._read_prompt()
            if group not in needed:
                for mapping in (self._prompt_of, self._before, self._counts_after):
                    mapping.pop(group)
        if restored:
            for group, plain in saved["results"].items():
                self._results[int(group)] = _result_of(
                    plain, self._prompt_of[int(group)], self.options.vocab_size
                )

    def close(self) -> None:
        """End all groups, and close service, runner and engine."""
        try:
            self._stop_all()
            self.service.close()
        finally:
            self._scoring.shutdown()
            if not self.runner.owns_loop:
                self._loop.close()
            self.runner.close()

    # ---- weights ---------------------------------------------------------------------------

    def _after_poll(self) -> None:
        """Tell the schedule which weights the engine has; called in the engine thread."""
        with self._changed:
            version = self._weights.get(self.service.version)
            if version is None or version <= self._schedule.engine_version:
                return
            self._schedule.loaded(version)
            oldest = version - self.options.limits.max_staleness - 1
            self._weights = {p: v for p, v in self._weights.items() if v >= oldest}
            self._changed.notify_all()
        self._loop.spawn(self._start_groups)

    def _wait_for_weights(self) -> None:
        """Wait until the engine has the newest weights."""
        with self._changed:
            while self._schedule.engine_version < self._schedule.taken and self._started:
                self._check()
                self._changed.wait(_POLL_S)

    def _check(self) -> None:
        """Raise the error of a transfer, of a group, or of the engine. A failed transfer comes
        first: the engine cannot sample after it, so it may be the cause of the others."""
        errors = (e for f in self._loading if (e := _error_of(f)) is not None)
        error = next(errors, None) or self._error or self.service.error
        if error is not None:
            raise error

    # ---- groups ----------------------------------------------------------------------------

    async def _start_groups(self) -> None:
        """Start the groups that may start, in the event loop."""
        with self._changed:
            while self._started and not self._stopping and self._schedule.may_start():
                group = self._schedule.start()
                try:
                    while group not in self._prompt_of:
                        self._read_prompt()
                except Exception as error:  # raised by the step that needs the group
                    self._fail(error)
                    return
                running = self._run_group(group, self._prompt_of[group])
                self._tasks[group] = asyncio.get_running_loop().create_task(running)

    def _read_prompt(self) -> int:
        """Read the next prompt and return its group."""
        group, before = self._next_prompt, self.prompts.state_dict()
        (self._prompt_of[group],) = self.prompts.next(1)
        self._before[group], self._counts_after[group] = before, self.prompts.counts
        self._next_prompt += 1
        return group

    async def _run_group(self, group: int, prompt: Prompt) -> None:
        """Sample one group, and score it together with all others that wait for it."""
        loop = asyncio.get_running_loop()
        scored: asyncio.Future[GroupResult] = loop.create_future()
        try:
            sampled = await self.runner.draw(prompt, self.service)
            self._unscored.append((sampled, scored))
            await loop.run_in_executor(self._scoring, self._score_waiting, loop)
            result = await scored
        except BaseException as error:  # raised by the step that waits for the group
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # (the run ends; user code that raises it must not end this task silently)
            self._fail(error)
            return
        with self._changed:
            self._tasks.pop(group, None)
            self._results[group] = result
            self._schedule.finish(group, result.outcome)
            self._changed.notify_all()
        await self._start_groups()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _score_waiting(self, loop: asyncio.AbstractEventLoop) -> None:
        """Score the groups that wait for it, in the thread of the rewards."""

        def answer(
            future: asyncio.Future[GroupResult], result: GroupResult | BaseException
        ) -> None:
            if future.done():
                return
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)

        waiting = []
        with suppress(IndexError):
            while True:
                waiting.append(self._unscored.popleft())
        if not waiting:  # an earlier call scored them
            return
        results: Sequence[GroupResult | BaseException]
        try:
            results = self.runner.measure([sampled for sampled, _ in waiting])
        except BaseException as error:  # each group raises it
            results = [error] * len(waiting)
        for (_, future), result in zip(waiting, results, strict=True):
            loop.call_soon_threadsafe(answer, future, result)

    def _use_up(self, taken: Taken | None) -> list[GroupResult]:
        """Return the results of a step in the order of their prompts, and forget the groups. None:
        those of all groups, too few for a step."""
        if taken is None:
            return [self._results[group] for group in sorted(self._results)]
        used = sorted({*taken.groups, *taken.lost})
        if used[-1] > self._newest_used:
            self._newest_used, self._counts = used[-1], self._counts_after[used[-1]]
        groups = []
        for group in used:
            groups.append(self._results.pop(group))
            for mapping in (self._prompt_of, self._before, self._counts_after):
                mapping.pop(group, None)
        return groups

    # ---- stopping and state ------------------------------------------------------------------

    def _stop_all(self) -> None:
        """Cancel all groups and wait for their ends."""

        async def cancel() -> None:
            tasks, self._tasks = list(self._tasks.values()), {}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._unscored.clear()

        self._stopping = True
        self._loop.run(cancel)
        self._scoring.submit(lambda: None).result()  # a running call of the rewards has ended then


def _result_to_plain(result: GroupResult) -> dict[str, Any]:
    """Return a ready group as a plain mapping, without its prompt."""
    assert result.measured is not None and result.measured.scores is not None
    return {
        "samples": samples_to_plain(result.measured.group.samples),
        "scores": {name: list(values) for name, values in result.measured.scores.items()},
        "episodes": [episode_to_plain(episode) for episode in result.sampled.episodes],
    }


def _result_of(plain: Mapping[str, Any], prompt: Prompt, vocab_size: int | None) -> GroupResult:
    """Return the ready group of :func:`_result_to_plain`. Raises as ``samples_from_plain`` does."""
    samples = samples_from_plain(plain["samples"], vocab_size=vocab_size)
    group = Group(0, prompt, tuple(samples))
    episodes = tuple(episode_from_plain(episode) for episode in plain["episodes"])
    return GroupResult(
        SampledGroup(prompt, group, episodes), ScoredGroup(group, plain["scores"]), "ready"
    )


def _error_of(future: Future[None]) -> BaseException | None:
    """Return the error of a transfer that has failed."""
    return future.exception() if future.done() and not future.cancelled() else None
