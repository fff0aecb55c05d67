"""Workers of a rollout engine: their start, calls, weights and replacement.

A worker starts, loads its model, loads the newest weights, and is then *ready*. A lost worker is
replaced. None of this stops the other workers: :meth:`RolloutPool.wait` returns as soon as any
worker answers.

New weights are *staged*: every worker is called to load them between two of its other calls. If
newer weights are staged before that call, the worker skips the older ones. Weights of a connection
have no copy: a replaced worker waits until the policy can send them (:attr:`RolloutPool.refill`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from burnish.config.rollout import InFlight
from burnish.messages import library_text
from burnish.rollout.base import Completion
from burnish.runtime.ray.cluster import RayCluster
from burnish.runtime.ray.errors import failure, loss_reason
from burnish.runtime.ray.rollout_worker import Orders, RolloutWorker

CLOSE_TIMEOUT_S = 10.0
_WAIT_S = 1.0
"""Longest wait for the policy if no worker samples."""

Lost = dict[int, str]
"""Index of a worker -> how it was lost."""
Kind = Literal["start", "build", "load", "advance", "other"]


@dataclass(eq=False)
class Weights:
    """One version of the weights, for all workers."""

    version: int
    """Number of optimizer steps."""
    send: Callable[[Any], Any] | None = None
    """Function that makes a worker load them and returns the reference to the result. None: they
    are sent through a connection of all workers, or no worker needs them any more."""
    in_flight: InFlight = "recompute"
    num_bytes: int = 0
    number: int = -1
    """Number of weights staged before."""
    released: threading.Event = field(default_factory=threading.Event)
    """Set once newer weights are staged and no worker loads these any more."""


@dataclass(eq=False)
class PoolWorker:
    """One worker process."""

    index: int
    handle: Any
    built: bool = False
    """True once it has loaded its model."""
    ready: bool = False
    """True once it takes requests."""
    requested: Weights | None = None
    """Weights of its last call to load."""
    loaded: Weights | None = None
    """Weights that it last confirmed. None: those of the model's files."""


@dataclass(eq=False)
class _Call:
    worker: PoolWorker
    kind: Kind
    left_s: float
    """Time until it is too late."""
    weights: Weights | None = None


@dataclass
class Answers:
    """Events since the last wait."""

    finished: list[tuple[int, list[Completion]]] = field(default_factory=list)
    """Index of a worker, and what it finished."""
    lost: Lost = field(default_factory=dict)


class RolloutPool:
    """Rollout workers of one engine. All methods are called by one thread."""

    def __init__(
        self,
        cluster: RayCluster,
        size: int,
        build: Callable[[Any], Any],
        *,
        may_load: Callable[[int], bool],
    ) -> None:
        """Start ``size`` workers. ``build`` calls a worker's method of that name. ``may_load``
        returns whether a worker may load new weights now."""
        self.cluster, self._build, self._may_load = cluster, build, may_load
        self.version = 0
        """Version of the newest weights that all ready workers have loaded."""
        self.newest: Weights | None = None
        self.refill: Callable[[Sequence[int], float], Lost] | None = None
        """Sends weights that have no ``send`` to replaced workers, and returns those that were
        lost. It waits up to the given seconds for the policy, and sends nothing if the policy is
        still in use then. Set by a sync. None: all weights have a ``send``."""
        self.max_len: int | None = None
        """Maximum length of a row in tokens; None: unlimited. Known once a worker is built."""
        self._calls: dict[Any, _Call] = {}
        """Reference to the result of a call -> the call."""
        self._held: list[Weights] = []
        """Weights that are not released."""
        self._staged = 0
        self._confirmed = -1
        """Number of the weights of :attr:`version`."""
        self.workers = [self._start(index, size) for index in range(size)]

    def _start(self, index: int, size: int) -> PoolWorker:
        handle = self.cluster.start_one("rollout", RolloutWorker, index, size)
        worker = PoolWorker(index, handle)
        self._call(worker, "start", self.cluster.first_response(handle))
        return worker

    # ---- calls -----------------------------------------------------------------------------

    def advance(self, worker: PoolWorker, orders: Orders) -> None:
        """Let a ready worker carry out ``orders`` and sample."""
        self._call(worker, "advance", worker.handle.advance.remote(orders))

    def call_all(self, call: Callable[[Any], Any]) -> None:
        """Call a method of every built worker. Its results are ignored, errors are raised by
        :meth:`wait`."""
        for worker in self.workers:
            if worker.built:
                self._call(worker, "other", call(worker.handle))

    def called(self, kind: Kind) -> set[int]:
        """Return the workers that have not answered a call of this kind."""
        return {call.worker.index for call in self._calls.values() if call.kind == kind}

    @property
    def is_loading(self) -> bool:
        """Return whether a ready worker loads weights, or all workers were lost before one had
        loaded the newest: then their replacements load them."""
        if self.loads_older or any(
            call.kind == "load" and call.worker.ready for call in self._calls.values()
        ):
            return True
        newest, none_ready = self.newest, not any(worker.ready for worker in self.workers)
        return newest is not None and none_ready and not self.is_confirmed(newest)

    @property
    def loads_older(self) -> bool:
        """Return whether a worker loads other weights than the newest. They are released once it
        has answered."""
        loads = (call for call in self._calls.values() if call.kind == "load")
        return any(call.weights is not self.newest for call in loads)

    @property
    def complete(self) -> bool:
        """Return whether all workers are ready."""
        return all(worker.ready for worker in self.workers)

    def _call(
        self, worker: PoolWorker, kind: Kind, ref: Any, weights: Weights | None = None
    ) -> None:
        config = self.cluster.config
        limit = config.start_timeout_s if kind == "start" else config.call_timeout_s
        self._calls[ref] = _Call(worker, kind, limit, weights)

    def forget_calls(self) -> None:
        """Ignore the outstanding answers of ready workers, and of others that load, after an
        error. The others are called to load again."""
        self._calls, calls = {}, self._calls
        for ref, call in calls.items():
            if not call.worker.ready and call.kind == "load":
                call.worker.requested = None
            elif not call.worker.ready:
                self._calls[ref] = call
        for weights in self._held:
            weights.released.set()  # the trainer must not wait for them

    # ---- answers ---------------------------------------------------------------------------

    def wait(self) -> Answers:
        """Wait until a worker answers or is lost, at most one heartbeat interval.

        Workers that start are called again here until they are ready. Raises an error of a
        worker."""
        answers = Answers()
        ready, answers.lost = self._ready()
        for ref in ready:
            call = self._calls.pop(ref, None)
            if call is not None and call.worker.index not in answers.lost:
                self._answer(call, ref, answers)
        answers.lost |= self._fill()
        self.load_due()
        self._confirm()
        return answers

    def _ready(self) -> tuple[list[Any], Lost]:
        """Return (references with an answer, lost workers)."""
        if not self._calls:
            return [], {}
        monitor = self.cluster.monitor
        least = min(call.left_s for call in self._calls.values())
        handles = {id(c.worker.handle): c.worker for c in self._calls.values()}
        begun = time.monotonic()
        ready, unresponsive = monitor.wait(
            list(self._calls),
            [worker.handle for worker in handles.values()],
            limit_s=max(0.0, min(monitor.every_s, least)),
        )
        passed = min(time.monotonic() - begun, monitor.every_s)  # a pause of the controller
        lost = {handles[id(h)].index: self.cluster.unresponsive_reason for h in unresponsive}
        answered = set(ready)
        for ref, call in self._calls.items():
            call.left_s -= passed
            if call.left_s <= 0 and ref not in answered:
                limit = self.cluster.config.call_timeout_s
                why = f"did not respond within {limit:g} s (cluster.call_timeout_s)"
                late = self.cluster.late_reason if call.kind == "start" else why
                lost.setdefault(call.worker.index, late)
        return ready, lost

    def _answer(self, call: _Call, ref: Any, answers: Answers) -> None:
        """Handle the answer to a call. Raises an error of the worker."""
        ray, worker = self.cluster.ray, call.worker
        if call.kind == "start":
            why = self.cluster.check_started(worker.handle, ref)
            if why is not None:
                answers.lost[worker.index] = why
            else:
                self._call(worker, "build", self._build(worker.handle))
            return
        if call.kind == "advance":
            try:
                answers.finished.append((worker.index, ray.get(ref)))
            except ray.exceptions.ObjectLostError as error:  # with its machine: sampled again
                why = f"died, and its unread samples are lost: {library_text(error)}"
                answers.lost[worker.index] = why
            except ray.exceptions.RayError as error:
                answers.lost[worker.index] = loss_reason(ray, error)
            return
        failed = failure(ray, ref)
        if failed is not None:
            answers.lost[worker.index] = loss_reason(ray, failed)
        elif call.kind == "build":
            self.max_len, worker.built = ray.get(ref), True
        elif call.kind == "load":
            worker.loaded = call.weights

    # ---- weights ---------------------------------------------------------------------------

    def stage(self, weights: Weights) -> None:
        """Let all workers load ``weights``, which have a ``send``, when they can."""
        self._add(weights)
        self.load_due()
        self._release()

    def mark_loaded(self, indices: Iterable[int], weights: Weights) -> None:
        """Record that workers received ``weights`` through a connection."""
        if weights is not self.newest:
            self._add(weights)
        for index in indices:
            self.workers[index].requested = self.workers[index].loaded = weights
        self._confirm()

    def _add(self, weights: Weights) -> None:
        weights.number, self._staged = self._staged, self._staged + 1
        self.newest = weights
        self._held.append(weights)

    def load_due(self) -> None:
        """Call the workers that need the newest weights and may load them now."""
        newest = self.newest
        if newest is None or newest.send is None:
            return
        loading = self.called("load")
        for worker in self.workers:
            due = worker.built and self.is_due(worker) and worker.index not in loading
            if due and (not worker.ready or self._may_load(worker.index)):
                worker.requested = newest
                self._call(worker, "load", newest.send(worker.handle), newest)

    def is_due(self, worker: PoolWorker) -> bool:
        """Return whether a worker was not called to load the newest weights."""
        return self.newest is not None and worker.requested is not self.newest

    def is_confirmed(self, weights: Weights) -> bool:
        """Return whether a worker is ready, and all that are have these weights or newer ones."""
        return self._confirmed >= weights.number

    def _fill(self) -> Lost:
        """Send the weights of a connection to replaced workers that wait for them. Return those
        that were lost. Waits for the policy only if no worker samples."""
        if self.newest is None or self.newest.send is not None or self.refill is None:
            return {}
        waiting = [w.index for w in self.workers if w.built and not w.ready and self.is_due(w)]
        if not waiting:
            return {}
        samples = bool(self._calls) or any(worker.ready for worker in self.workers)
        return self.refill(waiting, 0.0 if samples else _WAIT_S)

    def _confirm(self) -> None:
        """Update the version, let workers that have its weights take requests, and release the
        weights that no worker needs."""
        for worker in self.workers:
            if worker.built and not worker.ready:
                number = -1 if worker.loaded is None else worker.loaded.number
                worker.ready = self.newest is None or number >= max(0, self._confirmed)
        loaded = [worker.loaded for worker in self.workers if worker.ready]
        confirmed = [weights for weights in loaded if weights is not None]
        if confirmed and len(confirmed) == len(loaded):
            least = min(confirmed, key=lambda weights: weights.number)
            self.version, self._confirmed = least.version, least.number
        self._release()

    def _release(self) -> None:
        """Drop the weights that are neither the newest nor being loaded."""
        used = {id(call.weights) for call in self._calls.values()} | {id(self.newest)}
        for weights in self._held:
            if id(weights) not in used:
                weights.send = None
                weights.released.set()
        self._held = [weights for weights in self._held if id(weights) in used]

    # ---- loss ------------------------------------------------------------------------------

    def replace(self, lost: Mapping[int, str]) -> None:
        """Start new workers in place of lost ones. Raises ClusterError once ``max_restarts`` is
        exceeded."""
        gone = [self.workers[index] for index in sorted(lost)]
        monitor = self.cluster.monitor
        reasons = [f"{monitor.name(worker.handle)} {lost[worker.index]}" for worker in gone]
        for worker in gone:
            worker.built = worker.ready = False
        self._calls = {r: call for r, call in self._calls.items() if call.worker not in gone}
        self.cluster.end(worker.handle for worker in gone)
        self.cluster.count_restart(", ".join(reasons))
        for worker in gone:
            self.workers[worker.index] = self._start(worker.index, len(self.workers))
        self._confirm()

    def close(self) -> None:
        """Close the engines, then end their processes. May be called twice."""
        self._calls, self.newest = {}, None
        self._release()
        closing = [worker.handle.close.remote() for worker in self.workers if worker.built]
        if closing:
            self.cluster.ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
        self.cluster.end(worker.handle for worker in self.workers)
        self.workers = []
