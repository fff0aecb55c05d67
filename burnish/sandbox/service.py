"""A client of an external service that runs programs, over HTTP.

The protocol is one request per program::

    POST URL
    {"command": ["python3", "-I", "program.py"], "stdin": BASE64, "files": {"program.py": BASE64},
     "limits": {"wall_s": 10.0, "cpu_s": 10, "memory_bytes": 536870912, "processes": 32,
                "files_bytes": 67108864, "output_bytes": 1048576}}

The reply has status 200 and the result, whose fields are those of ``base.Result``::

    {"stdout": BASE64, "stderr": BASE64, "exit_code": 0, "ended": "exit", "seconds": 0.05}

Any other reply is a failure of the service, not of the program. Nothing is retried here: a program
may have run. Not run against a real service; the tests use a server on this machine.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import math
import os
from typing import Any, get_args

import httpx

from burnish.config.sandbox import ServiceSandbox
from burnish.sandbox.base import (
    PYTHON,
    Ended,
    Program,
    Result,
    SandboxError,
    check_files,
    python_program,
)
from burnish.secret import read_token, without_secrets


class ServiceClient:
    """Programs on a service. Implements ``base.Sandbox``; the isolation is the service's.

    Raises SandboxError if ``token_env`` has no token.
    """

    def __init__(self, config: ServiceSandbox) -> None:
        self._config = config
        self._slots = asyncio.Semaphore(config.max_concurrent or os.cpu_count() or 1)
        self._shown = without_secrets(config.url.partition("?")[0])
        try:
            token = None if config.token_env is None else read_token(config.token_env)
        except ValueError as error:
            raise SandboxError(str(error)) from error
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._client = httpx.AsyncClient(headers=headers, trust_env=False)

    async def check(self) -> None:
        """Run a small program. Raises SandboxError."""
        result = await self.run(python_program("print(6 * 7)"))
        if result.stdout != b"42\n":
            raise SandboxError(
                f"the sandbox service {self._shown} does not run Python: a program that prints 42 "
                f"printed {result.stdout[:200]!r} and ended with {result.ended} "
                f"{result.exit_code}; check python and the service"
            )

    async def run(self, program: Program) -> Result:
        """Run a program on the service. Raises SandboxError if it gives no valid reply."""
        check_files(program.files)
        config, body = self._config, self._body(program)
        timeout_s = program.wall_s + config.queue_timeout_s
        async with self._slots:
            try:
                async with asyncio.timeout(timeout_s):
                    return self._read(await self._send(body))
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise SandboxError(
                    f"the sandbox service {self._shown} cannot be reached: "
                    f"{type(error).__name__}: {error}"
                ) from error
            except TimeoutError as error:
                raise SandboxError(
                    f"the sandbox service {self._shown} did not reply within {timeout_s:g} s "
                    "(the program's time limit and queue_timeout_s)"
                ) from error

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def _body(self, program: Program) -> dict[str, Any]:
        config = self._config
        first = config.python if program.command[0] == PYTHON else program.command[0]
        cpu_s = math.ceil(program.wall_s) if program.cpu_s is None else program.cpu_s
        return {
            "command": [first, *program.command[1:]],
            "stdin": _encoded(program.stdin),
            "files": {name: _encoded(data) for name, data in program.files.items()},
            "limits": {
                "wall_s": program.wall_s,
                "cpu_s": cpu_s,
                "memory_bytes": config.memory_bytes,
                "processes": config.processes,
                "files_bytes": config.files_bytes,
                "output_bytes": config.output_bytes,
            },
        }

    async def _send(self, body: dict[str, Any]) -> bytes:
        """Return the body of a reply with status 200. Raises SandboxError."""
        most = 4 * self._config.output_bytes + (64 << 10)  # two outputs in base64
        timeout = httpx.Timeout(None, connect=self._config.connect_timeout_s)
        async with self._client.stream(
            "POST", self._config.url, json=body, timeout=timeout
        ) as reply:
            read = bytearray()
            async for chunk in reply.aiter_bytes():
                read += chunk
                if len(read) > most:
                    raise SandboxError(
                        f"the reply of the sandbox service {self._shown} is longer than {most} "
                        "bytes; it must cut output at limits.output_bytes"
                    )
            if reply.status_code != 200:
                raise SandboxError(
                    f"the sandbox service {self._shown} replied with status {reply.status_code}: "
                    f"{bytes(read[:500]).decode(errors='replace')!r}"
                )
            return bytes(read)

    def _read(self, text: bytes) -> Result:
        """Return the result in a reply. Raises SandboxError if it is not valid."""
        try:
            reply = json.loads(text)
            code = reply["exit_code"]
            if reply["ended"] not in get_args(Ended) or not isinstance(code, int | None):
                raise ValueError("ended or exit_code has an unknown value")
            limit = self._config.output_bytes
            stdout, stderr = (
                base64.b64decode(reply[name], validate=True)[:limit]
                for name in ("stdout", "stderr")
            )
            return Result(stdout, stderr, code, reply["ended"], float(reply["seconds"]))
        except (KeyError, TypeError, ValueError, RecursionError, binascii.Error) as error:
            raise SandboxError(
                f"the sandbox service {self._shown} sent an invalid reply "
                f"({type(error).__name__}: {error}); expected stdout, stderr, exit_code, ended and "
                f"seconds as in burnish/sandbox/service.py, got {text[:200]!r}"
            ) from error


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
