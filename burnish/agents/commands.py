"""Run a command line as an agent: one process per episode.

The process gets its task and the address of the policy in environment variables
(:func:`variables`). Its exit code is the outcome: 0 is success. It may write a reward to a file.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from burnish.agents.episodes import Endpoint
from burnish.agents.relay import read_reward
from burnish.environments.base import EnvironmentSetupError
from burnish.environments.pool import EpisodeFailedError

log = logging.getLogger("burnish")

MAX_LINES = 20
"""Lines of a failed agent's output in the error message."""
TERMINATE_S = 2.0
"""Time between SIGTERM and SIGKILL for an agent whose episode has ended."""
DRAIN_S = 1.0
"""Time in which the last output of a process that ended is read."""


class CommandAgents:
    """Runs a command once per episode. Implements :class:`burnish.agents.episodes.Agents`."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)

    async def start(self) -> None:
        """Check that the program exists. Raises EnvironmentSetupError."""
        program = self._command[0]
        if shutil.which(program) is None:
            raise EnvironmentSetupError(
                f"episodes.command: there is no program {program!r}; give its path, or a name that "
                "is found in PATH"
            )

    async def run(self, task: Mapping[str, Any], endpoint: Endpoint, *, timeout_s: float) -> Any:
        """Run the command on one task and return what it wrote as its reward.

        Canceling the wait ends the process and everything that it started. Raises
        EpisodeFailedError.
        """
        with tempfile.TemporaryDirectory(prefix="burnish-agent-", ignore_cleanup_errors=True) as at:
            folder = Path(at)
            given = variables(endpoint, folder)
            Path(given["BURNISH_TASK"]).write_text(task_text(task), encoding="utf-8")
            async with _process(self._command, {**os.environ, **given}) as (process, lines):
                try:
                    code = await asyncio.wait_for(process.wait(), timeout_s)
                except TimeoutError as error:
                    what = f"the agent took more than {timeout_s:g} s (episodes.timeout_s)"
                    raise EpisodeFailedError("timeout", what) from error
            if code:
                raise failure_of(self._command, code, lines)
            try:
                reward = read_reward(given["BURNISH_REWARD"])
            except (OSError, ValueError) as error:
                raise unreadable_reward(error) from error
            return parse_reward(reward)

    async def close(self) -> None:
        """Do nothing: each process ends with its episode."""


def variables(endpoint: Endpoint, folder: Path) -> dict[str, str]:
    """Return the environment variables of an agent's process whose working folder is ``folder``."""
    return {
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "ANTHROPIC_BASE_URL": endpoint.root_url,
        "ANTHROPIC_API_KEY": endpoint.api_key,
        "ANTHROPIC_AUTH_TOKEN": endpoint.api_key,
        "BURNISH_BASE_URL": endpoint.base_url,
        "BURNISH_API_KEY": endpoint.api_key,
        "BURNISH_MODEL": endpoint.model,
        "BURNISH_TASK": str(folder / "task.json"),
        "BURNISH_REWARD": str(folder / "reward.json"),
        "BURNISH_WORKDIR": str(folder),
    }


@asynccontextmanager
async def _process(
    command: Sequence[str], environment: Mapping[str, str]
) -> AsyncIterator[tuple[asyncio.subprocess.Process, deque[str]]]:
    """Start a command in a session of its own. Yield the process and its last lines of output. Kill
    the session at the end."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        what = f"the agent {command[0]!r} cannot be started: {error.strerror}"
        raise EpisodeFailedError("infra_error", what) from error
    lines: deque[str] = deque(maxlen=MAX_LINES)
    reader = asyncio.create_task(_read(process, lines))
    try:
        yield process, lines
    finally:
        await _end(process, reader)


async def _read(process: asyncio.subprocess.Process, lines: deque[str]) -> None:
    assert process.stdout is not None
    while True:
        try:
            line = await process.stdout.readline()
        except ValueError:  # a longer line than the limit: its rest is read as the next one
            continue
        if not line:
            return
        text = line.decode(errors="replace").rstrip()
        lines.append(text)
        log.debug("agent %d: %s", process.pid, text)


async def _end(process: asyncio.subprocess.Process, reader: asyncio.Task[None]) -> None:
    """End the process and its session: SIGTERM, then SIGKILL."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(process.wait()), TERMINATE_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await asyncio.wait([reader], timeout=DRAIN_S)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)


def task_text(task: Mapping[str, Any]) -> str:
    """Return a task as JSON. Raises EpisodeFailedError if it has other values."""
    try:
        return json.dumps(dict(task))
    except (TypeError, ValueError) as error:
        text = f"the task is not JSON: {error}; remove that column from the data"
        raise EpisodeFailedError("env_error", text) from error


def failure_of(command: Sequence[str], code: int, lines: Sequence[str]) -> EpisodeFailedError:
    """Return the error of an agent that failed. ``lines``: its last output."""
    said = "\n".join(lines)
    names: dict[int, str] = {s.value: s.name for s in signal.Signals}
    ended = names.get(-code, f"signal {-code}")
    what = f"exited with code {code}" if code > 0 else f"was ended by {ended}"
    text = f"the agent {command[0]!r} {what}" + (f"; its last output:\n{said}" if said else "")
    return EpisodeFailedError("infra_error" if code == -signal.SIGKILL else "env_error", text)


def unreadable_reward(error: object) -> EpisodeFailedError:
    """Return the error of an agent whose reward cannot be read."""
    return EpisodeFailedError("env_error", f"BURNISH_REWARD cannot be read: {error}")


def parse_reward(text: bytes | None) -> Any:
    """Return the reward that an agent wrote; None if it wrote none. Raises EpisodeFailedError."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        what = f"BURNISH_REWARD must contain a number or an object of numbers as JSON: {error}"
        raise EpisodeFailedError("env_error", what) from error
