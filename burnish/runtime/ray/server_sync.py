"""Transfer of weights from the policy's ranks on Ray to vLLM servers, through the controller.

Rank 0 puts buckets into Ray's object store, as for rollout workers (``weight_sync.py``). The
controller reads one bucket after the other, verifies its checksum, and gives its tensors to the
engine, which writes the files that the servers read (``rollout/servers/group.py``).

At most two versions are stored: the one that is being loaded and a newer one. Weights that are
staged and not yet being loaded are dropped before newer ones are stored, so the trainer does not
wait for the servers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any

from burnish.config.rollout import InFlight
from burnish.messages import library_text
from burnish.rollout.base import RolloutEngine, StagedWeights
from burnish.runtime.base import WorkerLostError
from burnish.runtime.ray.train_engine import RemoteTrainEngine
from burnish.runtime.worker import TransferOptions
from burnish.sync.base import Metrics, sync_metrics
from burnish.sync.snapshot import SnapshotSource, WeightSnapshot


class ServerSync:
    """Weight transfer that keeps servers, through the engine in the controller, at the policy's
    version. Implements ``runtime.base.Sync``."""

    def __init__(
        self, policy: RemoteTrainEngine, rollout: RolloutEngine, options: TransferOptions
    ) -> None:
        self.policy, self.rollout, self.options = policy, rollout, options
        self._pushes = 0
        self._lock = Lock()
        """Held for access to the next two: the trainer stages, the engine's thread loads."""
        self._staged: WeightSnapshot[Any] | None = None
        """Weights whose load has not begun."""
        self._loading_bytes = 0
        """Size of the weights that are being loaded."""
        self.push()

    def push(self) -> Metrics:
        """Transfer the weights; return when the servers have loaded them.

        Raises WorkerLostError if a rank or the stored weights are lost, SyncError if a bucket is
        damaged, and otherwise as ``VllmServerEngine.load_weights``."""
        started = time.perf_counter()
        snapshot = self._store()
        self._load(self.rollout, snapshot)
        return _metrics(snapshot, started)

    def stage(self, in_flight: InFlight) -> StagedWeights:
        """Store the weights, and return their load. It does nothing if newer weights were staged or
        pushed before it begins. The metric ``sync/stored_bytes`` counts all stored weights."""
        started = time.perf_counter()
        snapshot = self._store()
        with self._lock:
            self._staged = snapshot
            stored = snapshot.end.num_bytes + self._loading_bytes
        metrics = _metrics(snapshot, started) | {"sync/stored_bytes": float(stored)}
        number = snapshot.end.push

        def load(engine: RolloutEngine) -> None:
            with self._lock:
                staged = self._staged
                if staged is None or staged.end.push != number:
                    return
                self._staged, self._loading_bytes = None, staged.end.num_bytes
            self._load(engine, staged)

        finishes = in_flight == "finish"
        return StagedWeights(snapshot.end.version, metrics, load, needs_idle=finishes)

    def settle(self) -> None:
        """Do nothing: staged weights wait for no worker."""

    def policy_idle(self) -> AbstractContextManager[None]:
        """Return a context without effect: there are no workers to replace."""
        return nullcontext()

    def _store(self) -> WeightSnapshot[Any]:
        """Drop the staged weights, and return the policy's weights in the object store."""
        with self._lock:
            self._staged = None
        snapshot = self.policy.transfer_weights(self._pushes, self.options)
        self._pushes += 1
        return snapshot

    def _load(self, engine: RolloutEngine, snapshot: WeightSnapshot[Any]) -> None:
        """Load stored weights into the engine, after verification of each bucket."""
        source = SnapshotSource(
            snapshot.headers, self._payloads(snapshot), check=self.options.verify
        )
        try:
            with source.open(snapshot.end.version) as transfer:
                engine.load_weights(transfer.version, transfer)
        finally:
            with self._lock:
                self._loading_bytes = 0

    def _payloads(self, snapshot: WeightSnapshot[Any]) -> Iterator[Any]:
        """Yield the bytes of each bucket. Raises WorkerLostError if they are lost with their node:
        the run rolls back and transfers weights again."""
        cluster = self.policy.group.cluster
        for ref in snapshot.payloads:
            try:
                payload = cluster.ray.get(ref, timeout=cluster.config.call_timeout_s)
            except cluster.ray.exceptions.RayError as error:
                raise WorkerLostError(
                    f"weights in the object store are lost ({library_text(error)})"
                ) from error
            yield payload
            del payload


def _metrics(snapshot: WeightSnapshot[Any], started: float) -> Metrics:
    end, seconds = snapshot.end, time.perf_counter() - started
    return sync_metrics(end.version, end.num_bytes, buckets=end.num_buckets, seconds=seconds)
