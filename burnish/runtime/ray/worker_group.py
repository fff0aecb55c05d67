"""Ranks of a train engine as one group: started, called and lost together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from threading import RLock
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

from burnish.distributed.process_group import CollectiveTimeoutError, CollectiveTimeouts
from burnish.models.digest import present_weights_digest, weights_changed
from burnish.models.load import ModelError, describe
from burnish.oom import is_out_of_memory
from burnish.runtime.base import WorkerLostError
from burnish.runtime.ray.cluster import RayCluster
from burnish.runtime.ray.errors import died, failure, is_worker_loss
from burnish.runtime.worker import NO_SPANS, TrainWorker
from burnish.train.base import Role
from burnish.train.spec import EngineSpec

_OTHER_RANKS_S = 10.0
"""Seconds that other ranks have to fail after the first failure, because Ray detects a death later
than gloo does."""
_OTHER_DEATHS_S = 1.0
"""Seconds after a death in which others are named with it. The remaining ranks may wait for the
dead one as long as a collective may take."""


P = ParamSpec("P")
T = TypeVar("T")


def _alone(
    method: Callable[Concatenate[WorkerGroup, P], T],
) -> Callable[Concatenate[WorkerGroup, P], T]:
    """Return a method of a group that waits for the calls of other threads."""

    @wraps(method)
    def call(self: WorkerGroup, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._calling:
            return method(self, *args, **kwargs)

    return call


class WorkerGroup:
    """Ranks of one train engine. Several threads may call it; one call ends before the next one
    begins, so that all ranks get them in the same order."""

    def __init__(
        self,
        cluster: RayCluster,
        spec: EngineSpec,
        *,
        scalar: bool,
        seed: int,
        spans: Mapping[str, str] = NO_SPANS,
        name: str | None = None,
    ) -> None:
        """Start the ranks. ``spans``: engine method -> memory phase. ``name``: name of the group in
        the job's placement; None: its role."""
        self.cluster, self.spec, self.scalar, self.seed = cluster, spec, scalar, seed
        self.spans = dict(spans)
        self.role: Role = spec.role.engine_role
        self.name = name or spec.role.engine_role
        self.size = cluster.config.ranks(spec.role.engine_role)
        self.workers: list[Any] = []
        self.attention = ""
        """Attention of the engine, as a sentence."""
        self.mixed = False
        """True once other weights were mixed into those of a frozen model (``mix``)."""
        self._model = spec.role.model_read_on_resume
        """Model whose weights must be those of the first start after a restart."""
        self._digest = None if self._model is None else present_weights_digest(self._model)
        self._complete = False
        self._calling = RLock()
        self.restart()

    @_alone
    def restart(self) -> None:
        """Start workers that connect and load the model, repeatedly if some are lost. Raises
        ClusterError once ``max_restarts`` is exceeded, and ModelError if the model's folder now
        contains other weights."""
        while not self._complete:
            now = None if self._model is None else present_weights_digest(self._model)
            if self._model is not None and weights_changed(self._digest, now):
                raise ModelError(
                    f"the weights in {describe(self._model)} changed during the run, and the "
                    f"workers of the {self.name} are lost, so new ones would load another model; "
                    "restore the weights and resume the run with --resume"
                )
            try:
                self._start()
            except WorkerLostError as lost:
                self.cluster.count_restart(str(lost))

    def _start(self) -> None:
        self.end()
        self.workers = self.cluster.start(self.name, TrainWorker, self.size)
        limit = self.cluster.config.start_timeout_s
        longest = self.cluster.config.call_timeout_s
        limits = CollectiveTimeouts(longest, min(longest, self.cluster.config.collective_timeout_s))
        host, port = self.gather([self.workers[0].open_rendezvous.remote(limit)], limit_s=limit)[0]
        joining = {"timeout_s": limit, "limits": limits}
        self._each(lambda w: w.join.remote(host, port, **joining), limit_s=limit)
        options = {"scalar": self.scalar, "seed": self.seed, "spans": self.spans}
        self.attention = self._each(lambda w: w.build.remote(self.spec, **options))[0]
        self._complete = True

    @_alone
    def all(self, call: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
        """Return every rank's result of one call. ``arguments``: sequences with one entry per rank,
        which ``call`` receives after the worker.

        If a rank dies or hangs and the model has the weights it was loaded with, the group is
        restarted and the call is repeated. Otherwise raises WorkerLostError with the rank's name,
        and the group has to be restarted."""
        while True:
            try:
                return self._each(call, *arguments)
            except WorkerLostError as lost:
                if self.spec.role.trainable or self.mixed:
                    raise
                self.cluster.count_restart(str(lost))
                self.restart()

    def _each(
        self, call: Callable[..., Any], *arguments: Sequence[Any], limit_s: float | None = None
    ) -> list[Any]:
        if not self.workers:
            raise WorkerLostError(f"the workers of the {self.name} are lost")
        by_rank = zip(self.workers, *arguments, strict=True)
        return self.gather([call(*rank_arguments) for rank_arguments in by_rank], limit_s=limit_s)

    def gather(self, refs: Sequence[Any], *, limit_s: float | None = None) -> list[Any]:
        """Return the results of calls, ordered by rank. Raises WorkerLostError."""
        monitor = self.cluster.monitor
        limit = limit_s or self.cluster.config.call_timeout_s
        waiting = list(refs)
        while waiting:
            ready, unresponsive = monitor.wait(waiting, self.workers, limit_s=limit)
            for failed in (failure(self.cluster.ray, ref) for ref in ready):
                if failed is not None:
                    self._raise(refs, failed)
            waiting = [ref for ref in waiting if ref not in ready]
            if unresponsive and waiting:
                raise self.loss(unresponsive, self.cluster.unresponsive_reason)
            if waiting and not ready:
                late = [self.workers[refs.index(ref)] for ref in waiting]
                key = "call_timeout_s" if limit_s is None else "start_timeout_s"
                raise self.loss(late, f"did not respond within {limit:g} s (cluster.{key})")
        return list(self.cluster.ray.get(list(refs)))

    def _raise(self, refs: Sequence[Any], failed: BaseException) -> NoReturn:
        """Raise the error that names the cause. A dead or hung rank also makes the other ranks
        fail, so it is searched for first."""
        ray, monitor = self.cluster.ray, self.cluster.monitor
        limit_s = _OTHER_DEATHS_S if is_worker_loss(ray, failed) else _OTHER_RANKS_S
        done, undone = ray.wait(list(refs), num_returns=len(refs), timeout=limit_s)
        failures = {refs.index(ref): failure(ray, ref) for ref in done}
        dead = {i: e for i, e in failures.items() if e is not None and is_worker_loss(ray, e)}
        if dead:
            cause = died(next(iter(dead.values())))
            raise self.loss([self.workers[i] for i in dead], cause) from failed
        late = [self.workers[refs.index(ref)] for ref in undone]
        unresponsive = monitor.wait_for_heartbeats(late)
        if unresponsive:
            raise self.loss(unresponsive, self.cluster.unresponsive_reason) from failed
        waited = {i: e for i, e in failures.items() if isinstance(e, CollectiveTimeoutError)}
        if waited:
            self._complete = False
            reasons = [
                f"{monitor.name(self.workers[i])} {error}" for i, error in sorted(waited.items())
            ]
            if late:  # they send heartbeats
                reasons.append(f"{monitor.names(late)} did not reach it")
            raise WorkerLostError(
                f"a collective of the {self.name} timed out: {'; '.join(reasons)} "
                "(cluster.collective_timeout_s)"
            ) from failed
        for index, error in failures.items():
            if error is not None and is_out_of_memory(error):  # the cause of the other failures
                error.add_note(f"in {monitor.name(self.workers[index])}")
                raise error
        raise failed

    def loss(self, workers: Sequence[Any], cause: str) -> WorkerLostError:
        """Return the error with the names of lost ranks. The group has to be restarted."""
        self._complete = False
        return WorkerLostError(f"{self.cluster.monitor.names(workers)} {cause}")

    @_alone
    def is_complete(self) -> bool:
        """Return whether every rank responds, once the calls of other threads have ended."""
        if not self._complete:
            return False
        try:
            limit = self.cluster.config.heartbeat_timeout_s
            self._each(lambda w: w.ping.remote(), limit_s=limit)
        except WorkerLostError:
            return False
        return True

    def end(self) -> None:
        """End the workers immediately."""
        self._complete = False
        self.cluster.end(self.workers)
        self.workers = []
