"""Worker process of one rollout engine. Like ``worker.py`` it does not depend on Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from burnish.config.model import ModelConfig
from burnish.config.rollout import RolloutEngineConfig
from burnish.config.sync import DiskSync, LinkSync
from burnish.observe.timeline import timed
from burnish.rollout.base import Completion, Request, Sampling
from burnish.rollout.weights import Shape
from burnish.runtime.worker import Worker
from burnish.sync.base import Metrics
from burnish.sync.channel import connect_store
from burnish.sync.connect import Rendezvous, open_source
from burnish.sync.engine import SyncedEngine
from burnish.sync.snapshot import SnapshotSource

CHUNKS_PER_S = 64
"""Chunks of completions per second that all workers together send to the controller. Single
completions would cost it too much time. Completions that a dead worker did not send are sampled
again."""


def chunk_seconds(workers: int) -> float:
    """Return the seconds for which one of ``workers`` rollout workers collects completions."""
    return max(0.5, workers / CHUNKS_PER_S)


class RolloutWorker(Worker):
    """One rollout engine, which samples only from completely received weights."""

    engine: SyncedEngine
    _expected: Mapping[str, Shape] | None
    """Shapes of the weights received last."""

    def build(
        self,
        model: ModelConfig,
        config: RolloutEngineConfig,
        max_len: int | None,
        *,
        ready: bool = True,
    ) -> None:
        """Load the model and make the engine. ``ready``: it may sample from the model's own
        weights. Otherwise it needs a weight transfer first."""
        engine = self.runtime().standalone_rollout(model, config, max_len=max_len)
        self._expected = None
        synced = SyncedEngine(engine, SnapshotSource(), ready=ready)
        spans = {"generate": "rollout", "receive": "rollout_sync"}
        self.engine = timed(synced, self.timeline, spans)

    def generate(
        self, requests: Sequence[Request], sampling: Sampling
    ) -> Iterator[list[Completion]]:
        """Yield completions as they finish, collected over :func:`chunk_seconds`."""
        every = chunk_seconds(self.info.size)
        finished: list[Completion] = []
        begun = time.monotonic()
        for completion in self.engine.generate(requests, sampling):
            finished.append(completion)
            if time.monotonic() - begun >= every:
                yield finished
                finished, begun = [], time.monotonic()
        if finished:
            yield finished

    def sleep(self, *, new_weights_follow: bool) -> None:
        """Free caches until the next generate."""
        self.engine.sleep(new_weights_follow=new_weights_follow)

    def wake(self) -> None:
        """Allocate caches again."""
        self.engine.wake()

    def receive_snapshot(
        self, version: int, verify: bool, headers: Sequence[bytes], *payloads: Any
    ) -> Metrics:
        """Load a snapshot of the policy's weights. Raises SyncError if it is incomplete."""
        self.engine.source.close()
        source = SnapshotSource(headers, payloads, expected=self._expected, check=verify)
        self.engine.source = source
        metrics = self.engine.receive(version)
        self._expected = source.expected
        return metrics

    def open_source(
        self,
        sync: LinkSync | DiskSync,
        at: tuple[str, int] | None,
        connection: str,
        *,
        rank: int,
        num_receivers: int,
    ) -> None:
        """Join a new connection as receiver ``rank`` (from 1), after closing the previous one.
        ``at``: host and port of the sender's store."""
        self.engine.source.close()
        rendezvous = None
        if at is not None:
            store = connect_store(*at, timeout_s=sync.timeout_s)
            rendezvous = Rendezvous(
                store, connection, num_receivers, rank=rank, device=self.info.device
            )
        self.engine.source = open_source(sync, rendezvous)

    def receive(self, version: int) -> Metrics:
        """Load the weights that the trainer sends through the connection."""
        return self.engine.receive(version)

    def close(self) -> None:
        """Close the engine and all processes it started. Killing this process would leave them
        running."""
        self.engine.close()
