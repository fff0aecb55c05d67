"""Child processes for tests that are killed on purpose or change process limits."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable

import pytest


def _run_in_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked process; its exit code, or minus the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.fixture
def run_in_child() -> Callable[[Callable[[], None]], int]:
    return _run_in_child


@pytest.fixture
def dead_pid() -> int:
    """The id of a process that has just ended."""
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    return pid
