"""Contract of train engines, for every backend: a model that computes log-probs, accumulates
gradients and steps.

Engines never import algorithms: the loss is an argument.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Protocol

from torch import Tensor

from burnish.checkpoint.save import PendingSave
from burnish.errors import BurnishError
from burnish.types import Batch, Stats

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
    """[M] fp32. critic: value of the state in which action token t is chosen. reward: score, on the
    last token of each row (process reward models: of each step)"""
    divergence: Tensor | None = None
    """[M] fp32: divergence between the teacher's and this model's distribution of token t, in
    nats"""
    teacher_kl: Tensor | None = None
    """[M] fp32: KL(teacher || this model), without gradient"""
    agreement: Tensor | None = None
    """[M] fp32: 1 if both models rank the same token first, else 0"""
    states: Tensor | None = None
    """[M, H] in the compute dtype: last hidden state before token t, for other models"""
    router_logits: Tensor | None = None
    """[L, M, E]: router logits of L layers for every token, prompts included. Only for mixtures of
    E experts, in ``forward_backward`` with ``train.moe_aux_loss_coef`` set"""
    chosen_experts: Tensor | None = None
    """[L', M, k]: ids of the experts that compute every token. The first L layers are those of
    ``router_logits``; layers without a trained choice (hash routing) follow"""

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the fields, in their order."""
        return tuple(vars(self).values())


@dataclass(frozen=True)
class StepStats:
    """Result of one optimizer step."""

    grad_norm: float
    """L2 norm of the full gradient before clipping"""
    lr: float
    skipped: bool = False
    """True if the loss or the gradient was not finite; weights, moments, schedule and version are
    unchanged"""
    skipped_total: int = 0
    """Number of steps skipped by this engine so far, across resumes"""
    overflow: bool = False
    """True if the gradient was not finite"""
    loss_scale: float = 1.0
    """Factor by which the loss of this step was multiplied"""
    scaled: bool = False
    """True if the engine scales its loss (fp16)"""
    at_floor: bool = False
    """True if the gradient overflowed and the loss scale could not be reduced"""
    growth: float = 1.0
    """Size of the trained weights relative to the start, measured only if it may be large"""
    oom_retries: int | None = None
    """Number of restarts of the update because a pass ran out of memory, over all ranks. None:
    running out of memory ends the run (``train.on_oom=fail``)"""
    kernel_fallbacks: int = 0
    """Number of times so far that kernels of attention or log-probs raised and others took their
    place, over all ranks"""


class NonFiniteError(BurnishError, ArithmeticError):
    """Training cannot continue.

    Possible causes: the loss or the gradient is repeatedly not finite; the gradient overflows with
    the loss scale at its floor; a step made the weights far too large. The message names the first
    bad tensor, if any, and suggests changes. A step with a non-finite loss or gradient was skipped,
    so the engine is intact and can be saved. Weights that became far too large are not saved.
    """

    def __init__(self, message: str, stats: StepStats) -> None:
        super().__init__(message)
        self.stats = stats


class EngineLostError(BurnishError, RuntimeError):
    """The process of an engine ended or hangs. This is unrelated to the computed values, so it is
    never treated as a bad sample or a bad reward."""


class Loss(Protocol):
    """Function (outputs of a micro-batch, the micro-batch) -> (scalar, stats).

    The scalar is divided by the batch's GLOBAL counts, so micro-batch losses add up to the loss of
    the step.
    """

    def __call__(self, outputs: Outputs, batch: Batch) -> tuple[Tensor, Stats]: ...


class HasLogprobs(Protocol):
    """Interface of a reference model that the KL term needs."""

    def logprobs(self, batch: Batch) -> Tensor:
        """Return [M] fp32 log-probs of the action tokens, without gradient, at the sampling
        temperature."""
        ...


class MixableModel(HasLogprobs, Protocol):
    """A frozen model whose weights can be replaced."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) with HuggingFace names. Every rank consumes all of them."""
        ...

    def mix(self, weights: Iterable[tuple[str, Tensor]], alpha: float) -> None:
        """Set each of ``weights`` (name, full tensor) to alpha x it + (1 - alpha) x its current
        value."""
        ...


class TrainEngine(Protocol):
    """A model in one role that trains or computes outputs."""

    role: Role
    version: int
    """Number of optimizer steps taken."""

    def logprobs(self, batch: Batch) -> Tensor:
        """Return [M] fp32 log-probs of the action tokens, without gradient, at the sampling
        temperature."""
        ...

    def base_logprobs(self, batch: Batch) -> Tensor:
        """Return :meth:`logprobs` under the base model of a LoRA: adapters disabled."""
        ...

    def entropies(self, batch: Batch) -> Tensor:
        """Return [M] fp32 entropies in nats of the distributions that action tokens are drawn from,
        over the full vocabulary, without gradient. Language models only."""
        ...

    def logprobs_and_entropies(self, batch: Batch) -> Tensor:
        """Return [M, 2] fp32: :meth:`logprobs` and :meth:`entropies` of one pass."""
        ...

    def values(self, batch: Batch) -> Tensor:
        """Return [M] fp32 values (critic) or scores on the last token of each row (reward), without
        gradient; [M, outputs] if the head has several outputs."""
        ...

    def states(self, batch: Batch) -> Tensor:
        """Return the [M, H] last hidden states from which action tokens are predicted, without
        gradient, in the compute dtype. Language models only."""
        ...

    def forward_backward(self, batch: Batch, loss: Loss) -> Stats:
        """Add the gradient of ``loss`` over ``batch`` (split into micro-batches) to the accumulated
        gradient; return the statistics."""
        ...

    def measure(self, batch: Batch, loss: Loss) -> Stats:
        """Return the statistics of ``loss`` over ``batch`` and all ranks, without gradient."""
        ...

    def optim_step(self) -> StepStats:
        """Unscale, check, clip, step and schedule; clear the gradient.

        Raises NonFiniteError if training cannot continue.
        """
        ...

    def offload(self) -> None:
        """Move weights, gradients and optimizer state to host memory until they are needed."""
        ...

    def reload(self) -> None:
        """Move them back to the device. Every other method does so too if necessary."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) with HuggingFace names and LoRA merged."""
        ...

    @property
    def state_bytes(self) -> int:
        """Size of the tensors that :meth:`save` writes, in bytes."""
        ...

    def save(self, folder: Path) -> None:
        """Write all state that :meth:`load` needs to continue bit for bit (safetensors and JSON, no
        pickle).

        Every rank calls this with a folder that all ranks can access. Replicas are equal, so only
        rank 0 writes them. A rank that holds shards writes or sends its own. All ranks return after
        everything is written. Raises OSError on all ranks if one could not write. Raises
        ValueError, with nothing written, if a weight is not finite.
        """
        ...

    def save_async(self, folder: Path) -> PendingSave:
        """Start :meth:`save` for the current state and return a handle.

        An engine that can copy its state may still be writing when this returns, while training
        continues. ``engine.json`` is written last; a folder without it is not a checkpoint. At most
        one save runs at a time.
        """
        ...

    def load(self, folder: Path) -> None:
        """Restore a checkpoint that :meth:`save` wrote."""
        ...


BASE_SPANS: Mapping[str, str] = MappingProxyType({"base_logprobs": "reference"})
"""Method of any engine -> span of the timeline."""
POLICY_SPANS: Mapping[str, str] = MappingProxyType(
    {
        "logprobs": "logprobs",
        "entropies": "logprobs",
        "logprobs_and_entropies": "samples",
        "forward_backward": "train",
        "optim_step": "optim",
    }
)
"""Method of a policy's engine -> span of the timeline."""
CRITIC_SPANS: Mapping[str, str] = MappingProxyType(
    {"values": "values", "forward_backward": "critic", "optim_step": "critic"}
)


class DistributedPasses(ABC):
    """The methods that pass rows through the model, of an engine over several ranks. Each calls the
    method of the same name of every rank's own engine (``runtime/worker.py``)."""

    @abstractmethod
    def _per_token(self, method: str, batch: Batch) -> Tensor:
        """Call ``method`` of the engines of all ranks; return [M, ...] with the rows of all."""

    @abstractmethod
    def _stats(self, method: str, batch: Batch, loss: Loss) -> Stats:
        """Call ``method`` of the engines of all ranks; return the statistics over all of them."""

    def logprobs(self, batch: Batch) -> Tensor:
        return self._per_token("logprobs", batch)

    def base_logprobs(self, batch: Batch) -> Tensor:
        return self._per_token("base_logprobs", batch)

    def entropies(self, batch: Batch) -> Tensor:
        return self._per_token("entropies", batch)

    def logprobs_and_entropies(self, batch: Batch) -> Tensor:
        return self._per_token("logprobs_and_entropies", batch)

    def values(self, batch: Batch) -> Tensor:
        return self._per_token("values", batch)

    def states(self, batch: Batch) -> Tensor:
        return self._per_token("states", batch)

    def measure(self, batch: Batch, loss: Loss) -> Stats:
        return self._stats("measure", batch, loss)

    def forward_backward(self, batch: Batch, loss: Loss) -> Stats:
        return self._stats("forward_backward", batch, loss)


PASSES = tuple(name for name in DistributedPasses.__dict__ if not name.startswith("_"))
"""Names of the methods of a train engine that pass rows through the model."""


@dataclass(frozen=True)
class FrozenBase:
    """Reference model of a LoRA policy: its own weights, adapters disabled, at no memory."""

    policy: TrainEngine

    def logprobs(self, batch: Batch) -> Tensor:
        return self.policy.base_logprobs(batch)
