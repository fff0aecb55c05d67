"""Programs that try to leave the sandbox, to use up the machine, or not to end."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from burnish.config.sandbox import BubblewrapSandbox, UnsafeSubprocessSandbox
from burnish.sandbox import bubblewrap as module
from burnish.sandbox import seccomp
from burnish.sandbox.base import Program, Result, SandboxError, python_program
from burnish.sandbox.bubblewrap import Bubblewrap
from burnish.sandbox.make import SyncSandbox, check_sandbox
from burnish.sandbox.unsafe_subprocess import UnsafeSubprocess

Run = Callable[..., Result]


def said(result: Result) -> object:
    """The JSON that a program printed."""
    assert result.exit_code == 0, result
    return json.loads(result.stdout)


def test_output_exit_codes_and_input_come_back(python: Run, command: Run) -> None:
    found = python("import sys; print(sys.stdin.read()); sys.stderr.write('e'); sys.exit(7)",
                   stdin="äöü".encode())  # fmt: skip
    assert (found.stdout.decode(), found.stderr, found.exit_code) == ("äöü\n", b"e", 7)
    assert found.ended == "exit" and 0 < found.seconds < 10
    assert python("import os; os.write(1, bytes(range(256)))").stdout == bytes(range(256))
    assert python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)").exit_code == 128 + 11
    sorted_file = command("sort", "-n", "data/numbers", files={"data/numbers": b"10\n9\n"})
    assert sorted_file.stdout == b"9\n10\n"
    assert command("no-such-program").exit_code == 127
    assert python("print(\ud800)").exit_code == 1  # a lone surrogate is no valid source


def test_more_input_than_a_pipe_holds_is_no_deadlock(python: Run) -> None:
    """The program never reads 4 MB of input; it reads them; it writes as it reads."""
    data = b"x" * (4 << 20)
    assert python("print('done')", stdin=data).stdout == b"done\n"
    counted = python("import sys; print(len(sys.stdin.buffer.read()))", stdin=data)
    assert counted.stdout == b"4194304\n"


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "", "a//b"])
def test_files_stay_in_the_working_directory(sandbox: SyncSandbox, name: str) -> None:
    with pytest.raises(ValueError, match="not a relative path"):
        sandbox.run(Program(("true",), files={name: b""}))


WRITES = """
import json, os
wrote = []
for path in {paths}:
    try:
        open(path, "w").close(); wrote.append(path)
    except OSError:
        pass
try:
    os.symlink("/", "/tmp/all"); open("/tmp/all/usr/x", "w"); wrote.append("through a link")
except OSError:
    pass
print(json.dumps(wrote))
"""


def test_only_its_own_tmp_can_be_written(python: Run, tmp_path: Path) -> None:
    name = f"x{os.getpid()}"
    inside = [f"/tmp/{name}", f"/dev/shm/{name}"]
    outside = ["/x", "/usr/x", "/dev/x", "/etc/x", "/proc/sys/kernel/core_pattern"]
    outside += [str(tmp_path / "x"), str(Path.cwd() / "x"), "/proc/1/environ"]
    assert said(python(WRITES.format(paths=inside + outside))) == inside
    assert not Path(inside[0]).exists() and not list(tmp_path.iterdir())


READS = """
import json, os
found = {}
for path in ("/etc/shadow", "/etc/passwd", "/root", "/home", "/sys", "/var", "/proc/1/root/etc"):
    try:
        found[path] = os.listdir(path) if os.path.isdir(path) else open(path).read()
    except OSError:
        pass
environment = open("/proc/1/environ").read() + open("/proc/self/environ").read() + str(os.environ)
names = [e for p in os.listdir("/proc") if p.isdigit() for e in [open(f"/proc/{p}/cmdline").read()]]
print(json.dumps([sorted(found), "SECRET" in environment, len(names), os.listdir("/tmp")]))
"""


def test_files_secrets_and_processes_outside_cannot_be_read(
    python: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes are visible: bubblewrap's own and the program."""
    monkeypatch.setenv("BURNISH_SECRET_TOKEN", "SECRET")
    found, has_secret, num_processes, files = said(python(READS))
    assert set(found) <= {"/proc/1/root/etc"} and not has_secret
    assert num_processes == 2 and files == ["program.py"]
    listed = python("import os; print(os.listdir('/proc/1/root/etc'))").stdout
    assert b"shadow" not in listed


SOCKETS = """
import json, socket
port, name, path = json.loads(input())
opened = []
for family, address in ((socket.AF_INET, ("127.0.0.1", port)), (socket.AF_UNIX, name),
                        (socket.AF_UNIX, path), (socket.AF_INET, ("192.0.2.1", 80))):
    with socket.socket(family) as s:
        s.settimeout(2)
        try:
            s.connect(address); opened.append(address)
        except OSError:
            pass
try:
    socket.getaddrinfo("localhost.example", 80); opened.append("dns")
except OSError:
    pass
print(json.dumps([opened, [n for _, n in socket.if_nameindex()]]))
"""


def test_no_network_not_even_the_loopback_of_this_machine(python: Run, tmp_path: Path) -> None:
    name = f"\0burnish-test-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as file,
    ):
        abstract.bind(name)
        abstract.listen()
        file.bind(str(tmp_path / "s"))
        file.listen()
        given = json.dumps([server.getsockname()[1], name, str(tmp_path / "s")]).encode()
        assert said(python(SOCKETS, stdin=given)) == [[], ["lo"]]


FORKS = """
import os, time
made = 0
try:
    while True:
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
        made += 1
except OSError:
    print(made, flush=True)
"""


def test_a_fork_bomb_meets_the_limit_and_leaves_nothing(
    python: Run, processes_of: Callable[[str], list[psutil.Process]]
) -> None:
    """24 processes, of which bubblewrap's is one; and threads count too."""
    found = python(FORKS.replace("600", "600.0625"))
    assert 10 <= int(found.stdout) < 24 and found.exit_code == 0
    bomb = python("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", wall_s=1)
    assert bomb.ended == "wall_time"
    assert not processes_of("--hostname sandbox")


@pytest.mark.parametrize(
    "source",
    [
        "bytearray(1 << 30)",
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "import mmap; mmap.mmap(-1, 1 << 30)",
    ],
)
def test_memory_is_limited(python: Run, source: str) -> None:
    found = python(source)
    assert found.exit_code == 1 and b"Error" in found.stderr


def test_files_are_limited_one_by_one_and_together(python: Run) -> None:
    """8 MiB: an anonymous file of 9 MiB, and 9 files of 1 MiB in each writable folder."""
    anonymous = "import os; os.write(os.memfd_create('x'), bytes(9 << 20)); os.write(3, b'x')"
    assert b"File too large" in python(anonymous).stderr
    many = "for i in range(9): open(f'{folder}/{i}', 'wb').write(bytes(1 << 20))"
    for folder in ("/tmp", "/dev/shm"):
        assert b"No space left" in python(f"folder = '{folder}'\n{many}").stderr


def test_output_without_end_is_cut_while_it_is_read(python: Run) -> None:
    for stream in ("stdout", "stderr"):
        found = python(f"import sys\nwhile True: print('x' * 1000, file=sys.{stream})")
        assert found.ended == "output" and found.exit_code is None
        assert len(found.stdout) + len(found.stderr) == 64 << 10
    exact = python("print('x' * 65535)")
    assert exact.ended == "exit" and len(exact.stdout) == 64 << 10


@pytest.mark.parametrize(
    ("source", "ended"),
    [
        ("import time; time.sleep(600)", "wall_time"),
        ("import signal, time\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
         "    except (OSError, ValueError): pass\ntime.sleep(600)", "wall_time"),
        ("import os, time\nos.close(1); os.close(2)\ntime.sleep(600)", "wall_time"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "wall_time"),
    ],
)  # fmt: skip
def test_a_program_that_does_not_end_is_ended(python: Run, source: str, ended: str) -> None:
    found = python(source, wall_s=0.5)
    assert found.ended == ended and found.exit_code is None


def test_cpu_time_is_limited(sandbox: SyncSandbox) -> None:
    spin = python_program("while True: pass", wall_s=60)
    found = sandbox.run(Program(spin.command, files=spin.files, wall_s=60, cpu_s=1))
    assert found.ended == "cpu_time" and found.exit_code == 128 + 24


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        if {quiet}:
            for fd in range(3): os.close(fd)
        time.sleep(600)
    os._exit(0)
print("parent", flush=True)
"""


@pytest.mark.parametrize("quiet", [True, False])
def test_daemons_end_with_the_program(
    python: Run, processes_of: Callable[[str], list[psutil.Process]], quiet: bool
) -> None:
    found = python(DAEMON.format(quiet=quiet))
    assert found.stdout == b"parent\n" and found.ended == "exit" and found.seconds < 9
    assert not processes_of("--hostname sandbox") and not processes_of("program.py")


KILLS = """
import os, signal
for pid in [1, -1, os.getppid()]:
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
        try: os.kill(pid, number)
        except OSError: pass
memory = os.open("/proc/1/mem", os.O_RDWR)
for line in open("/proc/1/maps"):
    if "r-xp" in line and "bwrap" in line:
        begin, end = (int(x, 16) for x in line.split()[0].split("-"))
        os.pwrite(memory, b"\\xcc" * (end - begin), begin)
if os.fork() == 0:  # an orphan wakes process 1 when it ends
    os.fork()
    os._exit(0)
import time; time.sleep(600)
"""


def test_killing_or_corrupting_bubblewrap_is_the_programs_own_failure(python: Run) -> None:
    """Process 1 of the sandbox can be overwritten; the next program runs."""
    found = python(KILLS)
    assert found.ended == "exit" and found.exit_code not in (0, None)
    assert python("print(1)").stdout == b"1\n"


PIPES = """
import os
found = []
for pid in os.listdir("/proc"):
    if pid.isdigit() and int(pid) != os.getpid():
        for fd in os.listdir(f"/proc/{pid}/fd"):
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
own = sorted(int(fd) for fd in os.listdir("/proc/self/fd"))
print(sorted(set(found)), own)
"""


def test_no_other_process_inside_has_the_programs_input_or_output(python: Run) -> None:
    """The pipe that bubblewrap has is stderr. The fourth descriptor is the listing's own."""
    text = python(PIPES).stdout.decode()
    assert text.count("pipe:") == 1 and "/dev/null" in text and text.endswith("[0, 1, 2, 3]\n")


def test_no_new_namespaces_and_no_privileges(python: Run) -> None:
    """CLONE_NEWUSER is 0x10000000."""
    source = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.unshare(0x10000000), libc.mount(b"x", b"/tmp", b"tmpfs", 0, None), os.getuid() != 0)
print([line for line in open("/proc/self/status") if line.startswith(("CapEff", "NoNewPrivs"))])
"""
    lines = python(source).stdout.decode().splitlines()
    assert lines[0] == "-1 -1 True"
    assert "CapEff:\\t0000000000000000" in lines[1] and "NoNewPrivs:\\t1" in lines[1]


def interpreters(processes_of: Callable[[str], list[psutil.Process]]) -> list[psutil.Process]:
    """The Python processes inside sandboxes; bubblewrap forks several of its own around each."""
    return [p for p in processes_of("program.py") if p.info["name"].startswith("python")]


def test_programs_run_at_once_up_to_a_limit_and_a_cancelled_one_ends(
    bubblewrap: None, processes_of: Callable[[str], list[psutil.Process]]
) -> None:
    async def play() -> None:
        made = Bubblewrap(BubblewrapSandbox(max_concurrent=2))
        endless = python_program("import time; time.sleep(600)", wall_s=600)
        long = [asyncio.create_task(made.run(endless)) for _ in range(3)]
        while len(inside := interpreters(processes_of)) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert interpreters(processes_of) == inside, "the third waits"
        for task in long:
            task.cancel()
        assert all(isinstance(e, asyncio.CancelledError)
                   for e in await asyncio.gather(*long, return_exceptions=True))  # fmt: skip
        assert (await made.run(python_program("print(1)"))).stdout == b"1\n"

    asyncio.run(play())
    assert not processes_of("--hostname sandbox")


KILLED_PARENT = """
import sys
from burnish.config.sandbox import BubblewrapSandbox
from burnish.sandbox.base import python_program
from burnish.sandbox.make import SyncSandbox
sandbox = SyncSandbox(BubblewrapSandbox())
print("ready", flush=True)
sandbox.run(python_program("import time; time.sleep(600)", wall_s=600))
"""


def test_programs_end_if_the_run_is_killed(
    bubblewrap: None, processes_of: Callable[[str], list[psutil.Process]]
) -> None:
    run = psutil.Popen([sys.executable, "-c", KILLED_PARENT], stdout=-1)
    assert run.stdout.readline() == b"ready\n"
    while not (inside := interpreters(processes_of)):
        pass
    run.kill()
    run.wait()
    run.stdout.close()
    _, alive = psutil.wait_procs(inside, timeout=30)
    assert not alive and not processes_of("--hostname sandbox")


def test_a_virtual_environment_and_further_paths_can_be_read(bubblewrap: None) -> None:
    """The folder is readable by all users, which pytest's own are not."""
    folder = Path(tempfile.mkdtemp(prefix="burnish-test-"))
    folder.chmod(0o755)
    try:
        environment = folder / "venv"
        (folder / "data.txt").write_text("data")
        command = f"/usr/bin/python3 -m venv --without-pip {environment}"
        assert os.system(command) == 0
        packages = next(environment.glob("lib/python3*/site-packages"))
        (packages / "only_here.py").write_text("value = 42")
        config = BubblewrapSandbox(
            python=str(environment / "bin/python"), read_only_paths=(str(folder / "data.txt"),)
        )
        made = SyncSandbox(config)
        source = f"import only_here; print(only_here.value, open('{folder}/data.txt').read())"
        assert made.run(python_program(source)).stdout == b"42 data\n"
        made.close()
    finally:
        shutil.rmtree(folder)


def test_a_missing_bubblewrap_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    with pytest.raises(SandboxError, match=r"apt-get install bubblewrap.*unsafe_subprocess"):
        check_sandbox(BubblewrapSandbox())


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'bwrap: No permissions to create new namespace' >&2; exit 1", "seccomp=unconfined"),
        ("echo 'bwrap: strange' >&2; exit 1", "cannot start a program.*bwrap: strange"),
        ("exit 0", "cannot start a program"),
    ],
)
def test_a_bubblewrap_that_fails_is_no_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, says: str
) -> None:
    path = fake_bwrap(tmp_path, script, monkeypatch)
    with pytest.raises(SandboxError, match=says):
        check_sandbox(BubblewrapSandbox())
    shutil.rmtree(path)


class Open(Bubblewrap):
    """Runs programs without isolation."""

    async def run(self, program: Program) -> Result:
        weaker = UnsafeSubprocessSandbox(kind="unsafe_subprocess", memory_bytes=2 << 30)
        return await UnsafeSubprocess(weaker).run(program)


def test_a_bubblewrap_that_does_not_isolate_is_refused(bubblewrap: None) -> None:
    writes = ".*write to " if os.geteuid() == 0 else ""  # others may not in any case
    with pytest.raises(SandboxError, match=f"could connect to a port{writes}.*allocate more"):
        asyncio.run(Open(BubblewrapSandbox()).check())
    assert not Path("burnish-probe").exists()


def fake_bwrap(tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a program ``bwrap`` first on PATH, which other users can start."""
    folder = Path(tempfile.mkdtemp(prefix="burnish-test-"))
    folder.chmod(0o755)
    program = folder / "bwrap"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def test_an_interpreter_that_others_cannot_read_is_explained(bubblewrap: None) -> None:
    if os.geteuid() != 0:
        pytest.skip("programs run as the user who runs the tests")
    folder = Path(tempfile.mkdtemp(prefix="burnish-test-"))  # mode 700
    try:
        (folder / "x").touch()
        with pytest.raises(SandboxError, match="outside of /root"):
            check_sandbox(BubblewrapSandbox(read_only_paths=(str(folder / "x"),)))
    finally:
        shutil.rmtree(folder)


def test_the_weaker_mode_limits_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = SyncSandbox(UnsafeSubprocessSandbox(kind="unsafe_subprocess", output_bytes=1000))
    try:
        assert made.run(python_program("print(input())", stdin=b"a")).stdout == b"a\n"
        stuck = python_program("import os; os.mkdir('d'); os.chmod('d', 0); open('f', 'w')\n"
                               "while True: pass", wall_s=0.5)  # fmt: skip
        assert made.run(stuck).ended == "wall_time"
        assert made.run(python_program("while True: print('x')")).ended == "output"
        assert made.run(python_program("bytearray(1 << 30)")).exit_code == 1
        secret = made.run(python_program("import os; print(len(os.environ))"))
        assert int(secret.stdout) < 8
        first, second = (made.run(python_program("1 / 0")) for _ in range(2))
        assert b"ZeroDivisionError" in first.stderr and first.stderr == second.stderr
    finally:
        made.close()
    assert not list(tmp_path.glob("burnish-sandbox-*"))


_CALLS = """
import ctypes, errno, json, os, socket
libc = ctypes.CDLL(None, use_errno=True)
found = {}
for number in NUMBERS:
    ctypes.set_errno(0)
    done = libc.syscall(number, 0, 0, 0, 0, 0)
    found[number] = done < 0 and errno.errorcode.get(ctypes.get_errno())
try:
    socket.socket(40, socket.SOCK_STREAM).close()
    found["vsock"] = None
except OSError as error:
    found["vsock"] = errno.errorcode[error.errno]
socket.socketpair()[0].close()
socket.socket().close()
print(json.dumps(found))
"""


def test_keyrings_io_uring_and_the_host_of_a_virtual_machine_are_refused(python: Run) -> None:
    """keyctl would otherwise read and write the keys of the run and of other sandboxes."""
    (calls,) = [c for m, c in seccomp._CALLS.items() if m == platform.machine()]
    found = said(python(_CALLS.replace("NUMBERS", str(calls.refused))))
    assert found == {**{str(number): "EPERM" for number in calls.refused}, "vsock": "EPERM"}


_PROCESS_1 = """
import os, sys
from burnish.config.sandbox import BubblewrapSandbox
from burnish.sandbox.base import python_program
from burnish.sandbox.make import SyncSandbox
assert os.getpid() == 1
sandbox = SyncSandbox(BubblewrapSandbox())
for _ in range(4):
    assert sandbox.run(python_program("print(1)")).exit_code == 0
sandbox.close()
states = [open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
          for pid in os.listdir("/proc") if pid.isdigit()]
print(states.count("Z"))
"""


def test_process_1_of_a_container_keeps_no_ended_programs(bubblewrap: None) -> None:
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no PID namespaces for this user")
    done = subprocess.run(
        [*unshare, sys.executable, "-c", _PROCESS_1], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "0", done.stderr
