"""Worker process of one rollout engine. Like ``worker.py`` it does not depend on Ray."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from burnish.config.model import ModelConfig
from burnish.config.sync import DiskSync, LinkSync
from burnish.observe.timeline import timed
from burnish.rollout.base import Completion, Request, Sampling
from burnish.rollout.kinds import RolloutEngineConfig
from burnish.rollout.weights import Shape
from burnish.runtime.worker import Worker
from burnish.sync.base import Metrics
from burnish.sync.channel import connect_store
from burnish.sync.connect import Rendezvous, open_source
from burnish.sync.engine import SyncedEngine
from burnish.sync.snapshot import SnapshotSource

ANSWERS_PER_S = 128
"""Answers with completions per second that all workers together send to the controller. An answer
per completion would cost it too much time. Completions that a dead worker did not send are sampled
again."""
_SHORTEST_S = 0.02
_LONGEST_S = 0.25
_JOIN_S = 0.05
"""Seconds between two answers that the timeline does not show: usually a message to the controller
and back."""


@dataclass(frozen=True)
class Orders:
    """Changes of a worker's open requests."""

    cancel: tuple[str, ...] = ()
    """Request ids."""
    release: tuple[str, ...] = ()
    """Conversations."""
    submit: tuple[tuple[Request, Sampling], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.cancel or self.release or self.submit)


def answer_seconds(workers: int) -> tuple[float, float]:
    """Return (shortest, longest) seconds between two answers of one of ``workers`` workers.

    A worker answers after the shortest time if a completion finished, else after the longest. New
    requests reach it between two answers.
    """
    shortest = max(_SHORTEST_S, workers / ANSWERS_PER_S)
    return shortest, max(_LONGEST_S, shortest)


class RolloutWorker(Worker):
    """One rollout engine, which samples only from completely received weights."""

    engine: SyncedEngine
    _expected: Mapping[str, Shape] | None
    """Shapes of the weights received last."""
    _folder: DiskSync | None = None
    """Folder that it reads weights from. None: it does not."""

    def build(
        self,
        model: ModelConfig,
        config: RolloutEngineConfig,
        max_len: int | None,
        *,
        ready: bool = True,
    ) -> int | None:
        """Load the model and make the engine. Return the maximum length of a row in tokens (None:
        unlimited). ``ready``: it may sample from the model's own weights. Otherwise it needs a
        weight transfer first."""
        engine = self.runtime().standalone_rollout(model, config, max_len=max_len, ready=ready)
        self._expected = None
        synced = SyncedEngine(engine, SnapshotSource(), ready=ready)
        self.engine = timed(synced, self.timeline, {"receive": "rollout_sync"})
        return engine.max_len

    def advance(self, orders: Orders) -> list[Completion]:
        """Carry out ``orders``, then advance the open requests for :func:`answer_seconds` or until
        none is open. Return what finished."""
        begun = time.monotonic()
        shortest, longest = answer_seconds(self.info.size)
        finished: list[Completion] = []
        with self.timeline.span("rollout", join_s=_JOIN_S):
            self.engine.cancel(orders.cancel)
            self.engine.release(orders.release)
            for sampling, same in groupby(orders.submit, key=lambda order: order[1]):
                self.engine.submit([request for request, _ in same], sampling)
            while self.engine.busy:
                finished += self.engine.poll()
                passed = time.monotonic() - begun
                if passed >= longest or (finished and passed >= shortest):
                    break
        return finished

    def sleep(self, *, new_weights_follow: bool) -> None:
        """Free caches until the next poll."""
        self.engine.sleep(new_weights_follow=new_weights_follow)

    def wake(self) -> None:
        """Allocate caches again."""
        self.engine.wake()

    def receive_snapshot(
        self,
        version: int,
        verify: bool,
        headers: Sequence[bytes],
        *payloads: Any,
        keep_cache: bool = False,
    ) -> Metrics:
        """Load a snapshot of the policy's weights. ``keep_cache`` is that of
        :meth:`RolloutEngine.load_weights`. Raises SyncError if it is incomplete."""
        self.engine.source.close()
        source = SnapshotSource(headers, payloads, expected=self._expected, check=verify)
        self.engine.source, self._folder = source, None
        metrics = self.engine.receive(version, keep_cache=keep_cache)
        self._expected = source.expected
        return metrics

    def receive_files(self, sync: DiskSync, version: int, *, keep_cache: bool = False) -> Metrics:
        """Load weights of ``version`` from a folder. Raises SyncError if they are incomplete."""
        if self._folder != sync:
            self.engine.source.close()
            self.engine.source, self._folder = open_source(sync, None), sync
        return self.engine.receive(version, keep_cache=keep_cache)

    def open_source(
        self,
        sync: LinkSync,
        at: tuple[str, int],
        connection: str,
        *,
        rank: int,
        num_receivers: int,
    ) -> None:
        """Join a new connection as receiver ``rank`` (from 1), after closing the previous one.
        ``at``: host and port of the sender's store."""
        self.engine.source.close()
        store = connect_store(*at, timeout_s=sync.timeout_s)
        rendezvous = Rendezvous(
            store, connection, num_receivers, rank=rank, device=self.info.device
        )
        self.engine.source, self._folder = open_source(sync, rendezvous), None

    def receive(self, version: int, *, keep_cache: bool = False) -> Metrics:
        """Load the weights that the trainer sends through the connection."""
        return self.engine.receive(version, keep_cache=keep_cache)

    def close(self) -> None:
        """Close the engine and all processes it started. Killing this process would leave them
        running."""
        self.engine.close()
