"""Parent process of an MCP server that uses stdio. Run by path, not imported.

``python mcp_guard.py LIMIT COMMAND...`` runs the command and copies its stdin and stdout. The guard
ensures that nothing of the server is left: when its own stdin ends (the connection is closed, or
the worker was killed), it closes the stdin of the server and, after ``GRACE_S``, kills the server
with all of its descendants. They cannot escape into another process group or session, because the
guard is their subreaper.

Only lines of stdout that can be JSON-RPC messages are copied; other output goes to stderr. A line
of more than LIMIT bytes ends the server.

This file only uses the standard library, so that its start is fast.
"""

from __future__ import annotations

import ctypes
import glob
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

GRACE_S = 1.0
"""Time in which a server may end by itself after the end of its stdin."""
PR_SET_CHILD_SUBREAPER = 36


class GuardedServer:
    """A server and the threads that copy its pipes."""

    def __init__(self, limit: int, command: list[str]) -> None:
        self._limit = limit
        self._ending = threading.Lock()
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=self.end).start())
        pipe = subprocess.PIPE
        self.server = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)

    def run(self) -> None:
        """Copy until the server or its client ends. Does not return."""
        threading.Thread(target=self._feed, daemon=True).start()
        reader = threading.Thread(target=self._read, daemon=True)
        reader.start()
        self.server.wait()
        reader.join(GRACE_S)  # its last output
        self.end()

    def _feed(self) -> None:
        stdin: Any = self.server.stdin
        with suppress(OSError):
            while chunk := os.read(0, 1 << 16):
                stdin.write(chunk)
                stdin.flush()
        with suppress(OSError):
            stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.server.wait(GRACE_S)
        self.end()

    def _read(self) -> None:
        stdout: Any = self.server.stdout
        out = sys.stdout.buffer
        with suppress(OSError):
            while line := stdout.readline(self._limit + 1):
                if len(line) > self._limit:
                    log(f"a message of the server has more than {self._limit} bytes".encode())
                    break
                if line.lstrip()[:1] in (b"{", b"["):
                    out.write(well_formed(line))
                    out.flush()
                else:
                    log(line)
        self.end()

    def end(self) -> None:
        """Kill and reap all descendants, and exit. Later callers wait for the exit."""
        self._ending.acquire()  # never released
        kill_descendants(self.server.pid)
        os._exit(0)


def kill_descendants(server: int) -> None:
    """Kill children until none is left. Those of a killed process become children of the guard."""
    with suppress(OSError):
        os.killpg(server, signal.SIGKILL)
    while True:
        for pid in children():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def children() -> list[int]:
    """Return the process ids of the children of all threads."""
    pids = []
    for path in glob.glob("/proc/self/task/*/children"):
        with suppress(OSError), open(path) as file:
            pids += [int(pid) for pid in file.read().split()]
    return pids


def well_formed(line: bytes) -> bytes:
    r"""Return a message whose lone surrogates (``\ud800``) are U+FFFD.

    Python's JSON writes them, and the reader of the client discards the message, so that its call
    would wait for the timeout.
    """
    if b"\\ud" not in line and b"\\uD" not in line:
        return line
    try:
        text = json.dumps(json.loads(line), ensure_ascii=False)
    except (ValueError, RecursionError):
        return line
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode() + b"\n"


def log(line: bytes) -> None:
    """Write a line to stderr."""
    with suppress(OSError):
        os.write(2, line[:1000].rstrip() + b"\n")


def main() -> None:
    """Run the command of the arguments."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        guard = GuardedServer(int(sys.argv[1]), sys.argv[2:])
    except OSError as error:
        log(f"{sys.argv[2]} cannot be started: {error.strerror}".encode())
        os._exit(127)
    guard.run()


if __name__ == "__main__":
    main()
