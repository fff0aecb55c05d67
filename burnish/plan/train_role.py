"""What a role that trains or scores holds on one rank: policy, reference, critic, reward model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from burnish.config.distill import DistillConfig
from burnish.config.jobs import InferenceJob, RewardModelConfig, RLConfig
from burnish.config.model import CriticConfig, ModelConfig, PrecisionConfig
from burnish.config.roles import role_of
from burnish.config.train import DeepSpeedEngine, TorchEngine, TrainConfig
from burnish.models.logprobs import chunk_tokens
from burnish.plan import model_state
from burnish.plan.activations import Peaks
from burnish.plan.distill import teacher_head, with_teacher
from burnish.plan.memory_plan import PHASES
from burnish.plan.model_state import EngineSetup, Item
from burnish.plan.passes import Pass, Row
from burnish.plan.role_base import (
    REWARD_ROWS,
    Context,
    Items,
    RoleMemory,
    lengths_of,
    model_reward,
    overhead,
    peaks_of,
    positions,
    resolve_model,
    uniform_rows,
    with_fragmentation,
    with_layout,
)
from burnish.plan.shapes import shape_of
from burnish.plan.tensor_parallel import rank_shape


def train_role(context: Context, role: str) -> RoleMemory:
    """Policy, reference, teacher, critic or reward model."""
    setup, rows = setup_of(context.config, role, context.ranks(role), context.assume)
    passes = _passes(context, setup, role, rows)
    peaks, notes, guessed = {}, [], 0.0
    for name, work in passes.items():
        found, extra, note = peaks_of(setup, work, context.over["fallback_margin"])
        peaks[name] = with_teacher(context.config, found, work) if role == "policy" else found
        guessed = max(guessed, extra)
        notes += [f"{role}: {note}"] if note else []
    always = (*overhead(context, context.ranks(role)), *model_state.state(setup))
    always += teacher_head(context.config) if role == "policy" else ()
    passing = {
        name: _in_pass(setup, peaks[name], accumulates=work.accumulates)
        for name, work in passes.items()
    }
    loading, loading_host = _loading(context, setup, model_of(context.config, role)[0])
    passing["load"] = (*loading, *loading_host)
    if setup.trainable:
        passing["step"] = tuple(model_state.gradients_in_step(setup))
        passing["checkpoint"] = _saving(context, setup)
    first: dict[str, Items] = {}
    if role == "policy" and isinstance(context.config, RLConfig):
        passing["sync"] = tuple(model_state.weight_transfer(setup))
        first = _object_store(context, setup)
    resident = {phase: always for phase in PHASES}
    resident["load"] = tuple(i for i in always if not i.how.startswith("moments"))
    worst = max(model_state.total(items) for items in passing.values())
    unsharded, said = _unsharded(setup, model_state.total(always) + worst)
    notes += [f"{role}: {said}"] if said else []
    return RoleMemory(
        role=role,
        ranks=context.ranks(role),
        pool="main" if context.inline else role,
        resident=resident,
        passing={name: with_fragmentation(context, items) for name, items in passing.items()},
        first=first,
        setup=setup,
        disk=model_state.checkpoint_bytes(setup),
        works=tuple(passes.values()),
        notes=tuple(dict.fromkeys(notes)),
        guessed=guessed + unsharded,
    )


def setup_of(
    config: Any, role: str, ranks: int, assume: frozenset[str] = frozenset()
) -> tuple[EngineSetup, tuple[Row, ...]]:
    """The engine of a role, and the rows of its largest micro-batch."""
    model, scalar, trainable = model_of(config, role)
    shape = shape_of(model, scalar=scalar)
    train = with_layout(_train_of(config), shape)
    parts = _tensor_parallel(train)
    part = rank_shape(shape, parts, model.lora)
    setup = EngineSetup(
        shape=part or shape,
        unsharded=shape if part is not None and parts > 1 else None,
        train=train,
        precision=_precision_of(config, role),
        ranks=max(1, ranks // parts),
        trainable=trainable,
        saves_in_background=trainable and config.checkpoint.in_background,
        unreleased_gathers="unreleased-gathers" in assume
        and trainable
        and train.gradient_checkpointing,
    )
    rows = largest_rows(config, role, ranks, positions(shape), layout=train.layout)
    return setup, _local_rows(rows, train)


def _precision_of(config: Any, role: str) -> PrecisionConfig:
    own: PrecisionConfig = config.precision
    if role == "teacher" and config.teacher.dtype is not None:
        own = PrecisionConfig(dtype=config.teacher.dtype)
    return own


def _local_rows(rows: tuple[Row, ...], train: TrainConfig) -> tuple[Row, ...]:
    """What one of ``sequence_parallel_size`` ranks computes of the rows."""
    engine = train.engine
    parts = engine.sequence_parallel_size if isinstance(engine, TorchEngine) else 1
    if parts == 1:
        return rows
    return tuple(replace(r, length=-(-r.length // parts), prompt=r.prompt // parts) for r in rows)


def _unsharded(setup: EngineSetup, held: float) -> tuple[float, str | None]:
    """How many of the ``held`` bytes tensor parallelism would leave to other ranks, at most, where
    what a rank has is not known; and what is said of it."""
    parts = _tensor_parallel(setup.train)
    if parts == 1 or setup.unsharded is not None:
        return 0.0, None
    return held * (1 - 1 / parts), (
        f"tensor_parallel_size={parts} is counted as if every rank had whole layers, because no "
        f"config describes a part of {setup.shape.name}: an upper bound, for which no run is "
        "refused"
    )


def _tensor_parallel(train: TrainConfig) -> int:
    return train.engine.tensor_parallel_size if isinstance(train.engine, TorchEngine) else 1


def model_of(config: Any, role: str) -> tuple[ModelConfig, bool, bool]:
    """(model, scalar, trainable)"""
    if role == "policy":
        return config.model, False, True
    if role == "critic":
        own = (config.critic or CriticConfig()).model
        return resolve_model(own, config.model), True, True
    if role == "reference":
        own = config.reference.model if config.reference is not None else None
        return resolve_model(own, config.model), False, False
    if role == "teacher":
        return resolve_model(config.teacher.model, config.model), False, False
    if isinstance(config, RewardModelConfig):
        return config.model, True, True
    return resolve_model(model_reward(config, role).model, config.model), True, False


def _train_of(config: Any) -> TrainConfig:
    if isinstance(config, InferenceJob):
        return TrainConfig(train_batch_size=1)
    train: TrainConfig = config.train
    return train


def largest_rows(
    config: Any, role: str, ranks: int, limit: int, *, layout: str = "shared_prefix"
) -> tuple[Row, ...]:
    """The rows of the largest micro-batch that the recipe allows: all of full length, every second
    one token shorter (rows of one length would be computed without a mask)."""
    length, prompt = lengths_of(config, limit)
    if isinstance(config, InferenceJob):
        return uniform_rows(REWARD_ROWS, length, prompt, group=1)
    if role_of(role) == "reward" and isinstance(config, RLConfig):
        return uniform_rows(model_reward(config, role).micro_batch_size, length, prompt, group=1)
    rows = _update_rows(config, ranks, (length, prompt), layout)
    if role != "policy" or not isinstance(config, RLConfig) or config.ptx is None:
        return rows
    other = min(config.ptx.data.max_len, limit)
    budget, micro = config.train.max_tokens_per_micro_batch, config.batch_plan()
    most = micro.micro_train_batch_size or max(1, (budget or other) // other)
    mixed = uniform_rows(min(most, config.ptx.batch_size), other, 1, group=1)
    return max(rows, mixed, key=lambda found: sum(row.length for row in found))


def _update_rows(config: Any, ranks: int, lengths: tuple[int, int], layout: str) -> tuple[Row, ...]:
    """The largest micro-batch of the job's own rows of ``lengths`` (row, prompt)."""
    length, prompt = lengths
    unit = config.rows_per_unit
    plan = config.batch_plan()
    group = plan.n_samples_per_prompt if isinstance(config, RLConfig) else 1
    share = max(1, plan.train_batch_size // ranks) * unit
    if plan.micro_train_batch_size is not None:
        return uniform_rows(plan.micro_train_batch_size * unit, length, prompt, group=group)
    budget = config.train.max_tokens_per_micro_batch
    assert budget is not None
    rows: list[Row] = []
    used = 0
    while len(rows) < share:
        shares = layout == "shared_prefix" and len(rows) % group > 0
        cost = length - prompt if shares else length
        if rows and len(rows) % unit == 0 and used + cost > budget:
            break
        used += cost
        rows.append(Row(length, prompt, len(rows) // group))
    return uniform_rows(len(rows), length, prompt, group=group)


def _passes(
    context: Context, setup: EngineSetup, role: str, rows: tuple[Row, ...]
) -> dict[str, Pass]:
    config, train = context.config, setup.train
    base = Pass(
        rows=rows,
        layout=train.layout,
        dtype=setup.precision.dtype,
        train=False,
        chunk_tokens=chunk_tokens(train.logprob_chunk_tokens, context.hardware.device),
        grad_accum_dtype=setup.precision.grad_accum_dtype,
        lora=model_of(config, role)[0].lora,
        states=role == "teacher" and isinstance(config, DistillConfig),
        kernels=context.hardware.kernels,
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


def _needs_old_policy(config: Any, role: str) -> bool:
    """As ``loops/rl.with_old_policy``; a LoRA policy is its own reference too."""
    if role != "policy" or not isinstance(config, RLConfig):
        return False
    if config.teacher is not None:
        return True
    kl = config.algorithm.kl
    several = (config.batch_plan().optimizer_steps_per_rollout or 1) > 1
    return several or bool(kl.init_kl_coef and (kl.placement == "reward" or config.model.lora))


def _accumulates(config: Any, rows: tuple[Row, ...]) -> bool:
    plan = config.batch_plan()
    unit = config.rows_per_unit
    return plan.train_batch_size * unit // plan.data_parallel_size > len(rows)


def _in_pass(setup: EngineSetup, peaks: Peaks, *, accumulates: bool) -> Items:
    """The items of a pass at its worst stage. ``accumulates``: there are gradients of an earlier
    one."""
    stages = [_at_stage(setup, peaks, stage, accumulates) for stage in peaks.other]
    layers = len(setup.shape.layers)
    if setup.sharded and setup.trainable and layers > 2 and "bottom" in peaks.other:
        # The second layer from below: nearly all gradients, and still a layer to gather ahead.
        top, bottom = peaks.other["top"], peaks.other["bottom"]
        second = {**peaks.other, "middle": bottom + (top - bottom) / (layers - 1)}
        stages.append(_at_stage(setup, replace(peaks, other=second), "middle", accumulates))
    return max(stages, key=model_state.total)


def _at_stage(setup: EngineSetup, peaks: Peaks, stage: str, accumulates: bool) -> Items:
    others = peaks.other[stage]
    output = min(peaks.output, others) if stage in ("forward", "head") else 0.0
    items = [
        Item("activations", others - output, f"{peaks.how}; stage {stage}"),
        Item("logits/loss", output, "log-prob head, logits of one chunk at a time"),
    ]
    trains = setup.trainable and any(peaks.total[s] > peaks.other[s] for s in peaks.total)
    if setup.sharded or isinstance(setup.train.engine, DeepSpeedEngine):
        items += model_state.gathered(setup, stage)
        if trains:
            items += model_state.gradients_in_pass(setup, stage, accumulates=accumulates)
    elif trains:
        grad = peaks.total[stage] - others
        items.append(Item("gradients", grad, f"there in the stage {stage}, traced"))
    return tuple(i for i in items if i.bytes)


def _loading(context: Context, setup: EngineSetup, model: ModelConfig) -> tuple[Items, Items]:
    """(on the device, in host memory) while a model is loaded, beside its state: it is read into
    host memory, moved whole, and cut there. FSDP2's ranks read their own rows of a folder."""
    engine, whole = setup.train.engine, setup.model.parameters
    in_parts = model.path is not None and model.gguf_file is None
    if in_parts and setup.sharded and isinstance(engine, TorchEngine):
        how = "each rank reads its own rows, one weight at a time"
        largest = Item("parameters", 4.0 * setup.largest_tensor / setup.ranks, how)
        return (largest,), ()
    lora = bool(setup.shape.adapters)
    size = 4 if setup.trainable and not lora else setup.weight_size
    host = Item("parameters", whole * size, f"read: {whole / 1e9:.3f}e9 x {size} B", "host")
    zero = isinstance(engine, DeepSpeedEngine)
    if isinstance(engine, DeepSpeedEngine) and engine.zero_init:
        part = whole / setup.ranks * (0 if size == setup.weight_size else size)
        how = "zero_init: shards as they were read, and the largest weight whole"
        return (Item("parameters", setup.largest_tensor * size + part, how),), ()
    if context.hardware.gpu is None:
        host = replace(host, where="device")
    cut = setup.sharded or setup.unsharded is not None or (zero and setup.trainable)
    if not cut:
        return (), (host,) if context.hardware.gpu is not None else ()
    if zero and setup.trainable:  # the fp32 weights stay in host memory: train/engines.py
        size = setup.weight_size
    elif isinstance(engine, TorchEngine) and engine.cpu_offload:
        return (Item("parameters", 4.0 * setup.largest_tensor, "one weight at a time"),), (host,)
    kept = model_state.total(i for i in model_state.state(setup) if i.name == "parameters")
    how = f"whole on every rank before it is cut: {whole / 1e9:.3f}e9 x {size} B"
    item = Item("parameters", max(0.0, whole * size - kept), how)
    return (item,), (host,) if context.hardware.gpu is not None else ()


def _saving(context: Context, setup: EngineSetup) -> Items:
    """Host memory while a checkpoint is written."""
    where: Any = "device" if context.hardware.gpu is None else "host"
    if isinstance(setup.train.engine, DeepSpeedEngine):
        size = 8.0 * setup.largest_tensor
        return (Item("parameters", size, "one whole fp32 weight and its bytes", where),)
    if setup.sharded:
        if where == "device":  # it is there already
            return ()
        parts = setup.ranks * (_tensor_parallel(setup.train) if setup.unsharded is not None else 1)
        size = model_state.checkpoint_bytes(setup) / parts
        return (Item("optimizer", size, "this rank's state, copied to be written", where),)
    return (Item("optimizer", 4.0 * setup.trained, "one kind of tensors as bytes", where),)


def _object_store(context: Context, setup: EngineSetup) -> dict[str, Items]:
    """The weights of the last sync in shared memory."""
    if not context.has_store:
        return {}
    size = setup.model.parameters * setup.weight_size
    item = Item("parameters", size, "Ray's object store: weights of the last sync", "host")
    return {phase: (item,) for phase in PHASES if phase != "load"}
