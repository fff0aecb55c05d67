"""Shared parts of the roles' memory plans: memory by phase, the job context, rows and passes, and
the roles that are on a device at the same time, in host memory or released."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from burnish.config.model import ModelConfig
from burnish.config.roles import JobSpec
from burnish.config.train import TrainConfig
from burnish.models.load import ModelError, require_support
from burnish.models.support import row_limit, runs_own_code
from burnish.plan import model_state
from burnish.plan.activations import Pass, Peaks, TraceError, key_of, measure
from burnish.plan.hardware import Hardware
from burnish.plan.memory_plan import PHASES
from burnish.plan.model_state import SIZES, EngineSetup, Item, total
from burnish.plan.shapes import AdapterError, ModelShape, PlanError, shape_of
from burnish.plan.work import PassWork, work_by_formula
from burnish.train.host_memory import CHUNK_BYTES
from burnish.train.row_layout import RowSize

Items = tuple[Item, ...]


@dataclass(frozen=True)
class RoleMemory:
    """Memory of one role on one rank."""

    role: str
    """Name of the role's group (``config.roles``)."""
    ranks: int
    pool: str
    """Name of the process. Roles with the same pool share a process and its allocator."""
    resident: Mapping[str, Items]
    """Every phase (``memory_plan.PHASES``) -> items that exist in it even if the role is idle."""
    passing: Mapping[str, Items]
    """Phase -> items that exist only while the role computes."""
    first: Mapping[str, Items] = field(default_factory=dict)
    """Phase -> host memory of the first rank only."""
    phase: str = ""
    """Phase of the role's kind (``config/placement_rules.py``)."""
    keeps_peak: bool = True
    """True if the allocator of its process keeps the memory of the largest phase in later ones.
    False: the process holds the memory of ``resident`` in each phase, and no more."""
    offloaded: Mapping[str, Items] | None = None
    """``resident`` while roles of other phases compute, if the role is then in host memory. None:
    it stays on the device."""
    released: bool = False
    """True if the model computes before the other models are loaded, and is then released (a
    reference whose log-probs are precomputed)."""
    setup: EngineSetup | None = None
    disk: float = 0.0
    passes: tuple[Pass, ...] = ()
    """Traced passes."""
    notes: tuple[str, ...] = ()
    problem: str | None = None
    guessed: float = 0.0
    """Bytes by which the plan may be too high: the margin of activations computed by formula, and
    the upper bound for unknown tensor-parallel parts."""


@dataclass(frozen=True)
class Context:
    """The job and its hardware."""

    job: JobSpec
    hardware: Hardware
    assume: frozenset[str]

    @property
    def has_store(self) -> bool:
        """True if Ray keeps the weights of the last sync, for replaced workers."""
        syncs = [role.sync for role in self.job.train_roles if role.sync is not None]
        return not self.job.inline and any(sync.ray_store == "object_store" for sync in syncs)

    @property
    def overhead(self) -> Mapping[str, float]:
        """Memory constants other than tensors (``overhead`` in ``hardware.yaml``)."""
        return self.hardware.tables.overhead


def resolve_model(model: ModelConfig, policy: ModelConfig) -> ModelConfig:
    """Return a role's own model, or the policy's if its config is not available. The two usually
    have the same size, and the plan lists the assumption. Raises AdapterError."""
    try:
        shape_of(model)
    except AdapterError:
        raise
    except PlanError:
        return policy.model_copy(update={"lora": model.lora})
    return model


def positions(shape: ModelShape) -> int:
    """Return the longest row that the model has positions for."""
    return row_limit(shape.text) or 1 << 30


def with_layout(train: TrainConfig, shape: ModelShape, model: ModelConfig) -> TrainConfig:
    """Return ``train`` with the layout of the model's passes: padded if the model cannot pack
    rows, or its recipe names another attention. Raises PlanError if the model's family cannot be
    trained or sampled."""
    try:
        support = require_support(shape.config, shape.name, trust=runs_own_code(shape.config))
    except ModelError as error:
        raise PlanError(str(error)) from error
    if model.attn_implementation != "auto":
        return train.model_copy(update={"layout": "padded"})
    return train if support.packed else train.model_copy(update={"layout": "padded"})


def uniform_rows(count: int, length: int, prompt: int, *, group: int) -> tuple[RowSize, ...]:
    """Return ``count`` rows of one length, with every second row one token shorter."""
    shorter = [
        max(length - i % 2, prompt + 1 if length > prompt + 1 else prompt) for i in range(count)
    ]
    return tuple(RowSize(n, prompt, i // group) for i, n in enumerate(shorter))


def peaks_of(setup: EngineSetup, work: Pass, margin: float) -> tuple[Peaks, float, str | None]:
    """Return the peaks of a pass, the bytes of them that are a margin, and a note."""
    try:
        return measure(key_of(setup.shape), work), 0.0, None
    except TraceError as error:
        peaks = by_formula(setup, work)
        extra = margin * peaks.activations
        wider = Peaks(
            {k: v + extra for k, v in peaks.total.items()},
            {k: v + extra for k, v in peaks.other.items()},
            peaks.output,
            peaks.how,
        )
        note = (
            f"{setup.shape.name} could not be traced on fake tensors ({error}); its activations "
            f"are computed by the formula in docs/memory.md, with {margin:.0%} added"
        )
        return wider, extra, note


def work_of(setup: EngineSetup, work: Pass) -> PassWork:
    """Return the operations of a pass, traced or, if that fails, by a formula."""
    try:
        traced = measure(key_of(setup.shape), work).work
    except TraceError:
        traced = None
    if traced is not None and setup.train.compile == "layers":
        return replace(traced, body=traced.compiled)
    return traced or work_by_formula(
        setup.shape,
        tokens=work.tokens,
        actions=work.actions,
        train=work.train,
        checkpointing=work.checkpointing,
    )


def by_formula(setup: EngineSetup, work: Pass) -> Peaks:
    """Return the activations of a Llama-like model, computed from its sizes. Used if it cannot be
    traced."""
    shape, size = setup.shape, SIZES[work.dtype]
    hidden = shape.hidden_size
    inner = shape.inner_size
    heads, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = 2 * hidden * (4 if work.dtype == "fp32" else 2 + 8)
    layer = work.tokens * ((2 * hidden + 4 * heads + 4 * kv + 5 * inner) * size + norms)
    stream = work.tokens * hidden * size
    count = len(shape.layers)
    products = work.tokens * (2 * hidden + 2 * heads + 2 * kv + 2 * inner) * size
    kept = {False: layer, True: stream, "selective": stream + products}[work.checkpointing]
    saved = count * kept if work.train else 0.0
    head = 0.0
    if not shape.scalar:
        vocabulary = shape.vocab_size
        buffers = 4 * (4.5 if work.entropy_gradient else 2.3)  # counted in models/logprobs.py
        if work.fused_chunk_tokens is not None and not work.kept_ids:
            buffers = size  # one, in the compute dtype
        head = buffers * min(work.head_chunk, work.actions) * vocabulary
        head += (4.0 + size) * vocabulary * hidden if work.train and not work.lora else 0.0
    other = saved + max(layer + stream, head)
    sums = SIZES[work.grad_accum_dtype] if work.dtype != "fp32" else 4
    gradients = float(setup.trained * sums) if work.train else 0.0
    peaks = {"head": other}
    totals = {"head": other + gradients}
    return Peaks(totals, peaks, min(head, other), "by formula")


def with_fragmentation(context: Context, items: Items) -> Items:
    """Return the items with the memory that the GPU's allocator loses to fragmentation."""
    if context.hardware.gpu is None:
        return items
    share = context.overhead["fragmentation"]
    size = share * model_state.total(items)
    lost = Item("overhead", size, f"fragmentation: {share:.0%} of temporary memory")
    return (*items, lost) if size else items


def overhead(context: Context, ranks: int) -> Items:
    """Return the memory of a process other than tensors."""
    gb = context.overhead
    if context.hardware.gpu is None:
        return (Item("overhead", gb["process_gb"] * 1e9, "a Python process with torch"),)
    items = [
        Item("overhead", gb["context_gb"] * 1e9, "CUDA context and workspaces"),
        Item("overhead", gb["gpu_process_gb"] * 1e9, "a Python process with CUDA", "host"),
    ]
    if ranks > 1:
        items.append(Item("overhead", gb["nccl_gb"] * 1e9, "NCCL channels"))
    return tuple(items)


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
