"""One rollout engine made of rollout workers in other processes.

This file distributes requests; ``rollout_pool.py`` has the processes. Each request has one worker.
A worker receives new requests between two of its answers. Requests of a lost worker go to the
others at once. A worker that becomes free, because it is new or has loaded weights, takes requests
that others cannot have begun."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from burnish.config.model import ModelConfig
from burnish.config.rollout import InFlight
from burnish.rollout.base import Completion, Request, Sampling, generate
from burnish.rollout.kinds import RolloutEngineConfig
from burnish.rollout.requests import OpenRequests, check_requests
from burnish.runtime.ray.cluster import RayCluster
from burnish.runtime.ray.rollout_pool import PoolWorker, RolloutPool, Weights
from burnish.runtime.ray.rollout_worker import Orders
from burnish.runtime.worker import BUCKET_BYTES
from burnish.sync.base import encode
from burnish.sync.buckets import messages
from burnish.sync.snapshot import WeightSnapshot


class RemoteRolloutEngine:
    """Several rollout workers as one ``rollout.base.RolloutEngine``. Workers that die or hang are
    replaced here; callers get an error only once ``max_restarts`` is exceeded."""

    def __init__(
        self,
        cluster: RayCluster,
        model: ModelConfig,
        config: RolloutEngineConfig,
        *,
        max_len: int | None,
        ready: bool = True,
    ) -> None:
        """Start the workers. ``ready``: they may sample from the model's own weights before the
        first transfer."""
        self.cluster, self.model, self.config = cluster, model, config
        self.keeps_cache_on_update = config.keeps_cache_on_update
        self.size = cluster.config.ranks("rollout")
        self._slots = config.slots
        """Samples that a worker decodes at once."""
        self._requests = OpenRequests()
        self._open: dict[str, _OpenRequest] = {}
        self._waiting: dict[str, _OpenRequest] = {}
        """Open requests without a worker."""
        self._shares = [_Share() for _ in range(self.size)]
        """The open requests of each worker."""
        self._cache_owner: dict[str, int] = {}
        """Conversation -> the worker that has its cache."""
        self._finished: list[Completion] = []
        """Completions that arrived outside of a poll."""
        self._draining = False
        """True while no worker gets new requests."""
        self.staged = False
        """True once weights were staged: the workers sample while the policy is trained."""
        self.pool = RolloutPool(
            cluster,
            self.size,
            lambda w: w.build.remote(model, config, max_len, ready=ready),
            may_load=self._may_load,
        )
        try:
            self._until(lambda: self.pool.complete)
        except BaseException:
            self.close()
            raise

    # ---- the interface ---------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version of the newest weights that all workers have confirmed. Workers that are being
        replaced do not count: they begin with these or newer weights."""
        return self.pool.version

    @property
    def max_len(self) -> int | None:
        return self.pool.max_len

    @property
    def workers(self) -> list[Any]:
        """Return the handles of all workers."""
        return [worker.handle for worker in self.pool.workers]

    @property
    def busy(self) -> bool:
        """Return whether any request is open or staged weights are being loaded."""
        return bool(self._requests or self._finished or self.pool.is_loading)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Queue ``requests``: those of a known conversation at the worker that has its cache, all
        others at the least loaded workers. Raises ValueError, before any is queued, if one cannot
        run or is already open."""
        check_requests(requests, sampling, limit=self.max_len, holder="the rollout workers have")
        self._requests.add(requests)
        new = {r.request_id: _OpenRequest(r, sampling) for r in requests if r.n > 0}
        self._open |= new
        self._waiting |= new
        self._assign_waiting()

    def poll(self) -> list[Completion]:
        """Wait until a worker answers, and return the finished samples. Requests of a worker that
        is lost are repeated, except for their finished samples. Raises an error of a worker; all
        open requests are dropped then."""
        self._send()
        if self.busy and not self._finished:
            self._react()
            self._send()
        done, self._finished = self._finished, []
        return done

    def cancel(self, request_ids: Iterable[str]) -> None:
        names = set(request_ids)
        self._finished = [c for c in self._finished if c.request_id not in names]
        for name in self._requests.drop(names):
            self._remove(self._open.pop(name))
        self._send_orders()

    def release(self, conversations: Iterable[str]) -> None:
        for name in conversations:
            worker = self._cache_owner.pop(name, None)
            if worker is not None:
                self._shares[worker].release.append(name)
            for waiting in self._waiting.values():
                waiting.released |= waiting.request.conversation == name
        self._send_orders()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yield completions as any worker finishes them, after staged weights are loaded. Raises
        like :meth:`submit`, before the first one."""
        self._until(lambda: not self.pool.is_loading)
        return generate(self, requests, sampling)

    # ---- requests --------------------------------------------------------------------------

    def _remove(self, gone: _OpenRequest) -> None:
        """Take a request away from its worker."""
        name = gone.request.request_id
        self._waiting.pop(name, None)
        if gone.worker >= 0:
            share = self._shares[gone.worker]
            del share.open[name]
            if gone.sent:
                share.cancel.append(name)
            else:
                share.new.remove(gone)
            gone.worker, gone.sent = -1, False

    def _assign_waiting(self) -> None:
        """Choose the workers of requests that have none, if a worker takes new requests."""
        available = self._available()
        if not self._waiting or not available:
            return
        waiting, self._waiting = list(self._waiting.values()), {}
        others: list[Request] = []
        for open_request in waiting:
            owner = self._cache_owner.get(open_request.request.conversation or "")
            if owner in available:
                self._assign(open_request, owner)
            else:
                others.append(open_request.request)
        loads = [self._shares[worker].samples for worker in available]
        for worker, share in zip(available, _shares(others, loads), strict=True):
            for request in share:
                self._assign(self._open[request.request_id], worker)

    def _assign(self, request: _OpenRequest, worker: int) -> None:
        share, name = self._shares[worker], request.request.conversation
        request.worker = worker
        share.open[request.request.request_id] = request
        share.new.append(request)
        if name is None:
            return
        before = self._cache_owner.get(name, worker)
        if before != worker:  # it is about to load weights
            self._shares[before].release.append(name)
        if not request.released:
            self._cache_owner[name] = worker

    def _accept(self, completion: Completion, worker: int) -> bool:
        """Return whether a completion of ``worker`` is wanted, and count it. That of a canceled
        request may arrive after another request got its id."""
        request = self._open.get(completion.request_id)
        if request is None or completion.index in request.done:
            return False
        if request.worker != worker or not request.sent:
            return False
        request.done.add(completion.index)
        self._requests.finish(completion.request_id)
        if completion.request_id not in self._requests:
            del self._open[completion.request_id]
            share = self._shares[worker]
            del share.open[completion.request_id]
            conversation = request.request.conversation
            if conversation is not None and conversation not in self._cache_owner:
                share.release.append(conversation)  # released while it was open
        return True

    def _balance(self, free: int) -> None:
        """Move to worker ``free`` the newest requests of others that do not fit into their batches,
        until it has as many. Requests of conversations stay."""
        num_samples = self._shares[free].samples
        others = [share for worker, share in enumerate(self._shares) if worker != free]
        loads = [share.samples for share in others]
        for load, share in sorted(zip(loads, others, strict=True), key=lambda pair: -pair[0]):
            for request in reversed(list(share.open.values())):
                if load - request.left < max(self._slots, num_samples + request.left):
                    break
                if request.request.conversation is None and not request.done:
                    load, num_samples = load - request.left, num_samples + request.left
                    self._remove(request)
                    self._assign(request, free)

    # ---- answers ---------------------------------------------------------------------------

    def _is_held(self, worker: PoolWorker) -> bool:
        """Return whether a worker must not get new requests before it loads weights."""
        newest = self.pool.newest
        finishes = newest is not None and newest.in_flight == "finish"
        return self._draining or (finishes and self.pool.is_due(worker))

    def _may_load(self, worker: int) -> bool:
        """Return whether a worker may load the newest weights now."""
        newest = self.pool.newest
        finishes = newest is not None and newest.in_flight == "finish"
        return not (finishes and self._shares[worker].runs)

    def _send(self) -> None:
        """Call every ready worker that has orders or requests and owes no answer."""
        self.pool.load_due()
        self._assign_waiting()
        called = self.pool.called("advance")
        for worker in self.pool.workers:
            share = self._shares[worker.index]
            if worker.ready and worker.index not in called and share.has_work:
                orders = share.take_orders(hold=self._is_held(worker))
                if orders or share.runs:
                    self.pool.advance(worker, orders)

    def _send_orders(self) -> None:
        """Let workers without requests cancel and release, and load weights that they may load now.
        Nothing is sampled; other workers get their orders with the next requests."""
        self.pool.load_due()
        called = self.pool.called("advance")
        for worker in self.pool.workers:
            share = self._shares[worker.index]
            idle = worker.ready and worker.index not in called
            if idle and not share.runs and (share.cancel or share.release):
                self.pool.advance(worker, share.take_orders(hold=True))

    def _react(self) -> None:
        """Wait for the next answer of a worker. Drops all open requests if it is an error."""
        before = self._available()
        try:
            answers = self.pool.wait()
            for worker, completions in answers.finished:
                self._finished += [c for c in completions if self._accept(c, worker)]
            if answers.lost:
                self.lose(answers.lost)
        except Exception:  # an error of a worker: the others may have the same one in their answers
            self.pool.forget_calls()
            self.cancel([*self._open, *(c.request_id for c in self._finished)])
            raise
        self._assign_waiting()
        for worker in self._available():
            if worker not in before:
                self._balance(worker)

    def _available(self) -> list[int]:
        """Return the workers that take new requests."""
        return [w.index for w in self.pool.workers if w.ready and not self._is_held(w)]

    def lose(self, lost: Mapping[int, str]) -> None:
        """Start new workers in place of lost ones, and let the others repeat their requests. Raises
        ClusterError once ``max_restarts`` is exceeded."""
        if not lost:
            return
        for index in lost:
            share, self._shares[index] = self._shares[index], _Share()
            for request in share.open.values():
                request.worker, request.sent = -1, False
            self._waiting |= share.open
        self._cache_owner = {name: w for name, w in self._cache_owner.items() if w not in lost}
        self.pool.replace(lost)

    def _until(self, condition: Callable[[], bool], *, sends: bool = False) -> None:
        """Handle answers until ``condition`` is true. Completions are kept for the next poll.
        ``sends``: requests continue meanwhile."""
        while not condition():
            if sends:
                self._send()
            self._react()

    def replace(self, lost: Mapping[int, str]) -> None:
        """Replace lost workers and wait until the new ones are ready. Raises ClusterError once
        ``max_restarts`` is exceeded."""
        self.lose(lost)
        self._until(lambda: self.pool.complete)

    # ---- weights ---------------------------------------------------------------------------

    def stage(self, weights: Weights) -> None:
        """Let the workers load ``weights`` while requests are open, and return at once.
        :attr:`version` changes in a later poll, once all workers have loaded them. Polls raise the
        error of a worker that rejects them."""
        self.staged = True
        self.pool.stage(weights)

    def settle(self) -> None:
        """Wait until no worker loads older weights than the newest. Nothing is sampled
        meanwhile."""
        self._until(lambda: not self.pool.loads_older)

    def load(self, weights: Weights) -> None:
        """Load ``weights`` in all workers, and return once they are confirmed. Raises SyncError if
        a worker rejects them."""
        self.pool.stage(weights)
        self._until(lambda: self.pool.is_confirmed(weights))

    def receive_snapshot(self, snapshot: WeightSnapshot[Any], *, verify: bool) -> None:
        """Send one transfer to all workers. It stays in the object store until the next one, for
        replaced workers. Raises SyncError if a worker rejects it."""
        self.load(snapshot_weights(snapshot, "recompute", verify=verify))

    def load_weights(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], *, keep_cache: bool = False
    ) -> None:
        """Put weights into the object store and load them in all workers. With ``keep_cache``,
        responses in progress and kept conversations continue with the keys and values of the
        previous weights."""
        ray = self.cluster.ray
        parts = messages(
            tensors,
            lambda: torch.empty(BUCKET_BYTES, dtype=torch.uint8),
            push=0,
            version=version,
        )
        pairs = [(encode(message), ray.put(payload.numpy())) for message, payload in parts]
        headers, payloads = zip(*pairs, strict=True)
        snapshot = WeightSnapshot(headers, payloads[:-1])
        self.load(
            snapshot_weights(snapshot, "continue" if keep_cache else "recompute", verify=True)
        )

    def drain(self) -> None:
        """Wait until the running requests are finished; new ones wait. Completions are kept for the
        next poll."""
        self._draining = True
        try:
            self._until(lambda: not any(o.sent for o in self._open.values()), sends=True)
        finally:
            self._draining = False

    def built_workers(self) -> list[int]:
        """Return the workers that have a model, after waiting until there is one."""
        self._until(lambda: any(worker.built for worker in self.pool.workers))
        return [worker.index for worker in self.pool.workers if worker.built]

    def sleep(self, *, new_weights_follow: bool = False) -> None:
        """Free the workers' caches until the next poll. Lost workers are replaced."""
        self._everywhere(lambda w: w.sleep.remote(new_weights_follow=new_weights_follow))

    def wake(self) -> None:
        """Allocate the workers' caches again. Lost workers are replaced."""
        self._everywhere(lambda w: w.wake.remote())

    def _everywhere(self, call: Callable[[Any], Any]) -> None:
        self._until(lambda: self.pool.complete)
        self.pool.call_all(call)
        self._until(lambda: self.pool.complete and not self.pool.called("other"))

    def close(self) -> None:
        """Drop open requests, close the engines, then end their processes. May be called twice."""
        self._requests.drop(list(self._requests.ids))
        self._open, self._waiting, self._cache_owner, self._finished = {}, {}, {}, []
        self._shares = [_Share() for _ in range(self.size)]
        self.pool.close()


def snapshot_weights(
    snapshot: WeightSnapshot[Any], in_flight: InFlight, *, verify: bool
) -> Weights:
    """Return a snapshot in the object store as weights for the workers of a pool."""
    end, headers, payloads = snapshot.end, snapshot.headers, snapshot.payloads
    keep_cache = in_flight == "continue"

    def send(worker: Any) -> Any:
        receive = worker.receive_snapshot
        return receive.remote(end.version, verify, headers, *payloads, keep_cache=keep_cache)

    return Weights(end.version, send, in_flight, end.num_bytes)


@dataclass(eq=False)
class _OpenRequest:
    request: Request
    sampling: Sampling
    worker: int = -1
    """Index of its worker; -1: not assigned."""
    sent: bool = False
    """True once it was sent to its worker."""
    done: set[int] = field(default_factory=set)
    """Indices of finished samples."""
    released: bool = False
    """True if its conversation was released before it had a worker."""

    @property
    def left(self) -> int:
        """Number of samples that are not finished."""
        return self.request.n - len(self.done)


@dataclass(eq=False)
class _Share:
    """The open requests of one worker, and orders that it has not received."""

    open: dict[str, _OpenRequest] = field(default_factory=dict)
    """Request id -> request, in the order of assignment."""
    new: list[_OpenRequest] = field(default_factory=list)
    """Requests that it has not received."""
    cancel: list[str] = field(default_factory=list)
    release: list[str] = field(default_factory=list)

    @property
    def samples(self) -> int:
        """Number of samples that are not finished."""
        return sum(request.left for request in self.open.values())

    @property
    def runs(self) -> bool:
        """Return whether it has received requests that are open."""
        return any(request.sent for request in self.open.values())

    @property
    def has_work(self) -> bool:
        """Return whether there is a request or an order."""
        return bool(self.open or self.cancel or self.release)

    def take_orders(self, *, hold: bool) -> Orders:
        """Return the orders, and count them as received. ``hold``: new requests wait."""
        new: list[_OpenRequest] = []
        if not hold:
            new, self.new = self.new, []
        for request in new:
            request.sent = True
        orders = Orders(
            tuple(self.cancel),
            tuple(self.release),
            tuple((request.request, request.sampling) for request in new),
        )
        self.cancel, self.release = [], []
        return orders


def _shares(requests: Sequence[Request], loads: Sequence[int]) -> list[list[Request]]:
    """Split requests over workers: the most expensive first, each to the least loaded. ``loads``:
    open samples of each worker."""
    shares: list[list[Request]] = [[] for _ in loads]
    heap = [(load, worker) for worker, load in enumerate(loads)]
    heapq.heapify(heap)
    for request in sorted(requests, key=lambda r: -r.n * (r.max_tokens or 1)):
        load, least = heap[0]
        shares[least].append(request)
        heapq.heapreplace(heap, (load + request.n, least))
    return shares
