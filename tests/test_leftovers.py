"""The check that follows every file (``conftest.nothing_outlives_its_file``) sees what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import psutil

LISTENS = """
import os, socket, sys, time
if os.fork():
    os._exit(0)
with socket.create_server(("127.0.0.1", 0)) as server:
    print(os.getpid(), server.getsockname()[1], flush=True)
    os.close(1)
    time.sleep(600)
"""


def test_a_process_that_lost_its_parent_is_found_with_the_port_it_listens_on(
    leftovers: Callable[[], list[str]],
) -> None:
    before = leftovers()
    done = subprocess.run([sys.executable, "-c", LISTENS], stdout=subprocess.PIPE, text=True)
    pid, port = done.stdout.split()
    try:
        (found,) = set(leftovers()) - set(before)
        assert found.startswith(f"{pid} ") and f"(listens on 127.0.0.1:{port})" in found
    finally:
        os.kill(int(pid), signal.SIGKILL)
    psutil.wait_procs([p for p in psutil.process_iter() if p.pid == int(pid)], timeout=30)
    assert leftovers() == before
