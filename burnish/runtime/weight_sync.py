"""Transfer of weights from the policy's ranks to the rollout workers of a Ray cluster.

:class:`ObjectStoreSync`, the default: rank 0 puts buckets into Ray's object store, the controller
keeps their headers, and every worker reads them there. No connection is needed, and a replaced
worker gets the same weights as the others.

:class:`ConnectionSync`: rank 0 and the workers open a connection (``sync/connect.py``). Once a
process of either side is replaced, the connection is replaced under a new name.

Both carry versions and checksums that the workers verify. A worker with an incomplete or corrupted
transfer refuses to sample."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from burnish.config.model import Dtype
from burnish.config.sync import DiskSync, LinkSync, resolve_kind
from burnish.runtime.base import Sync
from burnish.runtime.errors import died, failure, is_worker_loss
from burnish.runtime.remote_rollout import Lost, RemoteRolloutEngine
from burnish.runtime.remote_train import RemoteTrainEngine
from burnish.runtime.worker import TransferOptions
from burnish.sync.base import Metrics, sync_metrics

Call = tuple[Any, Any]
"""A worker, and the reference to the result of a call on it."""


def ray_sync(
    policy: RemoteTrainEngine,
    rollout: RemoteRolloutEngine,
    config: LinkSync | DiskSync,
    dtype: Dtype,
) -> Sync:
    """Return the sync configured in the recipe, after its first push."""
    options = TransferOptions(config.bucket_bytes, dtype, verify=config.verify)
    kind = resolve_kind(config, same_process=False, same_memory=False, has_store=True)
    if kind == "object_store":
        return ObjectStoreSync(policy, rollout, options)
    return ConnectionSync(policy, rollout, config, options)


class ObjectStoreSync:
    """Weight transfer through Ray's object store."""

    def __init__(
        self, policy: RemoteTrainEngine, rollout: RemoteRolloutEngine, options: TransferOptions
    ) -> None:
        self.policy, self.rollout, self.options = policy, rollout, options
        self._pushes = 0
        self.push()

    def push(self) -> Metrics:
        """Transfer the weights. Raises SyncError if a worker rejects them."""
        started = time.perf_counter()
        kept = self.policy.transfer_weights(self._pushes, self.options)
        self._pushes += 1
        self.rollout.receive_snapshot(kept, verify=self.options.verify)
        return sync_metrics(
            kept.end.version,
            kept.end.num_bytes,
            buckets=kept.end.num_buckets,
            seconds=time.perf_counter() - started,
        )


class ConnectionSync:
    """Weight transfer through a connection of the policy's rank 0 and the workers, or through a
    shared folder."""

    def __init__(
        self,
        policy: RemoteTrainEngine,
        rollout: RemoteRolloutEngine,
        config: LinkSync | DiskSync,
        options: TransferOptions,
    ) -> None:
        self.policy, self.rollout, self.config, self.options = policy, rollout, config, options
        self.ray = rollout.cluster.ray
        self._connected: list[Any] = []
        """Processes that the connection joins."""
        self._names = 0
        self._metrics: Metrics = {}
        rollout.refill = self._refill
        self.push()

    def push(self) -> Metrics:
        """Transfer the weights. Workers that die or hang are replaced, and all processes reconnect.
        Raises SyncError if a worker rejects the weights, and WorkerLostError if a rank is lost."""
        while lost := self._push(range(self.rollout.size)):
            self.rollout.replace(lost)  # the push to all supersedes this refill
        return self._metrics

    def _refill(self, indices: Sequence[int]) -> Lost:
        """Send the policy's weights to new workers, which invalidates the connection of all."""
        try:
            return self._push(indices)
        finally:
            self._connected = []

    def _push(self, indices: Sequence[int]) -> Lost:
        """Send the weights to some of the workers. Return those that were lost."""
        ranks, workers = self.policy.group.workers, [self.rollout.workers[i] for i in indices]
        processes = [*ranks, *workers]
        if self._connected != processes:
            self._connected = []
            if lost := self._connect(indices):
                return lost
        self._connected = []  # a connection may be dead after a failure
        version = self.policy.version
        sent = [(w, w.push.remote()) for w in ranks]
        if isinstance(self.config, DiskSync):  # all is written before any worker reads
            self._wait(sent, [], indices)
        received = [(w, w.receive.remote(version)) for w in workers]
        if lost := self._wait(sent, received, indices):
            return lost
        self._connected, self.rollout.version = processes, version
        self._metrics = self.ray.get(sent[0][1])
        return {}

    def _connect(self, indices: Sequence[int]) -> Lost:
        """Open a new connection of the ranks and these workers. Return those that were lost."""
        self._names += 1
        name, count, at = f"weights-{self._names}", len(indices), None
        ranks = self.policy.group.workers
        if not isinstance(self.config, DiskSync):
            serving = (ranks[0], ranks[0].serve_store.remote(self.config.timeout_s))
            self._wait([serving], [], indices)
            at = self.ray.get(serving[1])
        opening = [(w, w.open_sender.remote(self.config, self.options, name, count)) for w in ranks]
        joining = []
        for rank, index in enumerate(indices, 1):
            worker = self.rollout.workers[index]
            call = worker.open_source.remote(self.config, at, name, rank=rank, num_receivers=count)
            joining.append((worker, call))
        return self._wait(opening, joining, indices)

    def _wait(
        self, sending: Sequence[Call], receiving: Sequence[Call], indices: Sequence[int]
    ) -> Lost:
        """Wait until every call is done or its worker is lost. Surviving processes give up on dead
        ones after ``sync.timeout_s``. Return the lost receivers. Raises WorkerLostError if a sender
        is lost, and any other error of a call."""
        calls = [*sending, *receiving]
        gone = self._gone(calls)
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

    def _gone(self, calls: Sequence[Call]) -> Lost:
        """Wait for all calls. Return those whose workers died or hang, by their index in
        ``calls``."""
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
                if ref in ready or index in gone:
                    del waiting[index]
        return gone
