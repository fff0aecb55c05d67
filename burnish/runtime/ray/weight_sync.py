"""Transfer of weights from the policy's ranks to the rollout workers of a Ray cluster.

:class:`ObjectStoreSync`, the default: rank 0 puts buckets into Ray's object store, the controller
keeps their headers, and every worker reads them there. :class:`FolderSync`: rank 0 writes files,
and every worker reads them. Neither needs a connection. A replaced worker gets the same weights as
the others, and workers may read while the ranks train (``stage``). At most two versions are kept:
the trainer waits if workers still load the one before the last.

:class:`ConnectionSync`: rank 0 and the workers open a connection (``sync/connect.py``). Once a
process of either side is replaced, the connection is replaced under a new name. The ranks take part
in the transfer, so it does not overlap with training. In asynchronous runs, a worker that is
replaced while the policy is trained gets its weights once the trainer waits for groups.

All carry versions and checksums that the workers verify. A worker with an incomplete or corrupted
transfer refuses to sample."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from threading import Lock
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from burnish.config.model import Dtype
from burnish.config.rollout import InFlight
from burnish.config.sync import DiskSync, LinkSync, RayStore
from burnish.rollout.base import RolloutEngine, StagedWeights, Sync
from burnish.rollout.servers.engine import VllmServerEngine
from burnish.runtime.base import ClusterError
from burnish.runtime.ray.errors import died, failure, is_worker_loss
from burnish.runtime.ray.rollout_engine import RemoteRolloutEngine, snapshot_weights
from burnish.runtime.ray.rollout_pool import Lost, Weights
from burnish.runtime.ray.server_sync import ServerSync
from burnish.runtime.ray.train_engine import RemoteTrainEngine
from burnish.runtime.worker import TransferOptions
from burnish.sync.base import LinkError, Metrics, sync_metrics
from burnish.sync.channel import connect_store, end_connection

log = logging.getLogger("burnish")

REACH_S = 10.0
"""Time in which the controller must reach the store of a connection."""

Call = tuple[Any, Any]
"""A worker, and the reference to the result of a call on it."""


def ray_sync(
    policy: RemoteTrainEngine,
    rollout: RemoteRolloutEngine | VllmServerEngine,
    config: LinkSync | DiskSync,
    dtype: Dtype,
) -> Sync:
    """Return the sync configured in the recipe, after its first push."""
    options = TransferOptions(config.bucket_bytes, dtype, verify=config.verify)
    if isinstance(rollout, VllmServerEngine):
        assert config.ray_store == "object_store", "validation rejects other kinds"
        return ServerSync(policy, rollout, options)
    store = config.ray_store
    make: Callable[..., Sync] = ConnectionSync if store is None else STORED[store]
    return make(policy, rollout, config, options)


class _StoredSync(ABC):
    """Weight transfer through a store that workers read at any time."""

    def __init__(self, policy: RemoteTrainEngine, rollout: RemoteRolloutEngine) -> None:
        self.policy, self.rollout = policy, rollout
        self._stored: list[Weights] = []
        """Weights that may still be needed."""
        rollout.pool.refill = None

    @abstractmethod
    def _store(self, in_flight: InFlight) -> tuple[Weights, Metrics]:
        """Store the policy's weights. Return them, and metrics of the transfer."""

    def push(self) -> Metrics:
        """Transfer the weights. Raises SyncError if a worker rejects them, and WorkerLostError if a
        rank is lost."""
        started = time.perf_counter()
        weights, metrics = self._store("recompute")
        self._stored = [weights]
        self.rollout.load(weights)
        seconds = time.perf_counter() - started
        return metrics | _timing(weights.num_bytes, seconds)

    def stage(self, in_flight: InFlight) -> StagedWeights:
        """Store the weights, and return the load of all workers.

        Waits first if workers still load the weights before the last ones. The metric
        ``sync/stored_bytes`` counts all stored weights, ``sync/wait_s`` is the time of this wait.
        Raises ClusterError after ``cluster.call_timeout_s``.
        """
        started = time.perf_counter()
        limit = self.rollout.cluster.config.call_timeout_s
        for older in self._stored[:-1]:
            if not older.released.wait(limit):
                raise ClusterError(
                    f"version {older.version} of the weights was not loaded by all rollout "
                    f"workers within {limit:g} s (cluster.call_timeout_s) after version "
                    f"{self._stored[-1].version} was staged; see the driver's log for lost workers"
                )
        self._stored = self._stored[-1:]
        waited = time.perf_counter() - started
        weights, metrics = self._store(in_flight)
        self._stored.append(weights)
        metrics |= _timing(weights.num_bytes, time.perf_counter() - started)
        metrics["sync/wait_s"] = waited
        metrics["sync/stored_bytes"] = float(sum(w.num_bytes for w in self._stored))
        return StagedWeights(weights.version, metrics, lambda engine: self.rollout.stage(weights))

    def settle(self) -> None:
        """Wait until no worker loads weights before the newest."""
        self.rollout.settle()

    def policy_idle(self) -> AbstractContextManager[None]:
        """Return a context without effect: workers read the stored weights at any time."""
        return nullcontext()


def _timing(num_bytes: int, seconds: float) -> Metrics:
    return {"sync/seconds": seconds, "sync/bytes_per_s": num_bytes / seconds if seconds else 0.0}


class ObjectStoreSync(_StoredSync):
    """Weight transfer through Ray's object store."""

    def __init__(
        self,
        policy: RemoteTrainEngine,
        rollout: RemoteRolloutEngine,
        config: LinkSync,
        options: TransferOptions,
    ) -> None:
        super().__init__(policy, rollout)
        self.options = options
        self._pushes = 0
        self.push()

    def _store(self, in_flight: InFlight) -> tuple[Weights, Metrics]:
        snapshot = self.policy.transfer_weights(self._pushes, self.options)
        self._pushes += 1
        end = snapshot.end
        metrics = sync_metrics(end.version, end.num_bytes, buckets=end.num_buckets, seconds=0.0)
        return snapshot_weights(snapshot, in_flight, verify=self.options.verify), metrics


class FolderSync(_StoredSync):
    """Weight transfer through files in a folder that all processes share."""

    def __init__(
        self,
        policy: RemoteTrainEngine,
        rollout: RemoteRolloutEngine,
        config: DiskSync,
        options: TransferOptions,
    ) -> None:
        super().__init__(policy, rollout)
        self.config, self.options = config, options
        self._ranks: list[Any] = []
        """Processes that have opened the folder."""
        self.push()

    def _store(self, in_flight: InFlight) -> tuple[Weights, Metrics]:
        group, name = self.policy.group, "weights"
        if self._ranks != group.workers:
            group.all(lambda w: w.open_sender.remote(self.config, self.options, name, 0))
            self._ranks = list(group.workers)
        metrics: Metrics = group.all(lambda w: w.push.remote())[0]
        config, version, keep = self.config, self.policy.version, in_flight == "continue"

        def send(worker: Any) -> Any:
            return worker.receive_files.remote(config, version, keep_cache=keep)

        return Weights(version, send, in_flight, int(metrics["sync/bytes"])), metrics


STORED: Mapping[RayStore, Callable[..., Sync]] = {
    "object_store": ObjectStoreSync,
    "disk": FolderSync,
}
"""``ray_store`` of a sync -> its class. Without a store: :class:`ConnectionSync`."""


class ConnectionSync:
    """Weight transfer through a connection of the policy's rank 0 and the workers."""

    def __init__(
        self,
        policy: RemoteTrainEngine,
        rollout: RemoteRolloutEngine,
        config: LinkSync,
        options: TransferOptions,
    ) -> None:
        self.policy, self.rollout, self.config, self.options = policy, rollout, config, options
        self.ray = rollout.cluster.ray
        self._connected: list[Any] = []
        """Processes that the connection joins."""
        self._names = 0
        self._store: Store | None = None
        """Store of the connection, to end the waits of its processes. None: not reached."""
        self._sent: Weights | None = None
        """Weights of the last transfer to all workers."""
        self._in_use = Lock()
        """Held by the trainer while it may use the ranks, and by transfers to new workers."""
        self._reserved = False
        """True while the trainer holds the lock: in asynchronous runs, always except in
        :meth:`policy_idle`. In synchronous runs never, because one thread does everything."""
        rollout.pool.refill = self._refill
        self.push()

    def push(self) -> Metrics:
        """Transfer the weights. Workers that die or hang are replaced, and all processes reconnect.
        Raises SyncError if a worker rejects the weights, and WorkerLostError if a rank is lost."""
        return self._transfer("recompute")

    @contextmanager
    def policy_idle(self) -> Iterator[None]:
        """Let the engine's thread send weights to replaced workers in this context, which the
        trainer's thread enters while it does not use the ranks. At its end, wait for a transfer in
        progress. From the first context on, workers get no weights outside of it and of
        :meth:`stage`."""
        if self._reserved:
            self._reserved = False
            self._in_use.release()
        try:
            yield
        finally:
            self._reserved = self._in_use.acquire()

    def settle(self) -> None:
        """Do nothing: no weights are stored."""

    def stage(self, in_flight: InFlight) -> StagedWeights:
        """Return the transfer, in which the ranks take part. Its metrics are known at its end."""
        metrics: Metrics = {}
        self.rollout.staged = True

        def load(engine: RolloutEngine) -> None:
            if in_flight == "finish":
                self.rollout.drain()
            metrics.update(self._transfer(in_flight))

        return StagedWeights(self.policy.version, metrics, load, waits=True)

    def _transfer(self, in_flight: InFlight) -> Metrics:
        weights = Weights(self.policy.version, None, in_flight)
        while True:
            indices = self.rollout.built_workers()
            metrics, lost = self._push(indices, weights)
            if not lost:
                self._sent = weights
                return metrics
            self.rollout.lose(lost)

    def _refill(self, indices: Sequence[int], timeout_s: float) -> Lost:
        """Send the policy's weights to new workers, which invalidates the connection of all. Does
        nothing if the ranks are in use for the next ``timeout_s`` seconds."""
        if not self._in_use.acquire(timeout=timeout_s):
            return {}
        try:
            return self._send_to_new(indices)
        finally:
            self._in_use.release()

    def _send_to_new(self, indices: Sequence[int]) -> Lost:
        weights, version = self._sent, self.policy.version
        if weights is None or weights.version != version:
            weights = Weights(version)
        try:
            return self._push(indices, weights)[1]
        finally:
            self._connected = []

    def _push(self, indices: Sequence[int], weights: Weights) -> tuple[Metrics, Lost]:
        """Send the weights to some of the workers. Return metrics and the workers that were
        lost."""
        ranks, handles = self.policy.group.workers, self.rollout.workers
        workers = [handles[i] for i in indices]
        processes = [*ranks, *workers]
        if self._connected != processes:
            self._connected = []
            if lost := self._connect(indices):
                return {}, lost
        self._connected = []  # a connection may be dead after a failure
        keep = weights.in_flight == "continue"
        sent = [(w, w.push.remote()) for w in ranks]
        received = [(w, w.receive.remote(weights.version, keep_cache=keep)) for w in workers]
        if lost := self._wait(sent, received, indices):
            return {}, lost
        self._connected = processes
        self.rollout.pool.mark_loaded(indices, weights)
        metrics: Metrics = self.ray.get(sent[0][1])
        return metrics, {}

    def _connect(self, indices: Sequence[int]) -> Lost:
        """Open a new connection of the ranks and these workers. Return those that were lost."""
        self._names, self._store = self._names + 1, None
        name, count = self._name, len(indices)
        ranks, handles = self.policy.group.workers, self.rollout.workers
        serving = (ranks[0], ranks[0].serve_store.remote(self.config.timeout_s))
        self._wait([serving], [], indices)
        at = self.ray.get(serving[1])
        try:
            self._store = connect_store(*at, timeout_s=REACH_S)
        except LinkError as error:
            log.warning(
                "the controller cannot reach the store of the weight transfer (%s): if a worker "
                "dies during a transfer, the others wait for sync.timeout_s",
                error,
            )
        opening = [(w, w.open_sender.remote(self.config, self.options, name, count)) for w in ranks]
        joining = [
            (w, w.open_source.remote(self.config, at, name, rank=rank, num_receivers=count))
            for rank, w in enumerate((handles[i] for i in indices), 1)
        ]
        return self._wait(opening, joining, indices)

    def _wait(
        self, sending: Sequence[Call], receiving: Sequence[Call], indices: Sequence[int]
    ) -> Lost:
        """Wait until every call is done or its worker is lost. Return the lost receivers. Raises
        WorkerLostError if a sender is lost, and any other error of a call."""
        calls = [*sending, *receiving]
        gone = self._gone(calls, len(sending))
        ranks = [i for i in gone if i < len(sending)]
        if ranks:
            workers = [calls[i][0] for i in ranks]
            raise self.policy.group.loss(workers, f"{gone[ranks[0]]} (during a weight transfer)")
        if gone:
            return {indices[i - len(sending)]: why for i, why in gone.items()}
        ends = [failure(self.ray, ref) for _, ref in calls]
        for error in (*ends[len(sending) :], *ends[: len(sending)]):  # receivers' are specific
            if error is not None:
                raise error
        return {}

    def _gone(self, calls: Sequence[Call], num_senders: int) -> Lost:
        """Wait for all calls. Return those whose workers died or hang, by their index in ``calls``.
        Once one is lost, the waits of the others end within seconds. Once a sender is lost, the
        other senders are not waited for: their group restarts."""
        cluster = self.rollout.cluster
        limit = cluster.config.call_timeout_s
        waiting = dict(enumerate(calls))
        gone: Lost = {}
        while waiting:
            refs, workers = [ref for _, ref in waiting.values()], [w for w, _ in waiting.values()]
            ready, unresponsive = cluster.monitor.wait(refs, workers, limit_s=limit)
            late = not ready and not unresponsive
            for index, (worker, ref) in list(waiting.items()):
                error = failure(self.ray, ref) if ref in ready else None
                if error is not None and is_worker_loss(self.ray, error):
                    gone[index] = died(error)
                elif ref not in ready and worker in unresponsive:
                    gone[index] = cluster.unresponsive_reason
                elif ref not in ready and late:
                    gone[index] = f"did not respond within {limit:g} s (cluster.call_timeout_s)"
                if ref in ready:
                    del waiting[index]
                elif index in gone:
                    del waiting[index]
                    self.ray.kill(worker)  # others wait for its part of a broadcast
            if gone:
                self._end_waits(calls, gone)
            if any(index < num_senders for index in gone):
                waiting = {index: call for index, call in waiting.items() if index >= num_senders}
        return gone

    def _end_waits(self, calls: Sequence[Call], gone: Lost) -> None:
        """Tell the processes that wait in the connection that others are lost. If the store is lost
        too, their waits have ended."""
        names, store = self.rollout.cluster.monitor, self._store
        reason = ", ".join(f"{names.name(calls[i][0])} {why}" for i, why in gone.items())
        if store is not None:
            with suppress(LinkError):
                end_connection(store, self._name, reason)

    @property
    def _name(self) -> str:
        return f"weights-{self._names}"
