"""Run episodes with agent programs: each gets an endpoint and calls the policy there."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from burnish.agents.accepted import Accepted
from burnish.agents.calls import Backend
from burnish.agents.session import MODEL, TrainingSession
from burnish.environments.pool import EpisodeFailedError
from burnish.episodes.loop import EpisodeLimits, EpisodeResult, Policy, Task
from burnish.types import is_metric_name

log = logging.getLogger("burnish")


@dataclass(frozen=True)
class Endpoint:
    """Address and key of one episode, for any client of a model API."""

    root_url: str
    """Without ``/v1``: the base URL of Anthropic's clients."""
    api_key: str = field(repr=False)
    model: str = MODEL
    max_tokens: int = 0
    """Tokens of a conversation (``episodes.max_tokens``)."""

    @property
    def base_url(self) -> str:
        """Return the base URL of OpenAI's clients."""
        return f"{self.root_url}/v1"


class AgentServer(Protocol):
    """Server of the model APIs for open episodes."""

    async def start(self) -> None:
        """Listen. Raises ServeError if the address cannot be used."""
        ...

    def admit(self, backend: Backend) -> Endpoint:
        """Return a new endpoint whose calls ``backend`` answers."""
        ...

    def dismiss(self, endpoint: Endpoint) -> None:
        """Close an endpoint. Later calls are refused with status 410."""
        ...

    async def close(self) -> None:
        """Stop listening and close all connections."""
        ...


class Agents(Protocol):
    """Processes that run a user's agent program."""

    async def start(self) -> None:
        """Start the processes. Raises EnvironmentSetupError if the program cannot be loaded."""
        ...

    async def run(self, task: Mapping[str, Any], endpoint: Endpoint, *, timeout_s: float) -> Any:
        """Run the agent on one task and return its result. Canceling the wait ends the agent.

        Raises EpisodeFailedError: env_error if the agent raised or exited with an error, timeout
        after ``timeout_s`` seconds, infra_error if its process was lost.
        """
        ...

    async def close(self) -> None:
        """End all processes."""
        ...


@functools.cache
def _warn_of_replaced_column() -> None:
    """Log, once, that a column of the data does not reach agents."""
    log.warning(
        "the data has a column prompt_text, but the task of an agent has the rendered prompt under "
        "this name; rename the column"
    )


@dataclass(frozen=True)
class AgentProgram:
    """Runs episodes with an agent program. Implements
    :class:`burnish.episodes.loop.EpisodeProgram`."""

    server: AgentServer
    agents: Agents
    accepted: Accepted = Accepted()
    _warned: set[str] = field(default_factory=set)

    async def start(self) -> None:
        await self.server.start()
        await self.agents.start()

    async def run_episode(self, task: Task, policy: Policy, limits: EpisodeLimits) -> EpisodeResult:
        """Run one episode: run the agent until it returns, fails, or reaches the time limit."""
        session = TrainingSession(task, policy, limits, self.accepted)
        endpoint = replace(self.server.admit(session), max_tokens=limits.max_tokens)
        if "prompt_text" in task.row:
            _warn_of_replaced_column()
        row = {**task.row, "seed": task.environment_seed, "prompt_text": task.prompt_text}
        agent = asyncio.ensure_future(self.agents.run(row, endpoint, timeout_s=limits.timeout_s))
        rewards: Mapping[str, float] = {}
        error: EpisodeFailedError | None = None
        try:
            await asyncio.wait({agent, session.failure}, return_when=asyncio.FIRST_COMPLETED)
            if session.failure.done():
                session.failure.result()
            rewards = as_rewards(agent.result())
        except EpisodeFailedError as failed:
            error = failed
            with suppress(EpisodeFailedError):
                rewards = as_rewards(failed.result)
        finally:
            self.server.dismiss(endpoint)
            agent.cancel()
            await asyncio.gather(agent, return_exceptions=True)
            await session.close()
        if not session.failure.cancelled():  # the engine failed just when the agent ended
            session.failure.result()
        result = session.result(rewards, error)
        if loop := session.summary_loop():
            self._warn_once("summary_loop", loop)
        if error is not None and result.error is None:
            text = f"an agent failed behind a limit, so that its episode is {result.record.status}"
            self._warn_once("failed_behind", f"{text}: {error}")
        return result

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("%s (logged once)", text)

    async def close(self) -> None:
        try:
            await self.agents.close()
        finally:
            await self.server.close()


def as_rewards(result: Any) -> dict[str, float]:
    """Return the result of an agent as rewards by name.

    None: no rewards. A number is the reward ``reward``. Raises EpisodeFailedError (env_error) for
    anything else than a mapping of names to finite numbers.
    """
    rewards = {} if result is None else result
    if not isinstance(rewards, Mapping):
        rewards = {"reward": rewards}
    for name, value in rewards.items():
        if not is_metric_name(name) or not _is_number(value):
            raise EpisodeFailedError(
                "env_error",
                f"the agent returned {result!r:.80}; return None, a finite number, or a mapping of "
                "names without control characters to finite numbers",
            )
    return {name: float(value) for name, value in rewards.items()}


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, bool | int | float) and math.isfinite(value)
    except OverflowError:  # an integer beyond the range of float
        return False
