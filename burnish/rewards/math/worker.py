"""The worker process of ``reward.py``. Run by path, not imported.

It reads one JSON object per line from stdin and writes one per line to stdout. Input:
``{"label": str, "response": str}``. The first output is ``{"ready": true}``. The reply to each line
is ``{"score": 0 or 1}``, ``{"error": str}`` if math-verify raised, or ``{"bad_label": true}`` if
the label cannot be parsed.

The worker imports math_verify and nothing of this package. It therefore loads neither torch nor the
user's main module, which multiprocessing would import again.

A comparison that takes more than the CPU seconds in argv[1] is killed by the system (signal
SIGPROF, default action). This also works inside a huge integer power, where no Python handler would
run. The limit is CPU time, so a busy machine does not turn right answers into wrong ones. The
address space is limited to :data:`MEMORY_BYTES`. An expression that needs more raises MemoryError,
which is counted as an error.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from typing import Any

from math_verify import parse, verify


def compare(label: str, response: str) -> dict[str, Any]:
    """Return ``{"score": 1}`` if the last answer in ``response`` equals ``label``, else 0.

    Return ``{"bad_label": True}`` if the label cannot be parsed.
    """
    gold: list[Any] = []
    answer = label.rpartition("####")[2].strip()
    if answer:
        # A bare label (``x^2+1``) is put between dollars: math-verify parses LaTeX only there.
        wrapped = any(mark in answer for mark in ("$", "\\boxed", "\\(", "\\["))
        for form in [answer] if wrapped else [f"${answer}$", answer]:
            gold = gold or list(parse(form, parsing_timeout=None))
    if not gold:
        return {"bad_label": True}
    answer = parse(response, parsing_timeout=None, raise_on_error=True)
    return {"score": int(bool(verify(gold, answer, timeout_seconds=None)))}


MEMORY_BYTES = 2 << 30
"""Address space of a worker; sympy and math_verify take 0.06 GB of it."""


def _timed(label: str, response: str, timeout_s: float) -> dict[str, Any]:
    signal.setitimer(signal.ITIMER_PROF, timeout_s)
    try:
        return compare(label, response)
    except Exception as error:  # becomes data: counted, and the response scores 0
        return {"error": type(error).__name__}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    """Serve until stdin is closed, which also happens when the parent dies."""
    logging.disable(logging.CRITICAL)  # math-verify warns that its own timeouts are off
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    timeout_s = float(sys.argv[1])
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output printed by libraries must not mix with the replies
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = _timed(request["label"], request["response"], timeout_s)
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
