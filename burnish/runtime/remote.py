"""Engines made of workers in other processes; the loops cannot tell them from local ones.

``runtime`` is a ``ray.RayRuntime``: Ray itself is reached through it, and imported there alone.
Reading order: RemoteTrainEngine (on a ``worker_group.WorkerGroup`` of ranks), RemoteRolloutEngine.
What hands weights from one to the other is in ``weight_sync.py``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from burnish.config.model import ModelConfig
from burnish.config.rollout import RolloutEngineConfig
from burnish.messages import library_text
from burnish.observe.peaks import ProcessPeaks
from burnish.rollout.base import Completion, Request, Sampling
from burnish.runtime.errors import failure, why_lost
from burnish.runtime.rollout_worker import RolloutWorker
from burnish.runtime.worker import (
    TransferOptions,
    pack_batch,
    to_tensor,
)
from burnish.runtime.worker_group import WorkerGroup
from burnish.sync.base import encode
from burnish.sync.buckets import messages
from burnish.sync.snapshot import SnapshotSource, WeightSnapshot
from burnish.train.base import Loss, NonFiniteError, StepStats
from burnish.types import Batch, PendingSave, Stats

if TYPE_CHECKING:
    from burnish.runtime.ray import RayRuntime

BUCKET_BYTES = 64 << 20
CLOSE_TIMEOUT_S = 10.0
_PEAKS_S = 10.0
"""How long workers get to say what memory they held; one that is busy or hangs is not waited
for."""

Lost = dict[int, str]
"""Index of a worker -> how it was lost."""
Refill = Callable[[Sequence[int]], Lost]


class RemoteTrainEngine:
    """A group of ranks as one ``train.base.TrainEngine``."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group, self.role = group, group.role
        self.version = 0

    def logprobs(self, batch: Batch) -> Tensor:
        """[M] fp32 log-probs of the action tokens, without gradient."""
        packed = self._put(batch)
        return to_tensor(self.group.all(lambda w: w.logprobs.remote(packed))[0])

    def base_logprobs(self, batch: Batch) -> Tensor:
        """[M] the same under the base model of a LoRA."""
        packed = self._put(batch)
        return to_tensor(self.group.all(lambda w: w.base_logprobs.remote(packed))[0])

    def values(self, batch: Batch) -> Tensor:
        """[M] fp32 values (critic) or scores on last tokens (reward), without gradient."""
        packed = self._put(batch)
        return to_tensor(self.group.all(lambda w: w.values.remote(packed))[0])

    def states(self, batch: Batch) -> Tensor:
        """[M, H] hidden states from which action tokens are predicted, without gradient."""
        packed = self._put(batch)
        return to_tensor(self.group.all(lambda w: w.states.remote(packed))[0])

    def measure(self, batch: Batch, loss: Loss) -> Stats:
        """What ``loss`` measures over ``batch``, without gradient."""
        packed, function = self._put(batch), self.group.runtime.ray.put(loss)
        stats: list[Stats] = self.group.all(lambda w: w.measure.remote(packed, function))
        return stats[0]

    def forward_backward(self, batch: Batch, loss: Loss) -> Stats:
        """Add the gradient of ``loss`` over ``batch``; each rank computes its share."""
        packed, function = self._put(batch), self.group.runtime.ray.put(loss)
        stats: list[Stats] = self.group.all(lambda w: w.forward_backward.remote(packed, function))
        return stats[0]

    def optim_step(self) -> StepStats:
        """One optimizer step of all ranks. Raises NonFiniteError as a local engine does."""
        stats, failure, self.version = self.group.all(lambda w: w.optim_step.remote())[0]
        if failure is not None:
            raise NonFiniteError(failure, stats)
        result: StepStats = stats
        return result

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(HuggingFace name, tensor) on the controller. (A sync moves buckets instead.)"""
        kept = self.transfer_weights(0, TransferOptions(BUCKET_BYTES, None, verify=True))
        payloads = [self.group.runtime.ray.get(ref) for ref in kept.payloads]
        with SnapshotSource(kept.headers, payloads, hold=True).open(self.version) as transfer:
            yield from transfer

    def transfer_weights(self, push: int, options: TransferOptions) -> WeightSnapshot[Any]:
        """The weights as rank 0 gives them: headers here, bytes in the object store."""
        streams: list[Any] = []

        def start(worker: Any) -> Any:
            method = worker.transfer_weights.options(num_returns="streaming")
            streams.append(method.remote(push, options))
            return streams[-1].completed()

        self.group.all(start)
        refs = list(streams[-self.group.size])  # rank 0's: a bucket's bytes, then its header
        headers = self.group.runtime.ray.get(refs[1::2])
        return WeightSnapshot(tuple(headers), tuple(refs[0:-2:2]))  # the end has no bytes

    @property
    def state_bytes(self) -> int:
        """Size of what :meth:`save` writes."""
        size: int = self.group.all(lambda w: w.state_bytes.remote())[0]
        return size

    def save(self, folder: Path) -> None:
        """All ranks write what they have; the folder must be on a file system that all nodes
        share."""
        path = str(Path(folder).absolute())
        self.group.all(lambda w: w.save.remote(path))

    def save_async(self, folder: Path) -> PendingSave:
        """:meth:`save` as of now; ranks that can write while training goes on."""
        path = str(Path(folder).absolute())
        self.group.all(lambda w: w.save_async.remote(path))
        return RemoteSave(self.group)

    def load(self, folder: Path) -> None:
        """All ranks read."""
        path = str(Path(folder).absolute())
        self.version = self.group.all(lambda w: w.load.remote(path))[0]

    def _put(self, batch: Batch) -> Any:
        return self.group.runtime.ray.put(pack_batch(batch))


class RemoteSave:
    """A checkpoint that ranks write while training goes on. Implements ``PendingSave``."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group

    @property
    def done(self) -> bool:
        """Whether all ranks are through. Raises WorkerLostError."""
        return all(self.group.all(lambda w: w.is_saved.remote()))

    def wait(self) -> None:
        """Until it is whole. Raises what kept a rank from that."""
        self.group.all(lambda w: w.finish_save.remote())


class RemoteFrozenBase:
    """The base model of a LoRA policy, on its workers."""

    def __init__(self, policy: RemoteTrainEngine) -> None:
        self.policy = policy

    def logprobs(self, batch: Batch) -> Tensor:
        """[M] fp32 log-probs of the action tokens under the base model."""
        return self.policy.base_logprobs(batch)


class RemoteRolloutEngine:
    """Several rollout workers as one ``rollout.base.RolloutEngine``. One that dies or hangs is
    replaced here, and nobody else learns of it until that was too often."""

    def __init__(
        self,
        runtime: RayRuntime,
        model: ModelConfig,
        config: RolloutEngineConfig,
        *,
        max_len: int | None,
        ready: bool = True,
    ) -> None:
        """``ready``: they may sample from the model's own weights before the first transfer."""
        self.runtime, self.model, self.config, self.max_len = runtime, model, config, max_len
        self.ready, self.version = ready, 0
        self.size = runtime.config.ranks("rollout")
        self.refill: Refill = lambda indices: {}
        """Gives workers that were replaced the weights that the others have; a sync sets it."""
        self.workers: list[Any] = [
            runtime.start_one("rollout", RolloutWorker, i, self.size) for i in range(self.size)
        ]
        runtime.rollouts.append(self)
        self.replace(self._prepare(range(self.size)))

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Completions as they finish on any worker. The requests of a worker that dies are done
        again; what it had finished is kept."""
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
        """What is ready in a stream; None at its end. Adds to ``lost`` where its worker is, or what
        it had sent and nobody had read yet (its machine died): either way it is sampled again."""
        ray = self.runtime.ray
        try:
            completions: list[Completion] = ray.get(next(stream))
        except StopIteration:
            return None
        except ray.exceptions.ObjectLostError as error:
            lost[worker] = f"died, and what it had sampled is lost: {library_text(error)}"
            return []
        except ray.exceptions.RayError as error:
            lost[worker] = why_lost(ray, error)
            return []
        return completions

    def _wait(
        self, refs: Sequence[Any], busy: Sequence[int], *, limit_s: float | None = None
    ) -> tuple[list[Any], dict[int, str]]:
        """(what is ready, worker -> why it is lost), as soon as there is one of either. ``busy``:
        the worker of each."""
        limit = limit_s or self.runtime.config.call_timeout_s
        workers = {id(self.workers[i]): i for i in busy}
        ready, unresponsive = self.runtime.monitor.wait(
            refs, [self.workers[i] for i in busy], limit_s=limit
        )
        if ready or unresponsive:
            return ready, {workers[id(w)]: self.runtime.unresponsive_reason for w in unresponsive}
        return [], dict.fromkeys(
            busy, f"did not answer within {limit:g} s (cluster.call_timeout_s)"
        )

    def _call(self, indices: Iterable[int], call: Callable[[Any], Any]) -> dict[int, str]:
        """One call of several workers; worker -> why it was lost in it. Raises what one raised."""
        refs = {call(self.workers[i]): i for i in indices}
        lost: dict[int, str] = {}
        while refs:
            ready, gone = self._wait(list(refs), list(refs.values()))
            for ref in ready:
                failed = failure(self.runtime.ray, ref)
                if failed is not None:
                    lost[refs[ref]] = why_lost(self.runtime.ray, failed)
            lost |= gone
            refs = {r: i for r, i in refs.items() if r not in ready and i not in gone}
        return lost

    def replace(self, lost: Mapping[int, str]) -> None:
        """Fresh workers with the same weights in the places of those that were lost; anew, where
        some are lost meanwhile. Raises ClusterError where that was too often."""
        while lost:
            monitor = self.runtime.monitor
            said = [f"{monitor.name(self.workers[i])} {why}" for i, why in sorted(lost.items())]
            self.runtime.end(self.workers[i] for i in lost)
            self.runtime.count_restart(", ".join(said))
            for i in lost:
                self.workers[i] = self.runtime.start_one("rollout", RolloutWorker, i, self.size)
            lost = self._prepare(list(lost))

    def _prepare(self, indices: Sequence[int]) -> dict[int, str]:
        """Have fresh workers load the model and the weights; worker -> why it was lost in it."""
        handles = {id(self.workers[i]): i for i in indices}
        missing = self.runtime.wait_started([self.workers[i] for i in indices])
        lost = {handles[id(worker)]: why for worker, why in missing}
        left = [i for i in indices if i not in lost]
        model, config, max_len, ready = self.model, self.config, self.max_len, self.ready
        lost |= self._call(left, lambda w: w.build.remote(model, config, max_len, ready=ready))
        left = [i for i in left if i not in lost]
        return lost | (self.refill(left) if left else {})

    def receive_snapshot(self, kept: WeightSnapshot[Any], *, verify: bool) -> None:
        """Give all workers one transfer, which stays in the object store until the next, for
        those that are replaced. Raises SyncError where one does not accept it."""

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
        """Put weights into the object store and load them."""
        ray = self.runtime.ray
        found = messages(tensors, _new_buffer, push=0, version=version)
        pairs = [(encode(message), ray.put(payload.numpy())) for message, payload in found]
        headers, payloads = zip(*pairs, strict=True)
        self.receive_snapshot(WeightSnapshot(headers, payloads[:-1]), verify=True)

    def sleep(self, *, new_weights_follow: bool = False) -> None:
        """Free the workers' caches until the next generate. A worker that is lost is replaced."""
        drop = new_weights_follow
        everyone = range(self.size)
        self.replace(self._call(everyone, lambda w: w.sleep.remote(new_weights_follow=drop)))

    def wake(self) -> None:
        """Have the workers take memory again. A worker that is lost is replaced."""
        self.replace(self._call(range(self.size), lambda w: w.wake.remote()))

    def close(self) -> None:
        """End the engines, and then their processes. May be called twice."""
        if self.workers:
            closing = [w.close.remote() for w in self.workers]
            self.runtime.ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
        self.runtime.end(self.workers)
        self.workers = []


def worker_peaks(ray: Any, groups: Iterable[tuple[str, Sequence[Any]]]) -> list[ProcessPeaks]:
    """The most memory that each worker of the groups held in each phase, since the last call; of
    those that answer within :data:`_PEAKS_S`."""
    asked = {
        worker.peaks.remote(): (name, rank)
        for name, workers in groups
        for rank, worker in enumerate(workers)
    }
    ready: list[Any] = []
    if asked:
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_PEAKS_S)
    return [ProcessPeaks(*asked[r], ray.get(r)) for r in ready if failure(ray, r) is None]


def _new(chunk: Iterable[Completion], done: set[tuple[str, int]]) -> Iterator[Completion]:
    """Those that are not done yet, which then are."""
    for completion in chunk:
        key = (completion.request_id, completion.index)
        if key not in done:
            done.add(key)
            yield completion


def _shares(requests: Sequence[Request], count: int) -> list[list[Request]]:
    """Requests split over workers: the most expensive first, each to the least loaded."""
    shares: list[list[Request]] = [[] for _ in range(count)]
    loads = [(0, worker) for worker in range(count)]
    for request in sorted(requests, key=lambda r: -r.n * (r.max_tokens or 1)):
        load, least = loads[0]
        shares[least].append(request)
        heapq.heapreplace(loads, (load + request.n, least))
    return shares


def _new_buffer() -> Tensor:
    return torch.empty(BUCKET_BYTES, dtype=torch.uint8)
