"""What roles have in common: their memory by phase, the job around them, rows, passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from burnish.config.model import ModelConfig
from burnish.config.roles import JobSpec
from burnish.config.train import TrainConfig
from burnish.models.support import model_support, row_limit, runs_own_code
from burnish.plan import model_state
from burnish.plan.activations import Peaks, TraceError, key_of, measure
from burnish.plan.hardware import Hardware
from burnish.plan.model_state import SIZES, EngineSetup, Item
from burnish.plan.passes import Pass
from burnish.plan.shapes import ModelShape, PlanError, shape_of
from burnish.train.row_layout import RowSize

Items = tuple[Item, ...]


@dataclass(frozen=True)
class RoleMemory:
    """One role on one rank."""

    role: str
    """Its group's name (``config.roles``)."""
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
    works: tuple[Pass, ...] = ()
    """The passes that were traced."""
    notes: tuple[str, ...] = ()
    problem: str | None = None
    guessed: float = 0.0
    """Bytes that were added because activations come from the formula."""


_STORED = ("auto", "object_store")
"""Kinds of sync that go through Ray's object store, where there is a Ray."""


@dataclass(frozen=True)
class Context:
    """The job, and what it runs on."""

    job: JobSpec
    hardware: Hardware
    assume: frozenset[str]

    @property
    def has_store(self) -> bool:
        """Ray keeps the weights of the last sync, for workers that are replaced."""
        kinds = [role.sync.kind for role in self.job.train_roles if role.sync is not None]
        return any(kind in _STORED for kind in kinds) and not self.job.inline

    @property
    def over(self) -> Mapping[str, float]:
        """What is held besides tensors."""
        return self.hardware.tables.overhead


def resolve_model(own: ModelConfig, policy: ModelConfig) -> ModelConfig:
    """A role's own model, or the policy's where its config is not here: most often they are of one
    size, and the plan says so."""
    try:
        shape_of(own)
    except PlanError:
        return policy.model_copy(update={"lora": own.lora})
    return own


def positions(shape: ModelShape) -> int:
    """Longest row that the model has positions for."""
    return row_limit(shape.text) or 1 << 30


def with_layout(train: TrainConfig, shape: ModelShape) -> TrainConfig:
    """``train`` with the layout that the model's passes have: padded if it cannot pack rows."""
    packs = model_support(shape.text, trust=runs_own_code(shape.config)).packed
    return train if packs else train.model_copy(update={"layout": "padded"})


def uniform_rows(count: int, length: int, prompt: int, *, group: int) -> tuple[RowSize, ...]:
    """Rows of one length, every second one a token shorter."""
    shorter = [
        max(length - i % 2, prompt + 1 if length > prompt + 1 else prompt) for i in range(count)
    ]
    return tuple(RowSize(n, prompt, i // group) for i, n in enumerate(shorter))


def peaks_of(setup: EngineSetup, work: Pass, margin: float) -> tuple[Peaks, float, str | None]:
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
            f"{setup.shape.name} could not be traced on fake tensors ({error}); its activations "
            f"are from the formula in docs/memory.md, with {margin:.0%} added"
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


def with_fragmentation(context: Context, items: Items) -> Items:
    """What the GPU's allocator cannot use of what it reserved, added."""
    if context.hardware.gpu is None:
        return items
    share = context.over["fragmentation"]
    size = share * model_state.total(items)
    lost = Item("overhead", size, f"{share:.0%} of passing memory, lost between blocks")
    return (*items, lost) if size else items


def overhead(context: Context, ranks: int) -> Items:
    """What a process holds besides tensors."""
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
