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
import stat
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from burnish.agents.episodes import Endpoint
from burnish.environments.base import EnvironmentSetupError
from burnish.environments.pool import EpisodeFailedError

log = logging.getLogger("burnish")

MAX_LINES = 20
"""Lines of a failed agent's output in the error message."""
MAX_REWARD_BYTES = 1 << 20
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
            given = variables(task, endpoint, folder)
            async with _process(self._command, {**os.environ, **given}) as (process, lines):
                try:
                    code = await asyncio.wait_for(process.wait(), timeout_s)
                except TimeoutError as error:
                    what = f"the agent took more than {timeout_s:g} s (episodes.timeout_s)"
                    raise EpisodeFailedError("timeout", what) from error
            if code:
                raise EpisodeFailedError(*_outcome(self._command, code, lines))
            return _reward(folder / "reward.json")

    async def close(self) -> None:
        """Do nothing: each process ends with its episode."""


def variables(task: Mapping[str, Any], endpoint: Endpoint, folder: Path) -> dict[str, str]:
    """Return the environment variables of an agent's process, after writing its task to a file."""
    path = folder / "task.json"
    path.write_text(json.dumps(dict(task)), encoding="utf-8")
    return {
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "ANTHROPIC_BASE_URL": endpoint.root_url,
        "ANTHROPIC_API_KEY": endpoint.api_key,
        "ANTHROPIC_AUTH_TOKEN": endpoint.api_key,
        "BURNISH_BASE_URL": endpoint.base_url,
        "BURNISH_API_KEY": endpoint.api_key,
        "BURNISH_MODEL": endpoint.model,
        "BURNISH_TASK": str(path),
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


def _outcome(command: Sequence[str], code: int, lines: Sequence[str]) -> tuple[Any, str]:
    """Return status and message of an agent that failed."""
    said = "\n".join(lines)
    what = f"exited with code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
    text = f"the agent {command[0]!r} {what}" + (f"; its last output:\n{said}" if said else "")
    return ("infra_error" if code == -signal.SIGKILL else "env_error"), text


def _reward(path: Path) -> Any:
    """Return the reward that an agent wrote; None if it wrote none. Raises EpisodeFailedError."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):  # reading a pipe would wait
            raise EpisodeFailedError("env_error", "BURNISH_REWARD is not a regular file")
        with path.open("rb") as file:
            text = file.read(MAX_REWARD_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EpisodeFailedError("env_error", f"BURNISH_REWARD cannot be read: {error}") from error
    try:
        if len(text) > MAX_REWARD_BYTES:
            raise ValueError(f"more than {MAX_REWARD_BYTES} bytes")
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        what = f"BURNISH_REWARD must contain a number or an object of numbers as JSON: {error}"
        raise EpisodeFailedError("env_error", what) from error
