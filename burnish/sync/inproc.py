"""Weight transfer inside one process; nothing is copied if the rollout engine uses the trainer's
own module."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from burnish.config.rollout import InFlight
from burnish.rollout.base import RolloutEngine, StagedWeights
from burnish.rollout.local.engine import LocalRolloutEngine
from burnish.sync.base import Metrics, sync_metrics
from burnish.train.engine import BaseTrainEngine


class InprocWeightSync:
    """Weight transfer that keeps a rollout engine at the policy's version."""

    def __init__(self, policy: BaseTrainEngine, rollout: RolloutEngine) -> None:
        self.policy, self.rollout = policy, rollout
        local = isinstance(rollout, LocalRolloutEngine)
        self.shared = local and rollout.model is policy.model  # type: ignore[attr-defined]
        self.push()

    def push(self, *, keep_cache: bool = False) -> Metrics:
        """Load the policy's weights and version into the rollout engine; return metrics.
        ``keep_cache`` is that of :meth:`RolloutEngine.load_weights`.

        If the rollout engine uses the same module, only the version is set and there are no
        metrics.
        """
        version = self.policy.version
        if self.shared and isinstance(self.rollout, LocalRolloutEngine):
            self.rollout.weights_changed(version, keep_cache=keep_cache)
            return {}
        started, num_bytes = time.perf_counter(), 0

        def counted() -> Iterator[tuple[str, Tensor]]:
            nonlocal num_bytes
            for name, tensor in self.policy.weights():
                num_bytes += tensor.nbytes
                yield name, tensor

        self.rollout.load_weights(version, counted(), keep_cache=keep_cache)
        return sync_metrics(version, num_bytes, buckets=0, seconds=time.perf_counter() - started)

    def stage(self, in_flight: InFlight) -> StagedWeights:
        """Copy the policy's weights, and return the load of the copy.

        If the rollout engine uses the same module, nothing is copied, and the load declares that
        the weights have changed. The engine must not have been polled since the change.
        """
        version, keep, idle = self.policy.version, in_flight == "continue", in_flight == "finish"
        if self.shared:

            def declare(engine: RolloutEngine) -> None:
                self.push(keep_cache=keep)

            return StagedWeights(version, {}, declare, needs_idle=idle)
        started = time.perf_counter()
        copy = {name: tensor.clone() for name, tensor in self.policy.weights()}
        num_bytes = sum(tensor.nbytes for tensor in copy.values())

        def load(engine: RolloutEngine) -> None:
            engine.load_weights(version, copy.items(), keep_cache=keep)
            copy.clear()

        seconds = time.perf_counter() - started
        metrics = sync_metrics(version, num_bytes, buckets=0, seconds=seconds)
        return StagedWeights(version, metrics, load, needs_idle=idle)

    def settle(self) -> None:
        """Do nothing: there are no workers."""

    def policy_idle(self) -> AbstractContextManager[None]:
        """Return a context without effect: there are no workers to replace."""
        return nullcontext()
