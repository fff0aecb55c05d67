"""Which groups of workers a job has, each named by its role, and what a recipe cannot ask of their
places."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import count
from typing import Any, cast

from burnish.config.algorithm import GaeAdvantage
from burnish.config.cluster import COLOCATED, ClusterConfig, ClusterRole
from burnish.config.rewards import ModelReward
from burnish.config.rollout import VllmEngine


def roles_of(config: Any) -> list[str]:
    """The groups of workers of a job, by their roles. Where a job has several reward models they
    are ``reward``, ``reward 2`` and so on, in the order of the recipe."""
    if config.job == "sft":
        return ["policy"]
    if config.job == "rm":
        return ["reward"]
    if config.job == "distill":
        return ["policy", "teacher"]
    if config.job == "preference":
        return ["policy", "reference"] if config.needs_reference and _apart(config) else ["policy"]
    rewards: list[str] = []
    for entry in config.rewards:
        if isinstance(entry, ModelReward):
            rewards.append(free_name("reward", rewards))
    if config.job != "rl":
        return ["rollout", *rewards]
    roles = ["policy", "rollout", *rewards]
    if isinstance(config.algorithm.advantage, GaeAdvantage):
        roles.append("critic")
    if config.algorithm.kl.init_kl_coef and _apart(config):
        roles.append("reference")
    if config.teacher is not None:
        roles.append("teacher")
    return roles


def _apart(config: Any) -> bool:
    """Whether the reference is a model of its own, and not the base of a LoRA policy."""
    own = config.reference is not None and config.reference.model is not None
    return config.model.lora is None or own


def free_name(role: str, taken: Container[str]) -> str:
    """The name of a further group in a role.

    >>> free_name("reward", ["reward"])
    'reward 2'
    """
    return next(n for i in count(1) if (n := role if i == 1 else f"{role} {i}") not in taken)


def role_of(name: str) -> ClusterRole:
    """The role of a group.

    >>> role_of("reward 2")
    'reward'
    """
    return cast(ClusterRole, name.partition(" ")[0])


def number_of(name: str) -> int:
    """Which group of its role it is, from 0."""
    return int(name.partition(" ")[2] or 1) - 1


def sharing(cluster: ClusterConfig, roles: Sequence[str]) -> list[str]:
    """Those groups that stand in the same places."""
    return [name for name in roles if role_of(name) in COLOCATED[cluster.layout]]


def rollout_parallel_size(config: Any) -> int:
    """Parts of a job's rollout engine, each on a GPU; 1 where it has none."""
    engine = vars(vars(config).get("rollout", config)).get("engine")
    return engine.tensor_parallel_size if isinstance(engine, VllmEngine) else 1


def placement_rules(config: Any) -> Iterator[str]:
    """One sentence for each thing in a recipe that cannot be about the places of its job's groups,
    with the key in front."""
    cluster: ClusterConfig = config.cluster
    together = sharing(cluster, roles_of(config))
    for name in together[1:]:
        first = together[0]
        if cluster.ranks(first) != cluster.ranks(name):
            yield (
                f"cluster: layout={cluster.layout} puts {first} and {name} into the same places, "
                f"and they have {cluster.ranks(first)} and {cluster.ranks(name)} workers; give "
                "them equal numbers (a reward model has policy_ranks), or use layout=separate"
            )
    size = rollout_parallel_size(config)
    if cluster.runtime == "inline" or size == 1 or not cluster.gpus_per_worker:
        return
    if "rollout" in together and len(together) > 1:
        other = next(name for name in together if name != "rollout")
        yield (
            f"recipe: cluster.layout={cluster.layout} puts each rollout worker on its {other} "
            f"rank's GPU, and tensor_parallel_size={size} needs {size} GPUs for one; use "
            "tensor_parallel_size=1, or a layout that keeps the rollout apart (separate)"
        )
    elif cluster.gpus_per_worker != 1:
        yield (
            f"recipe: cluster.gpus_per_worker={cluster.gpus_per_worker:g} with "
            f"tensor_parallel_size={size}: a rollout worker takes gpus_per_worker x "
            "tensor_parallel_size GPUs, one for each part; use gpus_per_worker=1"
        )
