"""Processes that an agent leaves behind in its sandbox cannot set its reward."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_session import run_tasks

from burnish.agents.sandboxed import SandboxedCommands, SandboxedFunctions
from burnish.agents.server import EpisodeServer
from burnish.config.sandbox import BubblewrapSandbox
from burnish.environments.pool import EnvironmentSpec
from burnish.episodes.loop import EpisodeLimits
from burnish.sandbox.base import SandboxError
from burnish.sandbox.bubblewrap import DEFAULT_PYTHON

LIMITS = EpisodeLimits(max_turns=4, max_tokens=400, step_timeout_s=30, timeout_s=30)

CALL = """
import json, os, subprocess, sys, time, urllib.request


def call():
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "m", "messages": [{"role": "user", "content": "?"}]}).encode(),
        {"x-api-key": os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request))


def leave_behind(program):
    started = subprocess.Popen(
        [sys.executable, "-c", program], start_new_session=True, stdout=subprocess.PIPE
    )
    started.stdout.readline()  # it runs
"""
OVERWRITE = """
import os, sys, time
print("ready", flush=True)
path = os.environ["BURNISH_REWARD"]
while True:
    with open(path + str(os.getpid()), "w") as file:
        file.write("1.0")
    os.replace(path + str(os.getpid()), path)
    {more}
"""
FORK = OVERWRITE.replace("{more}", "os.fork() and os._exit(0)")
FORGE = """
import glob, os, sys, time
print("ready", flush=True)
while True:
    for path in glob.glob("/proc/[0-9]*/fd/*"):
        try:
            file = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            os.write(file, b'{"code": 0, "reward": "1.0"}\\n')
        except OSError:
            pass
        finally:
            os.close(file)
"""
THREAD = """
import ctypes, platform, threading
program = {loop!r}
threading.Thread(target=exec, args=(program, {{}})).start()
exit_of_one_thread = {{"x86_64": 60, "aarch64": 93}}[platform.machine()]
ctypes.CDLL(None).syscall(exit_of_one_thread, 0)
""".format(loop=OVERWRITE.replace("{more}", "pass"))
LEFT = {
    "none": "import time; print(1, flush=True); time.sleep(60)",
    "loop": OVERWRITE.replace("{more}", "pass"),
    "forks": FORK,
    "thread": THREAD,  # its process looks like one that has ended
    "forged": FORGE,
}
COMMAND = """
call()
leave_behind(sys.argv[1])
with open(os.environ["BURNISH_REWARD"] + ".own", "w") as file:
    file.write("0.25")
os.replace(os.environ["BURNISH_REWARD"] + ".own", os.environ["BURNISH_REWARD"])
"""
FUNCTION = """
def agent(task, endpoint, left):
    call()
    leave_behind(left)
    return 0.25
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="burnish-test-", dir="/tmp") as made:
        os.chmod(made, 0o755)
        yield Path(made)


def rewards(agents: Any, server: EpisodeServer) -> list[Any]:
    try:
        found, _ = run_tasks(agents, [{}] * 3, LIMITS, server=server)
    except SandboxError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    return [(result.record.status, dict(result.record.turns[-1].rewards)) for result in found]


@pytest.mark.parametrize("kind", LEFT)
def test_leftovers_of_a_function_do_not_change_its_reward(kind: str, folder: Path) -> None:
    (folder / "own.py").write_text(CALL + FUNCTION)
    spec = EnvironmentSpec(
        f"{folder / 'own.py'}:agent", {"left": LEFT[kind]}, DEFAULT_PYTHON, role="agent"
    )
    server = EpisodeServer("127.0.0.1", 0, unix_socket=True)
    found = rewards(SandboxedFunctions(spec, BubblewrapSandbox(), server), server)
    allowed = [("done", {"reward": 0.25})]
    if kind == "forged":  # it may destroy the result of its own episode
        allowed.append(("infra_error", {}))
    assert all(episode in allowed for episode in found), found


@pytest.mark.parametrize("kind", ["none", "forks", "forged"])
def test_leftovers_of_a_command_are_killed_before_its_reward_is_read(
    kind: str, folder: Path
) -> None:
    """What runs until the command ends may write the file as the command may; what it has written
    last counts, and nothing is written after the end."""
    (folder / "own.py").write_text(CALL + COMMAND)
    server = EpisodeServer("127.0.0.1", 0, unix_socket=True)
    config = BubblewrapSandbox(read_only_paths=(str(folder),))
    command = ["python", str(folder / "own.py"), LEFT[kind]]
    found = rewards(SandboxedCommands(command, config, server), server)
    allowed = [("done", {"reward": 0.25})]
    if kind == "forged":
        allowed.append(("infra_error", {}))
    if kind == "forks":
        allowed.append(("done", {"reward": 1.0}))
    assert all(episode in allowed for episode in found), found
