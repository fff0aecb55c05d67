"""The process that cleans up after a run that was killed. Run by path, not imported.

``python guard_program.py WORKER VARIABLE FOLDER`` waits for the end of its stdin. If the run did
not write ``done`` before, all processes of this machine with ``VARIABLE`` (``NAME=VALUE``) in their
environment are killed, and ``FOLDER`` is deleted. ``WORKER``: path of ``environments/worker.py``.

This file only uses the standard library.
"""

from __future__ import annotations

import importlib.util
import shutil
import signal
import sys


def main() -> None:
    """Wait for the end of the run."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the run ends by itself, or is killed
    worker_path, variable, folder = sys.argv[1:]
    if sys.stdin.buffer.read() == b"done":
        return
    spec = importlib.util.spec_from_file_location("worker", worker_path)
    assert spec is not None and spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    worker.kill_with(variable)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
