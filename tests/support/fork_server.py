"""Start Python processes by a fork of one process that has the large libraries imported.

Importing torch and transformers' model classes takes about 7 s of CPU, and the tests start some 400
processes that need them. A server imports them once, at the first request, and computes nothing; the command

    python -S -E tests/support/fork_server.py run SCRIPT [ARGUMENT ...]

behaves like ``python SCRIPT ARGUMENT ...``: the process that runs the script is forked from the
server with the command's arguments, environment, working folder and standard streams, and both end
together, with the same exit status. If no server runs, or the environment differs in a variable
that a library reads at import, the command becomes a plain ``python``.

Ray starts its workers by this command (see :func:`runtime_env_hook`), :func:`command` starts ranks.
"""

from __future__ import annotations

import os
import socket
import sys

ADDRESS = "BURNISH_FORK_SERVER"
"""Environment variable that holds the server's socket."""
PYTHON = "BURNISH_FORK_PYTHON"
"""Environment variable that holds the interpreter of the server."""
READ_AT_IMPORT = ("CUDA_", "DS_", "HF_", "KMP_", "LD_", "MKL_", "OMP_", "TORCH", "TRANSFORMERS_")
"""Prefixes of environment variables that a library reads when it is imported or loaded."""
PRELOADED = (
    "burnish.runtime.worker",
    "burnish.runtime.rollout_worker",
    "burnish.loops.run",
    "burnish.train.fsdp",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "deepspeed",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "grpc",
    "google.protobuf.descriptor_pb2",
    "peft",
)


def fixed(environment: dict[str, str]) -> dict[str, str]:
    """The variables that have to be equal in the server and in a process forked from it."""
    return {k: v for k, v in environment.items() if k.startswith(READ_AT_IMPORT)}


# ---- the command -------------------------------------------------------------------------------


def run(words: list[str]) -> None:
    """Have the server fork a process that runs ``words`` and end as it ends."""
    import array
    import json

    address = os.environ[ADDRESS]
    here = os.environ[PYTHON]
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
    except OSError:
        os.execv(here, [here, *words])
    request = {"words": words, "cwd": os.getcwd(), "environment": dict(os.environ)}
    streams = array.array("i", [0, 1, 2])
    data = json.dumps(request).encode()
    header = len(data).to_bytes(8, "little")
    connection.sendmsg([header], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    connection.sendall(data)
    answer = connection.recv(16)  # the exit status; nothing, if the server has ended
    if answer == b"exec":
        os.execv(here, [here, *words])
    status = int(answer) if answer else 1
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status)


# ---- the server --------------------------------------------------------------------------------


def serve(address: str) -> None:
    """Fork a process for each connection until standard input ends."""
    import selectors
    import signal

    needed = fixed(dict(os.environ))
    imported = False
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    awake, wake = socket.socketpair()
    awake.setblocking(False)
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    children: dict[int, socket.socket] = {}
    selector = selectors.DefaultSelector()
    for source in (listener, awake, sys.stdin):
        selector.register(source, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                _end(children)
                os.unlink(address)
                return
            if key.fileobj is awake:
                awake.recv(4096)
                _reap(children, selector)
            elif key.fileobj is listener:
                connection, _ = listener.accept()
                imported = imported or _import()
                pid = _fork(connection, needed)
                if pid is not None:
                    children[pid] = connection
                    selector.register(connection, selectors.EVENT_READ, pid)
            elif key.data in children:  # the command was killed: so is its process
                selector.unregister(key.fileobj)
                os.kill(key.data, signal.SIGKILL)


def _import() -> bool:
    import importlib
    import threading

    for name in PRELOADED:
        importlib.import_module(name)
    assert threading.active_count() == 1, threading.enumerate()
    return True


def _fork(connection: socket.socket, needed: dict[str, str]) -> int | None:
    """The process that runs what the connection asks for; None, if it has to be another Python."""
    import array
    import gc
    import json

    streams = array.array("i")
    header, extra, *_ = connection.recvmsg(8, socket.CMSG_SPACE(3 * streams.itemsize))
    for _, _, data in extra:
        streams.frombytes(data)
    if len(header) < 8:
        return None
    size, data = int.from_bytes(header, "little"), b""
    while len(data) < size and (more := connection.recv(size - len(data))):
        data += more
    request = json.loads(data)
    if fixed(request["environment"]) != needed:
        connection.sendall(b"exec")
        connection.close()
        pid = None
    else:
        gc.freeze()
        pid = os.fork()
        if pid == 0:
            _become(request, list(streams))
    for stream in streams:
        os.close(stream)
    return pid


def _become(request: dict[str, object], streams: list[int]) -> None:
    """Run the script of the request in this process, which is a fork of the server."""
    import random
    import runpy
    import signal
    import traceback

    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, 4096)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        environment, words = request["environment"], request["words"]
        assert isinstance(environment, dict) and isinstance(words, list)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(str(request["cwd"]))
        random.seed()
        sys.argv = words[:]
        sys.path[0] = os.path.dirname(words[0])
        added = environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[1:1] = [path for path in added if path and path not in sys.path]
        runpy.run_path(words[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        import atexit

        atexit._run_exitfuncs()
        os._exit(status & 0xFF)


def _reap(children: dict[int, socket.socket], selector: object) -> None:
    """Tell the commands of ended processes how these ended."""
    import contextlib

    while children:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        connection = children.pop(pid)
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(connection)  # type: ignore[attr-defined]
        with contextlib.suppress(OSError):
            connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        connection.close()


def _end(children: dict[int, socket.socket]) -> None:
    import contextlib
    import signal

    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# ---- for tests ---------------------------------------------------------------------------------


def runtime_env_hook(runtime_env: dict[str, object] | None) -> dict[str, object]:
    """Have Ray start its workers by :func:`run` (``RAY_RUNTIME_ENV_HOOK`` names this function)."""
    if not os.environ.get(ADDRESS):
        return runtime_env or {}
    return {**(runtime_env or {}), "py_executable": " ".join(command())}


def command() -> list[str]:
    """The words that take the place of the interpreter's name in a command."""
    return [os.environ[PYTHON], "-S", "-E", os.path.abspath(__file__), "run"]


def start(folder: str) -> None:
    """Start a server that ends with this process. What this process starts finds it by the
    environment."""
    import subprocess

    address = os.path.join(folder, f"fork-server-{os.getpid()}")
    server = subprocess.Popen(
        [sys.executable, os.path.abspath(__file__), "serve", address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None and server.stdout.readline() == b"ready\n"
    os.environ[ADDRESS], os.environ[PYTHON] = address, sys.executable
    os.environ["RAY_RUNTIME_ENV_HOOK"] = f"{__name__}.{runtime_env_hook.__name__}"
    _running.append(server)


_running: list[object] = []


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(sys.argv[2:])
    else:
        serve(sys.argv[2])
