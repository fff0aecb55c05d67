"""Start a Python worker of Ray as ray/_private/workers/setup_worker.py does, without Ray's imports,
which take 0.4 s of CPU time in each worker's start (see tests/support/fork_server.py)."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language", default="PYTHON")
    options, words = parser.parse_known_args()
    context = json.loads(options.serialized_runtime_env_context)
    assert options.language == "PYTHON" and not context.get("override_worker_entrypoint")
    for name, value in context.get("env_vars", {}).items():
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    executable = context.get("py_executable") or sys.executable
    command = [*context.get("command_prefix", []), "exec", executable, *map(shlex.quote, words)]
    os.execvp("bash", ["bash", "-c", " ".join(command)])


main()
