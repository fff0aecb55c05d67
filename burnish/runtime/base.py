"""Contract of runtimes, which make engines for roles and connect them. It is the same inline and on
a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from burnish.config.model import ModelConfig, PrecisionConfig
from burnish.config.sync import LinkSync, SyncConfig
from burnish.distributed.process_group import RankGroup
from burnish.environments.worker_set import EnvironmentWorker
from burnish.observe.memory import ProcessPeaks
from burnish.observe.timeline import Timeline
from burnish.rollout.base import RolloutEngine, Sync
from burnish.rollout.kinds import RolloutEngineConfig
from burnish.train.base import (
    CRITIC_SPANS,
    POLICY_SPANS,
    EngineLostError,
    HasLogprobs,
    TrainEngine,
)
from burnish.train.spec import EngineSpec

SYNC_SPANS = {"push": "sync", "stage": "sync"}


class Runtime(Protocol):
    """Factory of engines, each timed on the run's timeline."""

    tokenizer: PreTrainedTokenizerBase
    precision: PrecisionConfig
    timeline: Timeline
    loop_ranks: RankGroup
    """Ranks that run the loop: one, unless a launcher started several (``spmd/runtime.py``)."""
    attention: dict[str, str]
    """Attention of every train engine so far, as a sentence, by the name of its role."""

    def language_model(
        self, spec: EngineSpec, spans: Mapping[str, str] = POLICY_SPANS
    ) -> TrainEngine:
        """Return a train engine over a causal LM (policy, reference)."""
        ...

    def scalar_model(
        self, spec: EngineSpec, *, seed: int, spans: Mapping[str, str] = CRITIC_SPANS
    ) -> TrainEngine:
        """Return a train engine over a scalar model (critic, reward). A language model gets a new
        head, drawn with ``seed``, if it will be trained."""
        ...

    def rollout(
        self, policy: TrainEngine, config: RolloutEngineConfig, *, max_len: int | None = None
    ) -> RolloutEngine:
        """Return a rollout engine that gets its weights from ``policy``, for rows of up to
        ``max_len`` tokens (None: the model's limit)."""
        ...

    def standalone_rollout(
        self, model: ModelConfig, config: RolloutEngineConfig, *, max_len: int | None = None
    ) -> RolloutEngine:
        """Return a rollout engine without a trainer (evaluation of a finished model)."""
        ...

    def sync(
        self, policy: TrainEngine, rollout: RolloutEngine, config: SyncConfig = LinkSync()
    ) -> Sync:
        """Return a sync that transfers the policy's weights to the rollout engine. The first
        transfer is done before this returns."""
        ...

    async def start_worker(self, python: str | None) -> EnvironmentWorker:
        """Start a process for user code, such as environments, with the interpreter ``python``
        (None: that of the run). All calls come from one event loop.

        Raises OSError or ``environments.worker_set.WorkerEndedError`` if it cannot be started.
        """
        ...

    def release(self, engine: HasLogprobs) -> None:
        """Free the resources of a train engine that is no longer used."""
        ...

    def peaks(self) -> list[ProcessPeaks]:
        """Return the peak memory of each process in each phase since the last call, and add the
        spans of other processes to the timeline. Processes that do not respond soon are left
        out."""
        ...

    def close(self) -> None:
        """End all workers. May be called twice."""
        ...


class ClusterError(EngineLostError):
    """A cluster cannot run the job, or can no longer run it. The message contains the worker or
    resource, and a fix."""


class WorkerLostError(ClusterError):
    """A worker died or hangs. ``RayRuntime.recover`` may restore its group."""
