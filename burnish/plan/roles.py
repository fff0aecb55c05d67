"""Memory of every role of a recipe on one rank, by phase.

``predict.py`` combines the roles that share a GPU or node.
"""

from __future__ import annotations

from dataclasses import replace

from burnish.config.roles import JobSpec, RolloutRole
from burnish.plan.hardware import Hardware
from burnish.plan.role_base import Context, Items, RoleMemory
from burnish.plan.rollout_role import rollout_role
from burnish.plan.train_role import train_role


def roles_memory(
    job: JobSpec, hardware: Hardware, assume: frozenset[str] = frozenset()
) -> list[RoleMemory]:
    """Return the memory of every role of the job."""
    context = Context(job, hardware, assume)
    memories: list[RoleMemory] = []
    for role in job.roles:
        if isinstance(role, RolloutRole):
            memory = rollout_role(context, role)
        else:
            memory = train_role(context, role)
        if job.inline and memories:  # one process, whose overhead is already counted
            memory = replace(
                memory, resident={p: _no_process(i) for p, i in memory.resident.items()}
            )
            if memory.offloaded is not None:
                offloaded = {p: _no_process(i) for p, i in memory.offloaded.items()}
                memory = replace(memory, offloaded=offloaded)
        memories.append(memory)
    return memories


_PROCESS = ("CUDA context", "a Python process", "NCCL")


def _no_process(items: Items) -> Items:
    return tuple(i for i in items if i.name != "overhead" or not i.how.startswith(_PROCESS))
