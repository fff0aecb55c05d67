"""Shared parts of the roles' memory plans: memory by phase, the job context, rows and passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from burnish.config.model import ModelConfig
from burnish.config.roles import JobSpec
from burnish.config.train import TrainConfig
from burnish.models.load import ModelError, require_support
from burnish.models.support import row_limit, runs_own_code
from burnish.plan import model_state
from burnish.plan.activations import Pass, Peaks, TraceError, key_of, measure
from burnish.plan.hardware import Hardware
from burnish.plan.model_state import SIZES, EngineSetup, Item
from burnish.plan.shapes import AdapterError, ModelShape, PlanError, shape_of
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
    saved = 0.0 if not work.train else count * (stream if work.checkpointing else layer)
    head = 0.0
    if not shape.scalar:
        vocabulary = shape.vocab_size
        buffers = 4.5 if work.entropy_gradient else 2.3  # counted in models/logprobs.py
        head = buffers * 4 * min(work.chunk_tokens, work.actions) * vocabulary
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
