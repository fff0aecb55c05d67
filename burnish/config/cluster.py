"""Config of the runtime: one process, the ranks of a launcher, or groups of workers on a Ray
cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, get_args

from pydantic import Field

from burnish.config.base import Node

Layout = Literal["colocate_all", "colocate_actor_ref", "colocate_critic_reward", "separate"]
ClusterRole = Literal["policy", "reference", "teacher", "critic", "reward", "rollout"]
TrainedOrFrozen = Literal["policy", "reference", "teacher", "critic", "reward"]

COLOCATED: dict[Layout, frozenset[ClusterRole]] = {
    "colocate_all": frozenset({"policy", "reference", "teacher", "critic", "reward", "rollout"}),
    "colocate_actor_ref": frozenset({"policy", "reference", "teacher"}),
    "colocate_critic_reward": frozenset({"critic", "reward"}),
    "separate": frozenset(),
}
"""Roles that share placement in each layout: worker i of each role is in the same place."""

_HARDWARE = re.compile(r"(?:[1-9]\d*x){0,2}[A-Za-z]\S*")


class ClusterConfig(Node):
    """One process, ranks of a launcher, or groups of workers on Ray."""

    runtime: Literal["inline", "ray", "spmd"] = "inline"
    """``inline``: this process. ``ray``: each role is a group of worker processes, on this machine
    or a cluster. ``spmd``: every rank that torchrun, accelerate or srun started runs the
    loop; detected, so leave the key out."""
    ray_address: str | None = None
    """Running Ray cluster (``auto``, or ``host:port`` of its head). None: one on this machine,
    stopped with the run."""
    layout: Layout = "colocate_all"
    """Roles that share places (GPUs). colocate_all: all; colocate_actor_ref: policy, reference,
    teacher; colocate_critic_reward: critic, reward models; separate: none. They need equal numbers
    of workers. Each reward model has its own workers."""
    policy_ranks: int = Field(1, ge=1)
    """Data-parallel ranks of the policy. Under a launcher: its number of ranks."""
    reference_ranks: int | None = Field(None, ge=1)
    """Ranks of the reference model. None: ``policy_ranks``."""
    teacher_ranks: int | None = Field(None, ge=1)
    """Ranks of the teacher. None: ``policy_ranks``."""
    critic_ranks: int | None = Field(None, ge=1)
    """Ranks of the critic. None: ``policy_ranks``."""
    reward_ranks: int | None = Field(None, ge=1)
    """Ranks of each reward model that scores responses. None: ``policy_ranks``."""
    rollout_workers: int | None = Field(None, ge=1)
    """Rollout engines that share the requests. None: ``policy_ranks``. On the GPUs of other roles:
    their ranks / ``tensor_parallel_size``. vLLM servers: leave it out."""
    cpus_per_worker: float = Field(1.0, gt=0)
    """CPUs per place, shared by its workers, which use that many threads."""
    gpus_per_worker: float = Field(0.0, ge=0)
    """GPUs per place, shared by its workers. 0: run on CPUs."""
    offload_between_phases: tuple[TrainedOrFrozen, ...] = ()
    """Roles whose weights, gradients and optimizer state are moved to host memory while roles that
    share their GPUs compute."""
    hardware: str | None = None
    """Intended cluster, as NODESxGPUSxNAME (4x8xA800-80GB; 8xA800-80GB: one node), for ``burnish
    plan`` without ``--cluster``, and for a run's memory check if the starting process has no GPUs.
    None: this machine."""
    start_timeout_s: float = Field(300.0, gt=0)
    """Seconds until workers not started and connected are named as missing. Not a limit of later
    computation."""
    heartbeat_timeout_s: float = Field(60.0, gt=0)
    """Seconds until a hung worker is detected while a call
    waits for it. A thread reports six times in this period, also during long calls. Increase it if
    native code holds the interpreter lock longer (large pickles, first imports from slow disks)."""
    call_timeout_s: float = Field(3600.0, gt=0)
    """Timeout of one call of a worker that still reports; it is
    named, and replaced as if it hung. Also of collectives with waits for a disk or a transfer:
    loading, saving, weight sync."""
    collective_timeout_s: float = Field(600.0, gt=0)
    """Timeout of one collective in a pass or optimizer step, at most ``call_timeout_s``. The
    waiting ranks are named, with their collectives, and the group is replaced as if it hung. Must
    exceed the lag of the slowest rank. (NCCL logs the collective itself and ends the process.)"""
    max_restarts: int = Field(3, ge=0)
    """Maximum replacements of lost workers; simultaneous losses count once."""

    def ranks(self, role: str) -> int:
        """Return the number of workers of a role."""
        sizes = {
            "reference": self.reference_ranks,
            "teacher": self.teacher_ranks,
            "critic": self.critic_ranks,
            "reward": self.reward_ranks,
            "rollout": self.rollout_workers,
        }.get(role)
        return sizes or self.policy_ranks

    @property
    def shared_roles(self) -> frozenset[ClusterRole]:
        """Return the roles that share a device with each other, if the job has them."""
        return COLOCATED["colocate_all" if self.runtime == "inline" else self.layout]

    def rules(self) -> Iterator[str]:
        if self.hardware is not None and not _HARDWARE.fullmatch(self.hardware):
            yield (
                f"hardware={self.hardware!r} is not of the form NODESxGPUSxNAME, e.g. "
                "4x8xA800-80GB (8xNAME: one node; NAME: one GPU)"
            )
        if self.runtime != "ray" and self.ray_address is not None:
            yield (
                f"ray_address={self.ray_address!r} has no effect with runtime={self.runtime}, "
                "which does not use Ray; set runtime=ray"
            )
        if self.runtime == "spmd":
            yield from self._spmd_rules()
        if self.runtime == "inline":
            several = [r for r in get_args(ClusterRole) if self.ranks(r) > 1]
            if several:
                yield (
                    f"{several[0]} has {self.ranks(several[0])} workers, but runtime=inline has "
                    "one process; set runtime=ray, or start the ranks with torchrun (jobs without "
                    "a rollout engine)"
                )

    def _spmd_rules(self) -> Iterator[str]:
        """Yield an error for each key that has no effect on ranks that all run the entire job."""
        for name in ("reference_ranks", "teacher_ranks", "critic_ranks", "rollout_workers"):
            value = self.model_dump()[name]
            if value not in (None, self.policy_ranks):
                yield (
                    f"{name}={value} with runtime=spmd: every role is on all "
                    f"{self.policy_ranks} ranks of the launcher; remove {name}, or use runtime=ray"
                )
        if self.layout != "colocate_all":
            yield (
                f"layout={self.layout} with runtime=spmd: every rank holds all roles; remove "
                "layout, or use runtime=ray"
            )
        if self.offload_between_phases:
            yield (
                f"offload_between_phases={list(self.offload_between_phases)} with runtime=spmd: "
                "the jobs of a launcher have no phases in which a model is unused; remove "
                "offload_between_phases, or use runtime=ray"
            )
        if self.gpus_per_worker not in (0, 1):
            yield (
                f"gpus_per_worker={self.gpus_per_worker:g} with runtime=spmd: a rank uses the GPU "
                "with the number LOCAL_RANK; remove gpus_per_worker, or use runtime=ray"
            )
