"""A micro-batch through a model's body and head, for engines whose weights are there only inside of
their module's own forward.

:class:`BatchForward` is what such an engine wraps. The output projection (or the value head) is
called as a module, with the targets beside the hidden states, and computes log-probs in chunks
inside of its forward: hooks that gather its weight before, and reduce its gradient after, act as
they do on every other module. Tied embeddings need nothing more: one parameter, two modules.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from burnish.config.train import TrainConfig
from burnish.models.attention import NO_MASK
from burnish.models.logprobs import Head, token_logprobs
from burnish.train.base import Outputs, Role
from burnish.train.batching import Arranged, arrange, read_and_target
from burnish.types import Batch


class BatchForward(nn.Module):
    """``model`` on whole micro-batches. Parameters are those of ``model``, under the prefix
    ``model.``"""

    def __init__(
        self, model: nn.Module, role: Role, train: TrainConfig, *, temperature: float
    ) -> None:
        super().__init__()
        self.model = model
        self.role, self.layout = role, train.layout
        self.scalar = role in ("critic", "reward")
        body = model.model if self.scalar else model.get_decoder()  # type: ignore[operator]
        head = model.score if self.scalar else model.get_output_embeddings()  # type: ignore[operator]
        # Held in a tuple: as attributes they would be registered, and named, twice.
        self._parts = (cast(PreTrainedModel, body), cast(nn.Linear, head))
        if self.scalar:
            _teach(self.head, partial(_scores, self.head))
        else:
            _teach(
                self.head,
                partial(
                    _token_logprobs,
                    self.head,
                    temperature=temperature,
                    chunk_tokens=train.logprob_chunk_tokens,
                ),
            )

    @property
    def body(self) -> PreTrainedModel:
        """Everything before the head."""
        return self._parts[0]

    @property
    def head(self) -> nn.Linear:
        """The output projection, or the value head."""
        return self._parts[1]

    def forward(self, batch: Batch, with_entropy: bool = False) -> tuple[Tensor, ...]:
        """[M] fp32 values in line with the tokens, or log-probs and (on request) entropies: a plain
        tuple, so that hooks on outputs find the tensors."""
        arranged = arrange(batch, self.layout)
        hidden = self._hidden(arranged)
        if self.role == "reward":
            read = target = batch.offsets[1:].to(hidden.device) - 1
        else:
            read, target = read_and_target(batch)
        at_reads = hidden[arranged.place[read]]
        if self.scalar:
            return (_in_line(self.head(at_reads, extra=()), target, batch),)
        extra = (batch.tokens[target], with_entropy)
        return tuple(_in_line(x, target, batch) for x in self.head(at_reads, extra=extra))

    def _hidden(self, arranged: Arranged) -> Tensor:
        """[R * T, H] last hidden states."""
        packed: dict[str, Any] = {}
        if arranged.plan is not None:
            mask = NO_MASK.to(arranged.input_ids.device)
            packed = {"plan": arranged.plan, "attention_mask": mask}
        out = self.body(
            input_ids=arranged.input_ids,
            position_ids=arranged.position_ids,
            use_cache=False,
            **packed,
        )
        return out.last_hidden_state.flatten(0, 1)

    def as_outputs(self, tensors: tuple[Tensor, ...]) -> Outputs:
        """What :meth:`forward` returned, named."""
        if self.scalar:
            return Outputs(values=tensors[0])
        return Outputs(logprobs=tensors[0], entropy=tensors[1] if len(tensors) > 1 else None)


def _teach(layer: nn.Linear, extra_forward: Callable[..., Any]) -> None:
    """Give a layer a second forward, taken when it is called with ``extra``."""
    plain = layer.forward

    def forward(hidden: Tensor, extra: tuple[Any, ...] | None = None) -> Any:
        return plain(hidden) if extra is None else extra_forward(hidden, *extra)

    layer.forward = forward  # type: ignore[method-assign, assignment]


def _token_logprobs(
    layer: nn.Linear,
    hidden: Tensor,
    targets: Tensor,
    with_entropy: bool,
    *,
    temperature: float,
    chunk_tokens: int,
) -> tuple[Tensor, ...]:
    """[K] log-probs of ``targets``, and their entropies on request."""
    head = Head(layer.weight, layer.bias, temperature=temperature, chunk_tokens=chunk_tokens)
    logprobs, entropy = token_logprobs(hidden, targets, head, with_entropy=with_entropy)
    return (logprobs,) if entropy is None else (logprobs, entropy)


def _scores(layer: nn.Linear, hidden: Tensor) -> Tensor:
    """[K] scores in fp32: advantages and margins are differences of these numbers."""
    bias = None if layer.bias is None else layer.bias.float()
    return nn.functional.linear(hidden.float(), layer.weight.float(), bias)[:, 0]


def _in_line(values: Tensor, index: Tensor, batch: Batch) -> Tensor:
    """[M] with ``values`` [K] at ``index``, 0 elsewhere; differentiable."""
    return values.new_zeros(batch.tokens.numel()).index_put((index,), values)


def dummy_batch(device: torch.device) -> Batch:
    """One row of two tokens, for a pass that only has to take place."""
    row = torch.zeros(2, dtype=torch.int64)
    return Batch(
        tokens=row,
        offsets=torch.tensor([0, 2]),
        prompt_lens=torch.tensor([1]),
        action_mask=torch.tensor([False, True]),
        group_ids=torch.zeros(1, dtype=torch.int64),
        num_tokens=1,
        num_sequences=1,
    ).to(device)
