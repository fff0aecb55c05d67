"""Contract of runtimes, which make engines for roles and connect them. One contract, inline and on
a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from burnish.config.model import ModelConfig, PrecisionConfig
from burnish.config.rollout import RolloutEngineConfig
from burnish.config.sync import LinkSync, SyncConfig
from burnish.observe.peaks import ProcessPeaks
from burnish.observe.timeline import Timeline
from burnish.rollout.base import RolloutEngine
from burnish.sync.base import Metrics
from burnish.train.base import EngineLostError, HasLogprobs, TrainEngine
from burnish.train.spec import EngineSpec

POLICY_SPANS = {"logprobs": "logprobs", "forward_backward": "train", "optim_step": "optim"}
CRITIC_SPANS = {"values": "values", "forward_backward": "critic", "optim_step": "critic"}


class Sync(Protocol):
    """Hands one policy's weights to one rollout engine."""

    def push(self) -> Metrics:
        """Afterwards the rollout engine has the policy's weights and version. Returns ``sync/*``,
        or nothing where nothing was moved."""
        ...


class Runtime(Protocol):
    """Makes engines, each timed on the run's timeline."""

    tokenizer: PreTrainedTokenizerBase
    precision: PrecisionConfig
    timeline: Timeline

    def language_model(
        self, spec: EngineSpec, spans: Mapping[str, str] = POLICY_SPANS
    ) -> TrainEngine:
        """A train engine over a causal LM (policy, reference)."""
        ...

    def scalar_model(
        self, spec: EngineSpec, *, seed: int, spans: Mapping[str, str] = CRITIC_SPANS
    ) -> TrainEngine:
        """A train engine over a scalar model (critic, reward); a language model gets a new head if
        it is to be trained."""
        ...

    def frozen_base(self, policy: TrainEngine) -> HasLogprobs:
        """The reference model inside a LoRA policy."""
        ...

    def rollout(
        self, policy: TrainEngine, config: RolloutEngineConfig, *, max_len: int | None = None
    ) -> RolloutEngine:
        """A rollout engine that gets its weights from ``policy``, for rows of up to ``max_len``
        tokens (None: as the model allows)."""
        ...

    def standalone_rollout(
        self, model: ModelConfig, config: RolloutEngineConfig, *, max_len: int | None = None
    ) -> RolloutEngine:
        """A rollout engine without a trainer (evaluation of a finished model)."""
        ...

    def sync(
        self, policy: TrainEngine, rollout: RolloutEngine, config: SyncConfig = LinkSync()
    ) -> Sync:
        """Return a function that transfers the policy's weights to the rollout engine. The first
        transfer is done before this returns."""
        ...

    def release(self, engine: HasLogprobs) -> None:
        """Give back what a train engine that is used no more holds."""
        ...

    def peaks(self) -> list[ProcessPeaks]:
        """The most memory that each process held in each phase, since the last call. What does not
        answer soon is left out."""
        ...

    def close(self) -> None:
        """End all workers. May be called twice."""
        ...


class ClusterError(EngineLostError):
    """A cluster that cannot run the job, or no longer. Says which worker or resource, and what to
    do."""


class WorkerLostError(ClusterError):
    """A worker died or hangs. ``RayRuntime.recover`` may bring its group back."""
