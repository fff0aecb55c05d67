"""Engines made of workers in other processes; the loops cannot tell them from local ones.

``runtime`` is a ``ray.RayRuntime``: Ray itself is reached through it, and imported there alone.
Reading order: Group (the ranks of a train engine), RemoteTrainEngine, RemoteRolloutEngine. What
hands weights from one to the other is in ``weights.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from burnish.config.model import ModelConfig
from burnish.config.rollout import RolloutEngineConfig
from burnish.rollout.base import Completion, Request, Sampling
from burnish.runtime.base import WorkerLostError
from burnish.runtime.worker import RolloutWorker, Sending, TrainWorker, pack_batch
from burnish.sync.base import encode
from burnish.sync.buckets import LinkReceiver
from burnish.sync.engine import messages
from burnish.sync.stored import HandOver, StoredLink
from burnish.train.base import Loss, NonFiniteError, Role, StepStats
from burnish.train.torch import EngineSpec
from burnish.types import Batch, Stats

if TYPE_CHECKING:
    from burnish.runtime.ray import RayRuntime

BUCKET_BYTES = 64 << 20
CLOSE_TIMEOUT_S = 10.0


class Group:
    """The ranks of one train engine."""

    def __init__(self, runtime: RayRuntime, spec: EngineSpec, *, scalar: bool, seed: int) -> None:
        self.runtime, self.spec, self.scalar, self.seed = runtime, spec, scalar, seed
        self.role: Role = spec.role
        self.size = runtime.config.ranks(spec.role)
        self.workers: list[Any] = []
        self.lost: set[int] = set()
        self.restart()

    def restart(self) -> None:
        """Fresh workers that have met and loaded the model."""
        self.end()
        self.workers = self.runtime.start(self.role, TrainWorker, self.size)
        self.lost = set()
        address = self.runtime.ray.get(self.workers[0].free_address.remote())
        timeout = self.runtime.config.start_timeout_s
        self.all(lambda w: w.join.remote(address, timeout), timeout_s=timeout)
        self.all(lambda w: w.build.remote(self.spec, scalar=self.scalar, seed=self.seed))

    def all(self, call: Callable[[Any], Any], *, timeout_s: float | None = None) -> list[Any]:
        """Every rank's answer to one call. Raises WorkerLostError that names the dead or hung."""
        ray = self.runtime.ray
        refs = [call(worker) for worker in self.workers]
        limit = timeout_s or self.runtime.config.call_timeout_s
        waiting, failed = list(refs), None
        while waiting and failed is None:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=limit)
            if not ready:
                self.lost |= {refs.index(ref) for ref in waiting}
                raise WorkerLostError(
                    f"{self.names(self.lost)} did not answer within {limit:g} s "
                    "(cluster.call_timeout_s)"
                )
            failed = failure_of(ray, ready[0])
        if failed is not None:
            self._raise(refs, failed)
        return list(ray.get(refs))

    def pairs(self, call: Callable[[Any], Any]) -> Iterator[tuple[bytes, Any]]:
        """What rank 0 yields in a call that all ranks take part in: a reference to what is large,
        then what is small, turned round. Raises as :meth:`all` does."""
        streams = [call(worker) for worker in self.workers]
        while (payload := self._next(streams, 0)) is not None:
            header = self._next(streams, 0)
            if header is not None and failure_of(self.runtime.ray, header) is None:
                yield self.runtime.ray.get(header), payload
                continue
            failed = failure_of(self.runtime.ray, payload if header is None else header)
            self._raise_from(streams, failed or RuntimeError("a stream ended too early"))
        for rank in range(1, self.size):
            if (odd := self._next(streams, rank)) is not None:
                failed = failure_of(self.runtime.ray, odd)
                self._raise_from(streams, failed or RuntimeError("a rank had something to say"))

    def _next(self, streams: list[Any], rank: int) -> Any:
        """A stream's next reference; None at its end."""
        limit = self.runtime.config.call_timeout_s
        ready, _ = self.runtime.ray.wait([streams[rank]], num_returns=1, timeout=limit)
        if not ready:
            self.lost.add(rank)
            raise WorkerLostError(
                f"{self.names({rank})} did not answer within {limit:g} s (cluster.call_timeout_s)"
            )
        return next(streams[rank], None)

    def _raise_from(self, streams: list[Any], failed: BaseException) -> None:
        self._raise([stream.completed() for stream in streams], failed)

    def _raise(self, refs: list[Any], failed: BaseException) -> None:
        """A dead rank makes its neighbours fail as well: it is the one to name."""
        ray = self.runtime.ray
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=10.0)
        failures = {refs.index(ref): failure_of(ray, ref) for ref in done}
        dead = {i for i, e in failures.items() if isinstance(e, ray.exceptions.RayActorError)}
        if dead:
            self.lost |= dead
            raise WorkerLostError(f"{self.names(dead)} died") from failed
        raise failed

    def names(self, ranks: Iterable[int]) -> str:
        """The ranks for messages."""
        return ", ".join(f"rank {r} of the {self.role}" for r in sorted(ranks))

    def whole(self) -> bool:
        """Whether every rank answers."""
        ray = self.runtime.ray
        refs = [w.ping.remote() for w in self.workers]
        ready, waiting = ray.wait(refs, num_returns=len(refs), timeout=30.0)
        return not self.lost and not waiting and not any(failure_of(ray, r) for r in ready)

    def end(self) -> None:
        """End the workers at once."""
        for worker in self.workers:
            self.runtime.ray.kill(worker)
        self.workers = []


class RemoteTrainEngine:
    """A group of ranks as one ``train.base.TrainEngine``."""

    def __init__(self, group: Group) -> None:
        self.group, self.role = group, group.role
        self.version = 0

    def logprobs(self, batch: Batch) -> Tensor:
        """[M] fp32 log-probs of the action tokens, without gradient."""
        packed = self._put(batch)
        return _tensor(self.group.all(lambda w: w.logprobs.remote(packed))[0])

    def base_logprobs(self, batch: Batch) -> Tensor:
        """[M] the same under the base model of a LoRA."""
        packed = self._put(batch)
        return _tensor(self.group.all(lambda w: w.base_logprobs.remote(packed))[0])

    def values(self, batch: Batch) -> Tensor:
        """[M] fp32 values (critic) or scores on last tokens (reward), without gradient."""
        packed = self._put(batch)
        return _tensor(self.group.all(lambda w: w.values.remote(packed))[0])

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
        kept = self.hand_over(0, Sending(BUCKET_BYTES, None, verify=True))
        link = StoredLink()
        link.fill(kept.headers, [self.group.runtime.ray.get(ref) for ref in kept.payloads])
        incoming = LinkReceiver(link, hold=True).open(self.version)
        yield from incoming
        incoming.close(None)

    def hand_over(self, push: int, how: Sending) -> HandOver[Any]:
        """The weights as rank 0 gives them: headers here, bytes in the object store."""
        call = self.group.pairs(
            lambda w: w.hand_over.options(num_returns="streaming").remote(push, how)
        )
        headers, payloads = zip(*call, strict=True)
        return HandOver(headers, payloads[:-1])  # the end has no bytes

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

    def load(self, folder: Path) -> None:
        """All ranks read."""
        path = str(Path(folder).absolute())
        self.version = self.group.all(lambda w: w.load.remote(path))[0]

    def _put(self, batch: Batch) -> Any:
        return self.group.runtime.ray.put(pack_batch(batch))


class RemoteFrozenBase:
    """The base model of a LoRA policy, on its workers."""

    def __init__(self, policy: RemoteTrainEngine) -> None:
        self.policy = policy

    def logprobs(self, batch: Batch) -> Tensor:
        """[M] fp32 log-probs of the action tokens under the base model."""
        return self.policy.base_logprobs(batch)


class RemoteRolloutEngine:
    """Several rollout workers as one ``rollout.base.RolloutEngine``."""

    def __init__(
        self,
        runtime: RayRuntime,
        model: ModelConfig,
        config: RolloutEngineConfig,
        *,
        max_len: int | None,
        ready: bool = True,
    ) -> None:
        """``ready``: they may sample from the model's own weights before the first hand-over."""
        self.runtime, self.model, self.config, self.max_len = runtime, model, config, max_len
        self.ready, self.version = ready, 0
        self.size = runtime.config.ranks("rollout")
        self.refill: Callable[[int], None] = lambda index: None
        """Gives a worker that was replaced the weights that the others have; a sync sets it."""
        self.workers = runtime.start("rollout", RolloutWorker, self.size)
        runtime.rollouts.append(self)
        self.wait([self._build(w) for w in self.workers])

    def _build(self, worker: Any) -> Any:
        return worker.build.remote(self.model, self.config, self.max_len, ready=self.ready)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Completions as they finish on any worker. The requests of a worker that dies are done
        again; what it had finished is kept."""
        ray = self.runtime.ray
        done: set[tuple[str, int]] = set()
        streams = {
            self._start(i, part, sampling): (i, part)
            for i, part in enumerate(_shares(requests, self.size))
            if part
        }
        while streams:
            ready, _ = ray.wait(
                list(streams), num_returns=1, timeout=self.runtime.config.call_timeout_s
            )
            stream = ready[0] if ready else next(iter(streams))
            worker, part = streams[stream]
            try:
                if not ready:
                    raise WorkerLostError(f"rollout worker {worker} did not answer")
                completions: list[Completion] = ray.get(next(stream))
            except StopIteration:
                del streams[stream]
                continue
            except (ray.exceptions.RayActorError, WorkerLostError):
                del streams[stream]
                left = [r for r in part if any((r.request_id, k) not in done for k in range(r.n))]
                self.replace(worker)
                if left:
                    streams[self._start(worker, left, sampling)] = (worker, left)
                continue
            except ray.exceptions.RayTaskError as error:
                raise _cause(error) from None
            for completion in completions:
                key = (completion.request_id, completion.index)
                if key not in done:
                    done.add(key)
                    yield completion

    def _start(self, worker: int, part: Sequence[Request], sampling: Sampling) -> Any:
        method = self.workers[worker].generate.options(num_returns="streaming")
        return method.remote(list(part), sampling)

    def replace(self, index: int) -> None:
        """A fresh worker with the same weights in the place of one that died."""
        self.runtime.spend_restart(f"rollout worker {index} died")
        self.runtime.ray.kill(self.workers[index])
        fresh = self.runtime.start_one("rollout", RolloutWorker, index, self.size)
        self.workers[index] = fresh
        self.wait([self._build(fresh)])
        self.refill(index)

    def take(self, kept: HandOver[Any], *, verify: bool) -> None:
        """Give all workers one hand-over, which stays in the object store until the next, for
        those that are replaced. Raises SyncError where one does not accept it."""
        self.refill = lambda index: self._give(kept, self.workers[index], verify=verify)
        calls = [(i, self._take(kept, w, verify=verify)) for i, w in enumerate(self.workers)]
        for i, call in calls:
            try:
                self.wait([call])
            except WorkerLostError:
                self.replace(i)
        self.version = kept.end.version

    def _take(self, kept: HandOver[Any], worker: Any, *, verify: bool) -> Any:
        return worker.take.remote(kept.end.version, verify, kept.headers, *kept.payloads)

    def _give(self, kept: HandOver[Any], worker: Any, *, verify: bool) -> None:
        self.wait([self._take(kept, worker, verify=verify)])

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Put weights into the object store and load them."""
        ray = self.runtime.ray
        found = messages(tensors, _new_buffer, push=0, version=version)
        pairs = [(encode(message), ray.put(payload.numpy())) for message, payload in found]
        headers, payloads = zip(*pairs, strict=True)
        self.take(HandOver(headers, payloads[:-1]), verify=True)

    def sleep(self) -> None:
        """Workers free what they hold after every rollout if their config says so."""

    def wake(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """End the engines, and then their processes. May be called twice."""
        ray = self.runtime.ray
        if self.workers:
            closing = [w.close.remote() for w in self.workers]
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
        for worker in self.workers:
            ray.kill(worker)
        self.workers = []

    def wait(self, refs: list[Any]) -> list[Any]:
        """Results of calls. Raises WorkerLostError where a worker is gone, and what a worker
        raised."""
        ray = self.runtime.ray
        try:
            return list(ray.get(refs, timeout=self.runtime.config.call_timeout_s))
        except ray.exceptions.RayActorError as error:
            raise WorkerLostError(f"a rollout worker died ({first_line(error)})") from error
        except ray.exceptions.GetTimeoutError as error:
            raise WorkerLostError("a rollout worker did not answer") from error
        except ray.exceptions.RayTaskError as error:
            raise _cause(error) from None


def _shares(requests: Sequence[Request], count: int) -> list[list[Request]]:
    """Requests split over workers: the most expensive first, each to the least loaded."""
    shares: list[list[Request]] = [[] for _ in range(count)]
    loads = [0] * count
    for request in sorted(requests, key=lambda r: -r.n * (r.max_tokens or 1)):
        least = loads.index(min(loads))
        shares[least].append(request)
        loads[least] += request.n
    return shares


def failure_of(ray: Any, ref: Any) -> BaseException | None:
    """What a finished call raised, as the worker raised it."""
    try:
        ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        return _cause(error)
    except ray.exceptions.RayError as error:
        return error  # type: ignore[no-any-return]
    return None


def _cause(error: Any) -> BaseException:
    cause: BaseException = error.cause if isinstance(error.cause, BaseException) else error
    return cause


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(array.copy())


def first_line(error: BaseException) -> str:
    """The first line of an error's text, for messages."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _new_buffer() -> Tensor:
    return torch.empty(BUCKET_BYTES, dtype=torch.uint8)
