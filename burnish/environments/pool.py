"""Worker processes that run multi-turn environments, and the episodes in them.

:class:`EnvironmentPool` is used from one event loop. It gives every episode to the worker with the
fewest. A call that exceeds its time limit leaves user code running in the worker, so that worker is
retired: it gets no new episodes, is replaced, and is killed when its other episodes have ended.
Episodes of a worker that dies fail with status ``infra_error``; the pool starts a new worker.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, Protocol

from burnish.environments.base import EnvironmentSetupError
from burnish.environments.multi_turn import Start, Step
from burnish.errors import BurnishError

log = logging.getLogger("burnish")

MAX_MESSAGE_BYTES = 16 << 20
"""Maximum size of one reply of a worker."""
START_TIMEOUT_S = 120.0
"""Time in which a worker must have started its interpreter and imported the environment."""
CLOSE_TIMEOUT_S = 5.0
END_TIMEOUT_S = 10.0
"""Time in which a killed worker must have ended."""
DRAIN_S = 1.0
"""Time in which the last output of a worker that ended is read. Processes that it started may hold
its pipes open."""
MAX_START_FAILURES = 3
"""Consecutive failures to start a worker after which the pool gives up."""

Failure = Literal["env_error", "timeout", "infra_error"]


class EpisodeFailedError(BurnishError, RuntimeError):
    """An episode cannot continue. ``status`` is the cause: the environment's code raised or
    returned an invalid value (env_error), it exceeded a time limit (timeout), or its process died
    (infra_error)."""

    def __init__(self, status: Failure, message: str) -> None:
        super().__init__(message)
        self.status: Failure = status


@dataclass(frozen=True)
class EnvironmentSpec:
    """A multi-turn environment: class, options and interpreter."""

    spec: str
    """``path/to/file.py:Class`` or ``package.module:Class``."""
    options: Mapping[str, Any]
    """Keyword arguments of the class. JSON values only."""
    python: str | None = None
    """Interpreter of the worker processes. None: this one."""

    def with_absolute_paths(self) -> EnvironmentSpec:
        """Return the spec with absolute paths, for processes with another working directory."""
        where, _, name = self.spec.rpartition(":")
        spec = f"{os.path.abspath(where)}:{name}" if where.endswith(".py") else self.spec
        python = self.python and (
            os.path.abspath(self.python) if os.sep in self.python else self.python
        )
        return replace(self, spec=spec, python=python)


class OpenEpisode(Protocol):
    """An episode that has begun."""

    start: Start

    async def step(self, message: Mapping[str, Any], *, timeout_s: float) -> Step:
        """Pass a message to the environment. Raises EpisodeFailedError."""
        ...

    async def close(self) -> None:
        """End the episode. Never raises."""
        ...


class Environments(Protocol):
    """A place where episodes are played."""

    async def start(self) -> None:
        """Start the workers. Raises EnvironmentSetupError if the environment cannot be loaded."""
        ...

    async def open(self, task: Mapping[str, Any], seed: int, *, timeout_s: float) -> OpenEpisode:
        """Begin an episode. Raises EpisodeFailedError."""
        ...

    async def close(self) -> None:
        """End all workers."""
        ...


class _Reply(BurnishError):
    """An error reply of a worker: user code raised."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.trace = f"\n{trace.rstrip()}" if trace else ""


class _Protocol(asyncio.subprocess.SubprocessStreamProtocol):
    """The pipes of a worker. ``exited`` is set at its end, even if other processes hold the pipes
    open; then ``Process.wait`` does not return in all versions of Python."""

    def __init__(self) -> None:
        super().__init__(limit=MAX_MESSAGE_BYTES, loop=asyncio.get_running_loop())
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


class _Worker:
    """One worker process."""

    def __init__(self, transport: asyncio.SubprocessTransport, protocol: _Protocol) -> None:
        self.process = asyncio.subprocess.Process(transport, protocol, asyncio.get_running_loop())
        self._transport, self._exited = transport, protocol.exited
        self.episodes = 0
        self.retired = False
        self._ids = count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._said: deque[str] = deque(maxlen=20)
        self._readers = [
            asyncio.create_task(self._read_replies()),
            asyncio.create_task(self._read_output()),
        ]
        self._watcher = asyncio.create_task(self._watch())

    @property
    def alive(self) -> bool:
        return self.process.returncode is None and not self._readers[0].done()

    @property
    def last_output(self) -> str:
        """The last lines that the process wrote to stderr."""
        return "\n".join(self._said)

    async def call(self, timeout_s: float, **request: Any) -> Any:
        """Return the content of a reply. Raises _Reply, TimeoutError, or ConnectionError if the
        process ended."""
        number = next(self._ids)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            if not self.alive:
                raise ConnectionError("the process has ended")
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps({"id": number, **request}).encode() + b"\n")
            async with asyncio.timeout(timeout_s):
                await self.process.stdin.drain()
                return await future
        finally:
            del self._waiting[number]
            if future.done() and not future.cancelled():
                future.exception()  # read, or asyncio reports it as forgotten

    async def _watch(self) -> None:
        """Wait for the process to end. Kill what it started and free its pipes."""
        await self._exited.wait()
        self._kill_group()
        await asyncio.wait(self._readers, timeout=DRAIN_S)
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        self._transport.close()

    async def _read_replies(self) -> None:
        assert self.process.stdout is not None
        reason = "the process has ended"
        try:
            while line := await self.process.stdout.readline():
                reply = json.loads(line)
                future = self._waiting.get(reply["id"])
                if future is None or future.done():
                    continue
                if "error" in reply:
                    error = reply["error"]
                    future.set_exception(
                        _Reply(error["type"], error["message"], error["traceback"])
                    )
                else:
                    future.set_result(reply["ok"])
        except ValueError as error:  # a line over the limit, or not JSON
            reason = f"a reply cannot be read ({error}); at most {MAX_MESSAGE_BYTES >> 20} MiB"
            self.kill()
        finally:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(ConnectionError(reason))

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
                self._said.append(text)
            log.debug("environment worker %d: %s", self.process.pid, text)

    def kill(self) -> None:
        """Kill the process and everything in its process group."""
        if self.process.returncode is None:
            self._kill_group()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Kill the process and wait for it."""
        self.kill()
        done, _ = await asyncio.wait([self._watcher], timeout=END_TIMEOUT_S)
        if not done:
            log.warning("environment worker %d does not end", self.process.pid)


class EnvironmentPool:
    """Worker processes on this machine. Implements :class:`Environments`."""

    def __init__(self, spec: EnvironmentSpec, *, workers: int) -> None:
        self.spec, self.size = spec, workers
        self._workers: list[_Worker] = []
        self._names = count()
        self._lock = asyncio.Lock()
        self._failures = 0

    async def start(self) -> None:
        """Start the workers. Raises EnvironmentSetupError if one cannot be started."""
        async with self._lock:
            await self._fill()

    async def _fill(self) -> None:
        missing = self.size - sum(w.alive and not w.retired for w in self._workers)
        for found in await asyncio.gather(
            *(self._start_worker() for _ in range(missing)), return_exceptions=True
        ):
            if isinstance(found, BaseException):
                raise found

    async def _start_worker(self) -> None:
        spec = self.spec
        python = spec.python or sys.executable
        script = str(Path(__file__).with_name("worker.py"))
        try:
            pipes = await asyncio.get_running_loop().subprocess_exec(
                *(_Protocol, python, script), start_new_session=True
            )
        except OSError as error:
            raise EnvironmentSetupError(
                f"environment {spec.spec}: its worker cannot be started: {python!r} "
                f"({error.strerror}); give the path of a Python 3.9+ interpreter"
            ) from error
        worker = _Worker(*pipes)
        try:
            await worker.call(
                START_TIMEOUT_S, op="load", spec=spec.spec, options=dict(spec.options)
            )
        except _Reply as error:
            await worker.end()
            raise EnvironmentSetupError(
                f"environment {spec.spec} cannot be loaded: {error}{error.trace}"
            ) from error
        except (ConnectionError, TimeoutError) as error:
            await worker.end()
            what = (
                f"did not load it within {START_TIMEOUT_S:g} s"
                if isinstance(error, TimeoutError)
                else f"ended while loading it:\n{worker.last_output}"
            )
            raise EnvironmentSetupError(
                f"environment {spec.spec}: the worker process ({python}) {what}"
            ) from error
        except BaseException:
            await worker.end()
            raise
        self._workers.append(worker)

    async def _worker(self) -> _Worker:
        """Return the worker with the fewest episodes, after replacing workers that ended."""
        async with self._lock:
            for worker in [w for w in self._workers if not w.alive]:
                self._workers.remove(worker)
                await worker.end()
            try:
                await self._fill()
                self._failures = 0
            except EnvironmentSetupError as error:
                self._failures += 1
                if self._failures >= MAX_START_FAILURES:
                    raise
                raise EpisodeFailedError("infra_error", str(error)) from error
            return min(
                (w for w in self._workers if not w.retired), key=lambda worker: worker.episodes
            )

    async def open(self, task: Mapping[str, Any], seed: int, *, timeout_s: float) -> OpenEpisode:
        """Begin an episode. Raises EpisodeFailedError, or EnvironmentSetupError if workers cannot
        be started any more."""
        worker = await self._worker()
        worker.episodes += 1
        episode = _Episode(self, worker, f"{next(self._names)}")
        try:
            await episode.reset(task, seed, timeout_s=timeout_s)
        except BaseException:
            await episode.close()
            raise
        return episode

    async def left(self, worker: _Worker) -> None:
        """Count an episode of ``worker`` as ended."""
        worker.episodes -= 1
        if worker.retired and not worker.episodes:
            with suppress(ValueError):
                self._workers.remove(worker)
            await worker.end()

    async def close(self) -> None:
        """Kill all workers."""
        workers, self._workers = self._workers, []
        await asyncio.gather(*(worker.end() for worker in workers))


class _Episode:
    """An episode in a worker. Implements :class:`OpenEpisode`."""

    def __init__(self, pool: EnvironmentPool, worker: _Worker, name: str) -> None:
        self._pool, self._worker, self._name = pool, worker, name
        self._open = True
        self.start = Start(())

    async def reset(self, task: Mapping[str, Any], seed: int, *, timeout_s: float) -> None:
        reply = await self._call("open", "reset", timeout_s, task=dict(task), seed=seed)
        self.start = self._checked(check_start, reply)

    async def step(self, message: Mapping[str, Any], *, timeout_s: float) -> Step:
        reply = await self._call("step", "step", timeout_s, message=dict(message))
        return self._checked(check_step, reply)

    def _checked(self, check: Any, reply: Any) -> Any:
        try:
            return check(reply)
        except ValueError as error:
            raise EpisodeFailedError(
                "env_error", f"environment {self._pool.spec.spec}: {error}"
            ) from error

    async def _call(self, op: str, method: str, timeout_s: float, **request: Any) -> Any:
        name = self._pool.spec.spec
        try:
            return await self._worker.call(timeout_s, op=op, episode=self._name, **request)
        except _Reply as error:
            raise EpisodeFailedError(
                "env_error", f"environment {name}: {method}() raised {error}{error.trace}"
            ) from error
        except TimeoutError as error:
            self._worker.retired = True
            raise EpisodeFailedError(
                "timeout", f"environment {name}: {method}() took more than {timeout_s:g} s"
            ) from error
        except (ConnectionError, TypeError, ValueError) as error:
            if isinstance(error, ConnectionError):
                said = self._worker.last_output
                why = f"its worker process died during {method}(): {error}"
                message = f"environment {name}: {why}" + (f"\n{said}" if said else "")
                raise EpisodeFailedError("infra_error", message) from error
            raise EpisodeFailedError(
                "env_error", f"environment {name}: {method}() got a value that is not JSON: {error}"
            ) from error
        except asyncio.CancelledError:
            self._worker.retired = True  # user code may still be running
            raise

    async def close(self) -> None:
        """Close the environment object, unless its worker is retired. Never raises."""
        if not self._open:
            return
        self._open = False
        if not self._worker.retired:
            try:
                await self._worker.call(CLOSE_TIMEOUT_S, op="close", episode=self._name)
            except _Reply as error:
                log.warning("environment %s: close() raised %s", self._pool.spec.spec, error)
            except TimeoutError:
                self._worker.retired = True
            except ConnectionError:
                pass  # the process is gone, and the episode with it
            except asyncio.CancelledError:
                self._worker.retired = True
                await self._pool.left(self._worker)
                raise
        await self._pool.left(self._worker)


def check_start(reply: Any) -> Start:
    """Return the result of ``reset``. Raises ValueError if it is invalid."""
    messages = _messages(reply.get("messages"), "reset")
    if not messages:
        raise ValueError("reset() returned no messages, so there is nothing to respond to")
    tools = reply.get("tools") or ()
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"reset() returned tools={tools!r:.80}; expected a list of JSON schemas")
    return Start(messages, tuple(tools))


def check_step(reply: Any) -> Step:
    """Return the result of ``step``. Raises ValueError if it is invalid."""
    done = reply.get("done", False)
    if not isinstance(done, bool):
        raise ValueError(f"step() returned done={done!r:.80}; expected true or false")
    messages = _messages(reply.get("messages") or [], "step")
    if not messages and not done:
        raise ValueError(
            "step() returned done=False and no messages, so the policy would have nothing to "
            "respond to; return a message or done=True"
        )
    numbers = {}
    for key in ("rewards", "counts"):
        numbers[key] = _numbers(reply.get(key) or {}, key)
    return Step(messages, done, numbers["rewards"], numbers["counts"])


def _messages(value: Any, method: str) -> tuple[Mapping[str, Any], ...]:
    good = isinstance(value, list | tuple) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str | list)
        for message in value
    )
    if not good:
        raise ValueError(
            f"{method}() returned messages={value!r:.120}; expected a list of "
            '{"role": ..., "content": ...}'
        )
    return tuple({**message, "content": _text(message["content"], method)} for message in value)


def _text(content: Any, method: str) -> str:
    """Return content as text. A list of text parts is joined: many chat templates would write the
    list itself. Raises ValueError for other parts."""
    if isinstance(content, str):
        return content
    parts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in content]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError(
            f"{method}() returned the content {content!r:.120}; expected text, or a list of "
            '{"type": "text", "text": ...}. Episodes have no images'
        )
    return "".join(parts)


def _numbers(value: Any, key: str) -> dict[str, float]:
    if not isinstance(value, dict):
        raise ValueError(f"step() returned {key}={value!r:.80}; expected a mapping name -> number")
    for name, number in value.items():
        if not isinstance(name, str) or not _is_finite(number):
            raise ValueError(
                f"step() returned {key}={{{name!r}: {number!r:.40}}}; expected finite numbers"
            )
    return {name: float(number) for name, number in value.items()}


def _is_finite(number: Any) -> bool:
    try:
        return isinstance(number, bool | int | float) and math.isfinite(number)
    except OverflowError:  # an integer beyond the range of float
        return False
