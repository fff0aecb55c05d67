"""The built-in tool ``python``: run code of the policy in a sandbox."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from burnish.config.sandbox import AnySandbox, SandboxConfig
from burnish.environments.base import EnvironmentSetupError
from burnish.errors import BurnishError
from burnish.sandbox.base import Result, SandboxError, python_program
from burnish.sandbox.make import check_sandbox, shared_sandbox

MARK_CHARS = 160
"""Room for the marks between the parts of a result."""
_CONFIG: TypeAdapter[AnySandbox] = TypeAdapter(SandboxConfig)


class CodeTimeoutError(BurnishError, TimeoutError):
    """Code of the policy exceeded the time limit of its call."""


def read_sandbox(options: Mapping[str, Any] | None) -> AnySandbox:
    """Return the sandbox of the option ``sandbox``. Raises pydantic.ValidationError."""
    return _CONFIG.validate_python(dict(options or {}))


def check_code_tool(options: Mapping[str, Any] | None) -> None:
    """Raise EnvironmentSetupError if the tool ``python`` cannot run code here."""
    try:
        check_sandbox(read_sandbox(options))
    except SandboxError as error:
        raise EnvironmentSetupError(f"tool python: {error}") from error


@cache
def code_tool(
    sandbox: AnySandbox, timeout_s: float, max_chars: int
) -> Callable[[str], Awaitable[str]]:
    """Return the tool. Calls of one process share a sandbox and its limit on concurrent programs.

    ``timeout_s`` limits the run itself, without its time in the queue. ``max_chars``: longer output
    is cut in the middle.
    """

    async def python(code: str) -> str:
        """Run Python code and return its output.

        Each call is a new process: variables, imports and files of earlier calls are gone. Print
        what you want to see. There is no network.

        Args:
            code: The program.
        """
        program = python_program(code, wall_s=timeout_s)
        result = await shared_sandbox(sandbox).run(program)
        text = shown(result, max_chars)
        if result.ended in ("wall_time", "cpu_time"):
            raise CodeTimeoutError(f"the code ran longer than {timeout_s:g} s\n{text}".rstrip())
        return text

    return python


def shown(result: Result, max_chars: int) -> str:
    """Return the output of a program as text for the policy: at most ``max_chars`` characters, if
    that is more than MARK_CHARS."""
    stdout, stderr = (
        part.decode("utf-8", "replace").strip("\n") for part in (result.stdout, result.stderr)
    )
    room = max(max_chars - MARK_CHARS, 1)
    if stdout and stderr:
        room //= 2
    parts = [_cut(stdout, room)] if stdout else []
    if stderr:
        parts.append(f"[stderr]\n{_cut(stderr, room)}")
    if result.ended == "output":
        parts.append("[ended: too much output]")
    elif result.exit_code:
        parts.append(f"[exit code {result.exit_code}]")
    return "\n".join(parts) or ("" if result.exit_code is None else "(no output)")


def _cut(text: str, room: int) -> str:
    """Return the beginning and the end of a text."""
    if len(text) <= room:
        return text
    head = room // 2
    tail = text[len(text) - (room - head) :]
    return f"{text[:head]}\n(... {len(text) - room} characters ...)\n{tail}"
