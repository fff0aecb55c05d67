"""Memory of a role that trains or scores, on one rank: policy, reference, teacher, critic, reward
model, with the teacher's output projection in distillation, and with tensor-parallel parts."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from burnish.config.arithmetic import BatchPlan
from burnish.config.model import LoraConfig, ModelConfig
from burnish.config.placement_rules import PHASE_OF
from burnish.config.roles import JobSpec, TrainRole
from burnish.config.sync import LinkSync, SyncConfig
from burnish.host_copies import BUFFER_BYTES
from burnish.models.attention_kernel import Use, choose_kernel
from burnish.models.auto_class import language_model_class
from burnish.models.fused_head import device_problem, fused_chunk_tokens
from burnish.models.load import ModelError
from burnish.models.logprobs import chunk_tokens
from burnish.models.tensor_parallel import check_head_counts, shard_dims
from burnish.plan import model_state
from burnish.plan.activations import Pass, Peaks
from burnish.plan.engine_profile import TrainEngineProfile, profile_of
from burnish.plan.memory_plan import PHASES
from burnish.plan.model_state import SIZES, EngineSetup, Item, checkpoint_bytes
from burnish.plan.role_base import (
    Context,
    Items,
    RoleMemory,
    overhead,
    peaks_of,
    positions,
    resolve_model,
    uniform_rows,
    with_fragmentation,
    with_layout,
    with_offload,
)
from burnish.plan.shapes import ModelShape, PlanError, shape_from_config, shape_of
from burnish.train.row_layout import Layout, RowSize, by_tokens, count_tokens


def train_role(context: Context, role: TrainRole) -> RoleMemory:
    """Return the memory of a policy, reference, teacher, critic or reward model."""
    job = context.job
    setup, rows = setup_of(job, role, context.assume)
    profile = profile_of(setup)
    passes = passes_of(context, setup, role, rows)
    peaks, notes, guessed = {}, [], 0.0
    for name, work in passes.items():
        pass_peaks, extra, note = peaks_of(setup, work, context.overhead["fallback_margin"])
        peaks[name] = with_teacher(role, pass_peaks, work)
        guessed = max(guessed, extra)
        notes += [f"{role.name}: {note}"] if note else []
    always = (
        *overhead(context, role.ranks),
        *_host_buffers(context, role),
        *profile.state(),
        *teacher_head(role),
    )
    passing = {
        name: _in_pass(profile, peaks[name], accumulates=work.accumulates)
        for name, work in passes.items()
    }
    model, gpu = planned_model(job, role), context.hardware.gpu is not None
    from_folder = model.path is not None and model.gguf_file is None
    passing["load"] = tuple(profile.loading(from_folder=from_folder, gpu=gpu))
    if setup.trainable:
        passing["step"] = tuple(profile.gradients_in_step())
        passing["checkpoint"] = tuple(profile.saving(gpu=gpu))
    first: dict[str, Items] = {}
    if role.sync is not None:
        passing["sync"] = tuple(profile.weight_transfer())
        first = _object_store(context, setup, role.sync)
    resident = {phase: always for phase in PHASES}
    resident["load"] = tuple(i for i in always if not i.how.startswith("moments"))
    worst = max(model_state.total(items) for items in passing.values())
    released = role.precomputed_reference and not role.trainable
    if released:
        size = model_state.total(profile.state()) / 1e9
        notes.append(
            f"{role.name}: computes its log-probs before the policy is loaded and is then released "
            f"(reference.precompute), which saves {size:.3g} GB per rank in the steps"
        )
    notes += _mask_notes(job, role, role.lengths.within(positions(setup.model))[0])
    unsharded, note = _unsharded(setup, model_state.total(always) + worst)
    notes += [f"{role.name}: {note}"] if note else []
    memory = RoleMemory(
        role=role.name,
        ranks=role.ranks,
        pool="main" if job.inline else role.name,
        resident=resident,
        passing={name: with_fragmentation(context, items) for name, items in passing.items()},
        first=first,
        setup=setup,
        disk=checkpoint_bytes(setup, frozen=role.is_saved),
        passes=tuple(passes.values()),
        notes=tuple(dict.fromkeys(notes)),
        guessed=guessed + unsharded,
        phase=PHASE_OF[role.kind],
        released=released,
    )
    return with_offload(memory, profile.state(), gpu=gpu) if role.offload else memory


def _mask_notes(job: JobSpec, role: TrainRole, length: int) -> list[str]:
    """Return the largest size of the recorded sampling masks of a rollout, whose rows have up to
    ``length`` tokens; empty without masks, and for frozen roles, which read the same."""
    if not role.kept_ids or not role.trainable:
        return []
    rows, ids = job.rows_per_step, role.kept_ids
    return [
        f"{role.name}: the recorded sampling masks of a rollout take up to "
        f"{4.0 * ids * rows * length / 1e9:.3g} GB of host memory: {rows} rows x {length} tokens x "
        f"{ids} ids x 4 B"
    ]


def setup_of(
    job: JobSpec, role: TrainRole, assume: frozenset[str] = frozenset()
) -> tuple[EngineSetup, tuple[RowSize, ...]]:
    """Return the engine setup of a role, and the rows of its largest micro-batch."""
    model = planned_model(job, role)
    shape = shape_of(model, scalar=role.head == "scalar", outputs=role.outputs)
    train = with_layout(role.train, shape, model)
    part = rank_shape(shape, role.tensor_parallel, model.lora)
    setup = EngineSetup(
        shape=part or shape,
        unsharded=shape if part is not None and role.tensor_parallel > 1 else None,
        train=train,
        precision=role.precision,
        ranks=max(1, role.ranks // role.tensor_parallel),
        trainable=role.trainable,
        saves_in_background=role.checkpoint is not None and role.checkpoint.in_background,
        unreleased_gathers="unreleased-gathers" in assume
        and role.trainable
        and train.gradient_checkpointing is not False,
    )
    rows = largest_rows(job, role, positions(shape), layout=train.layout)
    parts = role.sequence_parallel
    if parts > 1:  # a rank computes its part of the tokens
        rows = tuple(
            replace(r, length=-(-r.length // parts), prompt=r.prompt // parts) for r in rows
        )
    return setup, rows


def planned_model(job: JobSpec, role: TrainRole) -> ModelConfig:
    """Return a role's model, or the model used for its sizes."""
    return resolve_model(role.model, job.model)


def _unsharded(setup: EngineSetup, held: float) -> tuple[float, str | None]:
    """Return the largest number of the ``held`` bytes that tensor parallelism may place on other
    ranks, with a note. It is 0 unless the rank's part of the model is unknown."""
    parts = setup.train.engine.tensor_parallel_size
    if parts == 1 or setup.unsharded is not None:
        return 0.0, None
    return held * (1 - 1 / parts), (
        f"the plan assumes complete layers on every rank despite tensor_parallel_size={parts}, "
        f"because no config describes a part of {setup.shape.name}: an upper bound, for which no "
        "run is refused"
    )


def largest_rows(
    job: JobSpec, role: TrainRole, limit: int, *, layout: Layout = "shared_prefix"
) -> tuple[RowSize, ...]:
    """Return the rows of the largest micro-batch that the recipe allows. All have full length, but
    every second one is one token shorter, because rows of equal length would be computed without a
    mask. Rows of episodes share no prompt, because their first messages may be short."""
    length, prompt = role.lengths.within(limit)
    prompt = prompt if role.lengths.episodes is None else 1
    if role.rows_per_pass is not None:
        return uniform_rows(role.rows_per_pass, length, prompt, group=1)
    assert job.batch is not None
    rows = _update_rows(job.batch, role, (length, prompt), layout)
    if role.ptx is None:
        return rows
    other = min(role.ptx.data.max_len, limit)
    budget, micro = role.train.max_tokens_per_micro_batch, job.batch.micro_train_batch_size
    most = micro or max(1, (budget or other) // other)
    mixed = uniform_rows(min(most, role.ptx.batch_size), other, 1, group=1)
    return max(rows, mixed, key=lambda batch: sum(row.length for row in batch))


def _update_rows(
    plan: BatchPlan, role: TrainRole, lengths: tuple[int, int], layout: Layout
) -> tuple[RowSize, ...]:
    """Return the largest micro-batch of the job's own rows, for ``lengths`` (row, prompt)."""
    length, prompt = lengths
    unit, group = role.rows_per_unit, plan.n_samples_per_prompt
    share = max(1, plan.train_batch_size // role.data_parallel_size) * role.rows_per_sample
    if plan.micro_train_batch_size is not None:
        return uniform_rows(plan.micro_train_batch_size * unit, length, prompt, group=group)
    budget = role.train.max_tokens_per_micro_batch
    assert budget is not None
    rows = [RowSize(length, prompt, i // group) for i in range(share)]
    units = [list(range(begin, begin + unit)) for begin in range(0, share, unit)]

    def tokens(chosen: Sequence[int]) -> int:
        return count_tokens([rows[i] for i in chosen], layout)

    first = next(by_tokens(units, budget, tokens))
    return uniform_rows(len(first) * unit, length, prompt, group=group)


def _fused_chunk_tokens(context: Context, setup: EngineSetup, role: TrainRole) -> int | None:
    """Return the tokens per chunk of log-probs by Triton kernels; None: a role does not use
    them."""
    problem = device_problem(context.hardware.kernels)
    if role.head != "lm" or role.distillation is not None or problem is not None:
        return None
    tokens, size = setup.train.logprob_chunk_tokens, SIZES[setup.precision.dtype]
    return fused_chunk_tokens(tokens, setup.shape.vocab_size, size)


def passes_of(
    context: Context, setup: EngineSetup, role: TrainRole, rows: tuple[RowSize, ...]
) -> dict[str, Pass]:
    """Return the passes of a role through its model by phase, for its largest micro-batch. Raises
    ModelError if the recipe wants FlashAttention and it cannot be used."""
    train, batch = setup.train, context.job.batch
    use = Use(
        setup.precision.dtype,
        context.hardware.kernels,
        layout=train.layout,
        dropout=role.trainable and role.dropout,
        deterministic=train.deterministic,
    )
    choice = choose_kernel(train.attention, setup.shape.config, use)
    base = Pass(
        rows=rows,
        layout=train.layout,
        dtype=setup.precision.dtype,
        train=False,
        chunk_tokens=chunk_tokens(train.logprob_chunk_tokens, context.hardware.device),
        grad_accum_dtype=setup.precision.grad_accum_dtype,
        lora=role.model.lora,
        states="states" in role.passes,
        kept_ids=role.kept_ids if role.head == "lm" else 0,
        kernels=context.hardware.kernels,
        flash=choice.kernel == "flash",
        attention_rate=choice.rate,
        fused_chunk_tokens=_fused_chunk_tokens(context, setup, role),
    )
    passes: dict[str, Pass] = {}
    if role.runs_forward_passes:
        passes["log-probs"] = base
    if role.trainable:
        assert batch is not None
        share = batch.train_batch_size * role.rows_per_sample // role.data_parallel_size
        passes["forward/backward"] = replace(
            base,
            train=True,
            accumulates=share > len(rows),
            checkpointing=train.gradient_checkpointing,
            with_entropy=role.with_entropy,
            entropy_gradient=role.entropy_gradient,
        )
    return passes


def _in_pass(profile: TrainEngineProfile, peaks: Peaks, *, accumulates: bool) -> Items:
    """Return the items of a pass at its worst stage. ``accumulates``: gradients of an earlier pass
    exist."""
    setup = profile.setup
    stages = [_at_stage(profile, peaks, stage, accumulates) for stage in peaks.other]
    layers = len(setup.shape.layers)
    if profile.gathers and setup.trainable and layers > 2 and "bottom" in peaks.other:
        # Second layer from the bottom: nearly all gradients, and one more layer to prefetch.
        def second(sizes: Mapping[str, float]) -> dict[str, float]:
            top, bottom = sizes["top"], sizes["bottom"]
            return {**sizes, "middle": bottom + (top - bottom) / (layers - 1)}

        between = replace(peaks, total=second(peaks.total), other=second(peaks.other))
        stages.append(_at_stage(profile, between, "middle", accumulates))
    return max(stages, key=model_state.total)


def _at_stage(profile: TrainEngineProfile, peaks: Peaks, stage: str, accumulates: bool) -> Items:
    others = peaks.other[stage]
    output = min(peaks.output, others) if stage in ("forward", "head") else 0.0
    items = [
        Item("activations", others - output, f"{peaks.how}; stage {stage}"),
        Item("logits/loss", output, "log-prob head, logits of one chunk"),
    ]
    items += profile.gathered(stage)
    trains = any(peaks.total[s] > peaks.other[s] for s in peaks.total)
    if profile.setup.trainable and trains:
        traced = peaks.total[stage] - others
        items += profile.gradients_in_pass(stage, accumulates=accumulates, traced=traced)
    return tuple(i for i in items if i.bytes)


def _host_buffers(context: Context, role: TrainRole) -> Items:
    """Return the pinned buffers through which weights and checkpoints leave a GPU."""
    if context.hardware.gpu is None or not role.trainable:
        return ()
    how = f"pinned buffers for copies to the host: 2 x {BUFFER_BYTES / 1e9:.3g} GB"
    return (Item("overhead", 2 * BUFFER_BYTES, how, "host"),)


def _object_store(context: Context, setup: EngineSetup, sync: SyncConfig) -> dict[str, Items]:
    """Return the weights of the last sync in shared memory, and the sender's pinned buckets. In
    runs whose sampling and training overlap, the next version is staged before all workers have
    loaded the last one."""
    if not context.has_store:
        return {}
    size = setup.model.parameters * setup.weight_size
    item = Item("parameters", size, "weights of the last sync, in Ray's object store", "host")
    rollout = context.job.rollout
    if rollout is not None and rollout.overlaps:
        formula = f"staged weights, two versions of {size / 1e9:.3g} GB in Ray's object store"
        item = Item("parameters", 2 * size, formula, "host")
    items = [item]
    if context.hardware.gpu is not None and isinstance(sync, LinkSync):
        how = f"pinned buckets of the weight transfer: 2 x {sync.bucket_bytes / 1e9:.3g} GB"
        items.append(Item("overhead", 2 * sync.bucket_bytes, how, "host"))
    return {phase: tuple(items) for phase in PHASES if phase != "load"}


MORE_BUFFERS = {"forward_kl": 4, "reverse_kl": 5, "jsd": 5}
"""Number of [chunk, vocab] fp32 buffers at the head's peak, in addition to those of plain
log-probs. Counted in ``models/distill.py`` (``tests/models/test_distilled_logprobs.py``)."""


def _sizes(teacher: ModelConfig, role: TrainRole) -> tuple[int, int]:
    """Return (vocabulary, width) of the teacher's output projection."""
    shape = shape_of(resolve_model(teacher, role.model))
    return shape.vocab_size, shape.hidden_size


def teacher_head(role: TrainRole) -> Items:
    """Return the resident memory of the teacher's output projection; empty in other jobs."""
    target = role.distillation
    if target is None:
        return ()
    rows, width = _sizes(target.model, role)
    size = SIZES[target.dtype]
    formula = f"the teacher's output projection: {rows} x {width} x {size} B"
    return (Item("parameters", float(rows * width * size), formula),)


def with_teacher(role: TrainRole, peaks: Peaks, work: Pass) -> Peaks:
    """Return the peaks of a student's pass, computed from those of the same pass without a
    teacher."""
    target = role.distillation
    if target is None or not work.train:
        return peaks
    vocabulary, width = _sizes(target.model, role)
    rows = min(work.chunk_tokens, work.actions)
    more = MORE_BUFFERS[target.divergence] * 4.0 * rows * vocabulary
    states = float(sum(r.length for r in work.rows) * width * SIZES[target.dtype])
    extra = {stage: states + (more if stage in ("forward", "head") else 0) for stage in peaks.total}
    return replace(
        peaks,
        total={stage: peak + extra[stage] for stage, peak in peaks.total.items()},
        other={stage: peak + extra[stage] for stage, peak in peaks.other.items()},
        output=peaks.output + more,
    )


SHARED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Config fields that are divided by the number of ranks."""
EXPERT_WIDTH = "moe_intermediate_size"
"""The same, in the configs of mixtures that have it (others have experts of intermediate_size)."""


def rank_shape(shape: ModelShape, parts: int, lora: LoraConfig | None) -> ModelShape | None:
    """Return the shape of the model on each of ``parts`` ranks, as a model with a smaller config;
    None if no config describes it.

    A layer with a share of the heads and of the inner width is equal to a layer of a smaller
    config, and is counted and traced like any other. A model whose part has another number of
    parameters than ``models/tensor_parallel.py`` shards has no such config.

    Raises PlanError if the model cannot be sharded among ``parts`` ranks."""
    if parts == 1:
        return shape
    config = copy.deepcopy(shape.config)
    text = config.get_text_config()
    try:
        check_head_counts(config, parts)
        expected = _entries(shape, parts)
    except ModelError as error:
        raise PlanError(str(error)) from error
    text.head_dim = shape.head_dim  # otherwise derived from the smaller number of heads
    values = text.to_dict()
    for name in (*SHARED, *([EXPERT_WIDTH] if EXPERT_WIDTH in values else [])):
        value = values.get(name)
        if value is None or value % parts:
            return None
        setattr(text, name, value // parts)
    part = shape_from_config(
        config, shape.name, shape.source, scalar=shape.scalar, outputs=shape.outputs, lora=lora
    )
    return part if part.parameters == expected else None


def _entries(shape: ModelShape, parts: int) -> int:
    """Return the number of entries on one rank, from the sharding plan of the model's layers."""
    with torch.device("meta"):
        network = language_model_class(shape.config).from_config(shape.config)
        body: Any = network.get_decoder()
    dims = shard_dims(body)
    sizes = {name: parameter.numel() for name, parameter in body.named_parameters()}
    less = sum(sizes[name] - sizes[name] // parts for name, dim in dims.items() if dim is not None)
    return shape.parameters - less
