"""Run an agent in bubblewrap, a process per episode, where it reaches the model server only: a
command line, or a function.

The sandbox has a network of its own. In it, ``relay.py`` listens at a port of the loopback
interface, forwards connections to the agent server's Unix socket, starts the agent, and reports its
exit code and reward. The folder /tmp of the sandbox is the agent's working folder.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from burnish.agents import function_program, relay
from burnish.agents.commands import (
    MAX_LINES,
    failure_of,
    result_of,
    task_text,
    unreadable_reward,
    variables,
)
from burnish.agents.episodes import Endpoint
from burnish.agents.server import EpisodeServer
from burnish.config.sandbox import BubblewrapSandbox
from burnish.environments import worker
from burnish.environments.base import EnvironmentSetupError
from burnish.environments.pool import EnvironmentSpec, EpisodeFailedError
from burnish.sandbox.base import PYTHON, Program, Result, SandboxError
from burnish.sandbox.bubblewrap import SOCKET, WORK, Bubblewrap, Opening

PORT = 8000
"""Port of the relay in the sandbox's own network."""
CHECK_S = 30.0
"""Time limit of the check at the start."""
MAX_OUTPUT_BYTES = 16 << 10
"""Bytes of a failed agent's output in the error message."""
_RELAY = "relay.py"
_FUNCTION = "function_program.py"


class SandboxedCommands:
    """Runs a command in a fresh sandbox once per episode. Implements
    :class:`burnish.agents.episodes.Agents`. ``server`` must listen on a Unix socket.

    Raises SandboxError if bubblewrap or the interpreter is missing.
    """

    def __init__(
        self,
        command: Sequence[str],
        config: BubblewrapSandbox,
        server: EpisodeServer,
        *,
        files: Mapping[str, bytes] = MappingProxyType({}),
        name: str | None = None,
    ) -> None:
        """``files``: name -> content of files in the agent's folder. ``name``: that of the agent
        in messages (None: the program's)."""
        self._sandbox = Bubblewrap(config)
        self._files = dict(files)
        self._name = command[0] if name is None else name
        self._unresolved_command = tuple(command)
        self._command = self._sandbox.resolved(command)
        self._server = server
        self._folder = os.getcwd()
        self._relay = Path(relay.__file__).read_bytes()

    async def start(self) -> None:
        """Test the sandbox, and that the agent can run in it.

        Raises SandboxError, and EnvironmentSetupError if a file of the agent cannot be read there.
        """
        await self._sandbox.check()
        paths = [word for word in self._unresolved_command[1:] if os.path.exists(word)]
        result = await self._run({"check": True, "paths": paths}, wall_s=CHECK_S)
        try:
            problems = json.loads(result.stdout)
        except ValueError:
            output = result.stderr.decode(errors="replace").strip()[-2000:]
            raise EnvironmentSetupError(
                f"the interpreter of episodes.sandbox cannot run agents; it ended with "
                f"{result.ended} {result.exit_code}:\n{output}\nIt must be Python 3.9 or newer; "
                "set episodes.sandbox.python, or raise the sandbox's limits"
            ) from None
        if problems:
            raise EnvironmentSetupError(
                "episodes.command cannot run in episodes.sandbox: " + "; ".join(problems)
            )

    async def run(self, task: Mapping[str, Any], endpoint: Endpoint, *, timeout_s: float) -> Any:
        """Run the command on one task and return what it wrote as its reward.

        Canceling the wait ends the sandbox with all its processes. Raises EpisodeFailedError.
        """
        path = urlsplit(endpoint.root_url).path
        inside = replace(endpoint, root_url=f"http://127.0.0.1:{PORT}{path}")
        environment = variables(inside, Path(WORK))
        nonce = secrets.token_hex()
        settings = {
            "environment": environment,
            "nonce": nonce,
            "task": environment["BURNISH_TASK"],
            "reward": environment["BURNISH_REWARD"],
            "row": task_text(task),
        }
        try:
            result = await self._run(settings, wall_s=timeout_s)
        except SandboxError as error:
            raise EpisodeFailedError("infra_error", str(error)) from error
        if result.ended == "wall_time":
            message = f"the agent took more than {timeout_s:g} s (episodes.timeout_s)"
            raise EpisodeFailedError("timeout", message)
        if result.ended == "output":
            raise unreadable_reward("it is larger than episodes.sandbox.output_bytes")
        return self._outcome(result, nonce)

    async def close(self) -> None:
        """Do nothing: each sandbox ends with its episode."""

    async def trial(self, *more: str) -> Result:
        """Run the command with more arguments, without an episode. Raises SandboxError."""
        command = (*self._command, *more)
        return await self._run_program(Program(command, files=self._files, wall_s=CHECK_S))

    async def _run(self, more: Mapping[str, Any], *, wall_s: float) -> Result:
        """Run the relay with settings. Raises SandboxError."""
        settings = {
            "command": self._command,
            "folder": self._folder,
            "socket": SOCKET,
            "port": PORT,
            **more,
        }
        program = Program(
            (PYTHON, "-I", f"{WORK}/{_RELAY}"),
            stdin=json.dumps(settings).encode(),
            files={_RELAY: self._relay, **self._files},
            wall_s=wall_s,
            cpu_s=math.ceil(wall_s) * (os.cpu_count() or 1),
        )
        return await self._run_program(program)

    async def _run_program(self, program: Program) -> Result:
        opening = Opening(self._server.unix_path, self._folder)
        return await self._sandbox.run_open(program, opening)

    def _outcome(self, result: Result, nonce: str) -> Any:
        """Return the agent's reward. Raises EpisodeFailedError if it failed, or if the result is
        not the relay's: it lacks the nonce."""
        output = result.stderr[-MAX_OUTPUT_BYTES:].decode(errors="replace")
        lines = output.splitlines()[-MAX_LINES:]
        try:
            end = json.loads(result.stdout)
            code, problem, reward = end["code"], end.get("problem"), end.get("reward")
            if not isinstance(code, int) or end["nonce"] != nonce:
                raise ValueError("no exit code, or not by the relay")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            # (the agent may end the relay, or write to its output)
            message = f"the sandbox of the agent ended with {result.exit_code} and no result:\n"
            raise EpisodeFailedError("infra_error", message + "\n".join(lines)) from None
        failed = failure_of([self._name], code, lines) if code else None
        if problem is not None:
            raise failed or unreadable_reward(problem)
        text = None if reward is None else str(reward).encode("latin-1", "replace")
        return result_of(text, failed)


class SandboxedFunctions:
    """Runs a user's function, ``agent(task, endpoint)``, in a fresh sandbox once per episode.
    Implements :class:`burnish.agents.episodes.Agents`.

    The folder of the function's file can be read in the sandbox. Raises EnvironmentSetupError if
    there is no such file, and SandboxError if bubblewrap or the interpreter is missing.
    """

    def __init__(
        self, spec: EnvironmentSpec, config: BubblewrapSandbox, server: EpisodeServer
    ) -> None:
        """``spec``: the function, with absolute paths."""
        self._name = spec.spec
        file = spec.spec.rpartition(":")[0]
        if file.endswith(".py") and not os.path.isfile(file):
            raise EnvironmentSetupError(f"agent {spec.spec}: there is no file {file}")
        folders = (os.path.dirname(file),) if file.endswith(".py") else ()
        python = spec.python or sys.executable
        inside = config.model_copy(
            update={
                "python": shutil.which(python) or python,
                "read_only_paths": (*config.read_only_paths, *folders),
            }
        )
        settings = {"spec": spec.spec, "options": dict(spec.options)}
        files = {
            _FUNCTION: Path(function_program.__file__).read_bytes(),
            "worker.py": Path(worker.__file__).read_bytes(),
            "function.json": json.dumps(settings).encode(),
        }
        command = (PYTHON, "-I", f"{WORK}/{_FUNCTION}", WORK)
        self._commands = SandboxedCommands(command, inside, server, files=files, name=spec.spec)

    async def start(self) -> None:
        """Test the sandbox, and load the function in it.

        Raises SandboxError, and EnvironmentSetupError if the function cannot be loaded there.
        """
        await self._commands.start()
        result = await self._commands.trial("check")
        if result.exit_code != 0:
            output = result.stderr.decode(errors="replace").strip()[-2000:]
            raise EnvironmentSetupError(
                f"agent {self._name} cannot be loaded in episodes.sandbox ({result.ended} "
                f"{result.exit_code}):\n{output}\nIt sees the folder of its file, read_only_paths "
                "and the packages of episodes.python"
            )

    async def run(self, task: Mapping[str, Any], endpoint: Endpoint, *, timeout_s: float) -> Any:
        return await self._commands.run(task, endpoint, timeout_s=timeout_s)

    async def close(self) -> None:
        """Do nothing: each sandbox ends with its episode."""
