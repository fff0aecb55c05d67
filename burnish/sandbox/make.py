"""Create the sandbox of a config, and use it from synchronous code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from burnish.config.sandbox import AnySandbox
from burnish.loop_thread import LoopThread
from burnish.sandbox.base import Program, Result, Sandbox
from burnish.sandbox.bubblewrap import Bubblewrap
from burnish.sandbox.service import ServiceClient
from burnish.sandbox.unsafe_subprocess import UnsafeSubprocess


def make_sandbox(config: AnySandbox) -> Sandbox:
    """Return the sandbox of a config. Call ``check`` before its first use.

    Raises SandboxError if something that it needs is missing.
    """
    return SANDBOXES[config.kind](config)


SANDBOXES: Mapping[str, Callable[[Any], Sandbox]] = {
    "bubblewrap": Bubblewrap,
    "service": ServiceClient,
    "unsafe_subprocess": UnsafeSubprocess,
}
"""``kind`` -> class. The configs are in ``config/sandbox.py``."""


@cache
def shared_sandbox(config: AnySandbox) -> Sandbox:
    """Return the one sandbox of a config in this process, so that its limit on concurrent programs
    holds for all users. For processes with one event loop."""
    return make_sandbox(config)


class SyncSandbox:
    """A sandbox for synchronous callers, on an event loop in a thread of its own.

    Raises SandboxError if the sandbox cannot be used.
    """

    def __init__(self, config: AnySandbox) -> None:
        self._loop = LoopThread("sandbox")
        try:
            self._sandbox = make_sandbox(config)
            self._loop.run(self._sandbox.check)
        except BaseException:
            self._loop.close()
            raise

    def run(self, program: Program) -> Result:
        """Run a program. Raises SandboxError if the sandbox itself fails."""
        return self._loop.run(self._sandbox.run, program)

    def close(self) -> None:
        """Release the sandbox and end the thread."""
        self._loop.run(self._sandbox.close)
        self._loop.close()


def check_sandbox(config: AnySandbox) -> None:
    """Run a small program in the sandbox. Raises SandboxError if it cannot be used."""
    SyncSandbox(config).close()
