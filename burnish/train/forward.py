"""Forward pass of a micro-batch through a model's body and head: from rows to log-probs, entropies
or values.

:class:`Forward` reads the head's weight directly. :class:`BatchForward` serves engines that gather
a module's weights only during that module's own forward. It calls the output projection (or the
value head) as a module, with the targets in addition to the hidden states. The module then computes
log-probs in chunks inside its forward. Hooks that gather its weight before, and reduce its gradient
after, run as they do on every other module. Tied embeddings need no special case: one parameter,
two modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from burnish.config.train import TrainConfig
from burnish.models.attention import NO_MASK, PackedPlan, SequenceParallelPlan, takes_plans
from burnish.models.distill import DistillTarget, distill_logprobs
from burnish.models.flash import FlashSwitch
from burnish.models.fused_head import FusedHead, HeadChoice, choose_head, fused_chunk_tokens
from burnish.models.logit_scaling import UNSCALED, logit_scaling
from burnish.models.logprobs import EntropyOrder, Head, chunk_tokens, token_logprobs
from burnish.models.lora_layers import effective_weight, with_dropout
from burnish.models.routing import Routing, RoutingRecorder
from burnish.tensors import upload
from burnish.train.base import Outputs, Role
from burnish.train.batching import Arranged, Layout, arrange, read_and_target
from burnish.types import Batch, rows_to_batch

NO_ROWS = rows_to_batch([[0, 0]], [[False, True]], prompt_lens=[1])
"""Dummy row that a rank computes in a pass for which it has no rows but other ranks wait for it."""


def no_rows(batch: Batch) -> Batch:
    """Return :data:`NO_ROWS` with the columns of ``batch`` that determine the outputs of a pass."""
    if batch.teacher_states is None:
        return NO_ROWS
    width = batch.teacher_states.shape[1]
    return replace(NO_ROWS, teacher_states=batch.teacher_states.new_zeros(2, width))


def zero_of(outputs: Outputs) -> Tensor:
    """Return a scalar 0 that depends on every output, with gradient 0, for any output values.

    ZeRO stage 3 gathers weights in the order of its trace of earlier passes, and runs a hook for
    each output that has a gradient. Passes whose losses use different outputs therefore have
    different traces. Ranks with different traces wait for each other in different collectives.
    Adding this scalar to the loss makes every pass use all outputs, with or without rows.
    """
    tensors = [t for t in outputs.tensors() if t is not None]
    zeros = [torch.where(torch.zeros_like(t, dtype=torch.bool), t, 0.0).sum() for t in tensors]
    return torch.stack(zeros).sum()


class Forward:
    """Forward pass of ``model`` over full micro-batches."""

    def __init__(
        self, model: nn.Module, role: Role, train: TrainConfig, *, temperature: float
    ) -> None:
        self.role = role
        self.scalar = role in ("critic", "reward")
        self._temperature, self._chunk_tokens = temperature, train.logprob_chunk_tokens
        body = model.model if self.scalar else model.get_decoder()  # type: ignore[operator]
        head = model.score if self.scalar else model.get_output_embeddings()  # type: ignore[operator]
        self.body = cast(PreTrainedModel, body)
        """All modules before the head."""
        self.packs = takes_plans(self.body)
        """True if the model supports packed rows (``models/support.py``)."""
        self.layout: Layout = train.layout if self.packs else "padded"
        self.flash: FlashSwitch | None = None
        """Switch of FlashAttention, if it is used (``models/attention_kernel.py``)."""
        self.fused_head: FusedHead | None = None
        """Kernels of log-probs, if they are used (``models/fused_head.py``)."""
        self.scaling = UNSCALED if self.scalar else logit_scaling(self.body.config)
        self.head = cast(nn.Linear, head)
        """The output projection, or the value head."""
        self.recorder = RoutingRecorder(self.body) if train.moe_aux_loss_coef else None
        """Recorder of the routing of passes with gradient, for the load-balancing loss."""
        self.ask_head: Callable[..., tuple[Tensor, ...]] = self.read_head
        self.entropy_order: EntropyOrder = 1
        """1: Shannon entropies; 2: collision entropies, in passes without gradient."""
        self.distill_target: DistillTarget | None = None
        """Distillation target of a student, for batches that contain teacher states."""
        self.noise: EmbeddingNoise | None = None
        """Noise on the embeddings of training passes."""

    def add_noise(self, alpha: float) -> None:
        """Add NEFTune's noise to the input embeddings of later training passes."""
        self.noise = EmbeddingNoise(self.body.get_input_embeddings(), alpha)

    def choose_head(self, device: torch.device, dtype: torch.dtype) -> HeadChoice:
        """Choose the computation of log-probs over logits in ``dtype``."""
        vocabulary = int(self.body.config.get_text_config().vocab_size)
        choice = choose_head(device, dtype, vocabulary, self.scaling)
        if choice.kernels is not None:
            tokens = fused_chunk_tokens(self._chunk_tokens, vocabulary, dtype.itemsize)
            self.fused_head = FusedHead(choice.kernels, tokens)
        return choice

    @property
    def kernel_fallbacks(self) -> int:
        """Number of times that kernels raised and others took their place."""
        head = self.fused_head is not None and not self.fused_head.on
        return head + (0 if self.flash is None else self.flash.fallbacks)

    def _announce(self, batch: Batch, arranged: Arranged) -> None:
        """Tell the noise which rows the next pass has."""
        if self.noise is not None:
            lengths = batch.offsets.diff()[batch.row_ids]
            self.noise.set_rows(arranged.flat_index, lengths, arranged.input_ids.shape)

    def __call__(self, batch: Batch, *, with_entropy: bool) -> Outputs:
        """Return outputs [M] fp32, aligned with the batch's tokens."""
        arranged = arrange(batch, self.layout, flash=self.flash)
        if not self.routes:
            return self.named(self._compute(batch, arranged, with_entropy=with_entropy))
        outputs, routed = self._compute_routed(batch, arranged, with_entropy=with_entropy)
        return replace(
            self.named(outputs), router_logits=routed.logits, chosen_experts=routed.chosen
        )

    @property
    def routes(self) -> bool:
        """Return whether the next pass returns router logits and chosen experts."""
        return self.recorder is not None and torch.is_grad_enabled()

    def states(self, batch: Batch) -> Tensor:
        """Return the [M, H] hidden states from which action tokens are predicted."""
        arranged = arrange(batch, self.layout, flash=self.flash)
        return self._compute(batch, arranged, with_entropy=None)[0]

    def no_states(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        """Return [M, H] zeros on the CPU, as a buffer for hidden states."""
        width = int(self.head.in_features)
        return torch.zeros(batch.tokens.numel(), width, dtype=dtype)

    def no_outputs(self, batch: Batch) -> Tensor:
        """Return [M] zeros on the CPU, or [M, outputs] for a head with several outputs, as a buffer
        for values or log-probs."""
        num = self.head.out_features if self.scalar else 1
        return torch.zeros(batch.tokens.numel(), *([num] if num > 1 else []))

    def _compute(
        self, batch: Batch, arranged: Arranged, *, with_entropy: bool | None
    ) -> tuple[Tensor, ...]:
        """Return the head's outputs, aligned with the tokens; its inputs if ``with_entropy`` is
        None."""
        self._announce(batch, arranged)
        hidden = self._hidden(arranged.input_ids, arranged.position_ids, arranged.plan)
        return self._read(batch, hidden, arranged.flat_index, with_entropy=with_entropy)

    def _compute_routed(
        self, batch: Batch, arranged: Arranged, *, with_entropy: bool
    ) -> tuple[tuple[Tensor, ...], Routing]:
        """Return the head's outputs, and the routing of the batch's tokens.

        Padding is dropped and a shared prompt is repeated for each of its rows, so all layouts
        agree.
        """
        self._announce(batch, arranged)
        hidden, routing = self._hidden_routed(
            arranged.input_ids, arranged.position_ids, arranged.plan
        )
        index = upload(arranged.flat_index, hidden.device)
        outputs = self._read(batch, hidden, arranged.flat_index, with_entropy=with_entropy)
        return outputs, Routing(routing.logits[:, index], routing.chosen[:, index])

    def _hidden_routed(
        self, ids: Tensor, positions: Tensor, plan: PackedPlan | SequenceParallelPlan | None
    ) -> tuple[Tensor, Routing]:
        """Return [R * T, H] last hidden states of tokens [R, T], and their routing."""
        assert self.recorder is not None
        with self.recorder.recording():
            hidden = self._hidden(ids, positions, plan)
        return hidden, self.recorder.routing()

    def _read(
        self, batch: Batch, hidden: Tensor, flat_index: Tensor, *, with_entropy: bool | None
    ) -> tuple[Tensor, ...]:
        """Return the head's outputs from ``hidden`` [R * T, H]. ``flat_index``: that of
        :class:`Arranged`."""
        read, target = self._reads(batch)
        at_reads = hidden[upload(flat_index[read], hidden.device)]
        return self._ask(batch, at_reads, upload(target, hidden.device), with_entropy=with_entropy)

    def _reads(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return [K] tokens whose hidden states are read and [K] tokens that the outputs belong to,
        on the CPU."""
        if self.role == "reward" and batch.step_labels is not None:
            steps = batch.on_host.action_mask.nonzero()[:, 0]
            return steps, steps
        if self.role == "reward":
            return batch.last_tokens, batch.last_tokens
        return read_and_target(batch)

    def _ask(
        self, batch: Batch, hidden: Tensor, target: Tensor, *, with_entropy: bool | None
    ) -> tuple[Tensor, ...]:
        """Return the head's outputs for ``hidden`` [K, H], aligned with the batch's tokens."""
        if with_entropy is None:
            return (_in_line(hidden, target, batch),)
        states = None if batch.teacher_states is None else batch.teacher_states[target]
        kept_ids = None if batch.kept_ids is None or self.scalar else batch.kept_ids[target]
        answers = self.ask_head(hidden, batch.tokens[target], with_entropy, states, kept_ids)
        return tuple(_in_line(values, target, batch) for values in answers)

    def named(self, tensors: tuple[Tensor, ...]) -> Outputs:
        """Return the output tensors by name: values, or log-probs with entropies or distillation
        outputs if present."""
        if self.scalar:
            return Outputs(values=tensors[0])
        if len(tensors) == 4:
            logprobs, divergence, kl, agreement = tensors
            return Outputs(logprobs, divergence=divergence, teacher_kl=kl, agreement=agreement)
        return Outputs(logprobs=tensors[0], entropy=tensors[1] if len(tensors) > 1 else None)

    def read_head(  # house: ok modules hand the arguments on as a tuple
        self,
        hidden: Tensor,
        targets: Tensor,
        with_entropy: bool = False,
        states: Tensor | None = None,
        kept_ids: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Return [K] values of ``hidden`` [K, H] ([K, outputs] if there are several), or [K]
        log-probs of ``targets`` [K], over the ids ``kept_ids`` [K, C] if they are given.

        ``with_entropy`` adds entropies. With teacher ``states`` [K, H'] the result contains the
        four tensors of ``DistillOutputs`` instead.
        """
        if self.scalar:  # in fp32: advantages and margins are differences of these numbers
            weight, bias = effective_weight(self.head)
            wide = None if bias is None else bias.float()
            values = nn.functional.linear(hidden.float(), weight.float(), wide)
            return (values if values.shape[1] > 1 else values[:, 0],)
        hidden, weight, bias = with_dropout(self.head, hidden)
        hidden = hidden.to(weight.dtype)  # some bodies return fp32, or have an fp32 head
        head = Head(
            weight,
            bias,
            temperature=self._temperature,
            chunk_tokens=chunk_tokens(self._chunk_tokens, hidden.device.type),
            scaling=self.scaling,
            fused=self.fused_head,
        )
        if states is not None:
            assert self.distill_target is not None, "teacher's states, and no lesson to use them in"
            comparison = distill_logprobs(
                hidden, targets, head, states=states, distill_target=self.distill_target
            )
            return comparison.logprobs, comparison.divergence, comparison.kl, comparison.agreement
        order = self.entropy_order
        logprobs, entropy = token_logprobs(
            hidden, targets, head, with_entropy=with_entropy, entropy_order=order, kept_ids=kept_ids
        )
        return (logprobs,) if entropy is None else (logprobs, entropy)

    def _hidden(
        self, ids: Tensor, positions: Tensor, plan: PackedPlan | SequenceParallelPlan | None
    ) -> Tensor:
        """Return [R * T, H] last hidden states of tokens [R, T]."""
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if self.packs:  # other models derive positions, from the left of each row
            inputs["position_ids"] = positions
        if plan is not None:
            inputs |= {
                "plan": plan,
                "attention_mask": torch.empty(NO_MASK.shape, device=ids.device),
            }
        return cast(Tensor, self.body(**inputs).last_hidden_state).flatten(0, 1)


class BatchForward(nn.Module):
    """:class:`Forward` as a module. Its parameters are those of ``model``, with the prefix
    ``model.``"""

    def __init__(self, model: nn.Module, parts: Forward) -> None:
        super().__init__()
        self.model, self.parts = model, parts
        head = parts.head
        plain = head.forward

        def forward(hidden: Tensor, extra: tuple[Any, ...] | None = None) -> Any:
            return plain(hidden) if extra is None else parts.read_head(hidden, *extra)

        head.forward = forward  # type: ignore[method-assign, assignment]
        parts.ask_head = lambda hidden, *extra: head(hidden, extra=extra)

    def forward(
        self, batch: Batch, with_entropy: bool = False, states: bool = False
    ) -> tuple[Tensor, ...]:
        """Return [M] fp32 values aligned with the tokens, or log-probs and the other outputs.
        ``states``: return only the hidden states.

        The result is a plain tuple, in which hooks on outputs find the tensors.
        """
        if states:
            return (self.parts.states(batch),)
        outputs = self.parts(batch, with_entropy=with_entropy)
        return tuple(t for t in outputs.tensors() if t is not None)


def _in_line(values: Tensor, index: Tensor, batch: Batch) -> Tensor:
    """Return [M, ...] with ``values`` [K, ...] at ``index`` and 0 elsewhere; differentiable."""
    zeros = values.new_zeros(batch.tokens.numel(), *values.shape[1:])
    return zeros.index_put((index,), values)


class EmbeddingNoise:
    """Uniform noise on the output of an embedding, in training passes only.

    A row of L tokens and width d gets noise in alpha / sqrt(L d) x [-1, 1]. Like dropout, it is
    drawn from torch's global generator, whose state a resumed run restores.
    """

    def __init__(self, embedding: nn.Module, alpha: float) -> None:
        self.alpha = alpha
        self.row_lengths: Tensor | None = None
        """[R, T] tokens in the row of each position of the next pass; 0 for padding. None: no
        noise."""
        embedding.register_forward_hook(self._add)

    def set_rows(self, flat_index: Tensor, lengths: Tensor, shape: torch.Size) -> None:
        """Set the rows of the next pass. ``flat_index`` [M]: place of each token in the input ids
        of ``shape`` [R, T]; ``lengths`` [M]: tokens of its row."""
        row_lengths = torch.zeros(shape.numel(), dtype=torch.float32)
        row_lengths[flat_index.cpu()] = lengths.float().cpu()
        self.row_lengths = row_lengths.view(shape)

    def _add(self, module: nn.Module, args: object, output: Tensor) -> Tensor | None:
        """Return the output with noise; None leaves it as it is."""
        lengths, self.row_lengths = self.row_lengths, None
        if lengths is None or not module.training or not torch.is_grad_enabled():
            return None
        width = output.shape[-1]
        scale = torch.where(lengths > 0, self.alpha * (lengths * width).clamp(min=1).rsqrt(), 0.0)
        noise = torch.rand(output.shape, device=output.device) * 2 - 1
        return output + (noise * scale.to(output.device)[..., None]).to(output.dtype)
