"""From a recipe to what each of its roles holds on one rank, in every phase.

Reading order: roles_memory -> _train_role, _rollout_role. Who is beside whom, and what that adds up
to, is in ``predict.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from burnish.config.cluster import ClusterRole
from burnish.config.jobs import EvaluateConfig, JobConfig, RewardModelConfig, RLConfig
from burnish.config.model import CriticConfig, ModelConfig
from burnish.config.placement import roles_of
from burnish.config.rewards import ModelReward
from burnish.config.rollout import LocalEngine, RolloutEngineConfig, VllmEngine
from burnish.config.train import DeepSpeedEngine, TrainConfig
from burnish.memory import model_state
from burnish.memory.activations import Pass, Peaks, Row, TraceError, key_of, measure
from burnish.memory.hardware import Hardware
from burnish.memory.kv_cache import (
    Demand,
    local_cache,
    local_logits,
    vllm_on_cpu,
    vllm_on_gpu,
)
from burnish.memory.model_state import SIZES, EngineSetup, Item
from burnish.memory.plan import PHASES
from burnish.memory.shapes import ModelShape, PlanError, shape_of

log = logging.getLogger("burnish")

Items = tuple[Item, ...]
REWARD_ROWS = 8
"""Rows of a forward pass of a reward model where the recipe does not say."""


@dataclass(frozen=True)
class RoleMemory:
    """One role on one rank."""

    role: ClusterRole
    ranks: int
    pool: str
    """Roles with the same pool share a process and its allocator."""
    resident: Mapping[str, Items]
    """By phase: what is there whether the role works or not."""
    passing: Mapping[str, Items]
    """By phase: what is there while the role works in it."""
    first: Mapping[str, Items] = field(default_factory=dict)
    """By phase: what only the first rank has, in host memory."""
    setup: EngineSetup | None = None
    disk: float = 0.0
    gives_back: bool = False
    """Frees what it does not need for other processes to take (a vLLM that sleeps)."""
    works: tuple[Pass, ...] = ()
    """The passes that were traced."""
    notes: tuple[str, ...] = ()
    problem: str | None = None
    guessed: float = 0.0
    """Bytes that were added because activations come from the formula."""


def roles_memory(
    config: JobConfig, hardware: Hardware, assume: frozenset[str] = frozenset()
) -> list[RoleMemory]:
    """Every role of the job."""
    context = _Context(config, hardware, assume)
    found = []
    for role in roles_of(config):
        made = _rollout_role(context) if role == "rollout" else _train_role(context, role)
        if context.inline and found:  # one process: what it is itself was counted
            made = replace(made, resident={p: _no_process(i) for p, i in made.resident.items()})
        found.append(made)
    return found


def _no_process(items: Items) -> Items:
    return tuple(i for i in items if i.name != "overhead" or "asleep" in i.how)


@dataclass(frozen=True)
class _Context:
    config: Any
    hardware: Hardware
    assume: frozenset[str]

    @property
    def inline(self) -> bool:
        return bool(self.config.cluster.runtime == "inline")

    @property
    def over(self) -> Mapping[str, float]:
        return self.hardware.tables.overhead

    def ranks(self, role: ClusterRole) -> int:
        return 1 if self.inline else int(self.config.cluster.ranks(role))


# ---- roles that train or score -----------------------------------------------------------------


def _train_role(context: _Context, role: ClusterRole) -> RoleMemory:
    setup, rows = setup_of(context.config, role, context.ranks(role), context.assume)
    passes = _passes(context, setup, role, rows)
    peaks, notes, guessed = {}, [], 0.0
    for name, work in passes.items():
        found, extra, note = _peaks(setup, work, context.over["fallback_margin"])
        peaks[name] = found
        guessed = max(guessed, extra)
        notes += [f"{role}: {note}"] if note else []
    always = (*_overhead(context, context.ranks(role)), *model_state.state(setup))
    passing = {name: _in_pass(setup, peaks[name]) for name in passes}
    loading, loading_host = _loading(context, setup)
    passing["load"] = (*loading, *loading_host)
    if setup.trainable:
        passing["step"] = tuple(model_state.gradients(setup, in_pass=False))
        passing["checkpoint"] = _saving(context, setup)
    first: dict[str, Items] = {}
    if role == "policy" and isinstance(context.config, RLConfig):
        passing["sync"] = tuple(model_state.handing_over(setup))
        first = _object_store(context, setup)
    resident = {phase: always for phase in PHASES}
    resident["load"] = tuple(i for i in always if not i.how.startswith("moments"))
    return RoleMemory(
        role=role,
        ranks=context.ranks(role),
        pool="main" if context.inline else role,
        resident=resident,
        passing={name: _with_loss(context, items) for name, items in passing.items()},
        first=first,
        setup=setup,
        disk=model_state.checkpoint_bytes(setup),
        works=tuple(passes.values()),
        notes=tuple(dict.fromkeys(notes)),
        guessed=guessed,
    )


def setup_of(
    config: Any, role: ClusterRole, ranks: int, assume: frozenset[str] = frozenset()
) -> tuple[EngineSetup, tuple[Row, ...]]:
    """The engine of a role, and the rows of its largest micro-batch."""
    model, scalar, trainable = _model_of(config, role)
    shape = shape_of(model, scalar=scalar)
    train = _train_of(config)
    setup = EngineSetup(
        shape=shape,
        train=train,
        precision=config.precision,
        ranks=ranks,
        trainable=trainable,
        unreleased_gathers="unreleased-gathers" in assume
        and trainable
        and train.gradient_checkpointing,
    )
    return setup, largest_rows(config, role, ranks, positions(shape))


def _model_of(config: Any, role: ClusterRole) -> tuple[ModelConfig, bool, bool]:
    """(model, scalar, trainable)"""
    if role == "policy":
        return config.model, False, True
    if role == "critic":
        own = (config.critic or CriticConfig()).model
        return known_or(own, config.model), True, True
    if role == "reference":
        own = config.reference.model if config.reference is not None else None
        return known_or(own, config.model), False, False
    if isinstance(config, RewardModelConfig):
        return config.model, True, True
    entry = _model_reward(config)
    assert entry is not None
    return known_or(entry.model, config.model), True, False


def known_or(own: ModelConfig | None, policy: ModelConfig) -> ModelConfig:
    """A role's own model, or the policy's where it has none or its config is not here: most often
    they are of one size, and the plan says so."""
    if own is None:
        return policy
    try:
        shape_of(own)
    except PlanError:
        return policy.model_copy(update={"lora": own.lora})
    return own


def _model_reward(config: Any) -> ModelReward | None:
    return next((r for r in config.rewards if isinstance(r, ModelReward)), None)


def _train_of(config: Any) -> TrainConfig:
    if isinstance(config, EvaluateConfig):
        return TrainConfig(train_batch_size=1)
    train: TrainConfig = config.train
    return train


def positions(shape: ModelShape) -> int:
    """Longest row that the model has positions for."""
    limit = shape.text.to_dict().get("max_position_embeddings")
    return int(limit) if limit else 1 << 30


def lengths_of(config: Any, limit: int) -> tuple[int, int]:
    """(longest row, its prompt) of the training data."""
    if isinstance(config, RLConfig):
        new = config.rollout.generate_max_len
        prompt = max(1, min(config.data.prompt_max_len, limit - new))
        return prompt + new, prompt
    if isinstance(config, EvaluateConfig):
        new = config.eval.generate_max_len or 1
        prompt = max(1, min(config.eval.data.prompt_max_len, limit - new))
        return prompt + new, prompt
    return min(int(config.data.max_len), limit), 1


def largest_rows(config: Any, role: ClusterRole, ranks: int, limit: int) -> tuple[Row, ...]:
    """The rows of the largest micro-batch that the recipe allows: all of full length, every second
    one token shorter (rows of one length would be computed without a mask)."""
    length, prompt = lengths_of(config, limit)
    if isinstance(config, EvaluateConfig):
        return _alike(REWARD_ROWS, length, prompt, group=1)
    if role == "reward" and isinstance(config, RLConfig):
        entry = _model_reward(config)
        count = entry.micro_batch_size if entry is not None else REWARD_ROWS
        return _alike(count, length, prompt, group=1)
    unit = 2 if isinstance(config, RewardModelConfig) else 1
    plan = config.batch_plan()
    group = plan.n_samples_per_prompt if isinstance(config, RLConfig) else 1
    share = max(1, plan.train_batch_size // ranks) * unit
    if plan.micro_train_batch_size is not None:
        return _alike(plan.micro_train_batch_size * unit, length, prompt, group=group)
    budget = config.train.max_tokens_per_micro_batch
    assert budget is not None
    rows: list[Row] = []
    used = 0
    while len(rows) < share:
        shares = config.train.layout == "shared_prefix" and len(rows) % group > 0
        cost = (length - prompt if shares else length) * (1 if shares else 1)
        if rows and len(rows) % unit == 0 and used + cost > budget:
            break
        used += cost
        rows.append(Row(length, prompt, len(rows) // group))
    return _alike(len(rows), length, prompt, group=group)


def _alike(count: int, length: int, prompt: int, *, group: int) -> tuple[Row, ...]:
    shorter = [
        max(length - i % 2, prompt + 1 if length > prompt + 1 else prompt) for i in range(count)
    ]
    return tuple(Row(n, prompt, i // group) for i, n in enumerate(shorter))


def _passes(
    context: _Context, setup: EngineSetup, role: ClusterRole, rows: tuple[Row, ...]
) -> dict[str, Pass]:
    config, train = context.config, setup.train
    base = Pass(
        rows=rows,
        layout=train.layout,
        dtype=setup.precision.dtype,
        train=False,
        chunk_tokens=train.logprob_chunk_tokens,
        grad_accum_dtype=setup.precision.grad_accum_dtype,
        lora=_model_of(config, role)[0].lora,
        device=context.hardware.device,
    )
    passes: dict[str, Pass] = {}
    if not setup.trainable or role == "critic" or _needs_old_policy(config, role):
        passes["log-probs"] = base
    if setup.trainable:
        passes["forward/backward"] = replace(
            base,
            train=True,
            accumulates=_accumulates(config, rows),
            checkpointing=train.gradient_checkpointing,
            with_entropy=role == "policy" and isinstance(config, RLConfig),
        )
    return passes


def _needs_old_policy(config: Any, role: ClusterRole) -> bool:
    """As ``loops/rl.with_old_policy``; a LoRA policy is its own reference too."""
    if role != "policy" or not isinstance(config, RLConfig):
        return False
    kl = config.algorithm.kl
    several = (config.batch_plan().optimizer_steps_per_rollout or 1) > 1
    return several or bool(kl.init_kl_coef and (kl.placement == "reward" or config.model.lora))


def _accumulates(config: Any, rows: tuple[Row, ...]) -> bool:
    plan = config.batch_plan()
    unit = 2 if isinstance(config, RewardModelConfig) else 1
    return plan.train_batch_size * unit // plan.data_parallel_size > len(rows)


def _peaks(setup: EngineSetup, work: Pass, margin: float) -> tuple[Peaks, float, str | None]:
    """What a pass takes, how many bytes of it are a margin, and a note."""
    try:
        return measure(key_of(setup.shape), work), 0.0, None
    except TraceError as error:
        found = by_formula(setup, work)
        extra = margin * found.activations
        wider = Peaks(
            {k: v + extra for k, v in found.total.items()},
            {k: v + extra for k, v in found.other.items()},
            found.output,
            found.how,
        )
        note = (
            f"{setup.shape.name} could not be traced on fake tensors ({error}); its activations are "
            f"from the formula in docs/memory.md, with {margin:.0%} added"
        )
        return wider, extra, note


def by_formula(setup: EngineSetup, work: Pass) -> Peaks:
    """Activations of a Llama-like model from its sizes, where it cannot be traced."""
    text, size = setup.shape.text.to_dict(), SIZES[work.dtype]
    hidden = int(text["hidden_size"])
    inner = int(text.get("intermediate_size") or 4 * hidden)
    heads = int(text.get("num_attention_heads") or 1) * setup.shape.head_dim
    kv = setup.shape.kv_heads * setup.shape.head_dim
    norms = 2 * hidden * (4 if work.dtype == "fp32" else 2 + 8)
    layer = work.tokens * ((2 * hidden + 4 * heads + 4 * kv + 5 * inner) * size + norms)
    stream = work.tokens * hidden * size
    count = len(setup.shape.layers)
    kept = 0.0 if not work.train else count * (stream if work.checkpointing else layer)
    head = 0.0
    if not setup.shape.scalar:
        vocabulary = int(text["vocab_size"])
        head = 3.0 * 4 * min(work.chunk_tokens, work.actions) * vocabulary
        head += (4.0 + size) * vocabulary * hidden if work.train and not work.lora else 0.0
    other = kept + max(layer + stream, head)
    sums = SIZES[work.grad_accum_dtype] if work.dtype != "fp32" else 4
    gradients = float(setup.trained * sums) if work.train else 0.0
    peaks = {"head": other}
    totals = {"head": other + gradients}
    return Peaks(totals, peaks, min(head, other), "by formula")


def _in_pass(setup: EngineSetup, peaks: Peaks) -> Items:
    """The items of a pass at its worst stage."""
    buffers = [*model_state.gathered(setup)]
    own_gradients = setup.trainable and any(peaks.total[s] > peaks.other[s] for s in peaks.total)
    elsewhere = setup.sharded or isinstance(setup.train.engine, DeepSpeedEngine)
    table = peaks.other if elsewhere else peaks.total
    stage = max(table, key=lambda s: table[s])
    output = min(peaks.output, peaks.other[stage]) if stage in ("forward", "head") else 0.0
    items = [
        Item("activations", peaks.other[stage] - output, f"{peaks.how}; stage {stage}"),
        Item("logits/loss", output, "log-prob head, logits of one chunk at a time"),
    ]
    if own_gradients and elsewhere:
        buffers += model_state.gradients(setup, in_pass=True)
    elif own_gradients:
        grad = peaks.total[stage] - peaks.other[stage]
        items.append(Item("gradients", grad, f"there in the stage {stage}, traced"))
    return tuple(i for i in (*items, *buffers) if i.bytes)


def _with_loss(context: _Context, items: Items) -> Items:
    """What the GPU's allocator cannot use of what it reserved, added."""
    if context.hardware.gpu is None:
        return items
    share = context.over["fragmentation"]
    size = share * model_state.total(items)
    lost = Item("overhead", size, f"{share:.0%} of passing memory, lost between blocks")
    return (*items, lost) if size else items


def _overhead(context: _Context, ranks: int) -> Items:
    over = context.over
    if context.hardware.gpu is None:
        return (Item("overhead", over["process_gb"] * 1e9, "a Python process with torch"),)
    items = [
        Item("overhead", over["context_gb"] * 1e9, "CUDA context and workspaces"),
        Item("overhead", over["gpu_process_gb"] * 1e9, "a Python process with CUDA", "host"),
    ]
    if ranks > 1:
        items.append(Item("overhead", over["nccl_gb"] * 1e9, "NCCL channels"))
    return tuple(items)


def _loading(context: _Context, setup: EngineSetup) -> tuple[Items, Items]:
    """(on the device, in host memory) while a model is loaded, beside its state: it is read into
    host memory, moved whole, and cut there."""
    engine, whole = setup.train.engine, setup.shape.parameters
    lora = bool(setup.shape.adapters)
    size = 4 if setup.trainable and not lora else setup.weight_size
    host = Item("parameters", whole * size, f"read: {whole / 1e9:.3f}e9 x {size} B", "host")
    zero = isinstance(engine, DeepSpeedEngine)
    if isinstance(engine, DeepSpeedEngine) and engine.zero_init:
        part = whole / setup.ranks * (size + setup.weight_size)
        how = "zero_init: shards in two formats, and the largest weight whole"
        return (Item("parameters", setup.largest_tensor * size + part, how),), ()
    if context.hardware.gpu is None:
        host = replace(host, where="device")
    cut = setup.sharded or (zero and setup.trainable)
    if not cut:
        return (), (host,) if context.hardware.gpu is not None else ()
    more = setup.weight_size if zero and setup.half and setup.trainable else 0
    kept = model_state.total(i for i in model_state.state(setup) if i.name == "parameters")
    moved = max(0.0, whole * (size + more) - kept)
    how = f"whole on every rank before it is cut: {whole / 1e9:.3f}e9 x {size + more} B"
    item = Item("parameters", moved, how)
    return (item,), (host,) if context.hardware.gpu is not None else ()


def _saving(context: _Context, setup: EngineSetup) -> Items:
    """Host memory while a checkpoint is written."""
    where: Any = "device" if context.hardware.gpu is None else "host"
    if isinstance(setup.train.engine, DeepSpeedEngine):
        size = 8.0 * setup.largest_tensor
        return (Item("parameters", size, "one whole fp32 weight and its bytes", where),)
    if setup.sharded:
        if where == "device":  # it is there already
            return ()
        size = model_state.checkpoint_bytes(setup) / setup.ranks
        return (Item("optimizer", size, "this rank's state, copied to be written", where),)
    return (Item("optimizer", 4.0 * setup.trained, "one kind of tensors as bytes", where),)


def _object_store(context: _Context, setup: EngineSetup) -> dict[str, Items]:
    """Ray keeps the weights of the last sync in shared memory, for workers that are replaced."""
    if context.inline:
        return {}
    size = setup.shape.parameters * setup.weight_size
    item = Item("parameters", size, "Ray's object store: weights of the last sync", "host")
    return {phase: (item,) for phase in PHASES if phase != "load"}


# ---- the rollout engine ------------------------------------------------------------------------


def _rollout_role(context: _Context) -> RoleMemory:
    config = context.config
    engine: RolloutEngineConfig = (
        config.rollout.engine if isinstance(config, RLConfig) else config.engine
    )
    shape = shape_of(config.model.model_copy(update={"lora": None}))
    demand = demand_of(config, context.ranks("rollout"), shape)
    if isinstance(engine, VllmEngine):
        return _vllm_role(context, engine, shape, demand)
    return _local_role(context, engine, shape, demand)


def demand_of(config: Any, workers: int, shape: ModelShape) -> Demand:
    """What one rollout worker is asked for at most."""
    limit = positions(shape)
    length, prompt = lengths_of(config, limit)
    new = length - prompt
    sequences = 0
    if isinstance(config, RLConfig):
        rollout = config.rollout
        sequences = -(-rollout.rollout_batch_size // workers) * rollout.n_samples_per_prompt
    held_out = config.eval
    if held_out is not None:
        prompt = max(prompt, min(held_out.data.prompt_max_len, limit))
        new = max(new, held_out.generate_max_len or new)
        count = held_out.num_prompts or 1 << 20
        sequences = max(sequences, -(-count // workers) * held_out.n_samples_per_prompt)
    return Demand(sequences, min(prompt, limit - 1), min(new, limit))


def _local_role(
    context: _Context, engine: LocalEngine, shape: ModelShape, demand: Demand
) -> RoleMemory:
    config, gpu = context.config, context.hardware.gpu is not None
    dtype = config.precision.sampler_dtype
    graphs = gpu and engine.cuda_graphs
    cache, slots = local_cache(shape, engine, demand, dtype, graphs=graphs)
    logits = local_logits(shape, slots, graphs=graphs, longest=demand.longest)
    count = max(1, min(slots, engine.max_prefill_tokens // demand.prompt))
    rows = _alike(count, demand.prompt + 1, demand.prompt, group=1)
    work = Pass(rows, dtype=dtype, train=False, device=context.hardware.device)
    setup = EngineSetup(
        shape=shape,
        train=TrainConfig(train_batch_size=1),
        precision=config.precision.model_copy(update={"dtype": dtype, "grad_accum_dtype": "fp32"}),
        trainable=False,
    )
    peaks, extra, note = _peaks(setup, work, context.over["fallback_margin"])
    prefill = Item("activations", max(0.0, peaks.activations - peaks.output), "prefill, traced")
    own = _own_weights(context, setup)
    always = (*(() if context.inline else _overhead(context, 1)), *own)
    passing = [cache, logits, prefill]
    if not gpu and dtype == "fp16":
        passing.append(Item("parameters", 4.0 * shape.parameters, "fp32 copies for the CPU"))
    kept = (cache,) if graphs and not engine.sleep_between_rollouts else ()
    resident: dict[str, Items] = {phase: (*always, *kept) for phase in PHASES}
    resident["load"] = always
    loads: Items = ()
    if own and gpu:
        loads = (Item("parameters", own[0].bytes, f"read: {own[0].how}", "host"),)
    return RoleMemory(
        role="rollout",
        ranks=context.ranks("rollout"),
        pool="main" if context.inline else "rollout",
        resident=resident,
        passing={
            "load": loads,
            "rollout": _with_loss(context, tuple(i for i in passing if i not in kept)),
        },
        works=(work,),
        notes=(f"rollout: {note}",) if note else (),
        guessed=extra,
    )


def _own_weights(context: _Context, setup: EngineSetup) -> Items:
    """Weights of the local engine's own; none where it runs the trainer's module."""
    config = context.config
    if context.inline and isinstance(config, RLConfig):
        same = config.precision.sampler_dtype == config.precision.dtype
        train = config.train.engine
        in_shards = isinstance(train, DeepSpeedEngine) and train.zero_stage == 3
        if same and not in_shards:
            return ()
    size = setup.shape.parameters * setup.weight_size
    how = f"{setup.shape.parameters / 1e9:.3f}e9 x {setup.weight_size} B"
    return (Item("parameters", size, how),)


def _vllm_role(
    context: _Context, engine: VllmEngine, shape: ModelShape, demand: Demand
) -> RoleMemory:
    dtype = context.config.precision.sampler_dtype
    common: dict[str, Any] = {
        "role": "rollout",
        "ranks": context.ranks("rollout"),
        "pool": "vllm",
    }
    whole = Item(
        "parameters", shape.parameters * SIZES[dtype], "the model read by the worker", "host"
    )
    reads = () if context.inline and isinstance(context.config, RLConfig) else (whole,)
    if context.hardware.gpu is None:
        weights, cache = vllm_on_cpu(shape, engine, demand, dtype)
        always: Items = (*_overhead(context, 1), weights, cache)
        return RoleMemory(
            **common,
            resident={phase: always for phase in PHASES},
            passing={"load": tuple(replace(i, where="device") for i in reads)},
        )
    found = vllm_on_gpu(
        shape,
        engine,
        demand,
        dtype=dtype,
        gpu_bytes=context.hardware.gpu.bytes,
        overhead=dict(context.over),
    )
    process = _overhead(context, engine.tensor_parallel_size)
    awake: Items = (*process, found.weights, found.cache, found.rest)
    sleeping = (
        *(i for i in process if i.where == "host"),
        Item("overhead", context.over["vllm_asleep_gb"] * 1e9, "vLLM asleep"),
        Item("parameters", found.weights.bytes, "weights of the sleeping vLLM", "host"),
    )
    sleeps = engine.sleep_between_rollouts
    resting = sleeping if sleeps else awake
    resident: dict[str, Items] = {phase: resting for phase in PHASES}
    resident |= {phase: awake for phase in ("load", "rollout", "sync")}
    first: dict[str, Items] = {"load": reads}
    if engine.tensor_parallel_size > 1:
        copy = replace(whole, how="weights for the other processes, in /dev/shm")
        first = {"load": (*reads, copy), "sync": (copy,)}
    if not context.inline:
        store = replace(whole, how="Ray's object store: weights of the last sync, pulled here")
        for phase in ("sync", "rollout"):
            first[phase] = (*first.get(phase, ()), store)
    return RoleMemory(
        **common,
        resident=resident,
        passing={},
        first=first,
        gives_back=sleeps,
        problem=found.problem,
        notes=(
            f"rollout: vLLM's cache holds {found.cache_tokens} tokens, "
            f"{found.cache_tokens / demand.longest:.1f} rows of {demand.longest}",
        ),
    )
