"""Calls of the user's code: each is named while it runs, ends in time, and raises Exceptions."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from burnish import call_guard, user_calls
from burnish.user_calls import CallRaisedError, CallTimeoutError, UserCalls


@pytest.fixture
def calls():
    made = UserCalls("reward 'f' (function f at my.py:1)", limit_s=0.2)
    yield made
    made.close()
    user_calls.ABANDONED.clear()


def test_results_and_exceptions_pass_unchanged(calls):
    assert calls.run(lambda a, b: a + b, 1, 2) == 3
    with pytest.raises(ZeroDivisionError):
        calls.run(lambda: 1 / 0)


@pytest.mark.parametrize(
    "error", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, BaseException]
)
def test_an_error_that_is_no_exception_becomes_one(calls, error):
    def f():
        raise error

    with pytest.raises(CallRaisedError, match=error.__name__):
        calls.run(f)


def test_a_late_call_is_abandoned_and_the_next_one_runs(calls, monkeypatch):
    """The process exits at once while the late call runs, and as usual after it has returned."""
    block, exits = threading.Event(), []
    monkeypatch.setattr(os, "_exit", exits.append)
    with pytest.raises(CallTimeoutError, match=r"within 0.2 s \(timeout_s\)"):
        calls.run(block.wait)
    assert calls.run(lambda: 4) == 4
    user_calls.exit_despite_abandoned_calls(3)
    block.set()
    assert user_calls.ABANDONED[0].done.wait(30)
    user_calls.exit_despite_abandoned_calls(4)
    assert exits == [3]


def test_a_long_call_is_named_once(calls, monkeypatch, caplog):
    monkeypatch.setattr(user_calls, "NOTICE_S", 0.0)
    monkeypatch.setattr(user_calls, "_BEAT_S", 0.01)
    with caplog.at_level(logging.WARNING), pytest.raises(CallTimeoutError):
        calls.run(threading.Event().wait)
    (line,) = [r.getMessage() for r in caplog.records]
    assert "reward 'f' (function f at my.py:1) has been running" in line


def test_all_calls_run_in_one_thread_with_the_callers_context(calls):
    threads = {calls.run(threading.get_ident) for _ in range(3)}
    assert len(threads) == 1 and threading.get_ident() not in threads


BLOCKING = """
import re, sys
from burnish.user_calls import UserCalls
UserCalls("reward 'f'", limit_s=float(sys.argv[1])).run(re.fullmatch, "(a|aa)+", "a" * 60 + "b")
"""


def test_code_that_holds_pythons_lock_is_named_and_ends_the_process(tmp_path: Path):
    """The guard's waits are shortened: 0.2 s of silence instead of 40 s."""
    fast = Path(call_guard.__file__).read_text(encoding="utf-8")
    fast = fast.replace("SILENCE_S = 40", "SILENCE_S = 0.2").replace("POLL_S = 1.0", "POLL_S = 0.1")
    guard = tmp_path / "guard.py"
    guard.write_text(fast, encoding="utf-8")
    code = f"import pathlib\nfrom burnish import user_calls\nuser_calls._GUARD = {str(guard)!r}\n"
    done = subprocess.run(
        [sys.executable, "-c", code + BLOCKING, "0.5"],
        capture_output=True, text=True, timeout=60, check=False, env=os.environ | {"CI": ""},
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    named, ended = done.stderr.splitlines()
    assert re.match("burnish: reward 'f' has blocked the process .* holds Python's lock", named)
    assert "burnish: reward 'f' has blocked" in ended and ended.endswith("ending it")


def test_silence_between_calls_is_no_block(monkeypatch):
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    call: dict[str, Any] = {"name": "f", "limit_s": 1000}
    call_guard.act([], call_guard.SILENCE_S + 1)
    call_guard.act([call], call_guard.SILENCE_S - 1)
    assert said.getvalue() == ""
    call_guard.act([call], call_guard.SILENCE_S)
    call_guard.act([call], call_guard.SILENCE_S + 1)
    assert said.getvalue().count("\n") == 1


def test_the_guard_ends_with_its_parent_also_if_its_input_stays_open():
    """Otherwise it would kill the process that adopts it, such as the user's service manager."""
    reader, writer = os.pipe()
    os.write(writer, b'{"begin": 0, "name": "f", "limit_s": 1}\n')
    start = "import os, subprocess, sys; subprocess.Popen([*sys.argv[1:], str(os.getpid())])"
    command = [sys.executable, "-c", start, sys.executable, "-I", "-S", call_guard.__file__]
    try:  # the output ends with the guard
        subprocess.run(command, stdin=reader, stdout=subprocess.PIPE, timeout=20, check=True)
    finally:
        os.close(reader)
        os.close(writer)
