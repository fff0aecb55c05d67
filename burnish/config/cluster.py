"""Where the parts of a job run: in this process, or as groups of workers on a Ray cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from burnish.config.base import Node

Layout = Literal["colocate_all", "colocate_actor_ref", "colocate_critic_reward", "separate"]
ClusterRole = Literal["policy", "reference", "teacher", "critic", "reward", "rollout"]

COLOCATED: dict[Layout, frozenset[ClusterRole]] = {
    "colocate_all": frozenset({"policy", "reference", "teacher", "critic", "reward", "rollout"}),
    "colocate_actor_ref": frozenset({"policy", "reference", "teacher"}),
    "colocate_critic_reward": frozenset({"critic", "reward"}),
    "separate": frozenset(),
}
"""Which roles share their places: worker i of each is in the same place."""

_HARDWARE = re.compile(r"(?:[1-9]\d*x){0,2}[A-Za-z]\S*")


class ClusterConfig(Node):
    """One process, or groups of workers on Ray."""

    runtime: Literal["inline", "ray"] = "inline"
    """``inline``: everything in this process. ``ray``: every role is a group of worker processes,
    on this machine or on a cluster; the loop and its numbers are the same."""
    ray_address: str | None = None
    """Address of a running Ray cluster (``auto``, or ``host:port`` of its head). None: a Ray of our
    own is started on this machine and ended with the run."""
    layout: Layout = "colocate_all"
    """Which roles share their places (GPUs). colocate_all: all of them; colocate_actor_ref: policy,
    reference and teacher; colocate_critic_reward: critic and reward models; separate: none. Those
    that share have equal numbers of workers. Every reward model has workers of its own."""
    policy_ranks: int = Field(1, ge=1)
    """Data-parallel ranks of the policy."""
    reference_ranks: int | None = Field(None, ge=1)
    """Ranks of the reference model. None: as the policy."""
    teacher_ranks: int | None = Field(None, ge=1)
    """Ranks of the teacher. None: as the policy."""
    critic_ranks: int | None = Field(None, ge=1)
    """Ranks of the critic. None: as the policy."""
    rollout_workers: int | None = Field(None, ge=1)
    """Rollout engines that share the requests. None: as many as the policy has ranks."""
    cpus_per_worker: float = Field(1.0, gt=0)
    """CPUs that a place has; the workers in it share them, and use that many threads."""
    gpus_per_worker: float = Field(0.0, ge=0)
    """GPUs that a place has; the workers in it share them. 0: on CPUs."""
    hardware: str | None = None
    """The cluster that the recipe is written for, as NODESxGPUSxNAME (4x8xA800-80GB; 8xA800-80GB
    is one node). ``burnish plan`` assumes it unless ``--cluster`` is given, and the memory check of
    a run does if the process that starts it has no GPUs of its own. It reserves nothing. None:
    this machine."""
    start_timeout_s: float = Field(300.0, gt=0)
    """Longest wait until all workers have started and met; then the missing ones are named. It
    limits nothing of what they compute later."""
    heartbeat_timeout_s: float = Field(60.0, gt=0)
    """Within how many seconds a worker that hangs (stopped, its interpreter in a deadlock, its
    machine gone) is found while something waits for it. A thread of the worker reports six times
    in that time, so long calls and waiting for other ranks are no matter; native code that holds
    Python's interpreter lock for longer is (a large pickle, a library that loads for the first
    time from a slow disk): then choose more."""
    call_timeout_s: float = Field(3600.0, gt=0)
    """Longest wait for one call of a worker that does report (a whole forward_backward, say); then
    it is named, and replaced as if it hung. Also the limit of collectives in which ranks wait for a
    disk or a transfer: loading, saving, handing weights over."""
    collective_timeout_s: float = Field(600.0, gt=0)
    """Longest that a rank waits for the others in one collective of a forward/backward pass or an
    optimizer step; ``call_timeout_s`` if that is less. Then the waiting ranks are named, each with
    its collective, and the group is replaced as if it hung. It must exceed the time by which the
    slowest rank is behind the fastest. (NCCL logs the collective itself, and ends the process.)"""
    max_restarts: int = Field(3, ge=0)
    """How often lost workers are replaced in one run; those that are lost at once count once."""

    def ranks(self, role: str) -> int:
        """Workers of a role. (Reward models have as many as the policy.)"""
        own = {
            "reference": self.reference_ranks,
            "teacher": self.teacher_ranks,
            "critic": self.critic_ranks,
            "rollout": self.rollout_workers,
        }.get(role)
        return own or self.policy_ranks

    def rules(self) -> Iterator[str]:
        if self.hardware is not None and not _HARDWARE.fullmatch(self.hardware):
            yield (
                f"hardware={self.hardware!r} is not of the form NODESxGPUSxNAME, e.g. "
                "4x8xA800-80GB (8xNAME: one node; NAME: one GPU)"
            )
        if self.runtime == "inline":
            if self.ray_address is not None:
                yield "ray_address is set and runtime=inline uses no Ray; set runtime=ray"
            roles: tuple[ClusterRole, ...] = ("policy", "reference", "teacher", "critic", "rollout")
            several = [r for r in roles if self.ranks(r) > 1]
            if several:
                yield (
                    f"{several[0]} has {self.ranks(several[0])} workers and runtime=inline has one "
                    "process; set runtime=ray"
                )
