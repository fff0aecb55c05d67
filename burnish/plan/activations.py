"""Measure the memory of a pass, in addition to the model's own state, by running it on fake
tensors.

The real HuggingFace model, with Burnish's attention, log-prob head and checkpointing, runs on
tensors that have sizes but no storage. ``tracking.py`` counts the live bytes. Only a few layers are
run. Memory in every stage of a pass is linear in the number of layers of each kind, so two depths
are enough to extrapolate. ``tests/plan/test_activations.py`` compares with entire models.

Reading order: Pass, measure, _Trace.run, extended.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from transformers import PretrainedConfig, masking_utils
from transformers.integrations import moe

from burnish.config.model import Dtype, LoraConfig, PrecisionConfig
from burnish.config.train import Checkpointing, TrainConfig
from burnish.errors import BurnishError
from burnish.messages import library_text
from burnish.models.attention import PackedPlan, plan_segments
from burnish.models.attention_kernel import AttentionRate
from burnish.models.auto_class import language_model_class
from burnish.models.checkpointing import enable_checkpointing
from burnish.models.flash import FlashSwitch
from burnish.models.fused_head import SIZES_ONLY, FusedHead
from burnish.models.half_linear import use_fp32_products
from burnish.models.load import DTYPES, choose_attention
from burnish.models.logprobs import CHUNK_TOKENS, Head, token_logprobs
from burnish.models.lora import add_adapters
from burnish.models.lora_layers import with_dropout
from burnish.models.scalar_model import ScalarModel, head_width
from burnish.models.sdpa import Kernels
from burnish.models.units import layers_of
from burnish.plan.shapes import ModelShape
from burnish.plan.tracking import LiveBytes
from burnish.plan.work import PassWork, WorkCounter
from burnish.train.optim import Optimizer
from burnish.train.row_layout import Layout, RowSize, count_tokens, place_rows, segments_of


@dataclass(frozen=True)
class Pass:
    """One micro-batch through one model, with the options of its computation."""

    rows: tuple[RowSize, ...]
    layout: Layout = "packed"
    dtype: Dtype = "fp32"
    train: bool = True
    """False: no gradient (log-probs, values)."""
    accumulates: bool = False
    """True if gradients of an earlier micro-batch exist."""
    checkpointing: Checkpointing = False
    with_entropy: bool = False
    entropy_gradient: bool = False
    """True if the loss contains the entropy."""
    kept_ids: int = 0
    """Ids per token over which log-probs are computed. 0: all."""
    chunk_tokens: int = CHUNK_TOKENS["cpu"]
    grad_accum_dtype: Dtype = "fp32"
    lora: LoraConfig | None = None
    states: bool = False
    """True if the pass returns hidden states and runs no head."""
    kernels: Kernels | None = None
    """Attention kernels of the GPU. None: the pass runs on a CPU."""
    flash: bool = False
    """True if attention is computed by FlashAttention, without masks and repeated keys."""
    attention_rate: AttentionRate = "attention"
    """Rate of attention without masks."""
    fused_chunk_tokens: int | None = None
    """Tokens per chunk of log-probs by the Triton kernels of ``models/fused_head.py``. None: by
    PyTorch's operations, in chunks of ``chunk_tokens``."""

    @property
    def tokens(self) -> int:
        """Number of computed tokens, including padding."""
        return count_tokens(self.rows, self.layout)

    @property
    def actions(self) -> int:
        """Number of tokens with a log-prob."""
        return sum(r.length - max(r.prompt, 1) for r in self.rows)

    @property
    def head_chunk(self) -> int:
        """Tokens per chunk of the log-probs that the pass computes."""
        fused = self.fused_chunk_tokens
        return self.chunk_tokens if fused is None or self.kept_ids else fused


def fake_plan(work: Pass) -> PackedPlan | None:
    """Return the attention plan of a pass; None for padded rows. Call it inside a
    FakeTensorMode."""
    if work.layout == "padded":
        return None
    positions = torch.zeros(work.tokens, dtype=torch.int64)
    switch = FlashSwitch(may_fall_back=True) if work.flash else None
    segments = segments_of(place_rows(work.rows, work.layout))
    plan = plan_segments(segments, positions, flash=switch)
    return replace(plan, kernels=work.kernels)


_CHUNKS = 3
"""Number of log-prob chunks to trace. The last chunk differs; all others are identical."""

STAGES = ("forward", "head", "top", "middle", "bottom", "ends")
"""Stages of a pass: forward, then backward of the head, of the last layer, of the layers between,
of the first layer, and of the embedding."""


@dataclass(frozen=True)
class Peaks:
    """Peak bytes in each stage of a pass, without weights and optimizer state."""

    total: Mapping[str, float]
    """Peak by stage, including gradients."""
    other: Mapping[str, float]
    """Peak by stage, without the completed gradients of parameters."""
    output: float
    """Part of ``other`` that the log-prob head takes."""
    how: str
    """Description of the method."""
    work: PassWork | None = None
    """Operations of the pass, without the FLOPs of attention; None if they were not traced."""

    @property
    def peak(self) -> float:
        """Largest peak of any stage, including gradients."""
        return max(self.total.values())

    @property
    def activations(self) -> float:
        """Largest peak of any stage, without gradients."""
        return max(self.other.values())


class TraceError(BurnishError, RuntimeError):
    """A model that cannot be run on fake tensors."""


@functools.lru_cache(maxsize=256)
def measure(shape_key: _Key, work: Pass) -> Peaks:
    """Return the peaks of ``work`` on the model of ``shape_key``. Raises TraceError."""
    shape = shape_key.shape
    kinds = kinds_of(shape)
    if kinds is None or len(kinds) <= 3:
        traced = _trace(shape, len(shape.layers), None, work)
        return replace(traced, how="traced whole")
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    base = list(counts) if len(counts) > 1 else list(counts) * 2
    first = _trace(shape, len(base), base, work)
    longer = {}
    for kind in counts:
        layers = [base[0], kind, *base[1:]]
        longer[kind] = _trace(shape, len(layers), layers, work)
    return extended(first, longer, {k: n - base.count(k) for k, n in counts.items()})


class _Key:
    """Cache key of a shape, made of the fields that determine its trace."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self._text = f"{shape.scalar} {shape.config.to_json_string(use_diff=False)}"

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other._text == self._text


def key_of(shape: ModelShape) -> _Key:
    """Return the cache key of a shape for :func:`measure`."""
    return _Key(shape)


def extended(first: Peaks, longer: Mapping[str, Peaks], more: Mapping[str, int]) -> Peaks:
    """Extrapolate peaks and work linearly from a traced depth to the full depth. ``longer``: peaks
    with one additional layer of each kind; ``more``: number of layers of each kind to add. The
    stage "middle" is left out, because its peaks lie between those of "top" and "bottom"."""

    def at(select: Any) -> dict[str, float]:
        start = select(first)
        steps = {k: select(p) for k, p in longer.items()}
        out = {}
        for stage in STAGES:
            if stage == "middle":
                continue
            have = start.get(stage, 0)
            out[stage] = have + sum((steps[k].get(stage, 0) - have) * n for k, n in more.items())
        return out

    work = first.work
    for kind, peaks in longer.items():
        if work is not None and first.work is not None and peaks.work is not None:
            work += (peaks.work + first.work * -1.0) * more[kind]
    how = f"traced at {len(longer) + 1} depths, extended over the layers" if longer else "0"
    return Peaks(at(lambda p: p.total), at(lambda p: p.other), first.output, how, work)


def kinds_of(shape: ModelShape) -> list[str] | None:
    """Return the kind of each layer. Return None if layers of one kind differ in size, in which
    case the entire model must be traced."""
    text = shape.text.to_dict()
    names = list(text.get("layer_types") or ["layer"] * len(shape.layers))[: len(shape.layers)]
    if len(names) < len(shape.layers):  # other parts of a composite model have layers too
        return None
    sizes: dict[str, set[int]] = {}
    for name, unit in zip(names, shape.layers, strict=True):
        sizes.setdefault(name, set()).add(unit.num_gathered)
    return names if all(len(values) == 1 for values in sizes.values()) else None


# ---- the trace -------------------------------------------------------------------------------


def _trace(shape: ModelShape, depth: int, kinds: Sequence[str] | None, work: Pass) -> Peaks:
    config = copy.deepcopy(shape.config)
    text = config.get_text_config()
    try:
        text.num_hidden_layers = depth
        if kinds is not None and text.to_dict().get("layer_types"):
            text.layer_types = list(kinds)
        with _without_value_checks(), FakeTensorMode(), torch.random.fork_rng(devices=[]):
            return _Trace(config, shape, work).run()
    except Exception as error:  # any operation that needs values and not only sizes
        raise TraceError(f"{type(error).__name__}: {library_text(error)}") from error


@contextmanager
def _without_value_checks() -> Iterator[None]:
    """Silence the warnings of transformers, and disable its search for packed rows in position ids,
    which needs their values (padded rows are not packed, and packed rows bring a plan). Products of
    experts that are not in bf16 use transformers' own operator, because PyTorch's has no fake form
    of them and logs a traceback."""
    level = logging.getLogger("transformers").level
    logging.getLogger("transformers").setLevel(logging.ERROR)
    look: Any = vars(masking_utils).get("find_packed_sequence_indices")
    grouped: Any = vars(moe).get("_can_use_grouped_mm")

    def has_fake_form(input: Tensor, weight: Tensor, offs: Tensor) -> bool:
        return weight.dtype == torch.bfloat16 and bool(grouped(input, weight, offs))

    if look is not None:
        masking_utils.find_packed_sequence_indices = lambda *_: None  # type: ignore[assignment]
    if grouped is not None:
        moe._can_use_grouped_mm = has_fake_form
    try:
        yield
    finally:
        logging.getLogger("transformers").setLevel(level)
        if look is not None:
            masking_utils.find_packed_sequence_indices = look
        if grouped is not None:
            moe._can_use_grouped_mm = grouped


class _Trace:
    """A model on fake tensors. Create and run it inside a FakeTensorMode."""

    def __init__(self, config: PretrainedConfig, shape: ModelShape, work: Pass) -> None:
        self.work, self.scalar = work, shape.scalar
        self.dtype: Dtype = work.dtype
        if work.kernels is not None and work.dtype == "fp16":
            self.dtype = "bf16"  # same size, without the fp16 workarounds of a CPU
        model = _bare(config, work.lora, scalar=shape.scalar)
        _give_sizes(model)
        self.model, self.body = model, model.model if shape.scalar else model.get_decoder()
        if work.lora is not None:
            for parameter in model.parameters():
                if not parameter.requires_grad:
                    parameter.data = parameter.data.to(DTYPES[self.dtype])
        self.optimizer: Optimizer | None = None
        if work.train:
            sums: Dtype = "fp32" if work.grad_accum_dtype == "fp32" else self.dtype
            precision = PrecisionConfig(dtype=self.dtype, grad_accum_dtype=sums)
            optimizer = Optimizer(
                model,
                TrainConfig(train_batch_size=1),
                lr=1e-6,
                total_steps=1,
                precision=precision,
            )
            if work.checkpointing:
                enable_checkpointing(self.body, work.checkpointing)
            self.optimizer = optimizer
            for parameter, holder in self._holders():
                hook = functools.partial(self._complete, holder)
                parameter.register_post_accumulate_grad_hook(hook)
        else:
            model.requires_grad_(False)
            for parameter in model.parameters():
                parameter.data = parameter.data.to(DTYPES[self.dtype])
        if work.kernels is None:
            use_fp32_products(model, DTYPES[self.dtype])
        self.earlier = self._earlier_gradients() if work.train else {}
        self.live, self.counter = LiveBytes(), WorkCounter()
        self.output = 0.0

    def _earlier_gradients(self) -> dict[int, tuple[Tensor, Tensor]]:
        """Return the gradients of an earlier micro-batch, each with its holder, by the id of the
        parameter. They are created before bytes are counted."""
        if not self.work.accumulates:
            return {}
        gradients = {}
        for parameter, holder in self._holders():
            dtype = parameter.dtype if holder is parameter else torch.float32
            gradients[id(parameter)] = holder, torch.empty_like(holder, dtype=dtype)
        return gradients

    def _accumulate_from(self, loss: Tensor) -> None:
        """Give the parameters that ``loss`` reaches the gradients of an earlier micro-batch. Its
        graph exists after the forward pass, which changes no gradient: their bytes are added to
        the forward pass afterwards."""
        reached = _reached(loss) if self.earlier else set()
        gradients = []
        for parameter_id, (holder, gradient) in self.earlier.items():
            if parameter_id in reached:
                holder.grad = gradient
                gradients.append(gradient)
        self.earlier = {}
        self.live.hold_gradients(gradients)

    def _holders(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each trained parameter with the tensor that holds its gradient between passes."""
        optimizer = self.optimizer
        assert optimizer is not None
        holders = optimizer.masters if optimizer.half and optimizer.sums_fp32 else optimizer.params
        yield from zip(optimizer.params, holders, strict=True)

    def _complete(self, holder: Tensor, _: Tensor) -> None:
        if holder.grad is not None:
            self.live.is_gradient(holder.grad)

    def run(self) -> Peaks:
        """Run one pass and return its peaks."""
        work, live = self.work, self.live
        resident = [*self.model.parameters(), *self.model.buffers()]
        if self.optimizer is not None:
            resident += [m for m in self.optimizer.masters]
        plan = fake_plan(work)
        with self.counter, live:
            live.hold(resident)
            base = live.now
            handles = self._watch() if work.train else []
            live.peaks.clear()
            self._stage("forward")
            with torch.set_grad_enabled(work.train):
                self._pass(plan)
            for handle in handles:
                handle.remove()
        total = {s: float(t - base) for s, (t, _) in live.peaks.items()}
        other = {s: float(o - base) for s, (_, o) in live.peaks.items()}
        counted, few = self.counter.counted, _CHUNKS * work.head_chunk
        more = max(0, work.actions - few) / few  # chunks that were not traced
        counted = replace(counted, head=counted.head * (1.0 + more))
        return Peaks(total, other, self.output, "traced", counted)

    def _stage(self, name: str) -> None:
        """Start a stage of the pass."""
        self.live.stage(name)
        self.counter.in_head = name == "head"

    def _watch(self) -> list[Any]:
        """Register hooks that mark the stages of backward. The stage of a layer begins when the
        gradient of its output exists."""
        blocks = [module for _, module in layers_of(self.body)]
        names = {len(blocks) - 1: "top", 0: "bottom"} if len(blocks) > 1 else {0: "bottom"}
        handles = []
        for i, block in enumerate(blocks):
            stage = names.get(i, "middle")
            handles.append(block.register_forward_hook(functools.partial(self._hook, stage)))
        embedding = self.body.get_input_embeddings()
        handles.append(embedding.register_forward_hook(functools.partial(self._hook, "ends")))
        return handles

    def _hook(self, stage: str, _module: Any, _args: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _grad: self._stage(stage))

    def _pass(self, plan: Any) -> None:
        """Run the same operations as ``TorchTrainEngine._outputs`` and its backward pass."""
        work = self.work
        count = sum(r.length for r in work.rows)
        # tokens, mask, and four values per token: log-probs of three models, advantages
        batch = [torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.bool)]
        batch += [torch.zeros(count) for _ in range(4)]
        shape = (1, work.tokens)
        if work.layout == "padded":
            shape = (len(work.rows), work.tokens // len(work.rows))
        positions = torch.zeros(shape, dtype=torch.int64)
        place = torch.zeros(count, dtype=torch.int64)
        extra = {} if plan is None else {"plan": plan, "attention_mask": torch.zeros(1, 1, 1, 1)}
        out = self.body(
            input_ids=torch.zeros(shape, dtype=torch.int64),
            position_ids=positions,
            use_cache=False,
            **extra,
        )
        hidden = out.last_hidden_state.flatten(0, 1)
        del out
        result = self._outputs(hidden, batch[0], place)
        del hidden
        if not work.train:
            return
        if work.with_entropy and not work.entropy_gradient:
            result = result[:1]
        loss = sum(((x.exp() * batch[2]).sum() for x in result), torch.zeros(()))
        self._accumulate_from(loss)
        self._stage("head")
        loss.backward()

    def _outputs(self, hidden: Tensor, tokens: Tensor, place: Tensor) -> list[Tensor]:
        work = self.work
        actions = len(work.rows) if self.scalar else work.actions
        read = torch.zeros(actions, dtype=torch.int64)
        at_reads = hidden[place[read]]
        before = self.live.now
        self.counter.in_head = True
        outputs: list[Tensor | None]
        if work.states:
            outputs = [at_reads]
        elif self.scalar:
            head = self.model.score
            outputs = [torch.nn.functional.linear(at_reads.float(), head.weight.float())[:, 0]]
        else:
            at_reads, weight, bias = with_dropout(self.model.get_output_embeddings(), at_reads)
            fused = work.fused_chunk_tokens
            head = Head(
                weight,
                bias,
                temperature=0.5,
                chunk_tokens=work.chunk_tokens,
                fused=None if fused is None else FusedHead(SIZES_ONLY, fused),
            )
            outputs = self._log_probs(at_reads.to(head.weight.dtype), read, head)
        self.output = float(max(self.output, self.live.peaks["forward"][0] - before))
        blank = tokens.shape[0]
        return [
            x.new_zeros(blank, *x.shape[1:]).index_put((read[: x.shape[0]],), x)
            for x in outputs
            if x is not None
        ]

    def _log_probs(self, at_reads: Tensor, targets: Tensor, head: Head) -> list[Tensor | None]:
        """Return the log-probs of the first chunks only, because further chunks are identical.
        During backward, a tensor of the size of the other chunks' hidden-state gradients is held
        instead."""
        work = self.work
        few = _CHUNKS * work.head_chunk
        kept_ids = None
        if work.kept_ids:
            of_tokens = torch.zeros(work.tokens, work.kept_ids, dtype=torch.int32)
            kept_ids = of_tokens[targets]
        options: dict[str, Any] = {"with_entropy": work.with_entropy and work.train}
        more = at_reads.shape[0] - few
        if more <= 0:
            return list(token_logprobs(at_reads, targets, head, kept_ids=kept_ids, **options))
        held: list[Tensor] = []
        some = _Passed.apply(at_reads[:few], held, None)
        part = None if kept_ids is None else kept_ids[:few]
        logprobs = token_logprobs(some, targets[:few], head, kept_ids=part, **options)
        like = at_reads.new_empty(0).new_empty
        size = (more, at_reads.shape[1])
        return [
            None if x is None else _Passed.apply(x, held, functools.partial(like, size))
            for x in logprobs
        ]


def _reached(loss: Tensor) -> set[int]:
    """Return the ids of the parameters that get a gradient from ``loss``."""
    leaves: set[int] = set()
    nodes: list[Any] = [loss.grad_fn]
    seen = {loss.grad_fn, None}
    while nodes:
        node = nodes.pop()
        if node.name() == "torch::autograd::AccumulateGrad":
            leaves.add(id(node.variable))
        new = {following for following, _ in node.next_functions} - seen
        seen |= new
        nodes.extend(new)
    return leaves


class _Passed(torch.autograd.Function):
    """Identity function with a side effect in backward: clear ``held``, then add the result of
    ``make`` if it is not None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: list[Tensor], make: Any) -> Tensor:
        ctx.held, ctx.make = held, make
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.held.clear()
        if ctx.make is not None:
            ctx.held.append(ctx.make())
        return grads[0], None, None


def _bare(config: PretrainedConfig, lora: LoraConfig | None, *, scalar: bool) -> Any:
    """Return the model on the meta device."""
    with unset_fake_temporarily(), torch.device("meta"):
        model: Any = language_model_class(config).from_config(config, dtype=torch.float32)
        choose_attention(model, config.model_type)
        if config.to_dict().get("burnish_attention") == "eager":  # keeps its scores [T, T]
            model.set_attn_implementation("eager")
        if lora is not None:
            add_adapters(model, lora)
        if not scalar:
            return model
        head = torch.nn.Linear(head_width(model), 1, bias=False)
        return ScalarModel(model.get_decoder(), head)


def _give_sizes(model: torch.nn.Module) -> None:
    """Replace parameters and buffers by fake tensors on the CPU. Tied parameters stay tied."""
    held_by = [held for m in model.modules() for held in (m._parameters, m._buffers)]
    tensors = {id(tensor): tensor for held in held_by for tensor in held.values()}
    copies: dict[int, Any] = {id(None): None}
    for key, tensor in tensors.items():
        if tensor is None:
            continue
        fake = torch.empty(tuple(tensor.shape), dtype=tensor.dtype)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        copies[key] = torch.nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
    for held in held_by:
        held.update({name: copies[id(tensor)] for name, tensor in held.items()})
