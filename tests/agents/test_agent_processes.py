"""Processes and folders of agent commands: none is left by an episode that ends, nor by a run that
is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from burnish.agents.commands import CommandAgents
from burnish.agents.episodes import Endpoint

AGENT = """
import json, os, sys, time
notes = json.load(open(os.environ["BURNISH_TASK"]))["notes"]
reader, writer = os.pipe()
if os.fork() == 0:  # a daemon in a session of its own
    os.setsid()
    if os.fork():
        os._exit(0)
    name = "daemon"
else:
    os.wait()
    name = "agent"
open(f"{notes}/{name}.{os.getpid()}", "w").close()
if name == "daemon":
    os.write(writer, b"x")
else:
    os.read(reader, 1)  # the daemon has its note
if name == "daemon" or "waits" in sys.argv:
    time.sleep(600)
"""
RUN = """
import asyncio, sys
from burnish.agents.commands import CommandAgents
from burnish.agents.episodes import Endpoint

async def main():
    agents = CommandAgents([sys.executable, sys.argv[1], "waits"])
    await agents.start()
    endpoint = Endpoint("http://127.0.0.1:9/s/x", "key")
    tasks = [agents.run({"notes": sys.argv[2]}, endpoint, timeout_s=600) for _ in range(3)]
    await asyncio.gather(*tasks)

asyncio.run(main())
"""


def started(notes: Path, count: int) -> list[int]:
    """Ids of the processes of agents, once there are ``count``."""
    deadline = time.monotonic() + 60
    while len(found := [int(p.suffix[1:]) for p in notes.iterdir()]) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def gone(pids: list[int]) -> bool:
    """True if the processes end within a minute."""
    deadline = time.monotonic() + 60
    while any(psutil.pid_exists(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "agent.py").write_text(AGENT)
    return tmp_path / "agent.py"


def test_a_daemon_of_an_agent_ends_with_its_episode_and_no_other_one(
    agent: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        agents = CommandAgents([sys.executable, str(agent)])
        other = CommandAgents([sys.executable, str(agent), "waits"])
        await asyncio.gather(agents.start(), other.start())
        endpoint = Endpoint("http://127.0.0.1:9/s/x", "key")
        (tmp_path / "others").mkdir()
        task = {"notes": str(tmp_path / "others")}
        waiting = asyncio.ensure_future(other.run(task, endpoint, timeout_s=600))
        kept = await asyncio.to_thread(started, tmp_path / "others", 2)
        for _ in range(3):
            await agents.run({"notes": str(tmp_path / "notes")}, endpoint, timeout_s=60)
        assert gone(started(tmp_path / "notes", 6))
        assert all(psutil.pid_exists(pid) for pid in kept)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert gone(kept)
        await agents.close()
        await other.close()

    asyncio.run(scenario())
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_killed_leaves_no_process_and_no_folder(
    number: int, agent: Path, tmp_path: Path
) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, str(agent), str(tmp_path / "notes")],
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        stderr=subprocess.DEVNULL,
    )
    pids = started(tmp_path / "notes", 6)
    folders = [p for p in (tmp_path / "tmp").iterdir() if p.name.startswith("burnish-agents-")]
    assert len(folders) == 1 and len(list(folders[0].iterdir())) == 3
    assert json.loads(next(folders[0].glob("*/task.json")).read_text())["notes"]
    run.send_signal(number)
    run.wait(60)
    assert gone(pids)
    deadline = time.monotonic() + 60
    while folders[0].exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
