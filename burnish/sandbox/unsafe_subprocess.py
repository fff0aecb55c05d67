"""Programs with resource limits and without isolation, for machines without bubblewrap."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from burnish.config.sandbox import UnsafeSubprocessSandbox
from burnish.sandbox.base import (
    PYTHON,
    Program,
    Result,
    SandboxError,
    check_files,
    python_program,
)
from burnish.sandbox.process import cause_of, exit_code_of, run_process

OPEN_FILES = 256


class UnsafeSubprocess:
    """Child processes with resource limits. Implements ``base.Sandbox`` without its isolation:
    programs have the rights of this process, and those that leave their process group survive.

    Raises SandboxError if a program of util-linux is missing.
    """

    def __init__(self, config: UnsafeSubprocessSandbox) -> None:
        self._config = config
        self._slots = asyncio.Semaphore(config.max_concurrent or os.cpu_count() or 1)
        self._python = config.python or sys.executable
        self._tools = {}
        for name in ("prlimit", "setpriv"):
            path = shutil.which(name)
            if path is None:
                raise SandboxError(
                    f"unsafe_subprocess needs the program {name}: install util-linux"
                )
            self._tools[name] = path

    async def check(self) -> None:
        """Run a small program. Raises SandboxError."""
        result = await self.run(python_program("print(6 * 7)"))
        if result.stdout != b"42\n":
            stderr_text = result.stderr.decode(errors="replace").strip()[-2000:]
            raise SandboxError(
                f"programs cannot be run: {self._python} ended with {result.ended} "
                f"{result.exit_code}: {stderr_text}; check python and the limits"
            )

    async def run(self, program: Program) -> Result:
        """Run a program. Raises SandboxError if it cannot be started."""
        check_files(program.files)
        async with self._slots:
            with tempfile.TemporaryDirectory(
                prefix="burnish-sandbox-", ignore_cleanup_errors=True
            ) as folder:
                for name, data in program.files.items():
                    path = Path(folder, name)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data)
                return await self._run(program, folder)

    async def close(self) -> None:
        """Do nothing: every program has ended."""

    async def _run(self, program: Program, folder: str) -> Result:
        config = self._config
        first = self._python if program.command[0] == PYTHON else program.command[0]
        cpu_s = math.ceil(program.wall_s) if program.cpu_s is None else program.cpu_s
        command = [
            *(self._tools["setpriv"], "--pdeathsig", "KILL", "--", self._tools["prlimit"]),
            *(f"--as={config.memory_bytes}", f"--cpu={cpu_s}:{cpu_s + 1}", "--core=0"),
            *(f"--nproc={_processes_now() + config.processes}", f"--fsize={config.files_bytes}"),
            *(f"--nofile={OPEN_FILES}", "--", first, *program.command[1:]),
        ]
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": folder}
        environment |= {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        try:
            raw = await run_process(
                command,
                stdin=program.stdin,
                wall_s=program.wall_s,
                output_bytes=config.output_bytes,
                start={"cwd": folder, "env": environment},
            )
        except OSError as error:
            raise SandboxError(f"a program cannot be started: {error}") from error
        code = exit_code_of(raw.returncode) if raw.ended == "exit" else None
        # The name of the folder is random: equal runs would read other tracebacks.
        stdout, stderr = (
            text.replace(os.fsencode(folder), os.fsencode(tempfile.gettempdir()))
            for text in (raw.stdout, raw.stderr)
        )
        return Result(stdout, stderr, code, cause_of(raw, code), raw.seconds)


def _processes_now() -> int:
    """Return the number of threads of this user, which the limit on processes counts too."""
    count, user_id = 0, os.getuid()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # it ended
            if entry.name.isdigit() and entry.stat().st_uid == user_id:
                count += len(os.listdir(entry / "task"))
    return count
