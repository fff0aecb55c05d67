"""The model of the local engine: forward passes without gradients, whatever the calling thread's
state is.

On a CPU they are batch invariant: the log-probs of a sample have the same bits whatever else is in
the batch, and whether its tokens were prefilled or decoded. That needs linear layers through oneDNN
(:func:`onednn_linear`), attention with stable sums (``models/cache_attention.py``), and numbers of
rows for which elementwise functions end at a full vector (:meth:`LocalModel.padded`).

oneDNN is also faster. A decode step multiplies a few rows with every weight of the model. PyTorch's
default fp32 kernel is much slower per row for few rows than for many; oneDNN's kernel is 1.2 to 1.9
times faster up to 64 rows (docs/lab-notebook.md). In PyTorch, oneDNN is available for fp32 through
an inference-only operator, which is used only while sampling. fp16 layers use it on fp32 copies of
their weights (4 bytes per parameter while sampling), and their results are rounded to fp16 at the
same points as in the trainer (``models/half_linear.py``). Without copies, every token would convert
every weight, which takes as long as the matmuls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from burnish.models.attention import NO_MASK, DecodePlan
from burnish.models.cache_attention import KVCache, full_vectors, least_rows
from burnish.models.half_linear import WideLinear
from burnish.models.logit_scaling import logit_scaling
from burnish.models.paths import ModelError
from burnish.rollout.local.config import LocalEngine


class LocalModel:
    """Forward passes of a causal LM under attention plans, and what they need between calls."""

    def __init__(self, model: PreTrainedModel, config: LocalEngine) -> None:
        self.model, self.config = model, config
        self.device = next(model.parameters()).device
        self.uses_graphs = self.device.type == "cuda" and config.cuda_graphs
        self._body = model.get_decoder()
        self._scaling = logit_scaling(model.config)
        self._no_mask = NO_MASK.to(self.device)  # copied here: a copy in a captured graph fails
        batch_invariant = config.batch_invariant
        self._onednn = onednn_layers(model, bf16=batch_invariant is True)
        obstacle = _obstacle(model, self._onednn)
        if batch_invariant and obstacle is not None:
            raise ModelError(
                f"rollout.engine.batch_invariant: true is not possible: {obstacle}. Set it to null "
                "(batch invariant if possible) or false"
            )
        self.stable = batch_invariant is not False and obstacle is None
        """True if the forward passes are batch invariant."""
        self.keeps_conversations = self.device.type == "cpu"
        """True if a prefill can continue keys and values that are in the cache."""
        self._padded: dict[tuple[int, int], int] = {}
        """(number of threads, rows) -> result of :meth:`padded`."""
        self._wide: list[Fp32Layer] | None = None
        self._graphs: DecodeGraphs | None = None

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Prepare for forward passes inside the ``with`` block: evaluation mode, no gradients, no
        autocast, and oneDNN's linear layers on a CPU."""
        if self.model.training:
            self.model.eval()
        if self._wide is None:
            self._wide = fp32_layers(self._onednn)
        kind = self.device.type
        with torch.no_grad(), torch.autocast(kind, enabled=False), onednn_linear(self._wide):
            yield

    def weights_changed(self) -> None:
        """Free copies of the weights. Call it when weights changed or sampling pauses."""
        self._wide = None

    def free(self) -> None:
        """Free copies of the weights, captured graphs and their cache."""
        self._wide = self._graphs = None

    def padded(self, rows: int) -> int:
        """Return the number of rows for a pass over ``rows`` tokens.

        PyTorch computes functions like SiLU with vectors, and what is left at the end (of each
        thread's part) one by one, with other bits. With these rows nothing is left.
        """
        if not self.stable:
            return rows
        key = torch.get_num_threads(), rows
        if key not in self._padded:
            head = self.model.get_output_embeddings()
            widths = {layer.out_features for layer in self._onednn if layer is not head}
            self._padded[key] = full_vectors(rows, widths, threads=key[0])
        return self._padded[key]

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Return the fp32 logits [B, V] of last hidden states [B, H]."""
        head = self.model.get_output_embeddings()
        return self._scaling.apply_(head(hidden.to(head.weight.dtype)).float())

    def body(self, input_ids: Tensor, position_ids: Tensor, plan: object) -> Tensor:
        """Return the last hidden states [R, T, H] under a plan."""
        out = self._body(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=self._no_mask,
            plan=plan,
            use_cache=False,
        )
        return out.last_hidden_state

    def graphs_for(self, num_slots: int, capacity: int) -> DecodeGraphs:
        """Return decode graphs over a cache of at least this size, reused between calls."""
        have = self._graphs.cache if self._graphs is not None else None
        if have is None or have.num_slots < num_slots or have.capacity < capacity:
            cache = KVCache(num_slots, capacity)
            self._graphs = DecodeGraphs(self.body, self.head_logits, cache, self.device)
        assert self._graphs is not None
        return self._graphs

    def what_is_broken(self, version: int) -> str:
        """Return the error message for log-probs that are not finite, with the likely cause."""
        for name, weight in self.model.named_parameters():
            if not bool(weight.isfinite().all()):
                where = f"its weight {name} is not finite"
                break
        else:
            where = f"its weights are finite, so an activation overflows in {weight.dtype}"
        return (
            f"the policy at version {version} gives log-probs that are not finite: {where}. "
            "Either training diverged (use a lower train.lr), or the dtype has too little range "
            "(precision.dtype)"
        )


def _obstacle(model: PreTrainedModel, layers: Sequence[nn.Linear]) -> str | None:
    """Return why forward passes cannot be batch invariant if ``layers`` are computed by oneDNN;
    None if they can."""
    kind = next(model.parameters()).device.type
    if kind != "cpu":
        return f"it is for CPUs, and the model is on {kind}"
    known = {id(layer.weight) for layer in layers}
    known |= {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices = [p for p in model.parameters() if p.ndim > 1]
    if len(layers) <= 1 or any(id(p) not in known for p in matrices):  # other kernels multiply
        return "the model has matrices that are not weights of linear layers that oneDNN computes"
    if least_rows(torch.get_num_threads()) is None:
        return "the matmuls of this CPU depend on the number of rows"
    return None


# ---- linear layers through oneDNN, on a CPU ------------------------------------------------


@dataclass(frozen=True)
class Fp32Layer:
    """A linear layer with fp32 weights: its own, or copies if the layer is fp16."""

    layer: nn.Linear
    weight: Tensor
    bias: Tensor | None


def onednn_layers(model: nn.Module, *, bf16: bool = False) -> list[nn.Linear]:
    """Return the plain fp32 and fp16 linear layers of ``model`` on the CPU, which oneDNN can
    compute; with ``bf16`` also those in bf16. Empty if PyTorch is built without oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return []
    dtypes = {torch.float32, torch.float16} | ({torch.bfloat16} if bf16 else set())
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear)
        and type(module) in (nn.Linear, WideLinear)
        and module.weight.dtype in dtypes
        and module.weight.device.type == "cpu"
    ]


def fp32_layers(layers: Sequence[nn.Linear]) -> list[Fp32Layer]:
    """Return ``layers`` with fp32 weights for :func:`onednn_linear`.

    fp16 weights are copied. The copies do not reflect later changes of the weights.
    """
    return [
        Fp32Layer(
            layer,
            layer.weight.detach().float(),
            None if layer.bias is None else layer.bias.detach().float(),
        )
        for layer in layers
    ]


@contextmanager
def onednn_linear(layers: Sequence[Fp32Layer]) -> Iterator[None]:
    """Compute ``layers`` with oneDNN, without gradients, inside the ``with`` block.

    Their previous ``forward`` is restored on exit; an engine may have replaced that of the output
    projection.
    """
    before = [vars(wide.layer).get("forward") for wide in layers]
    for wide in layers:
        wide.layer.forward = partial(_forward, wide)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for wide, forward in zip(layers, before, strict=True):
            del wide.layer.forward
            if forward is not None:
                wide.layer.forward = forward  # type: ignore[method-assign]


def _forward(wide: Fp32Layer, inputs: Tensor) -> Tensor:
    """Return the layer's output. A single row is computed as two: oneDNN gives a row the same bits
    in every product of two or more rows, but not in a product of one (docs/lab-notebook.md)."""
    rows = inputs.float()
    single = inputs.numel() == inputs.shape[-1]
    if single:
        rows = rows.reshape(1, -1).expand(2, -1).contiguous()
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, wide.weight, wide.bias, "none", [], "")
    if single:
        out = out[:1].reshape(*inputs.shape[:-1], -1)
    return out.to(inputs.dtype)


# ---- CUDA graphs ---------------------------------------------------------------------------


@dataclass
class _Recorded:
    """A graph and all tensors that it reads and writes by address. A tensor that is freed may be
    replaced by another one there."""

    graph: torch.cuda.CUDAGraph
    tokens: Tensor  # [B]
    plan: DecodePlan
    mask: Tensor  # [B, 1, 1, length], that of the plan
    logits: Tensor  # [B, V]


class DecodeGraphs:
    """Captures and replays ``logits = head(body(tokens))`` for decode plans over one cache: one
    launch per token instead of hundreds of small kernels.

    One graph is captured per (batch bucket, length bucket), both powers of two, over a cache with
    fixed addresses. Rows beyond the active ones write garbage to free slots, which are never read.
    """

    def __init__(
        self,
        body: Callable[[Tensor, Tensor, DecodePlan], Tensor],
        head: Callable[[Tensor], Tensor],
        cache: KVCache,
        device: torch.device,
    ) -> None:
        self.body, self.head, self.cache, self.device = body, head, cache, device
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        self._pool: Any = None

    @staticmethod
    def padded(count: int) -> int:
        """Return the bucket of a count: the next power of two."""
        return 1 << max(0, count - 1).bit_length()

    def step(self, tokens: Tensor, positions: Tensor, length: int) -> Tensor:
        """Compute the fp32 logits [B, V] for one new token per active sequence."""
        count = tokens.numel()
        batch = self.padded(count)
        reach = min(self.padded(max(length, 64)), self.cache.capacity)
        if (batch, reach) not in self._recorded:
            with torch.cuda.device(self.device):  # may differ from the current device
                self._recorded[batch, reach] = self._record(batch, reach)
        recorded = self._recorded[batch, reach]
        recorded.tokens[:count].copy_(tokens)
        places = recorded.plan.positions
        places.zero_()
        places[:count].copy_(positions)
        keys = torch.arange(reach, device=self.device)
        recorded.mask.copy_((keys[None] <= places[:, None])[:, None, None])
        recorded.graph.replay()
        return recorded.logits[:count].clone()

    def _record(self, batch: int, reach: int) -> _Recorded:
        tokens = torch.zeros(batch, dtype=torch.int64, device=self.device)
        # Warm-up and capture write to the last position, which no active sequence has reached.
        positions = torch.full_like(tokens, self.cache.capacity - 1)
        mask = torch.ones(batch, 1, 1, reach, dtype=torch.bool, device=self.device)
        slots = torch.arange(batch, device=self.device)
        plan = DecodePlan(self.cache, slots, positions, reach, mask)

        def forward() -> Tensor:
            return self.head(self.body(tokens[:, None], positions[:, None], plan)[:, 0])

        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                forward()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # CUDA calls of other threads do not abort this capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = forward()
        self._pool = graph.pool()
        return _Recorded(graph, tokens, plan, mask, logits)
