"""Which models of a job are shared out among several processes by their heads. Whether they can be
is in their own configs: ``jobs/parallelism.py`` looks there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from burnish.config.distill import DistillConfig
from burnish.config.jobs import (
    JobConfig,
    PreferenceConfig,
    RLConfig,
    SupervisedJob,
)
from burnish.config.model import ModelConfig
from burnish.config.rewards import ModelReward
from burnish.config.roles import rollout_parallel_size
from burnish.config.train import TorchEngine

ParallelKind = Literal["rollout", "tensor", "sequence"]


@dataclass(frozen=True)
class ParallelDegree:
    """A model, and among how many processes its heads are shared."""

    model: ModelConfig
    kind: ParallelKind
    """rollout: vLLM's processes. tensor, sequence: a team of the torch engine's ranks."""
    size: int


def parallel_degrees(config: JobConfig) -> list[ParallelDegree]:
    """Every such model; empty for most jobs."""
    found = [ParallelDegree(config.model, "rollout", rollout_parallel_size(config))]
    if isinstance(config, (SupervisedJob, RLConfig)):
        engine = config.train.engine
        if isinstance(engine, TorchEngine):
            for model in models_of(config):
                found.append(ParallelDegree(model, "tensor", engine.tensor_parallel_size))
                found.append(ParallelDegree(model, "sequence", engine.sequence_parallel_size))
    return [degree for degree in found if degree.size > 1]


def models_of(config: JobConfig) -> list[ModelConfig]:
    """All models of a job, each once."""
    models: list[ModelConfig | None] = [config.model]
    if isinstance(config, (RLConfig, PreferenceConfig)) and config.reference is not None:
        models.append(config.reference.model)
    if isinstance(config, (RLConfig, DistillConfig)) and config.teacher is not None:
        models.append(config.teacher.model)
    if isinstance(config, RLConfig):
        models += [] if config.critic is None else [config.critic.model]
        models += [reward.model for reward in config.rewards if isinstance(reward, ModelReward)]
    found: list[ModelConfig] = []
    for model in models:
        if model is not None and model not in found:
            found.append(model)
    return found
