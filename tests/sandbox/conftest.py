"""The sandbox for tests. Without bubblewrap they are skipped, and under CI=true they fail."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import psutil
import pytest

from burnish.config.sandbox import BubblewrapSandbox
from burnish.sandbox.base import Program, Result, SandboxError, python_program
from burnish.sandbox.make import SyncSandbox

LIMITS = BubblewrapSandbox(
    memory_bytes=256 << 20,
    processes=24,
    files_bytes=8 << 20,
    output_bytes=64 << 10,
    max_concurrent=2,
)


@pytest.fixture(scope="session")
def bubblewrap() -> None:
    try:
        SyncSandbox(LIMITS).close()
    except SandboxError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def sandbox(bubblewrap: None) -> Iterator[SyncSandbox]:
    made = SyncSandbox(LIMITS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def python(sandbox: SyncSandbox) -> Callable[..., Result]:
    """``python(source, stdin=b"", wall_s=10)``: the result of Python source."""
    return lambda source, **more: sandbox.run(python_program(source, **more))


@pytest.fixture(scope="module")
def command(sandbox: SyncSandbox) -> Callable[..., Result]:
    """``command("sort", stdin=..., files=...)``: the result of a program."""
    return lambda *words, **more: sandbox.run(Program(words, **more))


@pytest.fixture
def processes_of() -> Callable[[str], list[psutil.Process]]:
    """Processes on this machine whose command line contains a text, with their names in `info`."""

    def find(text: str) -> list[psutil.Process]:
        own, found = os.getpid(), []
        for process in psutil.process_iter(["cmdline", "name"]):
            line = " ".join(process.info["cmdline"] or [])
            if process.pid != own and text in line:
                found.append(process)
        return found

    return find
