"""A worker process on this machine and the pipes to it. The process runs ``worker.py``."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

from burnish.environments import worker
from burnish.environments.worker_set import ReplyError, WorkerEndedError

log = logging.getLogger("burnish")

MAX_MESSAGE_BYTES = 16 << 20
"""Maximum size of one reply of a worker."""
LEAVE_S = 3.0
"""Time in which a worker whose stdin is closed must have ended. It ends itself in less (``END_S``
of worker.py)."""
END_TIMEOUT_S = 10.0
"""Time in which a killed worker must have ended."""
DRAIN_S = 1.0
"""Time in which the last output of a worker that ended is read. Processes that it started may hold
its pipes open."""


async def start_process(python: str | None) -> WorkerProcess:
    """Start a worker. ``python``: path of its interpreter; None: this one.

    Raises OSError if the interpreter cannot be executed.
    """
    mark = secrets.token_hex(16)
    pipes = await asyncio.get_running_loop().subprocess_exec(
        *(partial(ProcessPipes, MAX_MESSAGE_BYTES), python or sys.executable, worker.__file__),
        start_new_session=True,
        env={**os.environ, worker.MARK: mark},
    )
    return WorkerProcess(*pipes, mark=mark)


class ProcessPipes(asyncio.subprocess.SubprocessStreamProtocol):
    """The pipes of a process. ``exited`` is set at its end, even if other processes hold the pipes
    open; then ``Process.wait`` does not return in all versions of Python."""

    def __init__(self, max_line_bytes: int) -> None:
        super().__init__(limit=max_line_bytes, loop=asyncio.get_running_loop())
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


TOO_DEEP = "it is nested too deeply for JSON"


def as_json(request: Mapping[str, Any]) -> str:
    """Return a request as JSON text. Raises TypeError or ValueError if it is not JSON."""
    try:
        return json.dumps(request)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


class WorkerProcess:
    """A worker process. Implements :class:`~burnish.environments.worker_set.EnvironmentWorker`."""

    def __init__(
        self, transport: asyncio.SubprocessTransport, protocol: ProcessPipes, *, mark: str
    ) -> None:
        """``mark``: value of ``worker.MARK`` in the environment of the process."""
        self._mark = mark
        self.process = asyncio.subprocess.Process(transport, protocol, asyncio.get_running_loop())
        self._transport, self._exited = transport, protocol.exited
        self._ids = count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._last_lines: deque[str] = deque(maxlen=20)
        self._readers = [
            asyncio.create_task(self._read_replies()),
            asyncio.create_task(self._read_output()),
        ]
        self._watcher = asyncio.create_task(self._watch())

    @property
    def alive(self) -> bool:
        return self.process.returncode is None and not self._readers[0].done()

    async def call(self, timeout_s: float, **request: Any) -> Any:
        number = next(self._ids)
        line = as_json({"id": number, **request}).encode() + b"\n"
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            if not self.alive:
                raise self._ended("its worker process died")
            assert self.process.stdin is not None
            self.process.stdin.write(line)
            async with asyncio.timeout(timeout_s):
                await self.process.stdin.drain()
                return await future
        except ConnectionError as error:  # of drain()
            raise self._ended(str(error)) from error
        finally:
            del self._waiting[number]
            if future.done() and not future.cancelled():
                future.exception()  # read, or asyncio reports it as forgotten

    def _ended(self, reason: str) -> WorkerEndedError:
        """Return the error, with the last lines that the process wrote to stderr."""
        return WorkerEndedError("\n".join([reason, *self._last_lines]))

    async def exited(self) -> None:
        await asyncio.wait([self._watcher])

    async def _watch(self) -> None:
        """Wait for the process to end. Kill what it started and free its pipes."""
        await self._exited.wait()
        self._kill_group()
        await asyncio.to_thread(worker.kill_marked, self._mark)
        await asyncio.wait(self._readers, timeout=DRAIN_S)
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        self._transport.close()

    async def _read_replies(self) -> None:
        assert self.process.stdout is not None
        reason = "its worker process died"
        try:
            while line := await self.process.stdout.readline():
                reply = json.loads(line)
                future = self._waiting.get(reply["id"])
                if future is None or future.done():
                    continue
                if "error" in reply:
                    error = reply["error"]
                    future.set_exception(
                        ReplyError(error["type"], error["message"], error["traceback"])
                    )
                else:
                    future.set_result(reply["ok"])
        except (ValueError, RecursionError) as error:  # a line over the limit, or not JSON
            reason = f"a reply cannot be read ({error}); at most {MAX_MESSAGE_BYTES >> 20} MiB"
            self.kill()
        finally:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(self._ended(reason))

    async def _read_output(self) -> None:
        assert self.process.stderr is not None
        while True:
            try:
                line = await self.process.stderr.readline()
            except ValueError:  # a longer line than the limit: its rest is read as the next one
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            if text:
                self._last_lines.append(text)
            log.debug("environment worker %d: %s", self.process.pid, text)

    def kill(self) -> None:
        """Kill the process and everything in its process group."""
        if self.process.returncode is None:
            self._kill_group()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def end(self) -> None:
        """End the process and wait for it. It gets :data:`LEAVE_S` seconds to end processes of user
        code that are not in its process group; then it is killed."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        await asyncio.wait([self._watcher], timeout=LEAVE_S)
        self.kill()
        done, _ = await asyncio.wait([self._watcher], timeout=END_TIMEOUT_S)
        if not done:
            log.warning("environment worker %d does not end", self.process.pid)
