"""Workers of environments in actors on all nodes of a Ray cluster."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from burnish.environments.host import CallOutcome, WorkerHost
from burnish.environments.process import as_json
from burnish.environments.worker_set import WorkerEndedError

START_TIMEOUT_S = 120.0
"""Time in which an actor must have started."""
MARGIN_S = 30.0
"""Time that an actor may take in addition to the time limit of a call, which it enforces itself."""
MAX_CALLS = 2**20
"""Calls that an actor handles at once. Ray would let further ones wait, and their time limits with
them: a worker has as many as its episodes, which one on this machine takes without a limit."""


async def start_remote_worker(ray: Any, python: str | None) -> RemoteWorker:
    """Start a worker process with the interpreter ``python`` in an actor.

    Actors are spread over the nodes. They reserve no CPUs, because environments mostly wait.
    ``ray``: the module, connected to a cluster.

    Raises WorkerEndedError if the actor does not start, and OSError if the process does not.
    """
    actor = (
        ray.remote(WorkerHost)
        .options(
            num_cpus=0, max_restarts=0, scheduling_strategy="SPREAD", max_concurrency=MAX_CALLS
        )
        .remote()
    )
    worker = RemoteWorker(ray, actor)
    try:
        await worker.start(python)
    except BaseException:
        ray.kill(actor)  # a process that it started ends with it
        raise
    return worker


class RemoteWorker:
    """A worker process in an actor. Implements ``environments.worker_set.EnvironmentWorker``."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        self._lost = False
        self._watcher: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        """False after the process or the actor ended or did not answer in time."""
        return not self._lost

    async def start(self, python: str | None) -> None:
        """Start the process, and wait in the background for its end or that of the actor. Raises
        WorkerEndedError or OSError."""

        async def watch() -> None:
            with suppress(self._ray.exceptions.RayError):
                await _result(self._actor.exited.remote())
            self._lost = True

        await self._outcome(self._actor.start.remote(python), START_TIMEOUT_S)
        self._watcher = asyncio.create_task(watch())

    async def call(self, timeout_s: float, **request: Any) -> Any:
        """Return the content of a reply. See ``environments.worker_set.Worker.call``."""
        if self._lost:
            raise WorkerEndedError("its worker process died")
        line = as_json(request)
        return await self._outcome(self._actor.call.remote(timeout_s, line), timeout_s)

    async def _outcome(self, ref: Any, timeout_s: float) -> Any:
        try:
            outcome: CallOutcome = await asyncio.wait_for(_result(ref), timeout_s + MARGIN_S)
        except TimeoutError:
            self._lost = True
            why = f"the actor of its worker did not answer within {timeout_s + MARGIN_S:g} s"
            raise WorkerEndedError(why) from None
        except self._ray.exceptions.RayError as error:
            self._lost = True
            why = f"the actor of its worker died: {type(error).__name__}: {str(error)[:300]}"
            raise WorkerEndedError(why) from error
        if isinstance(outcome.error, WorkerEndedError):
            self._lost = True
        return outcome.unwrap()

    async def end(self) -> None:
        """End the worker process and the actor."""
        if self._watcher is not None:
            self._watcher.cancel()
        if not self._lost:
            self._lost = True
            with suppress(TimeoutError, self._ray.exceptions.RayError):
                await asyncio.wait_for(_result(self._actor.end.remote()), MARGIN_S)
        self._ray.kill(self._actor)


async def _result(ref: Any) -> Any:
    return await ref
