"""The program that runs an agent in a sandbox: it forwards a port of the sandbox's loopback
interface to the agent server's Unix socket.

The agent server copies this file into the sandbox, where none of Burnish's packages exist: standard
library only, Python 3.9 or newer. It reads its settings as JSON from standard input (:func:`main`)
and writes one JSON object to standard output: :func:`run`, or :func:`problems` if the settings have
``check``. It has no threads, because those count toward the limit on processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from typing import Any

MAX_REWARD_BYTES = 1 << 20
MAX_CONNECTIONS = 96
"""Connections at once, of two descriptors each. Others wait."""
CHUNK_BYTES = 1 << 16
END_S = 10.0
"""Time in which killed processes must have ended."""
_INIT = 1
_SET_DUMPABLE = 4
"""``PR_SET_DUMPABLE`` of prctl."""


def read_reward(path: str) -> bytes | None:
    """Return what an agent wrote as its reward; None if it wrote nothing.

    Raises ValueError if the file is too large or not a regular file, and OSError.
    """
    try:
        # (reading a pipe would wait, and a link may point to a file of someone else)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        text = file.read(MAX_REWARD_BYTES + 1)
    if len(text) > MAX_REWARD_BYTES:
        raise ValueError(f"it has more than {MAX_REWARD_BYTES} bytes")
    return text


def problems(settings: dict[str, Any]) -> list[str]:
    """Return the reasons why the agent cannot run here."""
    reasons = []
    if shutil.which(settings["command"][0]) is None:
        reasons.append(f"there is no program {settings['command'][0]!r} in it")
    for path in settings["paths"]:
        if not os.access(path, os.R_OK):
            reasons.append(f"{path} cannot be read in it; add its folder to read_only_paths")
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(settings["socket"])
    except OSError as error:
        reasons.append(f"the model server cannot be reached from it: {error}")
    return reasons


def end_others(*excluded: int) -> None:
    """Kill all processes of the sandbox but its init, this one and ``excluded``, and wait for their
    ends: what they write would no longer be the agent's.

    A process that forks and ends between two looks at the list of processes would escape one look.
    So this returns only after two looks that show the same ended processes and none that runs.

    Raises TimeoutError if they do not end.
    """
    kept = {_INIT, os.getpid(), *excluded}
    deadline = time.monotonic() + END_S
    before: set[tuple[int, bytes]] | None = None
    while True:
        processes = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
        others = [process for process in processes if process not in kept]
        for process in others:  # at once, before it forks
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        ended = {(process, _start_of_ended(process)) for process in others}
        if ended == before and all(start for _, start in ended):
            return
        before = ended
        if time.monotonic() > deadline:
            raise TimeoutError("a process in the sandbox does not end")
        time.sleep(0.001)


def _start_of_ended(process: int) -> bytes:
    """Return when a process that has ended was started, of those that its parent has not asked for
    (a number that tells it from later ones of the same id); empty if it runs, or is gone."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
    except OSError:
        return b""
    state, threads, start = fields[0], fields[17], fields[19]
    # (while other threads run, the first one can have ended)
    return start if state in (b"Z", b"X") and threads in (b"0", b"1") else b""


async def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Run the agent and return its end: ``code`` as of Popen, ``reward`` (text) or ``problem``, and
    the ``nonce`` of the settings, which only this process knows.

    Its output is written to standard error. All processes that it leaves behind are killed before
    its reward is read.
    """
    end: dict[str, Any] = {"nonce": settings["nonce"]}
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", settings["port"]), backlog=1024) as listening:
        listening.setblocking(False)
        serving = loop.create_task(_serve(listening, settings["socket"]))
        end["code"] = await _agent(settings)
        serving.cancel()
    try:
        end_others()
        reward = read_reward(settings["reward"])
    except (OSError, ValueError) as error:  # (TimeoutError is an OSError)
        return {**end, "problem": str(error)}
    return {**end, "reward": None if reward is None else reward.decode("latin-1")}


async def _agent(settings: dict[str, Any]) -> int:
    """Run the agent to its end. Return its exit code, or -n if signal n ended it."""
    process = subprocess.Popen(
        settings["command"],
        env={**os.environ, **settings["environment"]},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        stderr=sys.stderr,
        start_new_session=True,
    )
    ended = asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    asyncio.get_running_loop().add_reader(descriptor, ended.set)
    await ended.wait()
    asyncio.get_running_loop().remove_reader(descriptor)
    return process.wait()


async def _serve(listening: socket.socket, path: str) -> None:
    loop = asyncio.get_running_loop()
    free = asyncio.Semaphore(MAX_CONNECTIONS)
    tasks = set()
    while True:
        await free.acquire()
        client, _ = await loop.sock_accept(listening)
        task = loop.create_task(_connection(client, path))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda _: free.release())


async def _connection(client: socket.socket, path: str) -> None:
    """Forward a connection in both directions until both are closed, or one fails."""
    with client, socket.socket(socket.AF_UNIX) as server:
        server.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(server, path)
        except OSError:
            return  # closing the client's socket tells it
        copies = [
            asyncio.ensure_future(_copy(*ends)) for ends in ((client, server), (server, client))
        ]
        await asyncio.wait(copies, return_when=asyncio.FIRST_EXCEPTION)
        for copy in copies:  # if one failed, its side is gone: closing the sockets tells the other
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)


async def _copy(source: socket.socket, target: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(source, CHUNK_BYTES):
        await loop.sock_sendall(target, data)
    target.shutdown(socket.SHUT_WR)


def main() -> None:
    """Run the agent that standard input describes, or check whether it can run.

    Settings: ``command``; ``environment`` (added variables); ``socket`` (path); ``port`` of the
    loopback interface; ``nonce``; ``reward`` (path); ``task`` (path) and ``row`` (its text); or
    ``check`` and ``paths`` (files that the agent needs).
    """
    # An agent's leftovers could otherwise write to the result: hide this process's memory and open
    # files from other processes of the user.
    ctypes.CDLL(None).prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    settings = json.load(sys.stdin)
    os.chdir(settings["folder"])
    if settings.get("check"):
        print(json.dumps(problems(settings)))
        return
    with open(settings["task"], "w", encoding="utf-8") as file:
        file.write(settings["row"])
    print(json.dumps(asyncio.run(run(settings))))


if __name__ == "__main__":
    main()
