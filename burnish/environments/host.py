"""A worker process behind a cluster actor: the part of the actor that is not Ray.

Failures are returned as values, because an exception would be wrapped by the transport. Requests
and results are JSON text, because the transport cannot pickle deeply nested values.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from burnish.environments.process import TOO_DEEP, WorkerProcess, start_process
from burnish.errors import BurnishError


@dataclass(frozen=True)
class CallOutcome:
    """Result of a call, or its error."""

    value: str = "null"
    """The result as JSON text."""
    error: Exception | None = None

    def unwrap(self) -> Any:
        """Return the result, or raise the error."""
        if self.error is not None:
            raise self.error
        return json.loads(self.value)


class WorkerHost:
    """One worker process."""

    def __init__(self) -> None:
        self._process: WorkerProcess | None = None

    @property
    def process(self) -> WorkerProcess:
        """The started process."""
        assert self._process is not None, "start() comes first"
        return self._process

    async def start(self, python: str | None) -> CallOutcome:
        """Start the process with the interpreter ``python``."""
        try:
            self._process = await start_process(python)
        except OSError as error:
            return CallOutcome(error=error)
        return CallOutcome()

    async def call(self, timeout_s: float, request: str) -> CallOutcome:
        """Return the outcome of a call of the worker. ``request``: its arguments as JSON text."""
        try:
            arguments = json.loads(request)
            return CallOutcome(json.dumps(await self.process.call(timeout_s, **arguments)))
        except RecursionError:
            return CallOutcome(error=ValueError(TOO_DEEP))
        except (BurnishError, TimeoutError, TypeError, ValueError) as error:
            return CallOutcome(error=error)

    async def exited(self) -> None:
        """Wait for the end of the process."""
        await self.process.exited()

    async def end(self) -> None:
        """End the process and everything that it started."""
        if self._process is not None:
            await self._process.end()
