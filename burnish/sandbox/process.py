"""Run a command as a child process with limits on time and output, and end all of it.

Popen uses vfork for these arguments, so a start does not copy the page tables of a large process.
The end of a process is observed through its pidfd. The child receives a parent-death signal that is
bound to the thread which starts it: the thread of the event loop must outlive the program.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from burnish.sandbox.base import Ended

log = logging.getLogger("burnish")

END_TIMEOUT_S = 10.0
"""Time in which a killed process must have ended."""
START_TIMEOUT_S = 5.0
"""Time in which a process must be ready to be killed."""
DRAIN_S = 1.0
"""Time in which the pipes of a process that ended are read to their end."""
CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class Raw:
    """The end of a child process."""

    stdout: bytes
    stderr: bytes
    returncode: int
    """As of ``Popen``: -n if signal n ended it."""
    ended: Literal["exit", "wall_time", "output"]
    seconds: float


class _Pipe:
    """The read end of a pipe. Keeps the first ``limit`` bytes, discards the rest and calls
    ``over``; without ``over``, keeps the last bytes."""

    def __init__(self, fd: int, limit: int, over: Callable[[], object] | None) -> None:
        self.data = bytearray()
        self.closed = asyncio.Event()
        self._fd, self._limit, self._over = fd, limit, over
        os.set_blocking(fd, False)
        asyncio.get_running_loop().add_reader(fd, self._read)

    def _read(self) -> None:
        try:
            chunk = os.read(self._fd, CHUNK_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            self.close()
            return
        if self._over is None:
            self.data += chunk
            del self.data[: -self._limit]
            return
        room = self._limit - len(self.data)
        self.data += chunk[:room]
        if len(chunk) > room:
            self._over()

    def close(self) -> None:
        """Stop reading. The caller owns the file descriptor."""
        if not self.closed.is_set():
            asyncio.get_running_loop().remove_reader(self._fd)
            self.closed.set()


class _Input:
    """The write end of a pipe. Closed once everything is written or the reader is gone."""

    def __init__(self, fd: int, data: bytes) -> None:
        self._fd, self._left = fd, memoryview(data)
        self._open = True
        os.set_blocking(fd, False)
        asyncio.get_running_loop().add_writer(fd, self._write)

    def _write(self) -> None:
        try:
            self._left = self._left[os.write(self._fd, self._left[:CHUNK_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._left = self._left[:0]
        if not self._left:
            self.close()

    def close(self) -> None:
        """Stop writing and close the pipe."""
        if self._open:
            self._open = False
            asyncio.get_running_loop().remove_writer(self._fd)
            os.close(self._fd)


class ProcessEnd:
    """The end of a process, child or not, observed through its pidfd."""

    def __init__(self, pid: int) -> None:
        self.event = asyncio.Event()
        self._fd: int | None = None
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.event.set()
            return
        asyncio.get_running_loop().add_reader(self._fd, self.close)

    def kill(self) -> None:
        """Kill the process. Never kills another one with a reused id."""
        if self._fd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def close(self) -> None:
        """Stop observing."""
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None
            self.event.set()


async def run_process(  # house: ok a command and all its limits, from start to end
    command: Sequence[str],
    *,
    stdin: bytes,
    wall_s: float,
    output_bytes: int,
    start: Mapping[str, object],
    last_stderr: bool = False,
    may_kill: asyncio.Event | None = None,
) -> Raw:
    """Run a command in a new session and return its end. Its process group is killed at the end, at
    a limit, and if the call is cancelled.

    ``output_bytes``: limit of stdout and of stderr. ``last_stderr``: stderr has no limit, and its
    last ``output_bytes`` are returned. ``start``: further arguments of Popen.
    ``may_kill``: the process is not killed before this is set, unless that takes START_TIMEOUT_S.

    Raises OSError if the command cannot be started.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    process = subprocess.Popen(  # type: ignore[call-overload]  # (start is not typed)
        list(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        bufsize=0,
        **start,
    )
    cause: asyncio.Future[Any] = loop.create_future()

    def over() -> None:
        if not cause.done():
            cause.set_result("output")

    exited = ProcessEnd(process.pid)
    program_input = _Input(os.dup(process.stdin.fileno()), stdin)
    process.stdin.close()
    pipes = [
        _Pipe(process.stdout.fileno(), output_bytes, over),
        _Pipe(process.stderr.fileno(), output_bytes, None if last_stderr else over),
    ]
    waiting: asyncio.Future[Any] = asyncio.create_task(exited.event.wait())
    ended: Literal["exit", "wall_time", "output"] = "wall_time"
    try:
        done, _ = await asyncio.wait(
            [waiting, cause], timeout=wall_s, return_when=asyncio.FIRST_COMPLETED
        )
        if done:
            ended = "output" if cause in done else "exit"
    finally:
        if may_kill is not None and not exited.event.is_set():
            await _within(START_TIMEOUT_S, may_kill)
        waiting.cancel()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        program_input.close()
        await _end(process, exited, pipes)
    stdout, stderr = (bytes(pipe.data) for pipe in pipes)
    if ended == "exit" and cause.done():
        ended = "output"
    return Raw(stdout, stderr, process.returncode, ended, loop.time() - began)


async def _end(
    process: subprocess.Popen[bytes], exited: ProcessEnd, pipes: Sequence[_Pipe]
) -> None:
    """Wait for a killed process and for the end of its output, then close the pipes."""
    try:
        if await _within(END_TIMEOUT_S, exited.event):
            process.wait()
        else:
            log.warning("process %d of a sandbox does not end although it was killed", process.pid)
        # (a process that left the group may hold the pipes open)
        await _within(DRAIN_S, *(pipe.closed for pipe in pipes))
    finally:
        exited.close()
        for pipe, file in zip(pipes, (process.stdout, process.stderr), strict=True):
            pipe.close()
            assert file is not None
            file.close()


async def _within(timeout_s: float, *events: asyncio.Event) -> bool:
    """Return whether all events are set in time."""
    try:
        async with asyncio.timeout(timeout_s):
            for event in events:
                await event.wait()
    except TimeoutError:
        return False
    return True


def exit_code_of(returncode: int) -> int:
    """Return Popen's return code as a shell reports it: 128 + n for signal n."""
    return returncode if returncode >= 0 else 128 - returncode


def cause_of(raw: Raw, exit_code: int | None) -> Ended:
    """Return the cause of an end, with the limit of CPU time by its signal."""
    return "cpu_time" if exit_code == 128 + signal.SIGXCPU else raw.ended
