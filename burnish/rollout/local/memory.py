"""Memory of the local engine, for plans.

The engine allocates slots that grow (``running_batch.py``, ``models/cache_attention.py``). If it
records CUDA graphs, it allocates all positions at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from burnish.config.job import JobConfig
from burnish.config.model import Dtype
from burnish.config.roles import RolloutRole
from burnish.config.train import TrainConfig
from burnish.plan.activations import Pass
from burnish.plan.engine_profile import Suggestion
from burnish.plan.hardware import Hardware
from burnish.plan.memory_plan import PHASES
from burnish.plan.model_state import EngineSetup, Item
from burnish.plan.role_base import (
    Context,
    Items,
    RoleMemory,
    overhead,
    peaks_of,
    uniform_rows,
    with_fragmentation,
)
from burnish.plan.rollout_role import (
    DecodeStep,
    Demand,
    bytes_per_token,
    episode_notes,
    own_weights,
    staged,
)
from burnish.plan.shapes import ModelShape
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.running_batch import FIRST_ROOM


def role_memory(
    context: Context, role: RolloutRole, engine: LocalEngine, *, shape: ModelShape, demand: Demand
) -> RoleMemory:
    """Return the memory on one rank, by phase."""
    inline, gpu = context.job.inline, context.hardware.gpu is not None
    dtype = role.dtype
    graphs = gpu and engine.cuda_graphs
    cache, slots = local_cache(shape, engine, demand, dtype, graphs=graphs)
    logits = local_logits(shape, slots, graphs=graphs, longest=demand.longest)
    prompt = demand.prompt if role.episodes is None else demand.longest - 1  # of the last turn
    count = max(1, min(slots, engine.max_prefill_tokens // prompt))
    rows = uniform_rows(count, prompt + 1, prompt, group=1)
    work = Pass(rows, dtype=dtype, train=False, kernels=context.hardware.kernels)
    setup = EngineSetup(
        shape=shape,
        train=TrainConfig(train_batch_size=1),
        precision=role.precision,
        trainable=False,
    )
    peaks, extra, note = peaks_of(setup, work, context.overhead["fallback_margin"])
    prefill = Item("activations", max(0.0, peaks.activations - peaks.output), "prefill, traced")
    weights = () if inline and role.shares_weights else own_weights(setup)
    always = (*(() if inline else overhead(context, 1)), *weights)
    waiting = staged(setup) if inline and role.overlaps else ()
    passing = [cache, logits, prefill]
    if not gpu and dtype == "fp16":
        passing.append(Item("parameters", 4.0 * shape.parameters, "fp32 copies for the CPU"))
    kept_cache: Items = ()
    if role.overlaps:  # sampling continues in all phases
        kept_cache = with_fragmentation(context, tuple(passing))
        passing = []
    elif role.continues or (graphs and not engine.sleep_between_rollouts):
        kept_cache = (cache,)
    resident: dict[str, Items] = {phase: (*always, *waiting, *kept_cache) for phase in PHASES}
    resident["load"] = always
    loads: Items = ()
    if weights and gpu:
        loads = (Item("parameters", weights[0].bytes, f"model file: {weights[0].how}", "host"),)
    return RoleMemory(
        role=role.name,
        ranks=role.ranks,
        phase="rollout",
        pool="main" if inline else role.name,
        resident=resident,
        passing={
            "load": loads,
            "rollout": with_fragmentation(
                context, tuple(i for i in passing if i not in kept_cache)
            ),
        },
        passes=(work,),
        notes=(
            *((f"rollout: {note}",) if note else ()),
            *episode_notes(role, demand, at_once=slots),
        ),
        guessed=extra,
    )


def rows_at_once(
    role: RolloutRole, engine: LocalEngine, hardware: Hardware, *, shape: ModelShape, length: float
) -> int:
    """Return the maximum number of rows that are decoded at once."""
    return engine.slots


LAYER_KERNELS, SAMPLING_KERNELS = 39, 25
"""Kernels of a decode step: of a layer, and of sampling, outside of the graph."""


def decode_step(engine: LocalEngine, *, layers: int, length: float) -> DecodeStep:
    """Return the kernels of a decode step, and the positions of the cache that it reads: graphs
    exist for powers of two."""
    kernels = float(layers * LAYER_KERNELS)
    if engine.cuda_graphs:
        return DecodeStep(kernels, SAMPLING_KERNELS, _power_of_two(round(length)))
    return DecodeStep(0.0, kernels + SAMPLING_KERNELS, length)


def suggestions(role: RolloutRole, engine: LocalEngine) -> Iterator[Suggestion]:
    """Yield suggestions that reduce the memory of the engine."""
    if engine.max_batch_size > 1:
        override = f"{role.key}.max_batch_size={engine.max_batch_size // 2}"
        yield Suggestion((override,), "fewer concurrent samples")


def settings(
    config: JobConfig, role: RolloutRole, engine: LocalEngine, hardware: Hardware, *, inline: bool
) -> list[list[str]]:
    """Return the overrides that ``plan --fit`` tries: none."""
    return [[]]


def local_cache(
    shape: ModelShape, config: LocalEngine, demand: Demand, dtype: Dtype, *, graphs: bool
) -> tuple[Item, int]:
    """Return the local engine's cache and its number of slots."""
    slots = min(config.max_batch_size, max(demand.sequences, 1))
    if graphs:
        slots, capacity = _power_of_two(slots), demand.longest
    else:
        capacity = demand.prompt + min(demand.new_tokens, FIRST_ROOM)
        while capacity < demand.longest:
            capacity = (capacity + 1) + (capacity + 1) // 2
    size = slots * capacity * bytes_per_token(shape, dtype)
    grow = (
        0 if graphs else size // max(2 * len(shape.layers), 1)
    )  # tensors are copied one at a time
    formula = f"{slots} slots x {capacity} positions x {bytes_per_token(shape, dtype)} B"
    return Item("KV cache", size + grow, formula), slots


def local_logits(shape: ModelShape, slots: int, *, graphs: bool, longest: int) -> Item:
    """Return the memory of a decode step's logits and of the sampling tensors derived from them:
    [slots, vocabulary] fp32."""
    vocabulary = shape.vocab_size
    size, formula = 4 * 4 * slots * vocabulary, f"4 x {slots} x {vocabulary} x 4 B"
    if graphs:  # each recorded graph keeps its own result
        lengths = max(1, (_power_of_two(longest) // 64).bit_length())
        size += 2 * 4 * _power_of_two(slots) * vocabulary * lengths
        formula += f", and the outputs of CUDA graphs for {lengths} lengths"
    return Item("logits/loss", size, formula)


def _power_of_two(count: int) -> int:
    return 1 << max(0, count - 1).bit_length()
