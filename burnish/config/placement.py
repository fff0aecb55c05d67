"""Which workers a job has on a cluster, and which GPUs and CPUs they stand on: arithmetic over a
recipe, for the runtime that starts them and for everything that is said before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from burnish.config.algorithm import GaeAdvantage
from burnish.config.cluster import COLOCATED, ClusterConfig, ClusterRole
from burnish.config.distill import DistillConfig
from burnish.config.jobs import (
    EvaluateConfig,
    GenerateConfig,
    InferenceJob,
    JobConfig,
    PreferenceConfig,
    RewardModelConfig,
    RLConfig,
    SFTConfig,
)
from burnish.config.rewards import ModelReward
from burnish.config.rollout import RolloutEngineConfig, VllmEngine


@dataclass(frozen=True)
class Places:
    """Equal places; in each stands one worker of every role in ``roles``."""

    roles: tuple[ClusterRole, ...]
    count: int
    cpus: float
    """Of one place."""
    gpus: float
    """Of one place. Its workers share them."""

    def __str__(self) -> str:
        """For tables and messages."""
        what = f"{self.gpus:g} GPU{'s' * (self.gpus != 1)}" if self.gpus else f"{self.cpus:g} CPU"
        return f"{self.count} x {'+'.join(self.roles)} ({what} each)"


def roles_of(config: JobConfig) -> list[ClusterRole]:
    """The roles that a job has workers for."""
    if isinstance(config, SFTConfig):
        return ["policy"]
    if isinstance(config, RewardModelConfig):
        return ["reward"]
    if isinstance(config, DistillConfig):
        return ["policy", "teacher"]
    if isinstance(config, PreferenceConfig):
        own = config.reference is not None and config.reference.model is not None
        apart = config.needs_reference and (config.model.lora is None or own)
        return ["policy", "reference"] if apart else ["policy"]
    assert isinstance(config, (RLConfig, EvaluateConfig, GenerateConfig))
    rewards: list[ClusterRole] = (
        ["reward"] if any(isinstance(r, ModelReward) for r in config.rewards) else []
    )
    if isinstance(config, InferenceJob):
        return ["rollout", *rewards]
    roles: list[ClusterRole] = ["policy", "rollout", *rewards]
    if isinstance(config.algorithm.advantage, GaeAdvantage):
        roles.append("critic")
    own_reference = config.reference is not None and config.reference.model is not None
    if config.algorithm.kl.init_kl_coef and (config.model.lora is None or own_reference):
        roles.append("reference")
    if config.teacher is not None:
        roles.append("teacher")
    return roles


def places_of(config: JobConfig) -> list[Places]:
    """Every set of places that the job takes on a cluster."""
    size = tensor_parallel_size(config)
    return places_for(config.cluster, roles_of(config), tensor_parallel_size=size)


def places_for(
    cluster: ClusterConfig, roles: Sequence[ClusterRole], *, tensor_parallel_size: int = 1
) -> list[Places]:
    """The places of ``roles``. A rollout engine with ``tensor_parallel_size`` t is one worker on t
    times the CPUs and GPUs of the others."""
    together = [r for r in roles if r in COLOCATED[cluster.layout]]
    sets = [together] if together else []
    sets += [[r] for r in roles if r not in together]
    found = []
    for group in sets:
        size = tensor_parallel_size if group == ["rollout"] else 1
        count = max(cluster.ranks(role) for role in group)
        cpus, gpus = cluster.cpus_per_worker * size, cluster.gpus_per_worker * size
        found.append(Places(tuple(group), count, cpus=cpus, gpus=gpus))
    return found


def tensor_parallel_size(config: JobConfig) -> int:
    """Processes of one rollout engine."""
    engine: RolloutEngineConfig | None = None
    if isinstance(config, (RLConfig, GenerateConfig)):
        engine = config.rollout.engine
    elif isinstance(config, EvaluateConfig):
        engine = config.engine
    return engine.tensor_parallel_size if isinstance(engine, VllmEngine) else 1


def placement_text(config: JobConfig) -> str:
    """The places of a job as one small table; empty where it is one process.

    Sources of the roles: ``cluster.layout`` and the numbers of ranks.
    """
    if config.cluster.runtime == "inline":
        return ""
    places = places_of(config)
    lines = [f"cluster ({config.cluster.layout}): {total_text(places)}"]
    return "\n".join([*lines, *(f"  {p}" for p in places)])


def total_text(places: Sequence[Places]) -> str:
    """What all places need together, e.g. ``72 GPUs, 65 CPUs``."""
    gpus = sum(p.count * p.gpus for p in places)
    cpus = sum(p.count * p.cpus for p in places)
    return (f"{gpus:g} GPUs, " if gpus else "") + f"{cpus:g} CPUs"
