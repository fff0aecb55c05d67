"""The worker process of multi-turn environments. Run by path, not imported.

``python worker.py`` reads one JSON request per line from stdin and writes one JSON reply per line
to the original stdout. Requests of different episodes run concurrently. The first request is
``load``; every other one names an episode::

    {"id": 0, "op": "load", "spec": "file.py:Class", "options": {...}}
    {"id": 1, "op": "open", "episode": "a", "task": {...}, "seed": 7}
    {"id": 2, "op": "step", "episode": "a", "message": {...}}
    {"id": 3, "op": "close", "episode": "a"}
    {"id": 4, "op": "ping"}

A reply is ``{"id", "ok": ...}`` or ``{"id", "error": {"type", "message", "traceback"}}``.

This file only uses the standard library and supports Python 3.9, because it may run under another
interpreter that has none of Burnish's dependencies. Output of user code on stdout goes to stderr,
and its stdin is empty: the pipes of the protocol are on other file descriptors, which processes
started by user code do not inherit. When stdin ends (the parent is gone), the worker kills its
process group and the processes of user code outside of it, which it finds by the variable ``MARK``
in their environment. The parent does the same once a worker has died.

``ping`` returns the blocked state of the event loop: ``{"blocked": false}``, or ``{"blocked": true,
"episode", "stack"}`` with the episode whose coroutine blocks it (None: unknown). A thread answers
it, so it also works then. User code that holds the interpreter's lock gets no answer out at all.

The methods of one environment object always run in the same thread, so that it may hold objects
that are bound to a thread.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import inspect
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

REQUIRED = ("reset", "step")
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MAX_REPLY_BYTES = (16 << 20) - 1024
"""Maximum size of a reply. The parent cannot read more."""
MAX_ERROR_CHARS = 10_000
PING_S = 2.0
"""Time in which an event loop that is not blocked calls a function."""
MARK = "BURNISH_WORKER_MARK"
"""Environment variable with a random text per worker, which processes of user code inherit."""
KILL_ROUNDS = 20
"""Searches for marked processes: a process may start another one during a search."""
END_S = 2.0
"""Time after the end of stdin in which user code may still react to its cancellation."""


MAX_DEPTH = 200
"""Maximum nesting of a result. The parent could not parse a much deeper one."""


class EpisodeThread:
    """One environment object and the thread in which its sync methods run."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.environment: Any = None
        self._loop = loop
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return the result of a sync function (run in the episode's thread) or of a coroutine
        function."""
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        result = await self._in_thread(function, *args)
        return await result if inspect.isawaitable(result) else result

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._thread is None:

            def serve() -> None:
                while (call := self._calls.get()) is not None:
                    call()

            self._thread = threading.Thread(target=serve, daemon=True)
            self._thread.start()
        future: asyncio.Future[Any] = self._loop.create_future()

        def run() -> None:
            try:
                result, error = function(*args), None
            except BaseException as raised:  # exit() in user code must not end the worker
                result, error = None, raised
            self._loop.call_soon_threadsafe(_finish, future, result, error)

        self._calls.put(run)
        return await future

    def end(self) -> None:
        """End the thread after its current call."""
        self._calls.put(None)


def is_too_deep(value: Any) -> bool:
    """Return whether a value is nested deeper than :data:`MAX_DEPTH` levels."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inside = (item for v in level for item in (v.values() if isinstance(v, dict) else v))
        level = [item for item in inside if isinstance(item, (dict, list, tuple))]
        if not level:
            return False
    return True


def _finish(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        future.set_exception(error)
    else:  # asyncio would treat SystemExit and KeyboardInterrupt as its own
        future.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))


class Endpoint:
    """Address and key of the policy for one episode, the second argument of agent functions."""

    def __init__(self, root_url: str, api_key: str, model: str, max_tokens: int = 0) -> None:
        """``max_tokens`` of a conversation."""
        self.root_url, self.api_key, self.model = root_url, api_key, model
        self.max_tokens = max_tokens
        self.base_url = root_url + "/v1"

    def __repr__(self) -> str:
        return f"Endpoint({self.root_url!r}, model={self.model!r})"  # without the key


def without_proxy(environment: Mapping[str, str], url: str) -> dict[str, str]:
    """Return ``NO_PROXY`` and ``no_proxy`` of a process with the host of ``url`` added, so that its
    clients do not send the calls of the policy to the proxy of ``HTTP_PROXY``."""
    names, host = ("NO_PROXY", "no_proxy"), urlsplit(url).hostname or ""
    either = next((environment[name] for name in names if environment.get(name)), "")
    changed = {}
    for name in names:
        hosts = [part.strip() for part in (environment.get(name) or either).split(",")]
        if host not in hosts and "*" not in hosts:
            changed[name] = ",".join([*filter(None, hosts), host])
        elif not environment.get(name):
            changed[name] = either
    return changed


class CallHandler:
    """Handler of requests."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.make: Callable[[], Any] = lambda: None
        self.agent: Callable[..., Any] = lambda task, endpoint: None
        self.episodes: dict[str, EpisodeThread] = {}

    async def handle(self, request: dict[str, Any]) -> Any:
        """Return the reply's content. Raises whatever user code raises."""
        op = request["op"]
        if op == "load" and request["role"] == "agent":
            return self.load_agent(request["spec"], request["options"])
        if op == "load":
            return self.load(request["spec"], request["options"])
        name = request["episode"]
        if op == "run":
            return await self.run(name, request["task"], Endpoint(**request["endpoint"]))
        if op == "open":
            episode = self.episodes[name] = EpisodeThread(self.loop)
            episode.environment = await episode.call(self.make)
            start = await episode.call(episode.environment.reset, request["task"], request["seed"])
            return as_mapping(start, "reset", ("messages", "tools"))
        if op == "step":
            episode = self.episodes[name]
            step = await episode.call(episode.environment.step, request["message"])
            return as_mapping(step, "step", ("messages", "done", "rewards", "counts"))
        ended = self.episodes.pop(name, None)
        if ended is None:
            return None
        try:
            close = getattr(ended.environment, "close", None)  # house: ok a user's object
            if close is not None:
                await ended.call(close)
        finally:
            ended.end()
        return None

    def load(self, spec: str, options: dict[str, Any]) -> dict[str, Any]:
        """Import the environment class and check its methods."""
        factory = load_object(spec)
        missing = [name for name in REQUIRED if not is_callable(factory, name)]
        if missing:
            raise TypeError(
                f"{spec} has no method {' and no method '.join(missing)}; an environment needs "
                "reset(task, seed) and step(message)"
            )
        if inspect.isclass(factory):
            try:
                inspect.signature(factory).bind(**options)
            except TypeError as error:
                message = f"{spec} cannot be created with options {options!r}: {error}"
                raise TypeError(message) from None
            except ValueError:  # a class without an inspectable signature
                pass
            check = getattr(factory, "check_options", None)  # house: ok a user's class
            if check is not None:
                check(**options)
        self.make = lambda: factory(**options)
        return {"python": sys.version.split()[0]}

    def load_agent(self, spec: str, options: dict[str, Any]) -> dict[str, Any]:
        """Import the agent function and check its parameters."""
        function = load_object(spec)
        if not callable(function):
            raise TypeError(
                f"{spec} is {short(function)}; an agent is a function of (task, endpoint)"
            )
        try:
            inspect.signature(function).bind(None, None, **options)
        except TypeError as error:
            message = (
                f"{spec} cannot be called with (task, endpoint) and options {options!r}: {error}"
            )
            raise TypeError(message) from None
        except ValueError:  # a function without an inspectable signature
            pass
        check = vars(sys.modules[function.__module__]).get("check_options")
        if inspect.isfunction(check):
            check(**options)
        self.agent = functools.partial(function, **options)
        return {"python": sys.version.split()[0]}

    async def run(self, name: str, task: dict[str, Any], endpoint: Endpoint) -> Any:
        os.environ.update(without_proxy(os.environ, endpoint.root_url))
        episode = self.episodes[name] = EpisodeThread(self.loop)
        try:
            return await episode.call(self.agent, task, endpoint)
        finally:
            del self.episodes[name]
            episode.end()


def as_mapping(value: Any, method: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of a result as a dict. Raises TypeError for another kind of object."""
    if isinstance(value, dict):
        unknown = set(value) - set(keys)
        if unknown:
            raise TypeError(
                f"{method}() returned the unknown keys {', '.join(sorted(map(str, unknown)))}; "
                f"known are {', '.join(keys)}"
            )
        return value
    if not hasattr(value, "messages"):  # house: ok a user's object
        raise TypeError(
            f"{method}() returned {short(value)}; return a "
            f"{'Start' if method == 'reset' else 'Step'}, or a mapping with the keys "
            f"{', '.join(keys)}"
        )
    fields = {k: getattr(value, k) for k in keys if hasattr(value, k)}  # house: ok a user's object
    return {k: list(v) if k in ("messages", "tools") else v for k, v in fields.items()}


def plain(value: Any) -> Any:
    """Return the Python number of an array scalar. Raises TypeError for other objects."""
    if hasattr(value, "item"):  # house: ok a user's object
        return value.item()
    raise TypeError(f"{short(value)} cannot be sent as JSON")


def short(value: Any) -> str:
    """Return the type and the beginning of a value as text."""
    return f"{type(value).__name__} {value!r:.80}"


def is_callable(value: Any, name: str) -> bool:
    """Return whether a user's class has a method."""
    return callable(getattr(value, name, None))  # house: ok a user's object


def load_object(spec: str) -> Any:
    """Return the object named ``path/to/file.py:name`` or ``package.module:name``."""
    source, _, name = spec.rpartition(":")
    if source.endswith(".py"):
        module_name = "environment_" + os.path.basename(source)[:-3]
        module_spec = importlib.util.spec_from_file_location(module_name, source)
        if module_spec is None or module_spec.loader is None or not os.path.isfile(source):
            raise FileNotFoundError(f"there is no file {os.path.abspath(source)}")
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[module_name] = module
        folder = os.path.dirname(os.path.abspath(source))
        if os.path.dirname(folder) != PACKAGE:  # adapters are named like the package that they use
            sys.path.insert(0, folder)
        module_spec.loader.exec_module(module)
    else:
        module = importlib.import_module(source)
    if not hasattr(module, name):  # house: ok a user's module
        raise AttributeError(f"{source} has no {name!r}")
    return getattr(module, name)  # house: ok a user's module


async def serve(requests: Any, out: Any) -> None:
    """Answer requests until they end."""
    loop = asyncio.get_running_loop()
    worker = CallHandler(loop)
    running = set()

    episodes = EpisodeOfTask(loop)
    writing = threading.Lock()

    def write(line: str) -> None:
        with writing:
            out.write(line + "\n")
            out.flush()

    async def answer(request: dict[str, Any]) -> None:
        episodes.current.set(request.get("episode"))
        reply: dict[str, Any] = {"id": request["id"]}
        try:
            reply["ok"] = await worker.handle(request)
            line = json.dumps(reply, default=plain)
            if len(line) > MAX_REPLY_BYTES:
                raise ValueError(
                    f"the result has {len(line)} bytes as JSON; at most {MAX_REPLY_BYTES} can be "
                    "sent"
                )
            if is_too_deep(reply):
                raise ValueError(f"the result is nested deeper than {MAX_DEPTH} levels")
        except BaseException as error:  # every failure becomes a reply
            line = json.dumps({"id": request["id"], "error": describe(error)})
        write(line)

    def read() -> None:
        for line in requests:
            request = json.loads(line)
            if request["op"] == "ping":
                write(json.dumps({"id": request["id"], "ok": episodes.ping()}))
            else:
                loop.call_soon_threadsafe(start, request)
        loop.call_soon_threadsafe(ended.set)
        time.sleep(END_S)
        leave()  # a coroutine that does not yield blocks the loop

    def start(request: dict[str, Any]) -> None:
        task = loop.create_task(answer(request))
        episodes.add(task, request.get("episode"))
        running.add(task)
        task.add_done_callback(running.discard)

    ended = asyncio.Event()
    threading.Thread(target=read, daemon=True).start()
    await ended.wait()


class EpisodeOfTask:
    """The episode to which each task of the event loop belongs. Create it in the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.current: ContextVar[str | None] = ContextVar("episode", default=None)
        self._loop, self._thread = loop, threading.get_ident()
        self._episodes: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()
        loop.set_task_factory(self._task)

    def add(self, task: Any, episode: str | None) -> None:
        self._episodes[task] = episode

    def _task(self, loop: Any, coroutine: Any, **options: Any) -> Any:
        """Return a new task. It belongs to the episode of the task that creates it."""
        task = asyncio.Task(coroutine, loop=loop, **options)
        self.add(task, self.current.get())
        return task

    def ping(self) -> dict[str, Any]:
        """Return the blocked state of the loop. Call it from another thread."""
        called = threading.Event()
        self._loop.call_soon_threadsafe(called.set)
        if called.wait(PING_S):
            return {"blocked": False}
        task = asyncio.current_task(self._loop)
        frame = sys._current_frames().get(self._thread)
        stack = traceback.extract_stack(frame) if frame is not None else []
        user_frames = [f for f in stack if f.filename != __file__ and "asyncio" not in f.filename]
        return {
            "blocked": True,
            "episode": None if task is None else self._episodes.get(task),
            "stack": "".join(traceback.format_list(user_frames[-5:]))[-MAX_ERROR_CHARS:],
        }


def describe(error: BaseException) -> dict[str, str]:
    """Return type, message and traceback of an error as text. The traceback begins in user code and
    is empty if the error was not raised there."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [
        frame
        for frame in frames
        if frame.filename != __file__ and "importlib" not in frame.filename
    ]
    text = "".join(traceback.format_list(user_frames))
    return {
        "type": type(error).__name__,
        "message": message_of(error)[:MAX_ERROR_CHARS],
        "traceback": text[-MAX_ERROR_CHARS:],
    }


def message_of(error: BaseException) -> str:
    """Return the text of an error, also if its ``__str__`` raises."""
    try:
        return str(error)
    except Exception as raised:
        return f"(its text raised {type(raised).__name__})"


def kill_marked(mark: str) -> None:
    """Kill all processes of this machine whose ``MARK`` is ``mark``, except for this one."""
    kill_with(f"{MARK}={mark}")


def kill_with(variable: str) -> None:
    """Kill all processes of this machine with ``variable`` (name=value) in their environment,
    except for this one. Linux only; processes that cleared their environment are not found."""
    encoded = os.fsencode(variable)
    for _ in range(KILL_ROUNDS):
        if not any([kill_if_marked(pid, encoded) for pid in all_pids()]):
            return


def all_pids() -> list[int]:
    """Return the ids of the other processes of this machine; none without /proc."""
    names = os.listdir("/proc") if os.path.isdir("/proc") else []
    return [int(name) for name in names if name.isdecimal() and int(name) != os.getpid()]


def kill_if_marked(pid: int, variable: bytes) -> bool:
    """Kill a process if ``variable`` (name=value) is in its environment. Return whether it is."""
    try:
        descriptor = os.pidfd_open(pid)  # so that no later process with its id is killed
    except OSError:
        return False
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            is_marked = variable in file.read().split(b"\0")
        if is_marked:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return is_marked
    except OSError:  # it has ended, or is another user's
        return False
    finally:
        os.close(descriptor)


def leave() -> None:
    """End the process without waiting for threads of user code, and kill what user code started."""
    if MARK in os.environ:
        kill_marked(os.environ[MARK])
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def main() -> None:
    """Answer requests until stdin ends, then exit."""
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # user code must not read requests
    os.dup2(2, 1)  # prints of user code go to stderr
    sys.path.insert(0, os.getcwd())
    asyncio.run(serve(requests, out))
    leave()


if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder, whose modules would hide others of the same name
    main()
