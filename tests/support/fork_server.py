"""Start Python processes as forks of one process that has the large libraries imported.

Importing torch and transformers' model classes takes about 7 s of CPU time, and the tests start
some 400 processes that need them. A server imports them once, at the first request, and computes
nothing. The command

    python -S -E tests/support/fork_server.py run SCRIPT [ARGUMENT ...]

behaves like ``python SCRIPT ARGUMENT ...``: the server forks a process that runs the script with
the command's arguments, environment, working folder and standard streams. The same holds for
``-c CODE`` and ``-m MODULE`` instead of SCRIPT. The command ends with the exit status of that
process, passes SIGTERM and SIGINT to it, and killing the command kills it. The command becomes a
plain ``python`` if no server answers, if the environment differs in a variable that a library
reads at import, for any other option of the interpreter, or if it inherits more than the three
standard streams.

Ray starts its workers by this command (:func:`runtime_env_hook`). Its library reads variables of a
job when it is loaded, so the workers of a job are forks of a second server, which is a fork of the
first, has imported Ray with these variables, and ends with the job's node. Tests that start ranks
call :func:`command`. :func:`interpreter` is the same command as one file. In its processes
``sys.executable`` is that file, so processes that they start are forks, too.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

ADDRESS = "BURNISH_FORK_SERVER"
"""Environment variable that holds the path of the server's socket."""
PYTHON = "BURNISH_FORK_PYTHON"
"""Environment variable that holds the path of the server's interpreter."""
INTERPRETER = "BURNISH_FORK_INTERPRETER"
"""Environment variable that holds the path that :func:`interpreter` returns."""
READ_AT_IMPORT = ("DS_", "HF_", "OMP_", "TRANSFORMERS_")
"""Prefixes of environment variables that a library reads when it is imported or loaded. Left out
are variables that an import sets (DeepSpeed: ``TORCHINDUCTOR_CACHE_DIR``; vLLM: ``LD_PRELOAD``,
``KMP_*``): a process that has imported the library would never get a fork."""
OFFLINE = "HF_HUB_OFFLINE"
"""Read at import too, but a fork can apply it: the library has it as one variable."""
PRELOADED = (
    "burnish.runtime.worker",
    "burnish.runtime.ray.rollout_worker",
    "burnish.jobs.run",
    "burnish.jobs.rl",
    "burnish.jobs.sft",
    "burnish.report.build",
    "burnish.train.fsdp.engine",
    "burnish.optimizers.adamw.rule",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "deepspeed",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch.profiler._cupti_monitor",
    "grpc",
    "google.protobuf.descriptor_pb2",
    "google.protobuf.json_format",
    "openai",
    "peft",
    "pyarrow.json",
    "pydantic.deprecated.class_validators",
    "pydantic.v1",
    "requests",
    "starlette.datastructures",
    "uvloop",
)
"""Ray itself is not among them: its library reads ``RAY_JOB_ID`` when it is loaded."""
RAY_WORKER = "/ray/_private/workers/default_worker.py"
"""End of the path of the script that every worker of Ray runs."""
PRELOADED_FOR_RAY = (
    "ray._common.pydantic_compat",
    "ray._common.usage.usage_lib",
    "ray.actor",
    "ray.exceptions",
    "ray._private.arrow_serialization",
    "ray._private.async_compat",
    "ray._private.node",
    "ray._private.runtime_env.setup_hook",
    "ray._private.worker",
    "ray.util.scheduling_strategies",
)
OTHER_PYTHON = b"exec\n"
"""Answer of the server: the request needs an interpreter with another environment."""


def read_at_import(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that must be equal in the server and in a process forked from it."""
    return {k: v for k, v in environment.items() if k.startswith(READ_AT_IMPORT) and k != OFFLINE}


# ---- the command -------------------------------------------------------------------------------


def run(words: list[str], *, nested: bool = False) -> None:
    """Have the server fork a process that runs ``words``, wait for it, and end as it ends.
    ``nested``: its ``sys.executable`` is :func:`interpreter`."""
    import array
    import json
    import signal

    python = os.environ[PYTHON]
    passed_on = {signal.SIGTERM, signal.SIGINT} if nested else set()
    if nested and not _can_fork(words):
        os.execv(python, [python, *words])
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(os.environ[ADDRESS])
    except OSError:
        os.execv(python, [python, *words])
    request = {
        "words": words,
        "cwd": os.getcwd(),
        "environment": dict(os.environ),
        "nested": nested,
        "leads_group": os.getpgrp() == os.getpid(),
    }
    data = json.dumps(request).encode()
    # The process may run before its number arrives here. A signal until then stays pending.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    streams = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
    connection.sendmsg([len(data).to_bytes(8, "little")], streams)
    connection.sendall(data)
    answers = connection.makefile("rb")
    first = answers.readline()
    if first == OTHER_PYTHON:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        os.execv(python, [python, *words])
    for number in passed_on:
        signal.signal(number, lambda number, _: os.kill(int(first), number))
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    answer = answers.readline()  # the exit code, or nothing if the server has ended
    code = int(answer) if answer else 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def _can_fork(words: list[str]) -> bool:
    """Return False for options of the interpreter, and if descriptors are inherited."""
    option = words[0] if words else "-"
    inherited = [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]
    inherited = [number for number in inherited if os.path.exists(f"/proc/self/fd/{number}")]
    return (option in ("-c", "-m") or not option.startswith("-")) and not inherited


# ---- the server --------------------------------------------------------------------------------


class ForkServer:
    """Forks processes, reports their exit codes, and kills them when it is closed."""

    def __init__(self) -> None:
        import selectors
        import signal

        self.children: dict[int, socket.socket] = {}
        self.ended, self._wake = socket.socketpair()
        for end in (self.ended, self._wake):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.ended, selectors.EVENT_READ, self.report)

    def serve(self) -> None:
        while True:
            for key, _ in self.selector.select():
                key.data()

    def close(self) -> None:
        for pid in self.children:
            self._kill(pid)
        sys.exit()

    def start(self, connection: socket.socket, request: dict[str, Any], streams: list[int]) -> None:
        """Fork the process that ``request`` asks for, and close its ``streams`` here."""
        import contextlib
        import selectors

        pid = self._fork(request, streams)
        self.children[pid] = connection
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(f"{pid}\n".encode())
        self.selector.register(connection, selectors.EVENT_READ, lambda: self.drop(pid))
        for stream in streams:
            os.close(stream)

    def _fork(self, request: dict[str, Any], streams: list[int]) -> int:
        import gc
        import signal

        gc.freeze()
        # The fork ignores SIGINT, as the server does, until it has its own handler.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        pid = os.fork()
        if pid == 0:
            _become(request, streams, unblocked)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        return pid

    def drop(self, pid: int) -> None:
        """The command was killed: kill its process."""
        self.selector.unregister(self.children[pid])
        self._kill(pid)

    def _kill(self, pid: int) -> None:
        import signal

        os.kill(pid, signal.SIGKILL)  # a child that was not waited for: the number is its own

    def report(self) -> None:
        """Send the exit codes of ended processes to their commands."""
        import contextlib

        with contextlib.suppress(BlockingIOError):
            self.ended.recv(4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if (connection := self.children.pop(pid, None)) is None:
                continue  # a server of Ray
            with contextlib.suppress(KeyError):  # dropped
                self.selector.unregister(connection)
            with contextlib.suppress(BrokenPipeError):
                connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            connection.close()


class Server(ForkServer):
    """Forks a process for each connection until standard input ends."""

    def __init__(self, address: str) -> None:
        import selectors

        super().__init__()
        self.environment = read_at_import(dict(os.environ))
        self.imported = False
        self.servers_of_ray: dict[str, socket.socket] = {}
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(address)
        self.listener.listen(64)
        self.selector.register(sys.stdin, selectors.EVENT_READ, self.close)
        self.selector.register(self.listener, selectors.EVENT_READ, self.accept)

    def close(self) -> None:
        import contextlib

        for path in (self.listener.getsockname(), f"{self.listener.getsockname()}-python"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        super().close()

    def accept(self) -> None:
        """Fork the process that one connection asks for."""
        connection, _ = self.listener.accept()
        received = _receive(connection)
        if received is None:
            return
        request, streams = received
        if read_at_import(request["environment"]) != self.environment:
            connection.sendall(OTHER_PYTHON)
            connection.close()
            for stream in streams:
                os.close(stream)
            return
        if not self.imported:
            _import(PRELOADED)
            self.imported = True
        if not self._passed_to_ray(connection, request, streams):
            self.start(connection, request, streams)

    def _passed_to_ray(
        self, connection: socket.socket, request: dict[str, Any], streams: list[int]
    ) -> bool:
        """Pass the request of a worker of Ray to the server of its job; return False for other
        requests, and if that server has ended."""
        import json

        if not request["words"][0].endswith(RAY_WORKER):
            return False
        variables = {k: v for k, v in request["environment"].items() if k.startswith("RAY_")}
        job = json.dumps(variables, sort_keys=True)
        if job not in self.servers_of_ray:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
            if pid == 0:
                ours.close()
                self._become_server_of_ray(theirs, variables, [connection.detach(), *streams])
            theirs.close()
            self.servers_of_ray[job] = ours
        descriptors = [connection.fileno(), *streams]
        try:
            socket.send_fds(self.servers_of_ray[job], [json.dumps(request).encode()], descriptors)
        except OSError:
            return False
        connection.close()
        for stream in streams:
            os.close(stream)
        return True

    def _become_server_of_ray(
        self, channel: socket.socket, variables: dict[str, str], open_here: list[int]
    ) -> None:
        """Serve the workers of one job of Ray, in a fork of this server. Does not return."""
        import traceback

        code = 1
        try:
            for file in (self.selector, self.listener, self.ended, self._wake):
                file.close()
            for other in (*self.children.values(), *self.servers_of_ray.values()):
                other.close()
            for descriptor in open_here:
                os.close(descriptor)
            os.environ.update(variables)
            _import(PRELOADED_FOR_RAY)
            ServerOfRay(channel).serve()
        except SystemExit:
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


class ServerOfRay(ForkServer):
    """Forks the workers of one job of Ray. Ends with the first server, or if the job's node and all
    workers have ended."""

    def __init__(self, channel: socket.socket) -> None:
        import selectors

        super().__init__()
        self.channel = channel
        self.node = os.pidfd_open(int(os.environ["RAY_RAYLET_PID"]))
        self.node_has_ended = False
        self.selector.register(channel, selectors.EVENT_READ, self.accept)
        self.selector.register(self.node, selectors.EVENT_READ, self.end_with_node)

    def accept(self) -> None:
        """Fork the worker that the first server asks for."""
        import json

        data, descriptors, _, _ = socket.recv_fds(self.channel, 4 << 20, 4)
        if not data:
            self.close()
        connection = socket.socket(fileno=descriptors[0])
        self.start(connection, json.loads(data), descriptors[1:])

    def end_with_node(self) -> None:
        self.selector.unregister(self.node)
        self.node_has_ended = True
        self.report()

    def report(self) -> None:
        super().report()
        if self.node_has_ended and not self.children:
            self.close()


def _import(names: tuple[str, ...]) -> None:
    import gc
    import importlib
    import threading

    gc.disable()  # what an import makes is not garbage
    for name in names:
        importlib.import_module(name)
    gc.enable()
    assert threading.active_count() == 1, "a fork would lose these threads"


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return a request and its standard streams; None if the command ended before it asked."""
    import array
    import json

    streams = array.array("i")
    header, extra, *_ = connection.recvmsg(8, socket.CMSG_SPACE(3 * streams.itemsize))
    for _, _, numbers in extra:
        streams.frombytes(numbers)
    size, data = int.from_bytes(header, "little"), b""
    while len(data) < size and (more := connection.recv(size - len(data))):
        data += more
    return (json.loads(data), list(streams)) if header and len(data) == size else None


def _become(request: dict[str, Any], streams: list[int], unblocked: set[Any]) -> None:
    """Run the script of a request in this process, a fork of the server. Does not return.
    ``unblocked``: the signal mask of the script."""
    import atexit
    import signal
    import traceback

    import garbage

    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, 4096)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the server's has read ahead
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["cwd"])
        if request["leads_group"]:
            os.setpgid(0, 0)
        if request["nested"]:
            sys.executable = os.environ[INTERPRETER]
        _apply_offline()
        _reseed()
        garbage.keep_frozen()
        _run_words(request["words"])
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)


def _apply_offline() -> None:
    import huggingface_hub.constants

    offline = os.environ.get(OFFLINE, "").upper() in {"1", "ON", "YES", "TRUE"}
    huggingface_hub.constants.HF_HUB_OFFLINE = offline


def _run_words(words: list[str]) -> None:
    """Run a script, ``-c CODE`` or ``-m MODULE``, as the interpreter does."""
    import runpy
    import types

    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if words[0] == "-c":
        sys.argv, sys.path[:1] = ["-c", *words[2:]], ["", *added]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    elif words[0] == "-m":
        sys.argv, sys.path[:1] = words[1:], [os.getcwd(), *added]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:1] = words[:], [os.path.dirname(words[0]), *added]
        runpy.run_path(words[0], run_name="__main__")


def _reseed() -> None:
    """Draw new seeds where an import does: forks would share them."""
    import random

    import numpy as np

    random.seed()
    np.random.seed()


# ---- for tests ---------------------------------------------------------------------------------


def runtime_env_hook(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """Have Ray start its workers by :func:`run`, and skip the import of Ray that comes before
    (``RAY_RUNTIME_ENV_HOOK`` names this function, which Ray calls before it starts a node)."""
    if not os.environ.get(ADDRESS):
        return runtime_env or {}
    from ray._private import ray_constants

    setup = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ray_setup_worker.py")
    ray_constants.SETUP_WORKER_FILENAME = setup
    return {**(runtime_env or {}), "py_executable": " ".join(command())}


def command() -> list[str]:
    """Return the words that replace the interpreter in a command."""
    return [os.environ[PYTHON], "-S", "-E", os.path.abspath(__file__), "run"]


def interpreter() -> str:
    """Return the path of a command that is called like ``python`` (see the module docstring)."""
    return os.environ[INTERPRETER]


def start(folder: str) -> None:
    """Start a server that ends with this process. Processes that this one starts inherit the
    environment variables that lead to it."""
    import shlex
    import subprocess

    address = os.path.join(folder, f"fork-server-{os.getpid()}")
    server = subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), "serve", address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None and server.stdout.readline() == b"ready\n"
    _running.append(server)
    os.environ[ADDRESS], os.environ[PYTHON] = address, sys.executable
    os.environ[INTERPRETER] = f"{address}-python"
    with open(os.environ[INTERPRETER], "w", encoding="utf-8") as script:
        python, this = shlex.quote(sys.executable), shlex.quote(os.path.abspath(__file__))
        script.write(f'#!/bin/sh\nexec {python} -S -E {this} python "$@"\n')
    os.chmod(os.environ[INTERPRETER], 0o755)
    here = os.path.dirname(os.path.abspath(__file__))
    paths = [here, os.path.dirname(os.path.dirname(here)), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ["RAY_RUNTIME_ENV_HOOK"] = f"{__name__}.{runtime_env_hook.__name__}"


_running: list[Any] = []
"""Keeps the server's standard input open."""


if __name__ == "__main__":
    if sys.argv[1] in ("run", "python"):
        run(sys.argv[2:], nested=sys.argv[1] == "python")
    else:
        made = Server(sys.argv[2])
        print("ready", flush=True)
        made.serve()
