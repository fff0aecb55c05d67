"""One rollout engine made of rollout workers in other processes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from burnish.config.model import ModelConfig
from burnish.config.rollout import RolloutEngineConfig
from burnish.messages import library_text
from burnish.rollout.base import Completion, Request, Sampling
from burnish.runtime.errors import failure, loss_reason
from burnish.runtime.ray_cluster import RayCluster
from burnish.runtime.rollout_worker import RolloutWorker
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
        self.cluster, self.model, self.config, self.max_len = cluster, model, config, max_len
        self.ready, self.version = ready, 0
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

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yield completions as any worker finishes them. Requests of a worker that dies are
        repeated, except for its finished completions."""
        done: set[tuple[str, int]] = set()
        streams: dict[Any, tuple[int, list[Request]]] = {}

        def start(worker: int, part: Sequence[Request]) -> None:
            left = [r for r in part if any((r.request_id, k) not in done for k in range(r.n))]
            if left:
                method = self.workers[worker].generate.options(num_returns="streaming")
                streams[method.remote(left, sampling)] = worker, left

        for i, part in enumerate(_shares(requests, self.size)):
            start(i, part)
        while streams:
            ready, lost = self._wait(list(streams), [worker for worker, _ in streams.values()])
            for stream in ready:
                chunk = self._next(stream, streams[stream][0], lost)
                if chunk is None:
                    del streams[stream]
                yield from _new(chunk or (), done)
            again = [(s, worker, part) for s, (worker, part) in streams.items() if worker in lost]
            self.replace(lost)
            for stream, worker, part in again:
                del streams[stream]
                start(worker, part)

    def _next(self, stream: Any, worker: int, lost: dict[int, str]) -> list[Completion] | None:
        """Return the completions that are ready in a stream, or None at its end. Add the worker to
        ``lost`` if it is lost, or if its machine died and unread completions are lost. In both
        cases they are sampled again."""
        ray = self.cluster.ray
        try:
            completions: list[Completion] = ray.get(next(stream))
        except StopIteration:
            return None
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

    def _call(self, indices: Iterable[int], call: Callable[[Any], Any]) -> dict[int, str]:
        """Call a method of several workers. Return worker -> why it was lost. Raises an exception
        that a worker raised."""
        refs = {call(self.workers[i]): i for i in indices}
        lost: dict[int, str] = {}
        while refs:
            ready, gone = self._wait(list(refs), list(refs.values()))
            for ref in ready:
                failed = failure(self.cluster.ray, ref)
                if failed is not None:
                    lost[refs[ref]] = loss_reason(self.cluster.ray, failed)
            lost |= gone
            refs = {r: i for r, i in refs.items() if r not in ready and i not in gone}
        return lost

    def replace(self, lost: Mapping[int, str]) -> None:
        """Replace lost workers with new ones that have the same weights, repeatedly if more are
        lost. Raises ClusterError once ``max_restarts`` is exceeded."""
        while lost:
            monitor = self.cluster.monitor
            said = [f"{monitor.name(self.workers[i])} {why}" for i, why in sorted(lost.items())]
            self.cluster.end(self.workers[i] for i in lost)
            self.cluster.count_restart(", ".join(said))
            for i in lost:
                self.workers[i] = self.cluster.start_one("rollout", RolloutWorker, i, self.size)
            lost = self._prepare(list(lost))

    def _prepare(self, indices: Sequence[int]) -> dict[int, str]:
        """Load the model and the weights in new workers. Return worker -> why it was lost."""
        handles = {id(self.workers[i]): i for i in indices}
        missing = self.cluster.wait_started([self.workers[i] for i in indices])
        lost = {handles[id(worker)]: why for worker, why in missing}
        left = [i for i in indices if i not in lost]
        model, config, max_len, ready = self.model, self.config, self.max_len, self.ready
        lost |= self._call(left, lambda w: w.build.remote(model, config, max_len, ready=ready))
        left = [i for i in left if i not in lost]
        return lost | (self.refill(left) if left else {})

    def receive_snapshot(self, kept: WeightSnapshot[Any], *, verify: bool) -> None:
        """Send one transfer to all workers. It stays in the object store until the next one, for
        replaced workers. Raises SyncError if a worker rejects it."""

        def give(indices: Sequence[int]) -> Lost:
            version, headers = kept.end.version, kept.headers
            return self._call(
                indices,
                lambda w: w.receive_snapshot.remote(version, verify, headers, *kept.payloads),
            )

        self.refill = give
        self.replace(give(range(self.size)))
        self.version = kept.end.version

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Put weights into the object store and load them in all workers."""
        ray = self.cluster.ray
        found = messages(tensors, _new_buffer, push=0, version=version)
        pairs = [(encode(message), ray.put(payload.numpy())) for message, payload in found]
        headers, payloads = zip(*pairs, strict=True)
        self.receive_snapshot(WeightSnapshot(headers, payloads[:-1]), verify=True)

    def sleep(self, *, new_weights_follow: bool = False) -> None:
        """Free the workers' caches until the next generate. Lost workers are replaced."""
        drop = new_weights_follow
        everyone = range(self.size)
        self.replace(self._call(everyone, lambda w: w.sleep.remote(new_weights_follow=drop)))

    def wake(self) -> None:
        """Allocate the workers' caches again. Lost workers are replaced."""
        self.replace(self._call(range(self.size), lambda w: w.wake.remote()))

    def close(self) -> None:
        """Close the engines, then end their processes. May be called twice."""
        if self.workers:
            closing = [w.close.remote() for w in self.workers]
            self.cluster.ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
        self.cluster.end(self.workers)
        self.workers = []


def _new(chunk: Iterable[Completion], done: set[tuple[str, int]]) -> Iterator[Completion]:
    """Yield the completions that are not in ``done``, and add them to it."""
    for completion in chunk:
        key = (completion.request_id, completion.index)
        if key not in done:
            done.add(key)
            yield completion


def _shares(requests: Sequence[Request], count: int) -> list[list[Request]]:
    """Split requests over workers: the most expensive first, each to the least loaded."""
    shares: list[list[Request]] = [[] for _ in range(count)]
    loads = [(0, worker) for worker in range(count)]
    for request in sorted(requests, key=lambda r: -r.n * (r.max_tokens or 1)):
        load, least = loads[0]
        shares[least].append(request)
        heapq.heapreplace(loads, (load + request.n, least))
    return shares


def _new_buffer() -> Tensor:
    return torch.empty(BUCKET_BYTES, dtype=torch.uint8)
