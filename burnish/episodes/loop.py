"""The loop of one episode: the policy responds, the environment answers, until a limit or the end.

The next prompt is the previous prompt, the sampled ids and the ids of the new messages
(``renderer.py``). All waits have a time limit. Every way in which an episode can end has a named
status.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, Literal, Protocol, TypeVar

from burnish.data.left_out import with_lost_texts
from burnish.environments.multi_turn import Step
from burnish.environments.pool import EnvironmentPool, EpisodeFailedError, OpenEpisode
from burnish.episodes.renderer import ChatRenderer
from burnish.episodes.template import RendererError
from burnish.rollout.asynchronous.evaluation_lane import RequestSink
from burnish.rollout.base import Completion, Request, Sampling
from burnish.transcript import Episode, EpisodeStatus, Turn
from burnish.types import Ids

Message = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class EpisodeLimits:
    """EpisodeLimits of one episode. Each ends the episode with a status of its own."""

    max_turns: int
    """Maximum responses of the policy (status ``max_turns``)."""
    max_tokens: int
    """Maximum tokens of a conversation: prompt, responses and observations (``max_tokens``)."""
    timeout_s: float
    """Maximum seconds of the episode (``timeout``)."""
    step_timeout_s: float = 60.0
    """Maximum seconds of one call of the environment (``timeout``)."""
    on_parse_error: Literal["feedback", "end"] = "feedback"
    """Malformed tool calls: return the error to the policy as a message, or end the episode
    (``parse_error``)."""


@dataclass(frozen=True)
class EngineCall:
    """One call of the engine: exact prompt ids and what was sampled."""

    prompt_ids: Ids
    completion: Completion


@dataclass(frozen=True)
class EpisodeResult:
    """A finished episode: its record, and the engine calls of its turns in time order."""

    record: Episode
    calls: tuple[EngineCall, ...]
    error: EpisodeFailedError | None = None
    """Cause of a failure that the policy did not cause."""


@dataclass(frozen=True)
class Task:
    """One episode to run."""

    episode_id: str
    row: Mapping[str, Any]
    """Data row for ``reset``."""
    environment_seed: int
    """Equal for all members of a group."""
    sampling_seed: int
    """Different for every member of a group."""
    prompt_text: str = ""
    """The prompt as text, rendered by the chat template if it has messages."""


async def sample(service: RequestSink, request: Request, sampling: Sampling) -> Completion:
    """Sample one response. Cancelling the wait cancels the request."""
    future = asyncio.wrap_future(service.submit(request, sampling))
    try:
        return await future
    except asyncio.CancelledError:
        service.cancel(request.request_id)
        raise


@dataclass(frozen=True)
class Policy:
    """The sampled policy: engine, chat format and sampling parameters."""

    service: RequestSink
    renderer: ChatRenderer
    sampling: Sampling
    rendering: Executor
    """One thread for all calls of the renderer: fast tokenizers are not re-entrant."""
    stopped_s: Callable[[], float] = lambda: 0.0
    """Return the seconds so far in which the service did not sample for training."""

    async def respond(self, request: Request) -> Completion:
        """Sample one response. Cancelling the wait cancels the request."""
        return await sample(self.service, request, self.sampling)

    async def in_renderer(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Return the result of a method of the renderer, called in its thread."""
        call = partial(function, *args, **options)
        return await asyncio.get_running_loop().run_in_executor(self.rendering, call)


class EpisodeProgram(Protocol):
    """A program that runs episodes with the policy: an environment, or an agent."""

    async def start(self) -> None:
        """Start the processes that it needs. Raises EnvironmentSetupError."""
        ...

    async def run_episode(self, task: Task, policy: Policy, limits: EpisodeLimits) -> EpisodeResult:
        """Run one episode. Failures that the policy did not cause are part of the result.

        Raises EnvironmentSetupError if workers cannot be started anymore, and the engine's errors.
        """
        ...

    async def close(self) -> None:
        """End the processes."""
        ...


@dataclass(frozen=True)
class EnvironmentProgram:
    """Runs episodes with an environment. Implements :class:`EpisodeProgram`."""

    environments: EnvironmentPool

    async def start(self) -> None:
        await self.environments.start()

    async def run_episode(self, task: Task, policy: Policy, limits: EpisodeLimits) -> EpisodeResult:
        return await run_episode(task, policy, self.environments, limits)

    async def close(self) -> None:
        await self.environments.close()


async def run_episode(
    task: Task, policy: Policy, environments: EnvironmentPool, limits: EpisodeLimits
) -> EpisodeResult:
    """Run one episode. Failures that the policy did not cause are part of the result.

    Raises EnvironmentSetupError if workers cannot be started any more, and the engine's errors.
    """
    state = _EpisodeState(task, policy, limits)
    status: EpisodeStatus
    started = time.monotonic()
    episode: OpenEpisode | None = None
    error: EpisodeFailedError | None = None
    try:
        async with sampling_timeout(limits.timeout_s, policy.stopped_s):
            episode = await environments.open(
                task.row, task.environment_seed, timeout_s=limits.step_timeout_s
            )
            status = await state.run(episode)
    except EpisodeFailedError as failed:
        status, error = failed.status, failed
    except TimeoutError:
        status = "timeout"
        error = EpisodeFailedError("timeout", f"the episode took more than {limits.timeout_s:g} s")
    except RendererError as wrong:
        error = EpisodeFailedError("env_error", f"the environment's messages: {wrong}")
        status = error.status
    finally:
        if episode is not None:
            await episode.close()
        policy.service.release(task.episode_id)
    record = Episode(
        status=status,
        start=tuple(state.start),
        tools=tuple(state.tools),
        turns=tuple(state.turns),
        seconds=time.monotonic() - started,
        error="" if error is None else str(error),
    )
    return EpisodeResult(record, tuple(state.calls), error)


@asynccontextmanager
async def sampling_timeout(seconds: float, stopped_s: Callable[[], float]) -> AsyncIterator[None]:
    """Raise TimeoutError ``seconds`` after the start, plus those by which ``stopped_s`` grew."""
    loop = asyncio.get_running_loop()
    ends = loop.time() + seconds - stopped_s()
    async with asyncio.timeout(None) as timer:

        async def watch() -> None:
            while (left := ends + stopped_s() - loop.time()) > 0:
                await asyncio.sleep(left)
            timer.reschedule(loop.time())

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()


@dataclass
class _EpisodeState:
    """State of one episode."""

    task: Task
    policy: Policy
    limits: EpisodeLimits
    start: Sequence[Message] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    turns: list[Turn] = field(default_factory=list)
    calls: list[EngineCall] = field(default_factory=list)

    async def run(self, episode: OpenEpisode) -> EpisodeStatus:
        """Take turns until the episode ends. Return its status."""
        self.start, self.tools = episode.start.messages, episode.start.tools
        render = self.policy.renderer.render
        prompt, left_out = await self.policy.in_renderer(
            with_lost_texts, render, self.start, self.tools
        )
        if len(prompt) >= self.limits.max_tokens:
            return "prompt_too_long"
        for number in range(self.limits.max_turns):
            begun = time.monotonic()
            completion = await self.policy.respond(self._request(prompt, number))
            sampled = time.monotonic()
            self.calls.append(EngineCall(prompt, completion))
            message, problem = await self._parse(prompt, completion)
            step, status = await self._answer(episode, message, completion, problem)
            self.turns.append(
                Turn(
                    message=message,
                    answer=tuple(step.messages),
                    rewards=step.rewards,
                    counts={
                        **{f"ignored_template_{kind}": 1.0 for kind in left_out},
                        **step.counts,
                    },
                    finish_reason=completion.finish_reason,
                    problem=problem or "",
                    num_tokens=len(completion.token_ids),
                    num_prompt_tokens=len(prompt),
                    cached_tokens=completion.cached_tokens,
                    engine_s=sampled - begun,
                    environment_s=time.monotonic() - sampled,
                )
            )
            if status is not None:
                return status
            prompt, left_out = await self._next_prompt(prompt, completion, step.messages)
            if len(prompt) >= self.limits.max_tokens:
                return "max_tokens"
        return "max_turns"

    async def _answer(
        self,
        episode: OpenEpisode,
        message: Message,
        completion: Completion,
        problem: str | None,
    ) -> tuple[Step, EpisodeStatus | None]:
        """Return the answer to a turn, and the status if the episode ends with it."""
        if completion.finish_reason == "length":
            used = len(self.calls[-1].prompt_ids) + len(completion.token_ids)
            full = used >= self.limits.max_tokens
            return Step(done=True), "max_tokens" if full else "max_turn_tokens"
        if problem is None:
            step = await episode.step(message, timeout_s=self.limits.step_timeout_s)
            return step, "done" if step.done else None
        if self.limits.on_parse_error == "end":
            return Step(done=True), "parse_error"
        return Step([{"role": "user", "content": f"error: {problem}"}]), None

    def _request(self, prompt: Ids, number: int) -> Request:
        room = self.limits.max_tokens - len(prompt)
        return Request(
            request_id=f"{self.task.episode_id}/{number}",
            prompt_ids=prompt,
            seed=call_seed(self.task.sampling_seed, prompt),
            max_tokens=min(room, self.policy.sampling.max_tokens),
            conversation=self.task.episode_id,
        )

    async def _parse(self, prompt: Ids, completion: Completion) -> tuple[Message, str | None]:
        """Return the message of a response, and what is wrong with its calls. No call of an ended
        response is run if one is malformed: then all of them are text, as they were sampled."""
        ended = completion.finish_reason == "stop"
        parse = partial(self.policy.renderer.parse, completion.token_ids, prompt_ids=prompt)
        parsed = await self.policy.in_renderer(parse, self.tools, ended=ended)
        if parsed.problem is None or not ended:
            return parsed.message, parsed.problem
        as_text = await self.policy.in_renderer(parse, (), ended=ended)
        return as_text.message, parsed.problem

    async def _next_prompt(
        self, prompt: Ids, completion: Completion, messages: Sequence[Message]
    ) -> tuple[Ids, tuple[str, ...]]:
        """Return the prompt, and the kinds of notices about what the template leaves out."""
        renderer = self.policy.renderer
        earlier = list(self.start)
        for turn in self.turns[:-1]:
            earlier += [turn.message, *turn.answer]
        if renderer.history == "template":
            last = self.turns[-1]
            conversation = [*earlier, last.message, *last.answer]
            return await self.policy.in_renderer(
                with_lost_texts, renderer.render_again, conversation, self.tools
            )
        ids = await self.policy.in_renderer(
            renderer.bridge,
            prompt,
            completion.token_ids,
            messages,
            self.tools,
            earlier=earlier,
            ended=completion.finish_reason == "stop",
        )
        return ids, ()


def call_seed(seed: int, prompt_ids: Sequence[int], attempt: int = 0) -> int:
    """Return the sampling seed of a call: a function of the episode's seed, the exact prompt, and
    the number of earlier calls with this prompt in the episode. A resumed run, and calls that
    arrive in another order, draw the same tokens."""
    seed_bytes = seed.to_bytes(max(8, seed.bit_length() // 8 + 1), "little", signed=True)
    ids = array("q", [attempt, *prompt_ids])
    return int.from_bytes(blake2b(seed_bytes + ids.tobytes(), digest_size=8).digest(), "little")
