"""One rollout engine made of rollout workers in other processes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from burnish.config.model import ModelConfig
from burnish.config.rollout import RolloutEngineConfig
from burnish.messages import library_text
from burnish.rollout.base import Completion, Request, Sampling
from burnish.rollout.generation import generate
from burnish.rollout.requests import OpenRequests, check_requests
from burnish.runtime.errors import failure, loss_reason
from burnish.runtime.ray_cluster import RayCluster
from burnish.runtime.rollout_worker import Orders, RolloutWorker
from burnish.runtime.worker import BUCKET_BYTES
from burnish.sync.base import encode
from burnish.sync.buckets import messages
from burnish.sync.snapshot import WeightSnapshot

CLOSE_TIMEOUT_S = 10.0

Lost = dict[int, str]
"""Index of a worker -> how it was lost."""
Refill = Callable[[Sequence[int]], Lost]


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
        self.cluster, self.model, self.config, self._max_len = cluster, model, config, max_len
        self.ready, self.version = ready, 0
        self.max_len: int | None = None
        """Maximum length of a row in tokens; None: unlimited. Known once a worker is ready."""
        self.keeps_cache_on_update = config.keeps_cache_on_update
        self._requests = OpenRequests()
        self._orders: dict[int, list[_Order]] = {}
        """Worker -> orders that it has not received."""
        self._open: dict[str, _OpenRequest] = {}
        self._calls: dict[Any, int] = {}
        """Reference to the answer of a worker -> the worker. A worker has at most one."""
        self._homes: dict[str, int] = {}
        """Conversation -> the worker that has its cache."""
        self.size = cluster.config.ranks("rollout")
        self.refill: Refill = lambda indices: {}
        """Sends the current weights to replaced workers. Set by a sync."""
        self.workers: list[Any] = [
            cluster.start_one("rollout", RolloutWorker, i, self.size) for i in range(self.size)
        ]
        try:
            self.replace(self._prepare(range(self.size)))
        except BaseException:
            self.close()
            raise

    # ---- the interface ---------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Return whether any request is open."""
        return bool(self._requests)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Queue ``requests``: those of a known conversation at the worker that has its cache, all
        others at the least loaded workers. Raises ValueError, before any is queued, if one cannot
        run or is already open."""
        check_requests(requests, sampling, limit=self.max_len, holder="the rollout workers have")
        self._requests.add(requests)
        left = [request for request in requests if request.n > 0]
        self._open |= {r.request_id: _OpenRequest(r, sampling) for r in left}
        self._assign(left)

    def poll(self) -> list[Completion]:
        """Wait until a worker answers, and return what it finished. Requests of a worker that is
        lost are repeated, except for their finished samples. Raises an error of a worker; all open
        requests are dropped then."""
        self._send()
        if not self._calls:
            return []
        ready, lost = self._wait(list(self._calls), list(self._calls.values()))
        done: list[Completion] = []
        try:
            for call in ready:
                worker = self._calls.pop(call)
                done += [c for c in self._answer(call, worker, lost) if self._take(c, worker)]
        except Exception:  # an error of a worker: the others may have the same one in their answers
            self._calls.clear()
            self.cancel(list(self._open))
            raise
        if lost:
            self.replace(lost)
        self._send()
        return done

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Drop open requests. Unknown ids are ignored."""
        for name in self._requests.drop(request_ids):
            self._order(self._open.pop(name).worker, _Order(cancel=name))
        self._send()

    def release(self, conversations: Iterable[str]) -> None:
        """Free the kept cache of conversations. Unknown names are ignored."""
        for name in conversations:
            worker = self._homes.pop(name, None)
            if worker is not None:
                self._order(worker, _Order(release=name))
        self._send()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yield completions as any worker finishes them. Raises like :meth:`submit`, before the
        first one."""
        return generate(self, requests, sampling)

    # ---- requests and answers --------------------------------------------------------------

    def _assign(self, requests: Sequence[Request]) -> None:
        """Choose the workers of ``requests`` and order the samples that are not finished."""
        loads = [0] * self.size
        for open_request in self._open.values():
            if open_request.worker >= 0:
                loads[open_request.worker] += open_request.request.n
        kept = [r for r in requests if r.conversation in self._homes]
        shares = _shares([r for r in requests if r.conversation not in self._homes], loads)
        for request in kept:
            assert request.conversation is not None
            shares[self._homes[request.conversation]].append(request)
        for worker, share in enumerate(shares):
            for request in share:
                found = self._open[request.request_id]
                found.worker, found.sent = worker, False
                self._order(worker, _Order(submit=found))
                if request.conversation is not None:
                    self._homes[request.conversation] = worker

    def _order(self, worker: int, order: _Order) -> None:
        self._orders.setdefault(worker, []).append(order)

    def _send(self) -> None:
        """Call every worker that has orders or open requests and owes no answer."""
        called = set(self._calls.values())
        working = {open_request.worker for open_request in self._open.values()}
        for worker in sorted((working | set(self._orders)) - called):
            given = self._orders.pop(worker, [])
            new = [o.submit for o in given if o.submit is not None]
            new = [r for r in new if self._open.get(r.request.request_id) is r]
            for open_request in new:
                open_request.sent = True
            orders = Orders(
                tuple(o.cancel for o in given if o.cancel is not None),
                tuple(o.release for o in given if o.release is not None),
                tuple((r.request, r.sampling) for r in new),
            )
            self._calls[self.workers[worker].advance.remote(orders)] = worker

    def _take(self, completion: Completion, worker: int) -> bool:
        """Return whether a completion of ``worker`` is wanted, and count it. That of a canceled
        request may arrive after another request got its id."""
        found = self._open.get(completion.request_id)
        if found is None or completion.index in found.done:
            return False
        if found.worker != worker or not found.sent:
            return False
        found.done.add(completion.index)
        self._requests.finish(completion.request_id)
        if completion.request_id not in self._requests:
            del self._open[completion.request_id]
            conversation = found.request.conversation
            if conversation is not None and conversation not in self._homes:
                self._order(worker, _Order(release=conversation))  # released while it was open
        return True

    def _assign_again(self, lost: Collection[int]) -> None:
        """Forget what workers were told that are replaced, and assign their open requests again."""
        self._calls = {call: w for call, w in self._calls.items() if w not in lost}
        for worker in lost:
            self._orders.pop(worker, None)
        self._homes = {name: w for name, w in self._homes.items() if w not in lost}
        again = [o for o in self._open.values() if o.worker in lost]
        for open_request in again:
            open_request.worker = -1
        self._assign([o.request for o in again])

    def _answer(self, call: Any, worker: int, lost: dict[int, str]) -> list[Completion]:
        """Return the completions of an answer. Add the worker to ``lost`` if it is lost, or if its
        machine died and unread completions are lost. In both cases they are sampled again."""
        ray = self.cluster.ray
        try:
            completions: list[Completion] = ray.get(call)
        except ray.exceptions.ObjectLostError as error:
            lost[worker] = f"died, and its unread samples are lost: {library_text(error)}"
            return []
        except ray.exceptions.RayError as error:
            lost[worker] = loss_reason(ray, error)
            return []
        return completions

    def _wait(
        self, refs: Sequence[Any], busy: Sequence[int], *, limit_s: float | None = None
    ) -> tuple[list[Any], dict[int, str]]:
        """Return (ready references, worker -> why it is lost) once either is nonempty. ``busy``:
        the worker of each reference."""
        limit = limit_s or self.cluster.config.call_timeout_s
        workers = {id(self.workers[i]): i for i in busy}
        ready, unresponsive = self.cluster.monitor.wait(
            refs, [self.workers[i] for i in busy], limit_s=limit
        )
        if ready or unresponsive:
            return ready, {workers[id(w)]: self.cluster.unresponsive_reason for w in unresponsive}
        return [], dict.fromkeys(
            busy, f"did not respond within {limit:g} s (cluster.call_timeout_s)"
        )

    def _call(
        self,
        indices: Iterable[int],
        call: Callable[[Any], Any],
        *,
        results: list[Any] | None = None,
    ) -> dict[int, str]:
        """Call a method of several workers, and append what it returns to ``results``. Return
        worker -> why it was lost. Raises an exception that a worker raised."""
        refs = {call(self.workers[i]): i for i in indices}
        lost: dict[int, str] = {}
        while refs:
            ready, gone = self._wait(list(refs), list(refs.values()))
            for ref in ready:
                failed = failure(self.cluster.ray, ref)
                if failed is not None:
                    lost[refs[ref]] = loss_reason(self.cluster.ray, failed)
                elif results is not None:
                    results.append(self.cluster.ray.get(ref))
            lost |= gone
            refs = {r: i for r, i in refs.items() if r not in ready and i not in gone}
        return lost

    def replace(self, lost: Mapping[int, str]) -> None:
        """Replace lost workers with new ones that have the same weights, repeatedly if more are
        lost, and assign their open requests again. Raises ClusterError once ``max_restarts`` is
        exceeded."""
        replaced = set(lost)
        while lost:
            replaced |= set(lost)
            monitor = self.cluster.monitor
            reasons = [f"{monitor.name(self.workers[i])} {why}" for i, why in sorted(lost.items())]
            self.cluster.end(self.workers[i] for i in lost)
            self.cluster.count_restart(", ".join(reasons))
            for i in lost:
                self.workers[i] = self.cluster.start_one("rollout", RolloutWorker, i, self.size)
            lost = self._prepare(list(lost))
        self._assign_again(replaced)

    def _prepare(self, indices: Sequence[int]) -> dict[int, str]:
        """Load the model and the weights in new workers. Return worker -> why it was lost."""
        handles = {id(self.workers[i]): i for i in indices}
        missing = self.cluster.wait_started([self.workers[i] for i in indices])
        lost = {handles[id(worker)]: why for worker, why in missing}
        left = [i for i in indices if i not in lost]
        model, config, max_len, ready = self.model, self.config, self._max_len, self.ready
        limits: list[Any] = []
        lost |= self._call(
            left, lambda w: w.build.remote(model, config, max_len, ready=ready), results=limits
        )
        self.max_len = next(iter(limits), self.max_len)
        left = [i for i in left if i not in lost]
        return lost | (self.refill(left) if left else {})

    def receive_snapshot(
        self, kept: WeightSnapshot[Any], *, verify: bool, keep_cache: bool = False
    ) -> None:
        """Send one transfer to all workers. It stays in the object store until the next one, for
        replaced workers. ``keep_cache`` is that of :meth:`load_weights`. Raises SyncError if a
        worker rejects it."""

        def give(indices: Sequence[int]) -> Lost:
            version, headers = kept.end.version, kept.headers
            return self._call(
                indices,
                lambda w: w.receive_snapshot.remote(
                    version, verify, headers, *kept.payloads, keep_cache=keep_cache
                ),
            )

        self.refill = give
        self.replace(give(range(self.size)))
        self.version = kept.end.version

    def load_weights(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], *, keep_cache: bool = False
    ) -> None:
        """Put weights into the object store and load them in all workers. With ``keep_cache``,
        responses in progress and kept conversations continue with the keys and values of the
        previous weights."""
        ray = self.cluster.ray
        found = messages(tensors, _new_buffer, push=0, version=version)
        pairs = [(encode(message), ray.put(payload.numpy())) for message, payload in found]
        headers, payloads = zip(*pairs, strict=True)
        snapshot = WeightSnapshot(headers, payloads[:-1])
        self.receive_snapshot(snapshot, verify=True, keep_cache=keep_cache)

    def sleep(self, *, new_weights_follow: bool = False) -> None:
        """Free the workers' caches until the next poll. Lost workers are replaced."""
        drop = new_weights_follow
        everyone = range(self.size)
        self.replace(self._call(everyone, lambda w: w.sleep.remote(new_weights_follow=drop)))

    def wake(self) -> None:
        """Allocate the workers' caches again. Lost workers are replaced."""
        self.replace(self._call(range(self.size), lambda w: w.wake.remote()))

    def close(self) -> None:
        """Drop open requests, close the engines, then end their processes. May be called twice."""
        self._requests.drop(list(self._requests.ids))
        self._open, self._orders, self._calls, self._homes = {}, {}, {}, {}
        if self.workers:
            closing = [w.close.remote() for w in self.workers]
            self.cluster.ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
        self.cluster.end(self.workers)
        self.workers = []


@dataclass(eq=False)
class _OpenRequest:
    request: Request
    sampling: Sampling
    worker: int = -1
    """Index of its worker; -1: not assigned."""
    sent: bool = False
    """True once the worker was told."""
    done: set[int] = field(default_factory=set)
    """Indices of finished samples."""


@dataclass(frozen=True)
class _Order:
    """One change of a worker's open requests that it has not received."""

    cancel: str | None = None
    release: str | None = None
    submit: _OpenRequest | None = None


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


def _new_buffer() -> Tensor:
    return torch.empty(BUCKET_BYTES, dtype=torch.uint8)
