"""Weight transfer inside one process; nothing is copied if the rollout engine uses the trainer's
own module."""

from __future__ import annotations

import time
from collections.abc import Iterator

from torch import Tensor

from burnish.rollout.base import RolloutEngine
from burnish.rollout.local import LocalRolloutEngine
from burnish.sync.base import Metrics, sync_metrics
from burnish.train.engine import BaseTrainEngine


class InprocSync:
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
