"""A process that the fork server starts is, to its script and to who waits for it, a Python started
in the usual way (tests/support/fork_server.py)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fork_server
import psutil
import pytest

from burnish.messages import quiet_libraries

SCRIPT = """
import json, os, sys
import helper_of_the_script
if __name__ == "__main__":
    loaded = "transformers.models.llama.modeling_llama" in sys.modules
    print(json.dumps([sys.argv[1:], os.getcwd(), os.environ["COLOR"], sys.stdin.read(), loaded]))
    print("problem", file=sys.stderr)
    sys.exit(helper_of_the_script.CODE)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "helper_of_the_script.py").write_text("CODE = 7")
    return tmp_path / "script.py"


def started(script: Path, **environment: str) -> Any:
    return subprocess.run(
        [*fork_server.command(), str(script), "a", "b c"],
        input="typed",
        capture_output=True,
        text=True,
        cwd=script.parent,
        env=os.environ | {"COLOR": "red"} | environment,
    )


@pytest.mark.slow
def test_arguments_streams_folder_environment_and_exit_code_are_the_commands(script: Path) -> None:
    done = started(script)
    expected = [["a", "b c"], str(script.parent), "red", "typed", True]
    assert (json.loads(done.stdout), done.stderr) == (expected, "problem\n")
    assert done.returncode == 7


NESTED = """
import subprocess, sys
answer = "import sys; print('torch' in sys.modules, sys.argv)"
for words in (["-c", answer, "x"], ["-P", "-c", answer]):
    subprocess.run([sys.executable, *words], check=True)
subprocess.run([sys.executable, "-m", "burnish", "--version"], check=True)
"""


@pytest.mark.slow
def test_the_interpreter_forks_code_and_modules_and_what_they_start() -> None:
    """An option of Python gets a plain interpreter, which has not loaded torch."""
    done = subprocess.run(
        [fork_server.interpreter(), "-c", NESTED], capture_output=True, text=True, check=True
    )
    *found, version = done.stdout.splitlines()
    assert found == ["True ['-c', 'x']", "False ['-c']"]
    assert version.startswith("burnish ")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_to_the_interpreter_reach_its_process(number: signal.Signals) -> None:
    code = (
        "import signal, sys\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(7))\n"
        "print('ready', flush=True)\n"
        "signal.pause()"
    )
    command = [fork_server.interpreter(), "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as waits:
        assert waits.stdout is not None and waits.stdout.readline() == "ready\n"
        waits.send_signal(number)
        assert waits.wait(60) == 7


@pytest.mark.parametrize(
    ("name", "value"),
    [("OMP_NUM_THREADS", "2"), (fork_server.ADDRESS, "/nowhere")],
    ids=["read at import", "no server"],
)
def test_another_environment_gets_its_own_interpreter(script: Path, name: str, value: str) -> None:
    done = started(script, **{name: value})
    assert json.loads(done.stdout) == [["a", "b c"], str(script.parent), "red", "typed", False]
    assert done.returncode == 7


def test_commands_and_their_processes_have_the_environment_of_forks() -> None:
    """Otherwise each process that starts after a command of the command line is no fork."""
    before = fork_server.read_at_import(dict(os.environ))
    quiet_libraries()
    assert fork_server.read_at_import(dict(os.environ)) == before


@pytest.mark.slow
def test_a_killed_process_ends_its_command_and_a_killed_command_its_process(
    tmp_path: Path,
) -> None:
    script = tmp_path / "waits.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    for victim in ("process", "command"):
        command = [*fork_server.command(), str(script)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as waits:
            assert waits.stdout is not None
            forked = psutil.Process(int(waits.stdout.readline()))
            (forked if victim == "process" else waits).kill()
            assert waits.wait(30) == -signal.SIGKILL
        deadline = time.monotonic() + 30
        while forked.is_running() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not forked.is_running()


@pytest.mark.slow
def test_workers_of_a_ray_job_come_from_a_server_with_ray_that_ends_with_the_node(
    tmp_path: Path,
) -> None:
    pytest.importorskip("ray")
    worker = Path(f"{tmp_path}{fork_server.RAY_WORKER}")
    worker.parent.mkdir(parents=True)
    worker.write_text(
        "import os, sys\n"
        "print('ray._private.worker' in sys.modules, os.getppid(), os.environ['COLOR'])\n"
        "sys.exit(7)\n"
    )
    node = psutil.Popen(["sleep", "600"])
    try:
        job = {"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": str(node.pid)}
        done = [started(worker, **job, COLOR=color) for color in ("red", "blue")]
        (red, first), (blue, second) = (d.stdout.rsplit(None, 1)[::-1] for d in done)
        assert (red, blue) == ("red", "blue") and first == second, done
        loaded, server = first.split()
        assert loaded == "True" and [d.returncode for d in done] == [7, 7]
        [other] = psutil.wait_procs([psutil.Process(int(server))], timeout=0)[1]
    finally:
        node.kill()
        node.wait()
    assert psutil.wait_procs([other], timeout=30)[0]


def test_a_ray_worker_gets_the_words_and_variables_that_ray_gives_it(tmp_path: Path) -> None:
    setup = pytest.importorskip("ray._private.workers").__path__[0]
    printing = "import json, os, sys; print(json.dumps([sys.argv, os.environ['A']]))"
    (tmp_path / "worker.py").write_text(printing)
    context = {
        "env_vars": {"A": "${HOME}/a b$PATH${NOT_SET}"},
        "py_executable": f"{sys.executable} -S -E",
    }
    words = [str(tmp_path / "worker.py"), "--token=x y", "$HOME", "--language=PYTHON"]
    words.append(f"--serialized-runtime-env-context={json.dumps(context)}")
    ours = Path(fork_server.__file__).with_name("ray_setup_worker.py")
    found = [
        subprocess.run([sys.executable, str(script), *words], capture_output=True, check=True)
        for script in (ours, Path(setup, "setup_worker.py"))
    ]
    assert found[0].stdout == found[1].stdout and b"$HOME" in found[0].stdout
