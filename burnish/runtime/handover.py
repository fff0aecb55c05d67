"""Weights from the policy's ranks to the rollout workers of a Ray cluster.

Two ways. :class:`StoredSync`, the default: rank 0 puts buckets into Ray's object store, the
controller keeps their headers, and every worker reads them there. Nobody has to meet, and a worker
that is replaced is given what the others have. :class:`MeetingSync`: rank 0 and the workers make a
connection of their own (``sync/connect.py``), which is made anew, under a new name, when a process
of either side was replaced.

Both carry versions and checksums that the workers verify; a worker that did not get all of it, as
it was sent, refuses to sample.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from burnish.config.model import Dtype
from burnish.config.sync import DiskSync, LinkSync, resolve_kind
from burnish.runtime.base import Sync, WorkerLostError
from burnish.runtime.remote import RemoteRolloutEngine, RemoteTrainEngine, failure_of
from burnish.runtime.worker import Seat, Sending
from burnish.sync.base import Metrics, sync_metrics


def ray_sync(
    policy: RemoteTrainEngine,
    rollout: RemoteRolloutEngine,
    config: LinkSync | DiskSync,
    dtype: Dtype,
) -> Sync:
    """The sync that the recipe asks for, after its first push."""
    how = Sending(config.bucket_bytes, dtype, verify=config.verify)
    kind = resolve_kind(config, same_process=False, same_memory=False, has_store=True)
    if kind == "object_store":
        return StoredSync(policy, rollout, how)
    return MeetingSync(policy, rollout, config, how)


class StoredSync:
    """Through the object store."""

    def __init__(
        self, policy: RemoteTrainEngine, rollout: RemoteRolloutEngine, how: Sending
    ) -> None:
        self.policy, self.rollout, self.how = policy, rollout, how
        self._pushes = 0
        self.push()

    def push(self) -> Metrics:
        """Hand the weights over. Raises SyncError where a worker refuses them."""
        started = time.perf_counter()
        kept = self.policy.hand_over(self._pushes, self.how)
        self._pushes += 1
        self.rollout.take(kept, verify=self.how.verify)
        return sync_metrics(
            kept.end.version,
            kept.end.num_bytes,
            buckets=kept.end.num_buckets,
            seconds=time.perf_counter() - started,
        )


class MeetingSync:
    """Through a connection of the policy's rank 0 and the workers (or a folder that all see)."""

    def __init__(
        self,
        policy: RemoteTrainEngine,
        rollout: RemoteRolloutEngine,
        config: LinkSync | DiskSync,
        how: Sending,
    ) -> None:
        self.policy, self.rollout, self.config, self.how = policy, rollout, config, how
        self.ray = rollout.runtime.ray
        self._met: list[Any] = []
        """The processes that the connection is between."""
        self._names = 0
        rollout.refill = self._refill
        self.push()

    def push(self) -> Metrics:
        """Hand the weights over. Workers that die meanwhile are replaced, and all meet again.
        Raises SyncError where a worker refuses them, and WorkerLostError where a rank is gone."""
        while True:
            try:
                return self._push(range(len(self.rollout.workers)))
            except _RolloutLost as lost:
                for index in lost.indices:
                    # what it is given here is overtaken by the push to all
                    self.rollout.replace(index)

    def _refill(self, index: int) -> None:
        """The policy's weights to one fresh worker; the connection of all is void then."""
        try:
            self._push([index])
        except _RolloutLost as lost:
            raise WorkerLostError(f"the fresh rollout worker {index} was lost as well") from lost
        finally:
            self._met = []

    def _push(self, indices: Sequence[int]) -> Metrics:
        ranks, workers = self.policy.group.workers, [self.rollout.workers[i] for i in indices]
        processes = [*ranks, *workers]
        if self._met != processes:
            self._met = []
            self._meet(ranks, workers, indices)
        version = self.policy.version
        try:
            sent = [w.push.remote() for w in ranks]
            if isinstance(self.config, DiskSync):  # all of it is written before anybody reads
                self._wait(sent, [], indices)
            received = [w.receive.remote(version) for w in workers]
            self._wait(sent, received, indices)
        except BaseException:
            self._met = []  # a connection on which something failed may be dead
            raise
        self._met = processes
        self.rollout.version = version
        metrics: Metrics = self.ray.get(sent[0])
        return metrics

    def _meet(self, ranks: Sequence[Any], workers: Sequence[Any], indices: Sequence[int]) -> None:
        """Make a new connection of these processes."""
        self._names += 1
        name, count, at = f"weights-{self._names}", len(workers), None
        if not isinstance(self.config, DiskSync):
            serving = [ranks[0].serve_store.remote(self.config.timeout_s)]
            self._wait(serving, [], indices)
            at = self.ray.get(serving[0])
        opening = [w.open_sender.remote(self.config, self.how, name, count) for w in ranks]
        joining = [
            w.open_receiver.remote(self.config, at, name, seat=Seat(i + 1, count))
            for i, w in enumerate(workers)
        ]
        self._wait(opening, joining, indices)

    def _wait(
        self, sending: Sequence[Any], receiving: Sequence[Any], indices: Sequence[int]
    ) -> None:
        """Until all calls are done. Those who live name the dead ones after ``sync.timeout_s``."""
        calls = [*sending, *receiving]
        limit = self.rollout.runtime.config.call_timeout_s
        _, silent = self.ray.wait(calls, num_returns=len(calls), timeout=limit)
        ends = [None if call in silent else failure_of(self.ray, call) for call in calls]
        told, lost = ends[: len(sending)], self._lost(calls, silent, ends)
        hung = [i for i in lost if i < len(sending)]
        if hung:
            self.policy.group.lost |= set(hung)
            raise WorkerLostError(f"{self.policy.group.names(hung)} died or hangs in a hand-over")
        if lost:
            raise _RolloutLost([indices[i - len(sending)] for i in lost])
        for failure in (*ends[len(told) :], *told):  # a receiver says more than the sender of it
            if failure is not None:
                raise failure

    def _lost(
        self, calls: Sequence[Any], silent: Sequence[Any], ends: Sequence[BaseException | None]
    ) -> list[int]:
        dead = self.ray.exceptions.RayActorError
        return [i for i, call in enumerate(calls) if call in silent or isinstance(ends[i], dead)]


class _RolloutLost(Exception):
    def __init__(self, indices: Sequence[int]) -> None:
        super().__init__(f"rollout workers {list(indices)} are gone")
        self.indices = indices
