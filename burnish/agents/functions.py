"""Run an agent function in worker processes, many episodes in each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from burnish.agents.episodes import Endpoint
from burnish.environments.pool import (
    EnvironmentSpec,
    EpisodeFailedError,
    StartWorker,
    loaded_worker,
)
from burnish.environments.process import start_process
from burnish.environments.worker_set import (
    NoWorkerError,
    ReplyError,
    WorkerEndedError,
    WorkerSet,
)


class FunctionAgents:
    """Runs a user's function, ``agent(task, endpoint)``. Implements
    :class:`burnish.agents.episodes.Agents`.

    A worker in which an agent exceeded its time limit gets no new episodes, and is killed when its
    others have ended.
    """

    def __init__(
        self, spec: EnvironmentSpec, *, workers: int, start_worker: StartWorker = start_process
    ) -> None:
        self._name = spec.spec
        self._workers = WorkerSet(partial(loaded_worker, spec, start_worker), workers)

    async def start(self) -> None:
        await self._workers.start()

    async def run(self, task: Mapping[str, Any], endpoint: Endpoint, *, timeout_s: float) -> Any:
        try:
            session = await self._workers.acquire()
        except NoWorkerError as error:
            raise EpisodeFailedError("infra_error", str(error)) from error
        label = f"agent {self._name}"
        try:
            return await session.call(
                timeout_s, op="run", task=dict(task), endpoint=asdict(endpoint)
            )
        except ReplyError as error:
            text = f"{label} raised {error}{error.trace}"
            raise EpisodeFailedError("env_error", text, is_crash=True) from error
        except TimeoutError as error:
            raise EpisodeFailedError("timeout", f"{label} {error} (episodes.timeout_s)") from error
        except WorkerEndedError as error:
            raise EpisodeFailedError("infra_error", f"{label} has no result: {error}") from error
        except (TypeError, ValueError) as error:
            text = f"{label}: its task is not JSON: {error}"
            raise EpisodeFailedError("env_error", text) from error
        finally:
            await self._workers.release(session)

    async def close(self) -> None:
        await self._workers.close()
