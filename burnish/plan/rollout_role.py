"""Memory of a rollout engine on one rank, by phase."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from burnish.config.roles import RolloutRole
from burnish.config.rollout import LocalEngine, VllmEngine, VllmServers
from burnish.config.train import TrainConfig
from burnish.plan.kv_cache import (
    Demand,
    local_cache,
    local_logits,
    vllm_on_cpu,
    vllm_on_gpu,
)
from burnish.plan.memory_plan import PHASES
from burnish.plan.model_state import SIZES, EngineSetup, Item
from burnish.plan.passes import Pass
from burnish.plan.role_base import (
    Context,
    Items,
    RoleMemory,
    overhead,
    peaks_of,
    positions,
    uniform_rows,
    with_fragmentation,
)
from burnish.plan.shapes import ModelShape, shape_of
from burnish.rollout.vllm.weights import FILE_BYTES


def rollout_role(context: Context, role: RolloutRole) -> RoleMemory:
    """Return the memory of the recipe's rollout engine."""
    shape = shape_of(role.model.model_copy(update={"lora": None}))
    demand = demand_of(role, shape)
    if isinstance(role.engine, VllmEngine):
        return _vllm_role(context, role, role.engine, shape=shape, demand=demand)
    if isinstance(role.engine, VllmServers):
        return _server_role(context, role, role.engine, shape=shape, demand=demand)
    return _local_role(context, role, role.engine, shape=shape, demand=demand)


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


def _episode_notes(role: RolloutRole, demand: Demand, *, at_once: int) -> tuple[str, ...]:
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


def _local_role(
    context: Context, role: RolloutRole, engine: LocalEngine, *, shape: ModelShape, demand: Demand
) -> RoleMemory:
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
    own = () if inline and role.shares_weights else _own_weights(setup)
    always = (*(() if inline else overhead(context, 1)), *own)
    staged = _staged(setup) if inline and role.overlaps else ()
    passing = [cache, logits, prefill]
    if not gpu and dtype == "fp16":
        passing.append(Item("parameters", 4.0 * shape.parameters, "fp32 copies for the CPU"))
    kept: Items = ()
    if role.overlaps:  # sampling continues in all phases
        kept = with_fragmentation(context, tuple(passing))
        passing = []
    elif role.continues or (graphs and not engine.sleep_between_rollouts):
        kept = (cache,)
    resident: dict[str, Items] = {phase: (*always, *staged, *kept) for phase in PHASES}
    resident["load"] = always
    loads: Items = ()
    if own and gpu:
        loads = (Item("parameters", own[0].bytes, f"model file: {own[0].how}", "host"),)
    return RoleMemory(
        role=role.name,
        ranks=role.ranks,
        phase="rollout",
        pool="main" if inline else role.name,
        resident=resident,
        passing={
            "load": loads,
            "rollout": with_fragmentation(context, tuple(i for i in passing if i not in kept)),
        },
        passes=(work,),
        notes=(
            *((f"rollout: {note}",) if note else ()),
            *_episode_notes(role, demand, at_once=slots),
        ),
        guessed=extra,
    )


def _own_weights(setup: EngineSetup) -> Items:
    """Return the weights of a local engine that does not share the trainer's."""
    size = setup.model.parameters * setup.weight_size
    how = f"{setup.model.parameters / 1e9:.3f}e9 x {setup.weight_size} B"
    return (Item("parameters", size, how),)


def _staged(setup: EngineSetup) -> Items:
    """Return the copy of new weights that waits in the trainer's process until the engine loads
    it."""
    (weights,) = _own_weights(setup)
    return (replace(weights, how=f"staged copy of new weights: {weights.how}"),)


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
    how = "a file of weights for the processes of each engine on the node, in /dev/shm"
    size = _file_bytes(role, shape) * max(1, engines)
    return Item("parameters", size, how, "host")


def _file_bytes(role: RolloutRole, shape: ModelShape) -> float:
    """Return the maximum size of a file of weights."""
    largest = max(weight.numel for unit in shape.units for weight in unit.base)
    return float(largest * SIZES[role.dtype] + FILE_BYTES)


def _server_role(
    context: Context, role: RolloutRole, engine: VllmServers, *, shape: ModelShape, demand: Demand
) -> RoleMemory:
    """Return the memory of the process that is the client of the servers (the trainer's, or on Ray
    the controller): a file of weights. That of the servers is not planned."""
    inline = context.job.inline
    file = Item("parameters", _file_bytes(role, shape), "a file of weights, in /dev/shm", "host")
    files: Items = () if engine.weights_folder is not None else (file,)
    size = shape.parameters * SIZES[role.dtype]
    reads: Items = ()
    if not role.of_policy:
        reads = (Item("parameters", size, "model read for the servers", "host"), *files)
    kept: Items = ()
    if role.overlaps:  # weights are loaded while the policy is trained
        staged = Item("parameters", size, "staged copy of new weights")
        kept = (*files, *((staged,) if inline else ()))
    resident: dict[str, Items] = {phase: kept for phase in PHASES}
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
        passing={"load": reads, "sync": () if kept else files},
        notes=(*notes, *_episode_notes(role, demand, at_once=engine.max_concurrency)),
    )


def _vllm_role(
    context: Context, role: RolloutRole, engine: VllmEngine, *, shape: ModelShape, demand: Demand
) -> RoleMemory:
    dtype = role.dtype
    common: dict[str, Any] = {"role": role.name, "ranks": role.ranks, "pool": "vllm"}
    common["phase"] = "rollout"
    size = shape.parameters * SIZES[dtype]
    model = Item("parameters", size, "model read by the worker", "host")
    reads = () if role.of_policy else (model,)
    notes = _episode_notes(role, demand, at_once=engine.max_num_seqs)
    if context.hardware.gpu is None:
        always = _processes_on_cpu(context, engine, vllm_on_cpu(shape, engine, demand, dtype))
        return RoleMemory(
            **common,
            resident={phase: always for phase in PHASES},
            passing={"load": tuple(replace(i, where="device") for i in reads)},
            notes=notes,
        )
    found = vllm_on_gpu(
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
    awake: Items = (*process, found.weights, found.cache, found.rest)
    resident: dict[str, Items] = {phase: awake for phase in PHASES}
    if engine.sleep_between_rollouts:
        asleep = Item("overhead", context.overhead["vllm_asleep_gb"] * 1e9, "vLLM asleep")
        sleeping: Items = (*(i for i in process if i.where == "host"), asleep)
        resident = {phase: sleeping for phase in PHASES}
        resident |= {phase: awake for phase in ("load", "rollout")}
        resident["sync"] = (*process, found.weights, found.rest)  # cache not yet allocated
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
        problem=found.problem,
        notes=(
            f"rollout: vLLM's KV cache has space for {found.cache_tokens} tokens, "
            f"{found.cache_tokens / demand.longest:.1f} rows of {demand.longest}",
            *notes,
        ),
    )
