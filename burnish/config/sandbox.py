"""Config of the sandbox that runs code written by a model, or agent programs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field

from burnish.config.base import Node, PathText, absolute_program, named_kind
from burnish.config.paths import is_local, token_env_problems, url_problems

_EXAMPLE = "https://host:8000/run"


class _Sandbox(Node):
    """Limits of one program. Programs that exceed one are ended, or get an error of the system."""

    memory_bytes: int = Field(512 << 20, ge=32 << 20)
    """Maximum address space of each process."""
    processes: int = Field(32, ge=8)
    """Maximum processes and threads at once."""
    files_bytes: int = Field(64 << 20, ge=1 << 20)
    """Maximum size of all files in /tmp (unsafe_subprocess: of each file)."""
    output_bytes: int = Field(1 << 20, ge=1)
    """Maximum bytes of stdout and of stderr. A program that writes more is ended."""
    max_concurrent: int | None = Field(None, ge=1)
    """Maximum programs at once, in each process that starts programs. None: the number of CPUs."""

    def with_absolute_paths(self) -> Self:
        """Return the same settings for a process with another working directory."""
        return self


class BubblewrapSandbox(_Sandbox):
    """Linux namespaces through bubblewrap: no network, a read-only view of /usr, a private /tmp, an
    empty environment. A run that needs it does not start unless it works."""

    kind: Literal["bubblewrap"] = "bubblewrap"
    python: PathText | None = None
    """Interpreter of the programs, or of a virtual environment with the packages that they may
    import. It must be readable by all users if Burnish runs as root. None: /usr/bin/python3."""
    read_only_paths: tuple[PathText, ...] = ()
    """Further files and folders that programs can read, at the same paths."""

    def with_absolute_paths(self) -> Self:
        paths = tuple(os.path.abspath(path) for path in self.read_only_paths)
        python = self.python and absolute_program(self.python)
        return self.model_copy(update={"python": python, "read_only_paths": paths})


class ServiceSandbox(_Sandbox):
    """An external service that runs programs (docs/environments.md has its protocol). Burnish does
    not verify that it isolates them."""

    kind: Literal["service"]
    url: str
    """Full address, such as ``https://host:8000/run``."""
    token_env: str | None = None
    """Environment variable with the token for ``Authorization: Bearer``. None: no token."""
    python: str = "python3"
    """Interpreter on the service's side."""
    connect_timeout_s: float = Field(10.0, gt=0)
    """Timeout of opening a connection, in seconds."""
    queue_timeout_s: float = Field(60.0, gt=0)
    """Seconds in which a reply must arrive, in addition to the time limit of the program."""

    def rules(self) -> Iterator[str]:
        yield from (f"url {problem}" for problem in url_problems(self.url, _EXAMPLE))
        if self.token_env is not None:
            yield from token_env_problems(self.token_env)

    def advice(self) -> Iterator[str]:
        if self.url.startswith("http:") and not is_local(self.url):
            yield "the code, its tests and the token would be sent unencrypted (http); use https"


class UnsafeSubprocessSandbox(_Sandbox):
    """Resource limits only, for machines without bubblewrap: programs have the rights of the run.
    They can read its files, use the network, and leave processes behind."""

    kind: Literal["unsafe_subprocess"]
    python: PathText | None = None
    """Interpreter of the programs. None: that of this run."""

    def with_absolute_paths(self) -> Self:
        python = self.python and absolute_program(self.python)
        return self.model_copy(update={"python": python})

    def advice(self) -> Iterator[str]:
        yield (
            "kind=unsafe_subprocess runs model-written code with your rights: it can read and "
            "change your files and use the network; install bubblewrap and use kind=bubblewrap, "
            "unless this machine has nothing to protect"
        )


AnySandbox = BubblewrapSandbox | ServiceSandbox | UnsafeSubprocessSandbox
SandboxConfig = Annotated[
    Annotated[AnySandbox, Field(discriminator="kind")], named_kind("bubblewrap")
]
