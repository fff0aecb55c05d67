"""Memory of an engine on running servers, for plans: the files of weights."""

from __future__ import annotations

from collections.abc import Iterator

from burnish.config.job import JobConfig
from burnish.config.roles import RolloutRole
from burnish.plan.engine_profile import Suggestion
from burnish.plan.hardware import Hardware
from burnish.plan.memory_plan import PHASES
from burnish.plan.model_state import SIZES, Item
from burnish.plan.role_base import Context, Items, RoleMemory
from burnish.plan.rollout_role import DecodeStep, Demand, episode_notes, file_bytes
from burnish.plan.shapes import ModelShape
from burnish.rollout.servers.config import VllmServers
from burnish.rollout.vllm.memory import LAYER_KERNELS, SAMPLING_KERNELS


def role_memory(
    context: Context, role: RolloutRole, engine: VllmServers, *, shape: ModelShape, demand: Demand
) -> RoleMemory:
    """Return the memory of the process that is the client of the servers (the trainer's, or on Ray
    the controller): a file of weights. That of the servers is not planned."""
    inline = context.job.inline
    file = Item("parameters", file_bytes(role, shape), "a file of weights, in /dev/shm", "host")
    files: Items = () if engine.weights_folder is not None else (file,)
    size = shape.parameters * SIZES[role.dtype]
    reads: Items = ()
    if not role.of_policy:
        reads = (Item("parameters", size, "model read for the servers", "host"), *files)
    staged_weights: Items = ()
    if role.overlaps:  # weights are loaded while the policy is trained
        staged = Item("parameters", size, "staged copy of new weights")
        staged_weights = (*files, *((staged,) if inline else ()))
    resident: dict[str, Items] = {phase: staged_weights for phase in PHASES}
    resident["load"] = ()
    notes = ["rollout: the vLLM servers use their own memory, which is not planned"]
    if not inline:
        notes.append("rollout: the controller, which sends the weights, is on the fullest node")
    return RoleMemory(
        role=role.name,
        ranks=role.ranks,
        phase="rollout",
        pool="main",
        resident=resident,
        passing={"load": reads, "sync": () if staged_weights else files},
        notes=(*notes, *episode_notes(role, demand, at_once=engine.max_concurrency)),
    )


def rows_at_once(
    role: RolloutRole, engine: VllmServers, hardware: Hardware, *, shape: ModelShape, length: float
) -> int:
    """Return the maximum number of rows that a server decodes at once."""
    return engine.slots


def decode_step(engine: VllmServers, *, layers: int, length: float) -> DecodeStep:
    """Return the kernels of a decode step of vLLM with recorded graphs."""
    return DecodeStep(float(layers * LAYER_KERNELS), SAMPLING_KERNELS, length)


def suggestions(role: RolloutRole, engine: VllmServers) -> Iterator[Suggestion]:
    """Yield no suggestion: the memory of a server is not planned."""
    yield from ()


def settings(
    config: JobConfig, role: RolloutRole, engine: VllmServers, hardware: Hardware, *, inline: bool
) -> list[list[str]]:
    """Return the overrides that ``plan --fit`` tries: none."""
    return [[]]
