"""Episodes of a multi-turn environment in worker processes.

:class:`EnvironmentPool` gives every episode to the worker with the fewest (``worker_set.py``) and
turns failures of calls into the status of the episode. It is used from one event loop.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from burnish.chat_message import MessageError, canonical, text_of, wrapped_tool
from burnish.config.base import absolute_program
from burnish.environments.base import EnvironmentSetupError, EpisodeInfraError
from burnish.environments.multi_turn import Start, Step
from burnish.environments.process import start_process
from burnish.environments.worker_set import (
    EnvironmentWorker,
    NoWorkerError,
    ReplyError,
    Session,
    WorkerEndedError,
    WorkerSet,
)
from burnish.errors import BurnishError
from burnish.types import is_metric_name

log = logging.getLogger("burnish")

START_TIMEOUT_S = 120.0
"""Time in which a worker must have imported the environment."""
CLOSE_TIMEOUT_S = 5.0

Failure = Literal["env_error", "timeout", "infra_error"]


class EpisodeFailedError(BurnishError, RuntimeError):
    """An episode cannot continue. ``status`` is the cause: the environment's code raised or
    returned an invalid value (env_error), it exceeded a time limit (timeout), or its process died
    (infra_error)."""

    def __init__(self, status: Failure, message: str, *, is_crash: bool = False) -> None:
        """``is_crash``: an agent raised, or ended with an error."""
        super().__init__(message)
        self.status: Failure = status
        self.is_crash = is_crash
        self.result: Any = None
        """Result that an agent gave before it failed."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """A multi-turn environment: class, options and interpreter."""

    spec: str
    """``path/to/file.py:Class`` or ``package.module:Class``."""
    options: Mapping[str, Any]
    """Keyword arguments of the class. JSON values only."""
    python: str | None = None
    """Interpreter of the worker processes. None: this one."""
    role: Literal["environment", "agent"] = "environment"
    """agent: ``spec`` names a function that plays an episode by itself."""

    def with_absolute_paths(self) -> EnvironmentSpec:
        """Return the spec with absolute paths, for processes with another working directory."""
        python = self.python and absolute_program(self.python)
        return replace(self, spec=absolute_path(self.spec), python=python)


def absolute_path(spec: str) -> str:
    """Return ``path/to/file.py:name`` with an absolute path, and other names unchanged."""
    where, _, name = spec.rpartition(":")
    return f"{os.path.abspath(where)}:{name}" if where.endswith(".py") else spec


def absolute_argument(argument: str) -> str:
    """Return an argument that names a file of this machine, such as ``tools/server.py``, as an
    absolute path, and others unchanged."""
    is_path = os.sep in argument or os.path.splitext(argument)[1]
    return os.path.abspath(argument) if is_path and os.path.isfile(argument) else argument


StartWorker = Callable[[str | None], Awaitable[EnvironmentWorker]]
"""Starts a worker under an interpreter (None: this one)."""


class EnvironmentPool:
    """Episodes in worker processes.

    ``start_worker`` gets :attr:`EnvironmentSpec.python`. Default: processes on this machine.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        *,
        workers: int,
        start_worker: StartWorker = start_process,
    ) -> None:
        self.spec = spec
        self.workers = WorkerSet(partial(loaded_worker, spec, start_worker), workers)

    async def start(self) -> None:
        """Start the workers. Raises EnvironmentSetupError if one cannot be started."""
        await self.workers.start()

    async def open(self, task: Mapping[str, Any], seed: int, *, timeout_s: float) -> OpenEpisode:
        """Begin an episode. Raises EpisodeFailedError, or EnvironmentSetupError if workers cannot
        be started any more."""
        try:
            session = await self.workers.acquire()
        except NoWorkerError as error:
            raise EpisodeFailedError("infra_error", str(error)) from error
        episode = OpenEpisode(self, session)
        try:
            await episode.reset(task, seed, timeout_s=timeout_s)
        except BaseException:
            await episode.close()
            raise
        return episode

    async def close(self) -> None:
        """Kill all workers."""
        await self.workers.close()


async def loaded_worker(spec: EnvironmentSpec, start_worker: StartWorker) -> EnvironmentWorker:
    """Return a worker that has imported the user's code. Raises EnvironmentSetupError."""
    worker = None
    label = f"{spec.role} {spec.spec}"
    process = f"the worker process ({spec.python or sys.executable})"
    try:
        worker = await start_worker(spec.python)
        request = {"spec": spec.spec, "options": dict(spec.options), "role": spec.role}
        await worker.call(START_TIMEOUT_S, op="load", **request)
        loaded, worker = worker, None
        return loaded
    except ReplyError as error:
        raise EnvironmentSetupError(f"{label} cannot be loaded: {error}{error.trace}") from error
    except TimeoutError as error:
        raise EnvironmentSetupError(
            f"{label}: {process} did not load it within {START_TIMEOUT_S:g} s"
        ) from error
    except WorkerEndedError as error:
        raise EnvironmentSetupError(
            f"{label}: {process} ended while loading it: {error}"
        ) from error
    except OSError as error:
        raise EnvironmentSetupError(
            f"{label}: its worker cannot be started: {spec.python or sys.executable!r} "
            f"({error.strerror}); give the path of a Python 3.9+ interpreter"
        ) from error
    finally:
        if worker is not None:
            await worker.end()


class OpenEpisode:
    """An episode in a worker."""

    def __init__(self, pool: EnvironmentPool, session: Session) -> None:
        self._pool, self._session = pool, session
        self._open = True
        self.start = Start(())

    async def reset(self, task: Mapping[str, Any], seed: int, *, timeout_s: float) -> None:
        """Create the environment object and set :attr:`start`. Raises EpisodeFailedError."""
        reply = await self._call("open", "reset", timeout_s, task=dict(task), seed=seed)
        self.start = self._checked(check_start, reply)

    async def step(self, message: Mapping[str, Any], *, timeout_s: float) -> Step:
        """Pass a message to the environment. Raises EpisodeFailedError."""
        reply = await self._call("step", "step", timeout_s, message=dict(message))
        return self._checked(check_step, reply)

    def _checked(self, check: Any, reply: Any) -> Any:
        try:
            return check(reply)
        except ValueError as error:
            raise EpisodeFailedError(
                "env_error", f"environment {self._pool.spec.spec}: {error}"
            ) from error

    async def _call(self, op: str, method: str, timeout_s: float, **request: Any) -> Any:
        label = f"environment {self._pool.spec.spec}"
        try:
            return await self._session.call(timeout_s, op=op, **request)
        except ReplyError as error:
            # (the worker sends the name of the exception's class)
            infra = error.args[0] == EpisodeInfraError.__name__
            raise EpisodeFailedError(
                "infra_error" if infra else "env_error",
                f"{label}: {method}() raised {error}{error.trace}",
            ) from error
        except TimeoutError as error:
            raise EpisodeFailedError("timeout", f"{label}: {method}() {error}") from error
        except WorkerEndedError as error:
            raise EpisodeFailedError(
                "infra_error", f"{label}: {method}() has no result: {error}"
            ) from error
        except (TypeError, ValueError) as error:
            raise EpisodeFailedError(
                "env_error", f"{label}: {method}() got a value that is not JSON: {error}"
            ) from error

    async def close(self) -> None:
        """Close the environment object, unless its worker is retired. Never raises."""
        if not self._open:
            return
        self._open = False
        try:
            if not self._session.retired:
                await self._session.call(CLOSE_TIMEOUT_S, op="close")
        except ReplyError as error:
            log.warning("environment %s: close() raised %s", self._pool.spec.spec, error)
        except (WorkerEndedError, TimeoutError):
            pass  # the process is gone or retired, and the episode with it
        finally:
            await self._pool.workers.release(self._session)


def check_start(reply: Any) -> Start:
    """Return the result of ``reset`` with messages and tools in the canonical form. Raises
    ValueError if it is invalid."""
    messages = _messages(reply.get("messages"), "reset")
    if not messages:
        raise ValueError("reset() returned no messages, so there is nothing to respond to")
    tools = reply.get("tools") or ()
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"reset() returned tools={tools!r:.80}; expected a list of JSON schemas")
    return Start(messages, tuple(map(wrapped_tool, tools)))


def check_step(reply: Any) -> Step:
    """Return the result of ``step``. Raises ValueError if it is invalid."""
    done = reply.get("done", False)
    if not isinstance(done, bool):
        raise ValueError(f"step() returned done={done!r:.80}; expected true or false")
    messages = _messages(reply.get("messages") or [], "step")
    if not messages and not done:
        raise ValueError(
            "step() returned done=False and no messages, so the policy would have nothing to "
            "respond to; return a message or done=True"
        )
    numbers = {}
    for key in ("rewards", "counts"):
        numbers[key] = _numbers(reply.get(key) or {}, key)
    return Step(messages, done, numbers["rewards"], numbers["counts"])


def _messages(value: Any, method: str) -> tuple[Mapping[str, Any], ...]:
    try:
        if not isinstance(value, list | tuple):
            raise MessageError("it is no list")
        return tuple(canonical(message) for message in value)
    except MessageError as error:
        raise ValueError(
            f"{method}() returned messages={value!r:.120}; expected a list of "
            f'{{"role": ..., "content": ...}}: {error}'
        ) from error


def plain_text(content: Any, method: str) -> str:
    """Return content as text, with a list of text parts joined. Raises ValueError for other
    values and parts."""
    try:
        return text_of(content)
    except MessageError as error:
        raise ValueError(f"{method}() returned {content!r:.120}: {error}") from error


def _numbers(value: Any, key: str) -> dict[str, float]:
    if not isinstance(value, dict):
        raise ValueError(f"step() returned {key}={value!r:.80}; expected a mapping name -> number")
    for name, number in value.items():
        if not is_metric_name(name) or not _is_finite(number):
            raise ValueError(
                f"step() returned {key}={{{name!r:.80}: {number!r:.40}}}; expected finite numbers "
                "by names without control characters"
            )
    return {name: float(number) for name, number in value.items()}


def _is_finite(number: Any) -> bool:
    try:
        return isinstance(number, bool | int | float) and math.isfinite(number)
    except OverflowError:  # an integer beyond the range of float
        return False
