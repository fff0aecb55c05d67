"""Episodes of an environment, addressed by name: the part of a cluster actor that is not Ray.

An actor of this class runs one worker process (``pool.py``) on its node. Failures are returned as
values, because an exception would be wrapped by the transport.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from burnish.environments.base import EnvironmentSetupError
from burnish.environments.multi_turn import Start, Step
from burnish.environments.pool import (
    EnvironmentPool,
    EnvironmentSpec,
    EpisodeFailedError,
    Failure,
    OpenEpisode,
)


@dataclass(frozen=True)
class Failed:
    """A failed call. ``status`` None: the environment cannot be used at all."""

    status: Failure | None
    message: str

    def error(self) -> EpisodeFailedError | EnvironmentSetupError:
        """Return the error to raise where the call was made."""
        if self.status is None:
            return EnvironmentSetupError(self.message)
        return EpisodeFailedError(self.status, self.message)


class EnvironmentHost:
    """A worker process of an environment and its open episodes."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._spec = spec
        self._pool: EnvironmentPool | None = None
        self._episodes: dict[str, OpenEpisode] = {}

    async def start(self) -> Failed | None:
        """Start the worker process."""
        self._pool = EnvironmentPool(self._spec, workers=1)
        try:
            await self._pool.start()
        except EnvironmentSetupError as error:
            return Failed(None, str(error))
        return None

    async def open(
        self, name: str, task: Mapping[str, Any], seed: int, timeout_s: float
    ) -> Start | Failed:
        """Begin the episode ``name``."""
        assert self._pool is not None, "start() comes first"
        try:
            episode = await self._pool.open(task, seed, timeout_s=timeout_s)
        except EpisodeFailedError as error:
            return Failed(error.status, str(error))
        except EnvironmentSetupError as error:
            return Failed(None, str(error))
        self._episodes[name] = episode
        return episode.start

    async def step(self, name: str, message: Mapping[str, Any], timeout_s: float) -> Step | Failed:
        """Pass a message to the episode ``name``."""
        try:
            return await self._episodes[name].step(message, timeout_s=timeout_s)
        except EpisodeFailedError as error:
            return Failed(error.status, str(error))

    async def close(self, name: str) -> None:
        """End the episode ``name``. Unknown names are ignored."""
        episode = self._episodes.pop(name, None)
        if episode is not None:
            await episode.close()

    async def end(self) -> None:
        """End the worker process."""
        if self._pool is not None:
            await self._pool.close()
