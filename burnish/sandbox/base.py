"""The sandbox interface: a program with its limits in, its output and the cause of its end out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from burnish.errors import BurnishError

PYTHON = "python"
"""As the first argument of a command: the sandbox's interpreter."""

Ended = Literal["exit", "wall_time", "cpu_time", "output"]
"""exit: the program ended itself, or a signal ended it. The others: it exceeded that limit."""


class SandboxError(BurnishError, RuntimeError):
    """The sandbox cannot run programs: it is missing, does not isolate, or failed. A failure of the
    program itself is a :class:`Result`."""


@dataclass(frozen=True)
class Program:
    """A program to run in a fresh sandbox.

    Example: ``Program(("sort", "-n"), stdin=b"2\\n1\\n", wall_s=1.0)``.
    """

    command: tuple[str, ...]
    """Program and arguments. It runs in an empty temporary folder."""
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Relative path -> content of files in the working directory."""
    wall_s: float = 10.0
    """Maximum seconds from start to end."""
    cpu_s: int | None = None
    """Maximum seconds of CPU time of each process. None: ``wall_s``, rounded up."""


@dataclass(frozen=True)
class Result:
    """The end of a program.

    Example: ``Result(stdout=b"1\\n2\\n", stderr=b"", exit_code=0, ended="exit", seconds=0.05)``.
    """

    stdout: bytes
    stderr: bytes
    exit_code: int | None
    """Exit code; 128 + n if signal n ended the program, as in a shell. None if it was ended by
    the limit of ``wall_time`` or ``output``."""
    ended: Ended
    seconds: float
    """Seconds from start to end, without the time in the queue."""


class Sandbox(Protocol):
    """A place to run programs. All methods are called on one event loop."""

    async def check(self) -> None:
        """Run a small program that tests the isolation. Raises SandboxError."""
        ...

    async def run(self, program: Program) -> Result:
        """Run a program; wait if too many are running. Cancelling the call ends the program.

        Raises SandboxError if the sandbox itself fails.
        """
        ...

    async def close(self) -> None:
        """Release resources. No program is running."""
        ...


def python_program(source: str, *, stdin: bytes = b"", wall_s: float = 10.0) -> Program:
    """Return the program that runs Python source in isolated mode."""
    files = {"program.py": source.encode("utf-8", "surrogatepass")}
    return Program((PYTHON, "-I", "program.py"), stdin=stdin, files=files, wall_s=wall_s)


def check_files(files: Mapping[str, bytes]) -> None:
    """Raise ValueError if a path is not below the working directory."""
    for name in files:
        parts = name.split("/")
        if not name or "\0" in name or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"{name!r} is not a relative path without '.' and '..'")
