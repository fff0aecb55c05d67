"""The sandbox of bubblewrap: Linux namespaces and resource limits.

Reading order: Bubblewrap.run, _outer, _inner, check.

Notes on the command, all tested in tests/sandbox:

- ``setpriv`` changes the user if Burnish runs as root, because the kernel's limit on processes does
  not apply to root.
- bubblewrap starts with an empty environment, because programs can read ``/proc/1/environ``. Its
  standard input and output are ``/dev/null``, because programs can open ``/proc/1/fd``: two shells
  pass the real pipes to the program alone.
- The root and ``/dev`` are tmpfs without a size limit, so they are remounted read-only.
- ``--seccomp`` refuses system calls that namespaces do not separate (``seccomp.py``).
- ``--die-with-parent`` ends process 1 of the sandbox, and so all its processes, once the process
  that Burnish started has ended.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from burnish.config.sandbox import BubblewrapSandbox
from burnish.sandbox.base import (
    PYTHON,
    Program,
    Result,
    SandboxError,
    check_files,
    python_program,
)
from burnish.sandbox.process import (
    END_TIMEOUT_S,
    ProcessEnd,
    Raw,
    cause_of,
    log,
    run_process,
)
from burnish.sandbox.seccomp import seccomp_filter

DEFAULT_PYTHON = "/usr/bin/python3"
NOBODY = 65534
WORK = "/tmp"
"""Working directory of programs."""
SOCKET = "/run/burnish"
"""Path of the Unix socket of an :class:`Opening`."""
SHM_BYTES = 16 << 20
"""Size of /dev/shm, which multiprocessing needs for its locks."""
OPEN_FILES = 256
START_S = 10.0
"""Time limit of the probe, and of the interpreter when it is asked for its folders."""

INSTALL = (
    "install bubblewrap (apt-get install bubblewrap, dnf install bubblewrap). Where that is "
    "impossible, {kind: unsafe_subprocess} limits resources but isolates nothing"
)
NAMESPACES = (
    "the kernel or the container refuses user namespaces. In Docker or Podman add --security-opt "
    "seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined; "
    "on Ubuntu 24.04: sysctl kernel.apparmor_restrict_unprivileged_userns=0; elsewhere: sysctl "
    "user.max_user_namespaces and kernel.unprivileged_userns_clone. Where that is impossible, "
    "{kind: unsafe_subprocess} limits resources but isolates nothing"
)

_TO_7_AND_8 = 'exec "$@" 7<&0 8>&1 </dev/null >/dev/null'
_FROM_7_AND_8 = 'exec "$@" 0<&7 1>&8 7<&- 8>&-'

_PROBE = """
import json, os, socket, sys
port, memory, paths = json.load(sys.stdin)
wrong = []
try:
    socket.create_connection(("127.0.0.1", port), 2).close()
    wrong.append("connect to a port of this machine")
except OSError:
    pass
for path in paths:
    try:
        file = os.path.join(path, "burnish-probe")
        os.close(os.open(file, os.O_CREAT | os.O_WRONLY))
        wrong.append("write to " + path)
        os.unlink(file)
    except OSError:
        pass
try:
    bytearray(memory)
    wrong.append("allocate more than memory_bytes")
except MemoryError:
    pass
if set(os.environ) - {"PATH", "HOME", "LANG", "OMP_NUM_THREADS", "PWD", "LC_CTYPE"}:
    wrong.append("read environment variables of this process")
print(json.dumps(wrong))
"""


@dataclass(frozen=True)
class Opening:
    """A part of this machine that one program can use, in addition to those of the config."""

    socket: Path
    """Unix socket, which is ``SOCKET`` in the sandbox."""
    folder: str
    """Empty folder that exists in the sandbox."""


class Bubblewrap:
    """Programs in bubblewrap. Implements ``base.Sandbox``.

    Raises SandboxError if bubblewrap or the interpreter is missing.
    """

    def __init__(self, config: BubblewrapSandbox) -> None:
        self._config = config
        self._slots = asyncio.Semaphore(config.max_concurrent or os.cpu_count() or 1)
        self._tools, self._filter = _tools(), seccomp_filter()
        python = config.python or DEFAULT_PYTHON
        folders = () if python.startswith("/usr/") else _folders_of(python)
        self._python = os.path.abspath(python)
        shown = (*folders, *map(os.path.abspath, config.read_only_paths))
        missing = [path for path in (self._python, *shown) if not os.path.exists(path)]
        if missing:
            raise SandboxError(
                f"the sandbox needs {missing[0]}, which does not exist; "
                + (
                    "set python to an interpreter"
                    if missing[0] == self._python
                    else "correct read_only_paths"
                )
            )
        self._shown = tuple(dict.fromkeys(shown))

    async def check(self) -> None:
        """Run a program that tries to leave the sandbox. Raises SandboxError."""
        memory, folder = 2 * self._config.memory_bytes, os.getcwd()
        paths = ["/", "/usr", "/dev", "/etc"]
        if not Path(folder).is_relative_to(WORK):  # (its name may exist in the private folder)
            paths.append(folder)
        with socket.create_server(("127.0.0.1", 0)) as server:
            probe_input = json.dumps([server.getsockname()[1], memory, paths]).encode()
            result = await self.run(python_program(_PROBE, stdin=probe_input, wall_s=START_S))
        try:
            wrong = json.loads(result.stdout)
        except ValueError:
            stderr_text = result.stderr.decode(errors="replace").strip()[-2000:]
            raise SandboxError(
                f"bubblewrap does not work here: a test program ended with {result.ended} "
                f"{result.exit_code}:\n{stderr_text}\nCheck python, read_only_paths and the limits"
            ) from None
        if wrong:
            raise SandboxError(
                f"bubblewrap does not isolate here: a test program could {', and '.join(wrong)}. "
                "Do not run model-written code on this machine; report the output of `bwrap "
                "--version` and `uname -a`"
            )

    async def run(self, program: Program) -> Result:
        """Run a program. Raises SandboxError if bubblewrap fails."""
        check_files(program.files)
        async with self._slots:
            return await self._run(program)

    async def run_open(self, program: Program, opening: Opening) -> Result:
        """Run a program that can use a part of this machine. Raises SandboxError if bubblewrap
        fails.

        It does not wait for other programs. It may write to stderr without limit: the last
        ``output_bytes`` are returned.
        """
        check_files(program.files)
        return await self._run(program, opening)

    async def close(self) -> None:
        """Do nothing: every program has ended."""

    async def _run(self, program: Program, opening: Opening | None = None) -> Result:
        with ExitStack() as stack:
            status = _StatusPipe(stack)
            files = {name: _memory_file(data, stack) for name, data in program.files.items()}
            calls = _memory_file(self._filter, stack)
            limited = ["--seccomp", str(calls), *self._inner(program, files, opening)]
            command = [*self._outer(status.fd), *limited]
            try:
                raw = await run_process(
                    command,
                    stdin=program.stdin,
                    wall_s=program.wall_s,
                    output_bytes=self._config.output_bytes,
                    start={
                        "env": {"PATH": "/usr/bin:/bin"},
                        "pass_fds": (status.fd, calls, *files.values()),
                    },
                    last_stderr=opening is not None,
                    may_kill=status.begun,
                )
            except OSError as error:
                raise SandboxError(f"bubblewrap cannot be started: {error}") from error
            finally:
                await status.end()
        exit_code = status.exit_code
        if raw.ended == "exit" and not status.started:
            raise _failed(raw)
        if raw.ended != "exit":
            exit_code = None
        cause = cause_of(raw, exit_code)
        return Result(raw.stdout, raw.stderr, exit_code, cause, raw.seconds)

    def resolved(self, command: Sequence[str]) -> list[str]:
        """Return a command with the path of the interpreter in the place of ``PYTHON``."""
        return [self._python if command[0] == PYTHON else command[0], *command[1:]]

    def _outer(self, status_fd: int) -> list[str]:
        """Return the command up to bubblewrap's options."""
        user = ["--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
        as_nobody = [self._tools["setpriv"], *user] if os.geteuid() == 0 else []
        return [
            *("/bin/sh", "-c", _TO_7_AND_8, "sh"),
            *(self._tools["choom"], "--adjust", "1000", "--"),
            *as_nobody,
            *(self._tools["bwrap"], "--json-status-fd", str(status_fd)),
        ]

    def _inner(
        self, program: Program, files: Mapping[str, int], opening: Opening | None
    ) -> list[str]:
        """Return bubblewrap's options and the program's command. ``files``: path -> descriptor."""
        config = self._config
        opened = []
        if opening is not None:
            opened = ["--ro-bind", str(opening.socket), SOCKET, "--dir", opening.folder]
        options = [
            *("--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"),
            *("--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"),
            *_system_folders(),
            *("--proc", "/proc", "--dev", "/dev"),
            *("--size", str(config.files_bytes), "--tmpfs", WORK, "--chdir", WORK),
            *(word for path in self._shown for word in ("--ro-bind", path, path)),
            *(w for name, fd in files.items() for w in ("--file", str(fd), f"{WORK}/{name}")),
            *opened,
            *("--remount-ro", "/", "--remount-ro", "/dev"),
            *("--size", str(min(SHM_BYTES, config.files_bytes)), "--tmpfs", "/dev/shm"),
            *("--setenv", "PATH", f"{os.path.dirname(self._python)}:/usr/bin:/bin"),
            *("--setenv", "HOME", WORK, "--setenv", "LANG", "C.UTF-8"),
            *("--setenv", "OMP_NUM_THREADS", "1"),
        ]
        cpu_s = math.ceil(program.wall_s) if program.cpu_s is None else program.cpu_s
        return [
            *options,
            *("/bin/sh", "-c", _FROM_7_AND_8, "sh"),
            *("/usr/bin/prlimit", f"--as={config.memory_bytes}", f"--cpu={cpu_s}:{cpu_s + 1}"),
            *(f"--nproc={config.processes}", f"--fsize={config.files_bytes}"),
            *(f"--nofile={OPEN_FILES}", "--core=0", "--"),
            *self.resolved(program.command),
        ]


class _StatusPipe:
    """bubblewrap's reports: process 1 of the sandbox, and the exit code.

    ``begun`` is set once process 1 is known. Were bubblewrap killed before, process 1 would wait
    for it without end."""

    def __init__(self, stack: ExitStack) -> None:
        read, write = os.pipe()
        self.fd = _high(write, stack)
        stack.callback(os.close, read)
        self._fd, self._text = read, b""
        self.begun = asyncio.Event()
        self._process: ProcessEnd | None = None
        self._pid = 0
        os.set_blocking(read, False)
        loop = asyncio.get_running_loop()
        loop.add_reader(read, self._read)
        stack.callback(loop.remove_reader, read)

    def _read(self) -> None:
        try:
            self._text += os.read(self._fd, 4096)
        except BlockingIOError:
            return
        pid = self._reports().get("child-pid")
        if self._process is None and pid is not None:
            self._process, self._pid = ProcessEnd(pid), pid
            self.begun.set()

    def _reports(self) -> dict[str, Any]:
        reports: dict[str, Any] = {}
        for line in self._text.splitlines(keepends=True):
            if line.endswith(b"\n"):
                reports |= json.loads(line)
        return reports

    @property
    def exit_code(self) -> int | None:
        """Exit code of the program; None if it did not end by itself."""
        code = self._reports().get("exit-code")
        return None if code is None else int(code)

    @property
    def started(self) -> bool:
        """Return whether the program was started."""
        return "exit-code" in self._reports()

    async def end(self) -> None:
        """Kill process 1 of the sandbox and wait for its end; bubblewrap has ended before.

        It usually dies with bubblewrap, but not if that is killed while it sets the sandbox up.
        """
        self._read()
        if self._process is None:
            return
        self._process.kill()
        try:
            await asyncio.wait_for(self._process.event.wait(), END_TIMEOUT_S)
        except TimeoutError:
            log.warning("processes in a sandbox do not end although they were killed")
        finally:
            self._process.close()
        with suppress(ChildProcessError):  # a child only if this is process 1 of a container
            os.waitpid(self._pid, os.WNOHANG)


def _memory_file(data: bytes, stack: ExitStack) -> int:
    """Return a descriptor at the start of an anonymous file with ``data``."""
    fd = _high(os.memfd_create("program"), stack)
    with os.fdopen(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _high(fd: int, stack: ExitStack) -> int:
    """Move a descriptor to a number of 10 or more: the shells of the command use 7 and 8."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    stack.callback(os.close, moved)
    return moved


def _failed(raw: Raw) -> SandboxError:
    stderr_text = raw.stderr.decode(errors="replace").strip()[-2000:]
    if any(
        word in stderr_text
        for word in ("namespace", "uid map", "RTM_NEWADDR", "pivot_root", "mount")
    ):
        return SandboxError(f"bubblewrap does not work here ({stderr_text}): {NAMESPACES}")
    if "Permission denied" in stderr_text and os.geteuid() == 0:
        return SandboxError(
            f"bubblewrap cannot start a program ({stderr_text}). Programs run as user {NOBODY}, "
            "who must be able to read python and read_only_paths; choose paths outside of /root"
        )
    return SandboxError(
        f"bubblewrap cannot start a program (return code {raw.returncode}): {stderr_text}"
    )


def _tools() -> dict[str, str]:
    """Return the paths of the programs in the command. Raises SandboxError if one is missing."""
    if sys.platform != "linux":
        raise SandboxError(f"bubblewrap needs Linux, and this is {sys.platform}; {INSTALL}")
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError(f"bubblewrap is not installed (no program bwrap on PATH): {INSTALL}")
    tools = {"bwrap": bwrap}
    for name in ("choom", "prlimit", *(["setpriv"] if os.geteuid() == 0 else [])):
        path = shutil.which(name)
        if path is None:
            raise SandboxError(f"the sandbox needs the program {name}; install util-linux 2.33+")
        tools[name] = path
    return tools


@cache
def _folders_of(python: str) -> tuple[str, ...]:
    """Return the folders of an interpreter and of its virtual environment, without those in /usr.
    Raises SandboxError if it cannot be started."""
    ask = (
        "import json, os, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.exec_prefix, "
        "os.path.dirname(os.path.realpath(sys.executable))]))"
    )
    try:
        done = subprocess.run(
            [python, "-I", "-c", ask], capture_output=True, check=True, timeout=START_S
        )
        reply = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise SandboxError(
            f"python={python!r} of the sandbox cannot be started ({error}); give the path of a "
            "Python 3.9+ interpreter"
        ) from error
    folders = sorted({os.path.dirname(os.path.abspath(python)), *reply})
    outside = [path for path in folders if path != "/" and not Path(path).is_relative_to("/usr")]
    return tuple(
        path
        for path in outside
        if not any(path != other and Path(path).is_relative_to(other) for other in outside)
    )


@cache
def _system_folders() -> tuple[str, ...]:
    """Return bubblewrap's options for /usr and the folders that programs and libraries expect."""
    words = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/") / name
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            words += ["--ro-bind", str(path), str(path)]
    for file in ("/etc/ld.so.cache", "/etc/alternatives"):
        words += ["--ro-bind-try", file, file]
    return tuple(words)
