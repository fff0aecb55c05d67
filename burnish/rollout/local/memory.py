"""Memory of the local engine, for plans.

The engine allocates slots that grow by blocks of positions (``running_batch.py``,
``models/cache_attention.py``). The plan counts them at the length limit.
"""

from __future__ import annotations

from collections.abc import Iterator

from burnish.config.job import JobConfig
from burnish.config.model import Dtype
from burnish.config.roles import RolloutRole
from burnish.config.train import TrainConfig
from burnish.models.attention_kernel import Use, choose_kernel
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
from burnish.rollout.local.decode_graphs import BLOCK, DecodeGraphs
from burnish.rollout.local.running_batch import blocks_of


def role_memory(
    context: Context, role: RolloutRole, engine: LocalEngine, *, shape: ModelShape, demand: Demand
) -> RoleMemory:
    """Return the memory on one rank, by phase."""
    inline, gpu = context.job.inline, context.hardware.gpu is not None
    dtype = role.dtype
    graphs = gpu and engine.cuda_graphs
    cache, slots = local_cache(shape, engine, demand, dtype, graphs=graphs)
    logits = local_logits(shape, slots, graphs=graphs)
    prompt = demand.prompt if role.episodes is None else demand.longest - 1  # of the last turn
    count = max(1, min(slots, engine.max_prefill_tokens // prompt))
    rows = uniform_rows(count, prompt + 1, prompt, group=1)
    kernels = context.hardware.kernels
    flash = gpu and choose_kernel("auto", shape.config, Use(dtype, kernels)).kernel == "flash"
    work = Pass(rows, dtype=dtype, train=False, kernels=kernels, flash=flash)
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
    elif graphs and not engine.sleep_between_rollouts:
        kept_cache = (cache, logits)  # the graphs have memory of their own
    elif role.continues:
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


LAYER_KERNELS, COMPILED_LAYER_KERNELS = 37, 12
"""Kernels of a layer in a decode step, as it is and compiled. 39 were fitted to steps in which a
layer of Qwen 3 had 59 operations. It has 56, or 18 compiled (``benchmarks/compile_layers.py
--decode``)."""
DRAW_KERNELS, SAMPLING_KERNELS = 46, 25
"""Kernels of drawing and of the rows' state in a recorded step; and of sampling that the host
launches."""
BLOCK_LAUNCHES = 6
"""Copies and kernels that the host launches for each block of recorded steps."""


def decode_step(engine: LocalEngine, *, layers: int, length: float) -> DecodeStep:
    """Return the kernels of a decode step, and the positions of the cache that it reads."""
    of_layer = COMPILED_LAYER_KERNELS if engine.compile == "layers" else LAYER_KERNELS
    kernels = float(layers * of_layer)
    if engine.cuda_graphs:
        launched = 2 + BLOCK_LAUNCHES / BLOCK  # two graphs
        return DecodeStep(kernels + DRAW_KERNELS, launched, DecodeGraphs.keys_read(round(length)))
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
        slots = DecodeGraphs.padded(slots)
    capacity = blocks_of(demand.longest)
    size = slots * capacity * bytes_per_token(shape, dtype)
    growth = size // max(2 * len(shape.layers), 1)  # tensors are copied one at a time
    formula = f"{slots} slots x {capacity} positions x {bytes_per_token(shape, dtype)} B"
    return Item("KV cache", size + growth, formula), slots


def local_logits(shape: ModelShape, slots: int, *, graphs: bool) -> Item:
    """Return the memory of a decode step's logits and of the sampling tensors derived from them:
    [slots, vocabulary] fp32."""
    vocabulary = shape.vocab_size
    size, formula = 4 * 4 * slots * vocabulary, f"4 x {slots} x {vocabulary} x 4 B"
    if graphs:  # half precision, fp32, and those that recorded draws read
        size += 3 * 4 * slots * vocabulary
        formula = f"7 x {slots} x {vocabulary} x 4 B, with those of CUDA graphs"
    return Item("logits/loss", size, formula)
