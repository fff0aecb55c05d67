"""Contract of train engines: a model that computes log-probs, accumulates gradients and steps. One
contract, every backend.

Engines never import algorithms: the loss arrives as an argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from burnish.errors import BurnishError
from burnish.types import Batch, PendingSave, Stats

Role = Literal["policy", "critic", "reference", "reward", "teacher"]


@dataclass(frozen=True)
class Outputs:
    """Outputs of the model for a micro-batch, aligned with its tokens; entries outside the mask are
    0."""

    logprobs: Tensor | None = None
    """[M] fp32: log p(token t | tokens before it) at the engine's temperature, for action tokens"""
    entropy: Tensor | None = None
    """[M] fp32: entropy in nats of the distribution token t was drawn from"""
    values: Tensor | None = None
    """[M] fp32. critic: value of the state in which action token t is chosen. reward: the score,
    on the last token of each row (process reward models: of each step)"""
    divergence: Tensor | None = None
    """[M] fp32: between the teacher's and this model's distribution of token t, in nats"""
    teacher_kl: Tensor | None = None
    """[M] fp32: KL(teacher || this model), without gradient"""
    agreement: Tensor | None = None
    """[M] fp32: 1 where both models think the same token the most likely"""
    states: Tensor | None = None
    """[M, H] in the compute format: last hidden state before token t, for others to read"""
    router_logits: Tensor | None = None
    """[L, M, E]: what the routers of L layers say of every token, prompts included (mixtures of E
    experts, in ``forward_backward`` where ``train.moe_aux_loss_coef`` is set)"""
    experts_per_token: int = 0
    """Experts that each token is sent to (where there are ``router_logits``)"""

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the fields that are aligned with tokens, in their order."""
        return tuple(vars(self).values())[:7]

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None]) -> Outputs:
        """Rebuild the outputs from the result of :meth:`tensors`."""
        logprobs, entropy, values, divergence, teacher_kl, agreement, states = tensors
        return cls(logprobs, entropy, values, divergence, teacher_kl, agreement, states)


@dataclass(frozen=True)
class StepStats:
    """Result of one optimizer step."""

    grad_norm: float
    """L2 norm of the whole gradient before clipping"""
    lr: float
    skipped: bool = False
    """True where the loss or the gradient was not finite: weights, moments, schedule and version
    are as before"""
    skipped_total: int = 0
    """Steps of this engine skipped so far, over resumes too"""
    overflow: bool = False
    """True where the gradient was not finite"""
    loss_scale: float = 1.0
    """What the loss of this step was multiplied by"""
    scaled: bool = False
    """True where the engine scales its loss (fp16)"""
    at_floor: bool = False
    """True where the gradient overflowed and the loss scale could not go lower"""
    growth: float = 1.0
    """Size of the trained weights over that at the start, measured if it may be large"""
    oom_retries: int | None = None
    """How often the update was restarted because a pass ran out of memory, over all ranks. None:
    that ends the run (``train.on_oom=fail``)"""


class NonFiniteError(BurnishError, ArithmeticError):
    """Training cannot go on: the loss or the gradient is not finite, again and again, or with the
    loss scale at its floor. Says where it begins and what to try. The step was skipped and the
    engine is whole, so it can be saved."""

    def __init__(self, message: str, stats: StepStats) -> None:
        super().__init__(message)
        self.stats = stats


class EngineLostError(BurnishError, RuntimeError):
    """The process of an engine is gone or hangs. It says nothing about what was computed, so it is
    never taken for a bad sample or a bad reward."""


class Loss(Protocol):
    """(outputs of a micro-batch, the micro-batch) -> (scalar, stats).

    The scalar divides by the batch's GLOBAL counts, so micro-batch losses add up to the loss of
    the step.
    """

    def __call__(self, outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]: ...


class HasLogprobs(Protocol):
    """All that the KL term needs of a reference model."""

    def logprobs(self, batch: Batch) -> Tensor:
        """[M] fp32 log-probs of the action tokens, without gradient, at the sampling
        temperature."""
        ...


class TrainEngine(Protocol):
    """One model in one role."""

    role: Role
    version: int
    """Optimizer steps taken."""

    def logprobs(self, batch: Batch) -> Tensor:
        """[M] fp32 log-probs of the action tokens, without gradient, at the sampling
        temperature."""
        ...

    def values(self, batch: Batch) -> Tensor:
        """[M] fp32 values (critic) or scores on the last token of each row (reward), without
        gradient."""
        ...

    def states(self, batch: Batch) -> Tensor:
        """[M, H] last hidden states from which action token t is predicted, without gradient, in
        the compute format (language models only)."""
        ...

    def forward_backward(self, batch: Batch, loss: Loss) -> Stats:
        """Add the gradient of ``loss`` over ``batch`` (split into micro-batches) to what is
        accumulated."""
        ...

    def measure(self, batch: Batch, loss: Loss) -> Stats:
        """Return the statistics of ``loss`` over ``batch``, without gradient."""
        ...

    def optim_step(self) -> StepStats:
        """Unscale, check, clip, step, schedule; clears the gradient.

        Raises NonFiniteError, after skipping the step, if going on makes no sense.
        """
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) in HuggingFace naming, LoRA merged on the way out."""
        ...

    @property
    def state_bytes(self) -> int:
        """Size of what :meth:`save` writes."""
        ...

    def save(self, folder: Path) -> None:
        """Write everything :meth:`load` needs to go on bit by bit (safetensors and JSON, no
        pickle).

        Called by all ranks, with a folder that all of them see. Replicas are equal, and rank 0
        alone writes; who holds shards writes or sends its own. All ranks return when everything is
        written. Raises OSError on all of them if one could not write, and ValueError, with
        nothing written, if a weight is not finite.
        """
        ...

    def save_async(self, folder: Path) -> PendingSave:
        """:meth:`save` as of now. An engine that can copy its state first may still be writing
        when this returns, while training goes on; ``engine.json`` comes last, and a folder without
        it is no checkpoint. One save at a time."""
        ...

    def load(self, folder: Path) -> None:
        """Take back what :meth:`save` wrote."""
        ...
