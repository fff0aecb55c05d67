"""Memory of roles that are in host memory between their phases or released after them, and the
roles that are on a device at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from burnish.plan.memory_plan import PHASES
from burnish.plan.model_state import Item, total
from burnish.plan.role_base import Items, RoleMemory
from burnish.train.host_memory import CHUNK_BYTES

_MOVED = ("parameters", "gradients", "optimizer")
HOW = "offloaded between phases"


def with_offload(role: RoleMemory, state: Sequence[Item], *, gpu: bool) -> RoleMemory:
    """Return the memory of a role whose ``state`` is in host memory between its phases. On a GPU
    the pinned buffers exist during all phases."""
    moved = [item for item in state if item.name in _MOVED and item.where == "device"]
    size = total(moved)
    if gpu:
        size = CHUNK_BYTES * -(-size // CHUNK_BYTES)
    copy = Item("parameters", size, f"{HOW}: {total(moved) / 1e9:.3g} GB", "host")
    resident, offloaded = dict(role.resident), {}
    for phase, items in role.resident.items():
        offloaded[phase] = (*(item for item in items if item not in moved), copy)
        if gpu:
            resident[phase] = (*items, copy)
    return replace(role, resident=resident, offloaded=offloaded)


def together(roles: Mapping[str, RoleMemory], phase: str) -> Iterator[dict[str, RoleMemory]]:
    """Yield the roles as they are at the same time in a phase of the plan, once for each phase of
    the run that it contains.

    ``log-probs`` contains one for every kind of model. Models are loaded one after the other, and
    an offloaded one leaves the device before the next one is loaded. A released one is alone in its
    phases.
    """
    released = {name for name, role in roles.items() if role.released}
    if released:
        if any(phase in roles[name].passing for name in released):
            yield {n: r if n in released else _absent(r) for n, r in roles.items()}
        roles = {n: _absent(r) if n in released else r for n, r in roles.items()}
    if all(role.offloaded is None for role in roles.values()):
        yield dict(roles)
        return
    if phase == "load":
        for name in roles:
            yield {n: _loading(role, on_device=n == name) for n, role in roles.items()}
        return
    working = {role.phase for role in roles.values() if phase in role.passing}
    working |= {role.phase for role in roles.values() if phase == role.phase == "rollout"}
    for working_role in sorted(working) or [""]:
        yield {
            n: _in(role, phase, on_device=role.phase == working_role) for n, role in roles.items()
        }


def _absent(role: RoleMemory) -> RoleMemory:
    """Return a role whose process exists, without its model."""
    resident = {
        phase: tuple(item for item in items if item.name == "overhead")
        for phase, items in role.resident.items()
    }
    return replace(role, resident=resident, passing={}, first={}, offloaded=None, phase="")


def _in(role: RoleMemory, phase: str, *, on_device: bool) -> RoleMemory:
    """Return a role in a phase of the run. ``on_device``: the phase is the role's own. The rollout
    engine is awake while reward models score, which the plan counts as ``log-probs``."""
    if on_device and role.phase == phase == "rollout":
        return role
    if on_device and role.offloaded is None and role.phase == "rollout" and phase == "log-probs":
        return replace(role, resident={**role.resident, phase: role.resident["rollout"]})
    if on_device:
        return role
    return replace(role, resident=role.offloaded or role.resident, passing={})


def _loading(role: RoleMemory, *, on_device: bool) -> RoleMemory:
    """Return a role while a model is loaded. ``on_device``: it is the role's own. A sleeping
    rollout engine has freed its cache before the next model is loaded."""
    if on_device:
        return role
    if role.phase == "rollout" and role.offloaded is None:
        resident = {phase: role.resident["sync"] for phase in PHASES}
        return replace(role, resident=resident, passing={})
    return replace(role, resident=role.offloaded or role.resident, passing={})


def without_offload(roles: Mapping[str, RoleMemory]) -> dict[str, RoleMemory]:
    """Return the memory of the same roles if they stayed on their devices."""

    def stays(items: Items) -> Items:
        return tuple(item for item in items if not item.how.startswith(HOW))

    return {
        name: replace(
            role, offloaded=None, resident={p: stays(i) for p, i in role.resident.items()}
        )
        for name, role in roles.items()
    }
