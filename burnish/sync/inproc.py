"""Weight hand-over inside one process: none where the rollout engine holds the trainer's own
module."""

from __future__ import annotations

from burnish.rollout.base import RolloutEngine
from burnish.rollout.local import LocalRolloutEngine
from burnish.train.torch import TorchTrainEngine


class InprocSync:
    """Keeps a rollout engine at the policy's version."""

    def __init__(self, policy: TorchTrainEngine, rollout: RolloutEngine) -> None:
        self.policy, self.rollout = policy, rollout
        local = isinstance(rollout, LocalRolloutEngine)
        self.shared = local and rollout.model is policy.model  # type: ignore[attr-defined]
        self.push()

    def push(self) -> None:
        """Hand the policy's weights over (no copy where the rollout engine holds
        the same module) and its version."""
        if self.shared:
            self.rollout.version = self.policy.version
        else:
            self.rollout.load_weights(self.policy.version, self.policy.weights())
