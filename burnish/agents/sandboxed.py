"""Run a command line as an agent in bubblewrap, where it reaches the model server only.

The sandbox has a network of its own. In it, ``relay.py`` listens at a port of the loopback
interface, forwards connections to the agent server's Unix socket, starts the agent, and reports its
exit code and reward. The folder /tmp of the sandbox is the agent's working folder.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from burnish.agents import relay
from burnish.agents.commands import (
    MAX_LINES,
    failure_of,
    parse_reward,
    task_text,
    unreadable_reward,
    variables,
)
from burnish.agents.episodes import Endpoint
from burnish.agents.server import EpisodeServer
from burnish.config.sandbox import BubblewrapSandbox
from burnish.environments.base import EnvironmentSetupError
from burnish.environments.pool import EpisodeFailedError
from burnish.sandbox.base import PYTHON, Program, Result, SandboxError
from burnish.sandbox.bubblewrap import SOCKET, WORK, Bubblewrap, Opening

PORT = 8000
"""Port of the relay in the sandbox's own network."""
CHECK_S = 30.0
"""Time limit of the check at the start."""
MAX_OUTPUT_BYTES = 16 << 10
"""Bytes of a failed agent's output in the error message."""
_RELAY = "relay.py"


class SandboxedCommands:
    """Runs a command in a fresh sandbox once per episode. Implements
    :class:`burnish.agents.episodes.Agents`. ``server`` must listen on a Unix socket.

    Raises SandboxError if bubblewrap or the interpreter is missing.
    """

    def __init__(
        self, command: Sequence[str], config: BubblewrapSandbox, server: EpisodeServer
    ) -> None:
        self._sandbox = Bubblewrap(config)
        self._given = tuple(command)
        self._command = self._sandbox.resolved(command)
        self._server = server
        self._folder = os.getcwd()
        self._relay = Path(relay.__file__).read_bytes()

    async def start(self) -> None:
        """Test the sandbox, and that the agent can run in it.

        Raises SandboxError, and EnvironmentSetupError if a file of the agent cannot be read there.
        """
        await self._sandbox.check()
        paths = [word for word in self._given[1:] if os.path.exists(word)]
        result = await self._run({"check": True, "paths": paths}, wall_s=CHECK_S)
        try:
            found = json.loads(result.stdout)
        except ValueError:
            said = result.stderr.decode(errors="replace").strip()[-2000:]
            raise EnvironmentSetupError(
                f"the interpreter of episodes.sandbox cannot run agents; it ended with "
                f"{result.ended} {result.exit_code}:\n{said}\nIt must be Python 3.9 or newer; set "
                "episodes.sandbox.python, or raise the sandbox's limits"
            ) from None
        if found:
            raise EnvironmentSetupError(
                "episodes.command cannot run in episodes.sandbox: " + "; ".join(found)
            )

    async def run(self, task: Mapping[str, Any], endpoint: Endpoint, *, timeout_s: float) -> Any:
        """Run the command on one task and return what it wrote as its reward.

        Canceling the wait ends the sandbox with all its processes. Raises EpisodeFailedError.
        """
        path = urlsplit(endpoint.root_url).path
        inside = replace(endpoint, root_url=f"http://127.0.0.1:{PORT}{path}")
        given = variables(inside, Path(WORK))
        settings = {
            "environment": given,
            "task": given["BURNISH_TASK"],
            "reward": given["BURNISH_REWARD"],
            "row": task_text(task),
        }
        try:
            result = await self._run(settings, wall_s=timeout_s)
        except SandboxError as error:
            raise EpisodeFailedError("infra_error", str(error)) from error
        if result.ended == "wall_time":
            what = f"the agent took more than {timeout_s:g} s (episodes.timeout_s)"
            raise EpisodeFailedError("timeout", what)
        if result.ended == "output":
            raise unreadable_reward("it is larger than episodes.sandbox.output_bytes")
        return self._outcome(result)

    async def close(self) -> None:
        """Do nothing: each sandbox ends with its episode."""

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
            files={_RELAY: self._relay},
            wall_s=wall_s,
            cpu_s=math.ceil(wall_s) * (os.cpu_count() or 1),
        )
        opening = Opening(self._server.unix_path, self._folder)
        return await self._sandbox.run_open(program, opening)

    def _outcome(self, result: Result) -> Any:
        """Return the agent's reward. Raises EpisodeFailedError if it failed."""
        output = result.stderr[-MAX_OUTPUT_BYTES:].decode(errors="replace")
        lines = output.splitlines()[-MAX_LINES:]
        try:
            end = json.loads(result.stdout)
            code, problem, reward = end["code"], end.get("problem"), end.get("reward")
            if not isinstance(code, int):
                raise ValueError("no exit code")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            # (the agent may end the relay, or write to its output)
            said = "\n".join(lines)
            what = f"the sandbox of the agent ended with {result.exit_code} and no result:\n{said}"
            raise EpisodeFailedError("infra_error", what) from None
        if code:
            raise failure_of(self._given, code, lines)
        if problem is not None:
            raise unreadable_reward(problem)
        return parse_reward(None if reward is None else str(reward).encode("latin-1", "replace"))
