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
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from burnish.agents import guard_program
from burnish.agents.episodes import Endpoint
from burnish.agents.relay import read_reward
from burnish.environments import worker
from burnish.environments.base import EnvironmentSetupError
from burnish.environments.pool import EpisodeFailedError, Failure
from burnish.environments.process import ProcessPipes
from burnish.environments.worker import without_proxy
from burnish.json_text import json_object

log = logging.getLogger("burnish")

MAX_LINES = 20
"""Lines of a failed agent's output in the error message."""
MAX_LINE_BYTES = 1 << 16
"""Longest line of an agent's output. Longer ones are left out, except for their end."""
TERMINATE_S = 2.0
"""Time between SIGTERM and SIGKILL for an agent whose episode has ended."""
_RUN = "BURNISH_AGENTS"
"""Environment variable of all agents of a run: the folder of their folders."""
DRAIN_S = 1.0
"""Time in which the last output of a process that ended is read."""


class CommandAgents:
    """Runs a command once per episode. Implements :class:`burnish.agents.episodes.Agents`."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)
        self._folder: str | None = None
        """Folder of the folders of all episodes, once started."""
        self._guard: subprocess.Popen[bytes] | None = None
        """Process that cleans up if this one is killed."""

    async def start(self) -> None:
        """Check that the program exists. Raises EnvironmentSetupError."""
        program = self._command[0]
        if shutil.which(program) is None:
            raise EnvironmentSetupError(
                f"episodes.command: there is no program {program!r}; give its path, or a name that "
                "is found in PATH"
            )
        try:
            self._folder = tempfile.mkdtemp(prefix="burnish-agents-")
        except OSError as error:
            raise EnvironmentSetupError(
                f"there is no temporary folder for agents: {error}; make room in "
                f"{tempfile.gettempdir()}, or set TMPDIR to another folder"
            ) from error
        words = (guard_program.__file__, worker.__file__, f"{_RUN}={self._folder}", self._folder)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", *words], stdin=subprocess.PIPE, start_new_session=True
        )

    async def run(self, task: Mapping[str, Any], endpoint: Endpoint, *, timeout_s: float) -> Any:
        """Run the command on one task and return what it wrote as its reward.

        Canceling the wait ends the process and everything that it started. Raises
        EpisodeFailedError.
        """
        assert self._folder is not None
        async with _folder(self._folder) as folder:
            environment = {**variables(endpoint, folder), _RUN: self._folder}
            Path(environment["BURNISH_TASK"]).write_text(task_text(task), encoding="utf-8")
            environment |= without_proxy(os.environ, endpoint.root_url)
            async with _process(self._command, {**os.environ, **environment}) as process:
                try:
                    await asyncio.wait_for(process.pipes.exited.wait(), timeout_s)
                except TimeoutError as error:
                    message = f"the agent took more than {timeout_s:g} s (episodes.timeout_s)"
                    raise EpisodeFailedError("timeout", message) from error
            code = process.transport.get_returncode()
            failed = failure_of(self._command, code, process.lines) if code else None
            try:
                reward = read_reward(environment["BURNISH_REWARD"])
            except (OSError, ValueError) as error:
                raise failed or unreadable_reward(error) from error
            return result_of(reward, failed)

    async def close(self) -> None:
        """Delete the folders. Each process has ended with its episode."""
        guard, self._guard = self._guard, None
        if guard is not None and self._folder is not None:
            await asyncio.to_thread(guard.communicate, b"done")
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)


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
        "BURNISH_MAX_TOKENS": str(endpoint.max_tokens),
        "BURNISH_TASK": str(folder / "task.json"),
        "BURNISH_REWARD": str(folder / "reward.json"),
        "BURNISH_WORKDIR": str(folder),
    }


@asynccontextmanager
async def _folder(parent: str) -> AsyncIterator[Path]:
    """Make a temporary folder in another one and delete it at the end, in a thread: it may contain
    many files."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="a", dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        message = f"there is no temporary folder for an agent: {error}"
        raise EpisodeFailedError("infra_error", message) from error
    try:
        yield Path(folder.name)
    finally:
        await asyncio.to_thread(folder.cleanup)


@dataclass(frozen=True)
class _Process:
    """An agent's process and the last lines of its output."""

    transport: asyncio.SubprocessTransport
    pipes: ProcessPipes
    lines: deque[str]


@asynccontextmanager
async def _process(
    command: Sequence[str], environment: Mapping[str, str]
) -> AsyncIterator[_Process]:
    """Start a command in a session of its own. At the end, send SIGTERM, then SIGKILL to its
    process group, kill what it has started outside of the group, and close its pipes."""
    try:
        transport, pipes = await asyncio.get_running_loop().subprocess_exec(
            partial(ProcessPipes, MAX_LINE_BYTES),
            *command,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        message = f"the agent {command[0]!r} cannot be started: {error.strerror}"
        raise EpisodeFailedError("infra_error", message) from error
    process = _Process(transport, pipes, deque(maxlen=MAX_LINES))
    reader = asyncio.create_task(_read(process))
    try:
        yield process
    finally:
        pid, exited = transport.get_pid(), pipes.exited
        for number in (signal.SIGTERM, signal.SIGKILL):
            if number == signal.SIGKILL or not exited.is_set():
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, number)
            with suppress(TimeoutError):
                await asyncio.wait_for(exited.wait(), TERMINATE_S)
        await asyncio.to_thread(
            worker.kill_with, f"BURNISH_WORKDIR={environment['BURNISH_WORKDIR']}"
        )
        await asyncio.wait([reader], timeout=DRAIN_S)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        transport.close()  # processes outside the group may hold the pipes open


async def _read(process: _Process) -> None:
    output = process.pipes.stdout
    assert output is not None
    pid = process.transport.get_pid()
    while True:
        try:
            line = await output.readline()
        except ValueError:  # a longer line than the limit: its rest is read as the next one
            continue
        if not line:
            return
        text = line.decode(errors="replace").rstrip()
        process.lines.append(text)
        log.debug("agent %d: %s", pid, text)


def task_text(task: Mapping[str, Any]) -> str:
    """Return a task as JSON. Raises EpisodeFailedError if it has other values."""
    try:
        return json.dumps(dict(task))
    except (TypeError, ValueError) as error:
        text = f"the task is not JSON: {error}; remove that column from the data"
        raise EpisodeFailedError("env_error", text) from error


def failure_of(command: Sequence[str], code: int, lines: Sequence[str]) -> EpisodeFailedError:
    """Return the error of an agent that failed. ``lines``: its last output."""
    output = "\n".join(lines)
    names: dict[int, str] = {s.value: s.name for s in signal.Signals}
    signal_name = names.get(-code, f"signal {-code}")
    outcome = f"exited with code {code}" if code > 0 else f"was ended by {signal_name}"
    text = f"the agent {command[0]!r} {outcome}"
    text += f"; its last output:\n{output}" if output else ""
    status: Failure = "infra_error" if code == -signal.SIGKILL else "env_error"
    return EpisodeFailedError(status, text, is_crash=True)


def unreadable_reward(error: object) -> EpisodeFailedError:
    """Return the error of an agent whose reward cannot be read."""
    return EpisodeFailedError("env_error", f"BURNISH_REWARD cannot be read: {error}")


def result_of(text: bytes | None, failed: EpisodeFailedError | None) -> Any:
    """Return the reward that an agent wrote; None if it wrote none. Raises EpisodeFailedError: that
    of an agent that ``failed`` has the reward, too."""
    try:
        result = None if text is None else json.loads(text, object_pairs_hook=json_object)
    except (ValueError, RecursionError) as error:
        message = f"BURNISH_REWARD must contain a number or an object of numbers as JSON: {error}"
        raise failed or EpisodeFailedError("env_error", message) from error
    if failed is not None:
        failed.result = result
        raise failed
    return result
