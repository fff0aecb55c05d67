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

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from burnish.errors import BurnishError
from burnish.models.attention import NO_MASK, takes_plans
from burnish.models.attention_kernel import Use, choose_kernel
from burnish.models.cache_attention import KVCache, full_vectors, least_rows
from burnish.models.compiled_layers import CompiledLayers, is_decode_plan
from burnish.models.flash import FlashSwitch
from burnish.models.half_linear import WideLinear
from burnish.models.load import DTYPES
from burnish.models.logit_scaling import logit_scaling
from burnish.models.paths import ModelError
from burnish.models.sdpa import kernels_of
from burnish.oom import free_memory
from burnish.rollout.local.config import LocalEngine
from burnish.rollout.local.decode_graphs import DecodeGraphs

log = logging.getLogger("burnish")


class CacheTooLargeError(BurnishError, MemoryError):
    """A KV cache that does not fit into the GPU's memory was not allocated."""


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
        self.flash = None if self.stable else _prefill_switch(model, self.device)
        """Switch of FlashAttention for prefills, if they use it."""
        self._padded: dict[tuple[int, int], int] = {}
        """(number of threads, rows) -> result of :meth:`padded`."""
        self._wide: list[Fp32Layer] | None = None
        self.graphs: DecodeGraphs | None = None
        """Recorded decode steps and their cache, kept between rollouts."""
        self.compiled: CompiledLayers | None = None
        """Compiled layers of recorded decode steps. None: layers run as they are."""

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
        self._wide = self.graphs = None

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

    def new_cache(self, num_slots: int, capacity: int) -> KVCache:
        """Return a cache, whose memory is allocated with the first keys and values."""

        def check(cache: KVCache, layer_bytes: int) -> None:
            layers = int(self.model.config.get_text_config().num_hidden_layers)
            self._check_room(cache.num_slots, cache.capacity, layers * layer_bytes)

        return KVCache(num_slots, capacity, transposed_keys=self.stable, check=check)

    def resize(self, cache: KVCache, num_slots: int, capacity: int) -> None:
        """Change the size of a cache, and drop the graphs over it. Raises CacheTooLargeError."""
        self.graphs = None
        before = cache.num_bytes
        if before:
            size = before * num_slots * capacity // (cache.num_slots * cache.capacity)
            largest = max(t.nbytes for t in (*cache.keys.values(), *cache.values.values()))
            self._check_room(num_slots, capacity, size, replaced=before - largest)
        cache.resize(num_slots, capacity)

    def graphs_over(self, cache: KVCache) -> DecodeGraphs:
        """Return the decode graphs over ``cache``, and keep them until :meth:`free`."""
        if self.compiled is not None:
            self.compiled.report("local engine")
        elif self.config.compile == "layers":
            self.compiled = CompiledLayers(self._body, takes=is_decode_plan)
        if self.graphs is None or self.graphs.cache is not cache:
            self.graphs = DecodeGraphs(
                self.body, self.head_logits, cache, self.device, stable=self.stable
            )
        return self.graphs

    def _check_room(
        self, num_slots: int, capacity: int, num_bytes: int, *, replaced: int = 0
    ) -> None:
        """Raise CacheTooLargeError if a cache does not fit into the memory of the GPU.
        ``replaced``: bytes that are freed meanwhile."""
        free = free_memory(self.device)
        if free is None or num_bytes - replaced <= free:
            return
        fitting = (free + replaced) * num_slots // num_bytes
        advice = (
            f"use rollout.engine.max_batch_size={DecodeGraphs.largest_bucket(fitting)} or less, or "
            "shorter prompts and responses"
            if fitting
            else "use shorter prompts and responses (rollout.generate_max_len)"
        )
        raise CacheTooLargeError(
            f"the KV cache of the local engine must grow to {num_slots} slots x {capacity} "
            f"positions = {num_bytes / 1e9:.2f} GB, and {(free + replaced) / 1e9:.2f} GB of "
            f"{self.device} are free for it (rollout.engine.max_batch_size="
            f"{self.config.max_batch_size}): {advice}"
        )

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


def _prefill_switch(model: PreTrainedModel, device: torch.device) -> FlashSwitch | None:
    """Return the switch of torch's own FlashAttention for prefills of ``model``; None if it cannot
    compute them. (Newer kernels are registered for passes of train engines only.)"""
    names = {dtype: name for name, dtype in DTYPES.items()}
    dtype = names.get(model.get_output_embeddings().weight.dtype)
    if dtype is None:
        return None
    layout = "packed" if takes_plans(model) else "padded"
    use = Use(dtype, kernels_of(device), layout=layout, device=device, own_only=True)
    choice = choose_kernel("auto", model.config, use)
    if choice.kernel == "sdpa":
        return None
    log.info("local engine: prefill by %s", choice.sentence)
    return FlashSwitch(may_fall_back=True)


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
