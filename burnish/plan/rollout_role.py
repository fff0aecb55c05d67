"""The plan of a rollout engine: its load, and what the file ``memory.py`` of its kind reports.

``role_memory``: memory on one rank, by phase. ``rows_at_once``: rows that the cache holds.
``decode_step``: kernels of a decode step. ``suggestions``: changes that need less memory.
``settings``: overrides that ``plan --fit`` tries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from burnish.config.base import module_of
from burnish.config.job import JobConfig
from burnish.config.model import Dtype
from burnish.config.roles import JobSpec, RolloutRole
from burnish.plan.engine_profile import Suggestion
from burnish.plan.hardware import Hardware
from burnish.plan.model_state import SIZES, EngineSetup, Item
from burnish.plan.role_base import (
    Context,
    Items,
    RoleMemory,
    positions,
)
from burnish.plan.shapes import ModelShape, shape_of
from burnish.rollout.vllm.weights import FILE_BYTES


def rollout_role(context: Context, role: RolloutRole) -> RoleMemory:
    """Return the memory of the recipe's rollout engine."""
    shape = shape_of(role.model.model_copy(update={"lora": None}))
    memory: RoleMemory = module_of(role.engine, "memory").role_memory(
        context, role, role.engine, shape=shape, demand=demand_of(role, shape)
    )
    return memory


def rows_at_once(role: RolloutRole, hardware: Hardware, shape: ModelShape, length: float) -> int:
    """Return the maximum number of rows of ``length`` tokens that a worker decodes at once."""
    rows: int = module_of(role.engine, "memory").rows_at_once(
        role, role.engine, hardware, shape=shape, length=length
    )
    return rows


def rollout_suggestions(role: RolloutRole) -> Iterator[Suggestion]:
    """Yield suggestions that reduce the memory of the engine."""
    yield from module_of(role.engine, "memory").suggestions(role, role.engine)


def rollout_settings(config: JobConfig, job: JobSpec, hardware: Hardware) -> list[list[str]]:
    """Return overrides of the engine's memory and parts that ``plan --fit`` tries."""
    if job.rollout is None:
        return [[]]
    settings: list[list[str]] = module_of(job.rollout.engine, "memory").settings(
        config, job.rollout, job.rollout.engine, hardware, inline=job.inline
    )
    return settings


def decode_step(role: RolloutRole, shape: ModelShape, length: float) -> DecodeStep:
    """Return the kernels of a decode step whose rows have ``length`` tokens."""
    step: DecodeStep = module_of(role.engine, "memory").decode_step(
        role.engine, layers=len(shape.layers), length=length
    )
    return step


def responses_at_once(role: RolloutRole) -> int:
    """Return the maximum number of training responses (or episodes) that one rollout worker has at
    once."""
    count = -(-role.groups_at_once // role.ranks) * role.samples_per_prompt
    return min(count, _concurrent(role))


def _concurrent(role: RolloutRole) -> int:
    """Return the maximum number of responses or episodes that the recipe runs at once on a
    worker."""
    if role.episodes is None or role.episodes.max_concurrent is None:
        return 1 << 30
    return -(-role.episodes.max_concurrent // role.ranks)


def demand_of(role: RolloutRole, shape: ModelShape) -> Demand:
    """Return the largest load of one rollout worker."""
    limit = positions(shape)
    length, prompt = role.lengths.within(limit)
    new, held_out = length - prompt, role.evaluation
    sequences = responses_at_once(role)
    if held_out is not None:
        prompt = max(prompt, min(held_out.prompt_max_len, limit))
        new = max(new, held_out.generate_max_len or new)
        count = held_out.num_prompts or 1 << 20
        evaluated = -(-count // role.ranks) * held_out.n_samples_per_prompt
        together = role.overlaps and held_out.training_groups == "continue"
        sequences = evaluated + sequences if together else max(evaluated, sequences)
        sequences = min(sequences, _concurrent(role))
    return Demand(sequences, min(prompt, limit - 1), min(new, limit))


def episode_notes(role: RolloutRole, demand: Demand, *, at_once: int) -> tuple[str, ...]:
    """Return the assumptions on episodes, of which an engine computes ``at_once`` or fewer; none
    for single responses."""
    if role.episodes is None:
        return ()
    at_once = min(at_once, demand.sequences)
    return (
        f"{role.name}: a row holds the conversation of an episode, up to max_tokens="
        f"{role.episodes.max_tokens}; the KV cache holds those of all concurrent episodes, at most "
        f"{at_once} at once on an engine",
        f"{role.name}: the memory of prefill is that of the last turn with nothing cached; the "
        "time estimate counts one prefill per episode",
    )


def own_weights(setup: EngineSetup) -> Items:
    """Return the weights of a local engine that does not share the trainer's."""
    size = setup.model.parameters * setup.weight_size
    formula = f"{setup.model.parameters / 1e9:.3f}e9 x {setup.weight_size} B"
    return (Item("parameters", size, formula),)


def staged(setup: EngineSetup) -> Items:
    """Return the copy of new weights that waits in the trainer's process until the engine loads
    it."""
    (weights,) = own_weights(setup)
    return (replace(weights, how=f"staged copy of new weights: {weights.how}"),)


def file_bytes(role: RolloutRole, shape: ModelShape) -> float:
    """Return the maximum size of a file of weights."""
    largest = max(weight.numel for unit in shape.units for weight in unit.base)
    return float(largest * SIZES[role.dtype] + FILE_BYTES)


@dataclass(frozen=True)
class DecodeStep:
    """Kernels of one decode step on a GPU, and the keys that it reads."""

    recorded: float
    """Kernels of a recorded graph, each of which takes a few microseconds at least."""
    launched: float
    """Kernels that the host launches one by one."""
    cached: float
    """Positions of a row's cache that attention reads."""


@dataclass(frozen=True)
class Demand:
    """Load of a rollout engine."""

    sequences: int
    """Number of responses of one generate call."""
    prompt: int
    """Longest prompt, in tokens."""
    new_tokens: int
    """Longest response, in tokens."""

    @property
    def longest(self) -> int:
        """Longest prompt with its response, in tokens."""
        return self.prompt + self.new_tokens


def bytes_per_token(shape: ModelShape, dtype: Dtype) -> int:
    """Return the bytes of keys and values of one token in all layers; 0 for models without
    attention, whose state does not grow."""
    return 2 * len(shape.layers) * shape.kv_heads * shape.head_dim * SIZES[dtype]
