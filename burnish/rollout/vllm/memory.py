"""Memory of vLLM, for plans.

vLLM takes its share of the GPU. The part not needed by weights and its profiling pass becomes
cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from burnish.config.job import JobConfig
from burnish.config.model import Dtype
from burnish.config.placement import placement_groups
from burnish.config.roles import RolloutRole
from burnish.plan.engine_profile import Suggestion
from burnish.plan.hardware import Hardware
from burnish.plan.memory_plan import PHASES
from burnish.plan.model_state import SIZES, Item
from burnish.plan.role_base import Context, Items, RoleMemory, overhead
from burnish.plan.rollout_role import (
    DecodeStep,
    Demand,
    bytes_per_token,
    demand_of,
    episode_notes,
    file_bytes,
)
from burnish.plan.shapes import ModelShape
from burnish.rollout.vllm.config import VllmEngine
from burnish.rollout.vllm.engine import CPU_BLOCK


def role_memory(
    context: Context, role: RolloutRole, engine: VllmEngine, *, shape: ModelShape, demand: Demand
) -> RoleMemory:
    """Return the memory on one rank, by phase."""
    dtype = role.dtype
    common: dict[str, Any] = {"role": role.name, "ranks": role.ranks, "pool": "vllm"}
    common |= {"phase": "rollout", "keeps_peak": False}
    size = shape.parameters * SIZES[dtype]
    model = Item("parameters", size, "model read by the worker", "host")
    reads = () if role.of_policy else (model,)
    notes = episode_notes(role, demand, at_once=engine.max_num_seqs)
    if context.hardware.gpu is None:
        always = _processes_on_cpu(context, engine, vllm_on_cpu(shape, engine, demand, dtype))
        return RoleMemory(
            **common,
            resident={phase: always for phase in PHASES},
            passing={"load": tuple(replace(i, where="device") for i in reads)},
            notes=notes,
        )
    items = vllm_on_gpu(
        shape,
        engine,
        demand,
        dtype=dtype,
        gpu_bytes=context.hardware.gpu.bytes,
        overhead=dict(context.overhead),
    )
    process = overhead(context, engine.tensor_parallel_size)
    if engine.tensor_parallel_size > 1:  # one process per GPU, besides the worker
        process += engine.tensor_parallel_size * tuple(i for i in process if i.where == "host")
    awake: Items = (*process, items.weights, items.cache, items.rest)
    resident: dict[str, Items] = {phase: awake for phase in PHASES}
    if engine.sleep_between_rollouts:
        asleep = Item("overhead", context.overhead["vllm_asleep_gb"] * 1e9, "vLLM asleep")
        sleeping: Items = (*(i for i in process if i.where == "host"), asleep)
        resident = {phase: sleeping for phase in PHASES}
        resident |= {phase: awake for phase in ("load", "rollout")}
        resident["sync"] = (*process, items.weights, items.rest)  # cache not yet allocated
    first: dict[str, Items] = {"load": reads}
    if engine.tensor_parallel_size > 1:
        copy = _weight_file(context, role, engine, shape=shape)
        first = {"load": (*reads, copy) if reads else (), "sync": (copy,)}
    if context.has_store:
        store = replace(model, how="weights of the last sync, in this node's object store")
        for phase in PHASES[1:] if role.overlaps else ("sync", "rollout"):
            first[phase] = (*first.get(phase, ()), store)
    return RoleMemory(
        **common,
        resident=resident,
        passing={},
        first=first,
        problem=items.problem,
        notes=(
            f"rollout: vLLM's KV cache has space for {items.cache_tokens} tokens, "
            f"{items.cache_tokens / demand.longest:.1f} rows of {demand.longest}",
            *notes,
        ),
    )


def _processes_on_cpu(context: Context, engine: VllmEngine, each: Items) -> Items:
    """Return the memory of an engine's processes: the worker, which is the only one or has no
    tensors, and one with the tensors ``each`` per part of the model."""
    parts = engine.tensor_parallel_size
    count = 1 if parts == 1 else 1 + parts
    size = context.overhead["vllm_process_gb"] * 1e9
    return (*(count * (Item("overhead", size, "a Python process with vLLM"),)), *(parts * each))


def _weight_file(
    context: Context, role: RolloutRole, engine: VllmEngine, *, shape: ModelShape
) -> Item:
    """Return the files of weights, one for each engine on a node, that vLLM's processes read."""
    engines = min(role.ranks, context.hardware.gpus_per_node // engine.tensor_parallel_size)
    formula = "a file of weights for the processes of each engine on the node, in /dev/shm"
    size = file_bytes(role, shape) * max(1, engines)
    return Item("parameters", size, formula, "host")


def rows_at_once(
    role: RolloutRole, engine: VllmEngine, hardware: Hardware, *, shape: ModelShape, length: float
) -> int:
    """Return the maximum number of rows of ``length`` tokens that are decoded at once."""
    if hardware.gpu is None:
        return engine.slots
    memory = vllm_on_gpu(
        shape,
        engine,
        demand_of(role, shape),
        dtype=role.dtype,
        gpu_bytes=hardware.gpu.bytes,
        overhead=dict(hardware.tables.overhead),
    )
    return max(1, min(engine.slots, int(memory.cache_tokens / max(length, 1))))


LAYER_KERNELS, SAMPLING_KERNELS = 10, 20
"""Kernels of a decode step of vLLM, whose kernels are fused: of a layer, and of sampling. Assumed,
not measured."""


def decode_step(engine: VllmEngine, *, layers: int, length: float) -> DecodeStep:
    """Return the kernels of a decode step."""
    kernels = float(layers * LAYER_KERNELS)
    if engine.enforce_eager:
        return DecodeStep(0.0, kernels + SAMPLING_KERNELS, length)
    return DecodeStep(kernels, SAMPLING_KERNELS, length)


def suggestions(role: RolloutRole, engine: VllmEngine) -> Iterator[Suggestion]:
    """Yield suggestions that reduce the memory of the engine."""
    share = round(0.75 * engine.gpu_memory_utilization, 2)
    fewer = "less GPU memory for vLLM: fewer concurrent samples"
    yield Suggestion((f"{role.key}.gpu_memory_utilization={share}",), fewer)


def settings(
    config: JobConfig, role: RolloutRole, engine: VllmEngine, hardware: Hardware, *, inline: bool
) -> list[list[str]]:
    """Return the overrides that ``plan --fit`` tries: shares of a GPU, or parts of the model."""
    if hardware.gpu is None:
        return [[]]
    now, path = engine.gpu_memory_utilization, role.key
    shares = [s for s in (0.25, 0.35, 0.5, 0.6) if abs(s - now) > 0.04]
    alone = not inline and any(
        placement.roles == ("rollout",) for placement in placement_groups(config)
    )
    overrides: list[list[str]] = [[]]
    if not alone:
        overrides += [[f"{path}.gpu_memory_utilization={s}"] for s in shares]
    if alone and config.cluster.gpus_per_worker == 1:
        sizes = [n for n in (1, 2, 4, 8) if n != engine.tensor_parallel_size]
        overrides += [
            [f"{path}.tensor_parallel_size={n}"] for n in sizes if n <= hardware.gpus_per_node
        ]
    return overrides


@dataclass(frozen=True)
class VllmMemory:
    """Memory of vLLM on one GPU."""

    weights: Item
    cache: Item
    rest: Item
    """Activations of the profiling pass, and recorded graphs."""
    cache_tokens: int
    """Capacity of the cache in tokens, over all GPUs of the engine."""
    problem: str | None = None
    """Reason why vLLM cannot start."""


def vllm_on_gpu(
    shape: ModelShape,
    config: VllmEngine,
    demand: Demand,
    *,
    dtype: Dtype,
    gpu_bytes: float,
    overhead: dict[str, float],
) -> VllmMemory:
    """Return vLLM's memory within ``gpu_memory_utilization`` of a GPU: weights, activations and
    graphs, and the rest as cache."""
    parts = config.tensor_parallel_size
    size = shape.parameters * SIZES[dtype] / parts
    weights = Item(
        "parameters", size, f"{shape.parameters / 1e9:.3f}e9 x {SIZES[dtype]} B / {parts}"
    )
    tokens = int(max(overhead["vllm_profile_tokens"], config.max_num_seqs))
    width = max(shape.inner_size, shape.hidden_size)
    pass_bytes = tokens * (6 * shape.hidden_size + 3 * width / parts) * SIZES[dtype]
    pass_bytes += config.max_num_seqs * shape.vocab_size * 4 * 3
    graphs = 0.0 if config.enforce_eager else overhead["vllm_graphs_gb"] * 1e9
    formula = (
        f"profiling pass of {tokens} tokens, logits of {config.max_num_seqs} rows, CUDA graphs"
    )
    rest = Item("activations", pass_bytes + graphs, formula)
    share = config.gpu_memory_utilization * gpu_bytes
    left = config.kv_cache_bytes or share - weights.bytes - rest.bytes
    per_token = bytes_per_token(shape, dtype) / min(parts, max(1, shape.kv_heads))
    held = int(max(left, 0) / max(1.0, per_token))
    cache_how = (
        f"kv_cache_bytes: {held} tokens"
        if config.kv_cache_bytes
        else f"rest of {config.gpu_memory_utilization:g} x {gpu_bytes / 1e9:.1f} GB: {held} tokens"
    )
    problem = None
    if held < demand.longest:
        problem = (
            f"vLLM's KV cache has space for {held} tokens, but a row has up to {demand.longest}; "
            f"weights take {weights.bytes / 1e9:.1f} of vLLM's {share / 1e9:.1f} GB: raise "
            "rollout.engine.gpu_memory_utilization or tensor_parallel_size"
        )
    cache = Item("KV cache", max(left, 0), cache_how)
    return VllmMemory(weights, cache, rest, held, problem)


def vllm_on_cpu(
    shape: ModelShape, config: VllmEngine, demand: Demand, dtype: Dtype
) -> tuple[Item, Item]:
    """Return the weights and the cache of one process."""
    size = shape.parameters * SIZES[dtype] / config.tensor_parallel_size
    blocks = -(-demand.longest // CPU_BLOCK) + 1
    least = blocks * CPU_BLOCK * bytes_per_token(shape, dtype)
    cache = config.cpu_cache_bytes(least)
    return (
        Item("parameters", size, f"{shape.parameters} x {SIZES[dtype]} B"),
        Item("KV cache", cache, f"{config.max_num_seqs} rows, at most 4 GiB"),
    )
