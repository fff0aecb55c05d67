"""Program that watches a process in which code of the user may hold Python's lock.

A backtracking regular expression and other C code keep the lock (GIL) until they return. No thread
of the same process can then print a line, apply a time limit or receive Ctrl-C. Run by path, not
imported; only the standard library.

It reads a line ``{"begin": number, "name", "limit_s"}`` when a call begins, ``{"end": number}``,
and ``{}`` while the process is alive. After :data:`SILENCE_S` seconds without a line it names the
open calls on stderr, one of which holds the lock. After the longest ``limit_s`` of them it kills
its parent, whose process id is its argument. The end of stdin or of the parent ends it: a process
that the parent forked may hold stdin open.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys

SILENCE_S = 40
POLL_S = 1.0


def main() -> None:
    """Watch until stdin is closed or the parent ends."""
    parent = int(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    calls: dict[int, dict[str, object]] = {}
    silence_s = 0.0  # polls, so that a pause of the machine or of both processes does not count
    buffer = b""
    while os.getppid() == parent:  # a process that adopts this one is not killed
        if not select.select([0], [], [], POLL_S)[0]:
            silence_s += POLL_S
            act(list(calls.values()), silence_s)
            continue
        chunk = os.read(0, 1 << 16)
        if not chunk:
            return
        *lines, buffer = (buffer + chunk).split(b"\n")
        silence_s = 0.0
        for line in map(json.loads, lines):
            calls.pop(line.get("end"), None)
            if "begin" in line:
                calls[line["begin"]] = line


def act(calls: list[dict[str, object]], silence_s: float) -> None:
    """Name open calls, one of which blocks the process, once, and kill the process at the limit."""
    if not calls or silence_s < SILENCE_S:
        return
    names = " or ".join(str(call["name"]) for call in calls)
    limit_s = max(float(str(call["limit_s"])) for call in calls)
    problem = f"{names} has blocked the process for {silence_s:.0f} s"
    if silence_s >= limit_s:
        say(f"{problem} (timeout_s: {limit_s:g}); ending it")
        os.kill(os.getppid(), signal.SIGKILL)
        sys.exit(1)
    if not all(call.get("is_named") for call in calls):
        for call in calls:
            call["is_named"] = True
        say(
            f"{problem}: it holds Python's lock, as a backtracking regular expression does. The "
            f"process is killed after {limit_s:g} s (timeout_s)"
        )


def say(text: str) -> None:
    """Print a line on stderr."""
    print(f"burnish: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
