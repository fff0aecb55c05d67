"""Environments in actors on all nodes of a Ray cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from typing import Any

from burnish.environments.base import EnvironmentSetupError
from burnish.environments.host import EnvironmentHost, Failed
from burnish.environments.multi_turn import Start, Step
from burnish.environments.pool import (
    MAX_START_FAILURES,
    START_TIMEOUT_S,
    EnvironmentSpec,
    EpisodeFailedError,
    OpenEpisode,
)
from burnish.runtime.ray_cluster import RayCluster

log = logging.getLogger("burnish")

MARGIN_S = 30.0
"""Time that an actor may take in addition to the time limit of a call, which it enforces itself."""


class _Host:
    """One actor and its number of open episodes."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.episodes = 0
        self.lost = False


class RemoteEnvironments:
    """Actors that run environments, spread over the nodes. Implements
    ``environments.pool.Environments``.

    Actors reserve no CPUs: environments mostly wait. An actor that dies is replaced; its episodes
    fail with status ``infra_error``.
    """

    def __init__(self, cluster: RayCluster, spec: EnvironmentSpec, *, workers: int) -> None:
        self.cluster, self.spec, self.size = cluster, spec, workers
        self._hosts: list[_Host] = []
        self._names = count()
        self._lock = asyncio.Lock()
        self._failures = 0

    async def start(self) -> None:
        """Start the actors. Raises EnvironmentSetupError if the environment cannot be loaded."""
        async with self._lock:
            await self._fill()

    async def _fill(self) -> None:
        """Replace lost actors. Raises EnvironmentSetupError."""
        self._hosts = [host for host in self._hosts if not host.lost]
        new = [_Host(self._actor()) for _ in range(self.size - len(self._hosts))]
        found = await asyncio.gather(*map(self._started, new), return_exceptions=True)
        self._hosts += [host for host, error in zip(new, found, strict=True) if error is None]
        for error in found:
            if error is not None:
                raise error

    def _actor(self) -> Any:
        return (
            self.cluster.ray.remote(EnvironmentHost)
            .options(num_cpus=0, max_restarts=0, scheduling_strategy="SPREAD", max_concurrency=1000)
            .remote(self.spec)
        )

    async def _started(self, host: _Host) -> None:
        try:
            failed = await self._reply(host, host.actor.start.remote(), START_TIMEOUT_S)
        except EpisodeFailedError as error:
            failed = Failed(None, f"environment {self.spec.spec}: its actor did not start: {error}")
        if failed is not None:
            self._end(host)
            raise failed.error()

    async def _reply(self, host: _Host, ref: Any, timeout_s: float) -> Any:
        """Return the result of a call. Raises EpisodeFailedError if the actor died or hangs."""
        try:
            return await asyncio.wait_for(_result(ref), timeout_s + MARGIN_S)
        except TimeoutError:
            why = f"did not answer within {timeout_s + MARGIN_S:g} s"
        except self.cluster.ray.exceptions.RayError as error:
            why = f"died: {type(error).__name__}: {str(error)[:300]}"
        host.lost = True
        self._end(host)
        raise EpisodeFailedError("infra_error", f"environment {self.spec.spec}: its actor {why}")

    async def open(self, task: Mapping[str, Any], seed: int, *, timeout_s: float) -> OpenEpisode:
        """Begin an episode in the actor with the fewest. Raises EpisodeFailedError, or
        EnvironmentSetupError if actors cannot be started any more."""
        host = await self._host()
        host.episodes += 1
        name = f"{next(self._names)}"
        try:
            found = await self._reply(
                host, host.actor.open.remote(name, dict(task), seed, timeout_s), timeout_s
            )
            if isinstance(found, Failed):
                raise found.error()
        except BaseException:
            host.episodes -= 1
            raise
        return _Episode(self, host, name, found)

    async def _host(self) -> _Host:
        async with self._lock:
            try:
                await self._fill()
                self._failures = 0
            except EnvironmentSetupError as error:
                self._failures += 1
                if self._failures >= MAX_START_FAILURES or not self._hosts:
                    raise
                log.warning("%s", error)
            return min(self._hosts, key=lambda host: host.episodes)

    async def call(self, host: _Host, method: str, *args: Any, timeout_s: float) -> Any:
        """Return the result of a method of an episode's actor. Raises EpisodeFailedError."""
        if host.lost:
            what = f"environment {self.spec.spec}: its actor died"
            raise EpisodeFailedError("infra_error", what)
        remote = {"step": host.actor.step, "close": host.actor.close}[method]
        return await self._reply(host, remote.remote(*args), timeout_s)

    async def close(self) -> None:
        """End the actors and their worker processes."""
        hosts, self._hosts = self._hosts, []
        ending = [_result(host.actor.end.remote()) for host in hosts]
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*ending, return_exceptions=True), MARGIN_S)
        for host in hosts:
            self._end(host)

    def _end(self, host: _Host) -> None:
        self.cluster.ray.kill(host.actor)


class _Episode:
    """An episode in an actor. Implements ``environments.pool.OpenEpisode``."""

    def __init__(self, owner: RemoteEnvironments, host: _Host, name: str, start: Start) -> None:
        self._owner, self._host, self._name = owner, host, name
        self._open = True
        self.start = start

    async def step(self, message: Mapping[str, Any], *, timeout_s: float) -> Step:
        found = await self._owner.call(
            self._host, "step", self._name, dict(message), timeout_s, timeout_s=timeout_s
        )
        if isinstance(found, Failed):
            raise found.error()
        step: Step = found
        return step

    async def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._host.episodes -= 1
        with suppress(EpisodeFailedError):
            await self._owner.call(self._host, "close", self._name, timeout_s=MARGIN_S)


async def _result(ref: Any) -> Any:
    return await ref
