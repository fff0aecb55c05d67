# house: ok one template, whose hooks are documented in the order of their calls
"""Template of the in-process train engines: training steps independent of how state is stored.

:class:`BaseTrainEngine` implements :class:`burnish.train.base.TrainEngine`. It owns micro-batches,
statistics over ranks, skip accounting, the stop on non-finite values, retries with smaller
micro-batches, and ``engine.json``. An engine is a subclass with hooks and an optimizer.

Hooks in call order, with input (<-) and output (->) of each. Those marked * have a default.

=====================  ==================  ====================================================
hook                   when                contract
=====================  ==================  ====================================================
``_start_backend`` *   constructor, 1st    <- requested device -> compute device
``_groups`` *          constructor, 2nd    <- ranks -> (ranks that compute the same rows, ranks
                                           that compute other rows)
``_make_forward`` *    constructor, 3rd    <- model, groups -> :class:`Forward`
``_prepare``           constructor, 4th    <- model with gradients enabled or disabled -> weights on
                                           the device in the compute dtype, and the optimizer (None:
                                           the engine is frozen)
``_check_model``       constructor, last   raises ModelError if the model cannot compute
``_backward_passes`` * forward_backward    <- share -> rows of each micro-batch, in order
``_outputs`` *         every pass          <- micro-batch -> :class:`Outputs`, differentiable
``_states`` *          ``states``          <- micro-batch -> hidden states
``_end_passes`` *      after passes        frees the memory that passes without backward keep
                       without backward
``_find_bad`` *        when a run stops    <- one pass -> its first non-finite tensor
``weights``            weight transfer     -> (HuggingFace name, full tensor) in the compute dtype
``_own_part`` *        ``mix``             <- parameter, full tensor -> the tensor and the part of
                                           this rank
``_held_tensors`` *    offload             -> all tensors that the engine keeps between calls
``_write``             save                <- folder, ``describe`` -> the optimizer's tensors in the
                                           folder; ``describe(folder)`` is called last, on one rank
=====================  ==================  ====================================================

The optimizer (:class:`burnish.train.optim.EngineOptimizer`) owns gradients and trained state. In a
training step ``backward`` is called once per micro-batch. ``step`` is then called once and clears
the gradient.

Two attributes declare synchronization points between ranks: ``waits_in_forward`` and
``waits_in_backward``. If ranks wait, all of them make the same number of passes. A rank without
rows computes a dummy row whose loss is multiplied by 0.

Classmethods that are called before the model exists determine how it is loaded: ``loads_on_host``
*, ``reads_own_shards`` *, ``loading`` *.

No hook of a training step reads a value back from the device before ``optim_step``.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from burnish.checkpoint.save import PendingSave
from burnish.config.model import Dtype
from burnish.distributed.process_group import SINGLE, RankGroup
from burnish.models.attention_kernel import Choice
from burnish.models.buffers import (
    buffers_now,
    load_buffers,
    num_buffer_bytes,
    persistent_buffers,
)
from burnish.models.checkpointing import enable_checkpointing
from burnish.models.compiled_layers import CompiledLayers
from burnish.models.deterministic import deterministic_kernels
from burnish.models.dropout import start_training
from burnish.models.flash import FlashSwitch
from burnish.models.flash_versions import select
from burnish.models.half_linear import use_fp32_products
from burnish.models.islands import fp32_names
from burnish.models.load import DTYPES
from burnish.models.lora_layers import adapters_off
from burnish.train.base import Loss, NonFiniteError, Outputs, StepStats
from burnish.train.batching import MicroBatchBackoff, RowSplit, Share, fill_rows
from burnish.train.diagnose import (
    STAGES,
    BadTensor,
    bad_sum_message,
    bad_tensor_message,
    divergence_message,
    first_bad_tensor,
    stop_reason,
)
from burnish.train.forward import Forward, no_rows, zero_of
from burnish.train.host_memory import HostMemory, own_storages
from burnish.train.optim import MAX_GROWTH, EngineOptimizer
from burnish.train.spec import EngineSpec
from burnish.train.state import read_description, write_description
from burnish.types import Batch, Stats

log = logging.getLogger("burnish")

Describe = Callable[[Path], None]
"""Function that writes buffers, ``hf/`` and ``engine.json``, as of the start of the save."""


MIX_BYTES = 64 << 20
"""Size in fp32 of the part of a parameter that :meth:`BaseTrainEngine.mix` computes at a time."""


P = ParamSpec("P")
R = TypeVar("R")


def _with_kernels(
    method: Callable[Concatenate[BaseTrainEngine, P], R],
) -> Callable[Concatenate[BaseTrainEngine, P], R]:
    """Run a method of an engine with its model's kernels (:meth:`BaseTrainEngine._kernels`)."""

    @wraps(method)
    def run(engine: BaseTrainEngine, *args: P.args, **kwargs: P.kwargs) -> R:
        with engine._kernels():
            return method(engine, *args, **kwargs)

    return run


class BaseTrainEngine(ABC):
    """A train engine for one model in one role. The module docstring lists the hooks of subclasses.

    With several ``ranks``, all ranks call their engines in the same order, with the same batches or
    each with its share (:attr:`row_split`). Per-token results belong to the rows of the argument.
    """

    waits_in_forward = False
    """True if ranks synchronize in every forward pass."""
    waits_in_backward = False
    """True if ranks synchronize in every pass that adds to the gradient."""

    def __init__(
        self,
        model: nn.Module,
        spec: EngineSpec,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        ranks: RankGroup = SINGLE,
        device: torch.device | None = None,
    ) -> None:
        """``device``: compute device; None: the device of ``model``."""
        self.model, self.spec, self.role = model, spec, spec.role.engine_role
        self.tokenizer, self.ranks = tokenizer, ranks
        self.version = 0
        self.skipped_total = self.consecutive_skips = 0
        self.smaller: MicroBatchBackoff | None = None
        """Set by engines that can repeat a pass that ran out of memory, if the recipe asks."""
        self._since_step: list[tuple[Share, Loss]] = []
        """Shares and losses since the last step, for the search for the first bad tensor."""
        self._losses: list[Tensor] = []
        self._bad_tensor_text: str | None = None
        """Description of the first bad tensor, once found. Reset by the next step that is taken."""
        self._diverged = False
        """True if a step made the weights far too large. Reset when other weights are loaded."""
        self.device = self._start_backend(device)
        self.model_parallel, self.data_parallel = self._groups()
        self.forward = self._make_forward()
        self.scalar, self.body = self.forward.scalar, self.forward.body
        self.forward.distill_target = spec.load_distill_target(self.device)
        self.forward.entropy_order = spec.entropy_order
        self.compiled = None if spec.role.train.compile == "off" else CompiledLayers(self.body)
        """Compiled layers of the model's passes. None: layers run as they are."""
        if not spec.role.trainable:
            model.requires_grad_(False)
        elif spec.role.train.gradient_checkpointing:
            enable_checkpointing(self.body, spec.role.train.gradient_checkpointing)
        if spec.role.offload:
            own_storages(model)
        self.optimizer = self._prepare()
        self.attention = self._choose_attention()
        """Attention of the model's passes."""
        self._choose_head()
        if spec.neftune_noise_alpha:  # after hooks that complete the embedding's output
            self.forward.add_noise(spec.neftune_noise_alpha)
        model.eval()
        use_fp32_products(model, DTYPES[spec.role.precision.dtype])
        with self._kernels():
            self._check_model()
        self._host = HostMemory(self.device, frozen=not spec.role.trainable)
        if spec.role.offload:
            self.offload()

    def _choose_attention(self) -> Choice:
        """Choose the attention of the model's passes."""
        forward = self.forward
        choice = self.spec.choose_attention(self.body.config, self.device, forward.layout)
        if choice.kernel == "flash":
            auto = self.spec.role.train.attention == "auto"
            forward.flash = FlashSwitch(auto, newer=choice.newer)
        return choice

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        """Return a context manager for passes, after which the process has the kernels it had."""
        try:
            with deterministic_kernels(self.spec.role.train.deterministic):
                yield
        finally:
            select(None)

    def _choose_head(self) -> None:
        """Choose the computation of a language model's log-probs."""
        if self.scalar:
            return
        choice = self.forward.choose_head(self.device, DTYPES[self.spec.role.precision.dtype])
        log.info("%s: log-probs by %s", self.role, choice.sentence)

    # ---- before the model is loaded --------------------------------------------------------

    @classmethod
    def loads_on_host(cls, spec: EngineSpec) -> bool:
        """Return whether the model is loaded into host memory, regardless of the compute device."""
        return False

    @classmethod
    def reads_own_shards(cls, ranks: RankGroup) -> bool:
        """Return whether each rank reads its own rows into a model that is created without
        weights."""
        return False

    @classmethod
    @contextmanager
    def loading(cls, spec: EngineSpec, dtype: Dtype, ranks: RankGroup) -> Iterator[None]:
        """Return a context manager within which a model is loaded in ``dtype``."""
        yield

    # ---- hooks -----------------------------------------------------------------------------

    def _start_backend(self, device: torch.device | None) -> torch.device:
        """Start the backend and return the compute device. ``device``: requested by the caller;
        None: the device of the model, or the CPU if the model has no weights yet."""
        weights_on = next(self.model.parameters()).device
        return device or (torch.device("cpu") if weights_on.type == "meta" else weights_on)

    def _groups(self) -> tuple[RankGroup, RankGroup]:
        """Return the ranks that compute the same rows, and the ranks that compute other rows."""
        return SINGLE, self.ranks

    def _make_forward(self) -> Forward:
        """Return the function that maps a micro-batch to outputs."""
        train, temperature = self.spec.role.train, self.spec.temperature
        return Forward(self.model, self.role, train, temperature=temperature)

    @abstractmethod
    def _prepare(self) -> EngineOptimizer | None:
        """Move the weights to their device and dtype; return the optimizer, or None if frozen."""

    @abstractmethod
    def _check_model(self) -> None:
        """Raise ModelError if weights or activations overflow the compute dtype, or the device
        lacks an operation in that dtype."""

    def _outputs(self, batch: Batch, *, with_entropy: bool) -> Outputs:
        return self.forward(batch, with_entropy=with_entropy)

    def _states(self, batch: Batch) -> Tensor:
        return self.forward.states(batch)

    def _backward_passes(self, share: Share) -> Iterator[list[int]]:
        """Yield the rows of each micro-batch of this rank that adds to the gradient, in order."""
        for rows in share.passes_to_run(waits=self.waits_in_backward):
            yield from (rows,) if self.smaller is None else self.smaller.parts(share.batch, rows)

    def _end_passes(self) -> None:  # noqa: B027 (most engines keep nothing)
        """Free the memory that passes without backward keep."""

    def _find_bad(self, compute: Callable[[], Tensor], *, together: bool) -> BadTensor | None:
        """Repeat one pass and return its first non-finite tensor. ``together``: other ranks
        synchronize with this one in the pass, so it always runs to completion."""
        return first_bad_tensor(self.model, compute, to_the_end=together)

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (HuggingFace name, full tensor) in the compute dtype, LoRA merged. Every rank must
        consume all tensors, in step with the other ranks."""

    def _fp32_in_sampler(self) -> frozenset[str]:
        """Return the names of the weights that a sampler keeps in fp32."""
        return fp32_names(self.model, DTYPES[self.spec.role.precision.sampler_dtype])

    def _own_part(self, name: str, parameter: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tensor in which this rank holds a parameter, and the same part of ``full``."""
        return parameter, full

    def _held_tensors(self) -> Iterable[Tensor]:
        """Return the weights, gradients and optimizer state of this rank. Tensors may share
        storages."""
        tensors: list[Tensor] = []
        for parameter in self.model.parameters():
            tensors += [parameter] if parameter.grad is None else [parameter, parameter.grad]
        return tensors if self.optimizer is None else [*tensors, *self.optimizer.held_tensors()]

    @abstractmethod
    def _write(self, folder: Path, describe: Describe, *, copy: bool) -> PendingSave:
        """Write the optimizer's tensors, then call ``describe(folder)`` on one rank. ``copy``: the
        save may continue in the background while training runs."""

    # ---- phases ----------------------------------------------------------------------------

    def offload(self) -> None:
        """Move weights, gradients and optimizer state to host memory, pinned if the device is a
        GPU. Does nothing if they are there.

        Every other method that needs them moves them back first. Numbers do not change."""
        self._host.offload(self._held_tensors())

    def reload(self) -> None:
        """Move the tensors back to the device. Does nothing if they are there."""
        self._host.reload()

    # ---- computing -------------------------------------------------------------------------

    def logprobs(self, batch: Batch | Share) -> Tensor:
        """Return [M] fp32 log-probs of the action tokens, without gradient."""
        assert not self.scalar, f"a {self.role} computes values, not log-probs"
        return self._no_grad_pass(batch, "logprobs")

    def base_logprobs(self, batch: Batch | Share) -> Tensor:
        with adapters_off(self.model):
            return self.logprobs(batch)

    def entropies(self, batch: Batch | Share) -> Tensor:
        """Return [M] fp32 entropies of the action tokens' distributions, without gradient, of the
        order of the spec."""
        assert not self.scalar, f"a {self.role} computes values and has no vocabulary"
        return self._no_grad_pass(batch, "entropy")

    def logprobs_and_entropies(self, batch: Batch | Share) -> Tensor:
        """Return [M, 2] fp32 log-probs and entropies of the action tokens, without gradient."""
        assert not self.scalar, f"a {self.role} computes values and has no vocabulary"
        return self._no_grad_pass(batch, "logprobs_and_entropy")

    def values(self, batch: Batch | Share) -> Tensor:
        """Return [M] fp32 values of action states (critic) or scores on last tokens (reward),
        without gradient."""
        assert self.scalar, f"a {self.role} computes log-probs, not values"
        return self._no_grad_pass(batch, "values")

    def states(self, batch: Batch | Share) -> Tensor:
        """Return the [M, H] hidden states that predict the action tokens, without gradient."""
        assert not self.scalar, f"a {self.role} computes values and has no vocabulary"
        return self._no_grad_pass(batch, "states")

    @_with_kernels
    @torch.no_grad()
    def measure(self, batch: Batch | Share, loss: Loss) -> Stats:
        self.reload()
        stats, share = Stats(), self._share(batch)
        for rows in share.passes_to_run(waits=self.waits_in_forward):
            stats = stats + self._micro_loss(share.batch, rows, loss)[1]
        self._end_passes()
        return self.data_parallel.sum_stats(stats)

    @_with_kernels
    def forward_backward(self, batch: Batch | Share, loss: Loss) -> Stats:
        """Add the gradient of ``loss`` over ``batch``; return the statistics over all ranks."""
        assert self.optimizer is not None, f"the {self.role} engine is frozen"
        self.reload()
        share = self._share(batch)
        self._since_step.append((share, loss))
        start_training(self.model, dropout=self.spec.role.dropout)
        stats = self._add(share, loss)
        while stats is None:
            stats = self._add_all_again()
        self.model.eval()
        if self.compiled is not None:
            self.compiled.report(self.role)
        if self.device.type == "cuda":  # attribute the time to this call, not to optim_step
            torch.cuda.synchronize(self.device)
        return self.data_parallel.sum_stats(stats)

    @property
    def row_split(self) -> RowSplit:
        """Split of batches. This rank computes the share with number ``data_parallel.rank``."""
        return self.spec.row_split(self.data_parallel.size, self.forward.layout)

    def _share(self, batch: Batch | Share) -> Share:
        if isinstance(batch, Share):
            return batch
        return self.row_split.share(batch, self.data_parallel.rank)

    def _trained(self) -> EngineOptimizer:
        assert self.optimizer is not None, f"the {self.role} engine is frozen"
        return self.optimizer

    def _add(self, share: Share, loss: Loss) -> Stats | None:
        """Add the gradient of one share; return its statistics.

        Return None if a pass ran out of memory. Later passes are then smaller. The step must be
        restarted because the contribution of the failed pass to the sum is unknown.
        """
        stats, optimizer, batch = Stats(), self._trained(), share.batch
        for rows in self._backward_passes(share):
            try:
                scalar, micro_stats = self._micro_loss(batch, rows, loss)
                optimizer.backward(scalar)
            except Exception as error:
                if self.smaller is None or not self.smaller.try_reduce(error, batch, rows):
                    raise
                return None
            self._losses.append(scalar.detach())
            stats = stats + micro_stats
        return stats

    def _add_all_again(self) -> Stats | None:
        """Recompute the gradient accumulated since the last step; return the statistics of the last
        batch, or None if a pass ran out of memory again."""
        assert self.smaller is not None
        self.smaller.forget()
        self._losses = []
        if self.device.type == "cuda":  # free cached blocks of sizes that are no longer used
            torch.cuda.empty_cache()
        stats: Stats | None = None
        for share, loss in self._since_step:
            stats = self._add(share, loss)
            if stats is None:
                break
        return stats

    def _micro_loss(self, batch: Batch, rows: list[int], loss: Loss) -> tuple[Tensor, Stats]:
        """Return loss and statistics of one pass; without rows, a loss whose gradient is 0."""
        micro = self._micro(batch, rows)
        outputs = self._outputs(micro, with_entropy=self.spec.role.with_entropy)
        return loss(outputs, micro) if rows else (zero_of(outputs), Stats())

    def _micro(self, batch: Batch, rows: list[int]) -> Batch:
        """Return a micro-batch on the device; a dummy row if ``rows`` is empty."""
        return (batch.select(rows) if rows else no_rows(batch)).to(self.device)

    @_with_kernels
    @torch.no_grad()
    def _no_grad_pass(self, whole: Batch | Share, name: str) -> Tensor:
        self.reload()
        share = self._share(whole)
        batch, states = share.batch, name == "states"
        dtype = DTYPES[self.spec.role.precision.dtype]
        out = self.forward.no_states(batch, dtype) if states else self.forward.no_outputs(batch)
        if name == "logprobs_and_entropy":
            out = torch.stack([out, out], dim=1)
        parts: list[tuple[list[int], Tensor]] = []
        for rows in share.passes_to_run(waits=self.waits_in_forward):
            result = self._no_grad_output(self._micro(batch, rows), name)
            if rows:
                parts.append((rows, result))
            if states:  # [m, H] each: too large to keep on the device until the end
                fill_rows(out, batch, parts)
                parts = []
        fill_rows(out, batch, parts)
        self._end_passes()
        if share is not whole:
            self.data_parallel.all_reduce_([out])  # exact: an entry is 0 on all peers but one
        return out

    def _no_grad_output(self, micro: Batch, name: str) -> Tensor:
        if name == "states":
            return self._states(micro)
        outputs = self._outputs(micro, with_entropy=name.endswith("entropy"))
        if name == "logprobs_and_entropy":
            assert outputs.logprobs is not None and outputs.entropy is not None
            return torch.stack([outputs.logprobs, outputs.entropy], dim=1)
        columns = {
            "logprobs": outputs.logprobs,
            "entropy": outputs.entropy,
            "values": outputs.values,
        }
        column = columns[name]
        assert column is not None, "the head of the model has this output"
        return column

    # ---- stepping --------------------------------------------------------------------------

    @_with_kernels
    def optim_step(self) -> StepStats:
        """Unscale, check, clip, step, and schedule. If the loss or the gradient is not finite, no
        weight changes and ``skipped`` is set.

        Raises NonFiniteError with the first bad tensor if the gradient overflows at the floor of
        the loss scale, after ``max_consecutive_skips`` skips, or at a ``MAX_GROWTH``-fold growth.
        """
        self.reload()
        optimizer = self._trained()
        finite_loss = not self._losses or bool(torch.stack(self._losses).isfinite().all())
        fallbacks = self.forward.kernel_fallbacks
        not_finite, fell_back = self.ranks.any_across([not finite_loss, fallbacks > 0])
        finite_loss = not not_finite
        stats = optimizer.step(self.version, finite_loss=finite_loss, ranks=self.ranks)
        if stats.skipped:
            self.skipped_total += 1
            # An overflow that a smaller loss scale may fix is left to the scaler.
            self.consecutive_skips += not (optimizer.scaler.adapts and finite_loss)
        else:
            self.version += 1
            self.consecutive_skips, self._bad_tensor_text = 0, None
        retries = None if self.smaller is None else sum(self.ranks.gather(self.smaller.taken()))
        fallbacks = sum(self.ranks.gather(fallbacks)) if fell_back else 0
        stats = replace(
            stats,
            skipped_total=self.skipped_total,
            oom_retries=retries,
            kernel_fallbacks=fallbacks,
        )
        try:
            self._raise_if_diverged(stats)
        finally:
            self._since_step, self._losses = [], []
        return stats

    def _raise_if_diverged(self, stats: StepStats) -> None:
        """Raise NonFiniteError if later steps would be skipped too or the weights are ruined."""
        if not stats.growth <= MAX_GROWTH:
            self._diverged = True
            raise NonFiniteError(divergence_message(stats, self.role), stats)
        reason = stop_reason(
            stats,
            role=self.role,
            skips=self.consecutive_skips,
            limit=self.spec.role.train.max_consecutive_skips,
            precision=self.spec.role.precision,
        )
        if reason is None:
            return
        why, hint = reason
        if not stats.at_floor:
            self.consecutive_skips = 0  # a caller that continues gets the same number of tries
        if self._bad_tensor_text is None:  # of the first one in order of execution, on any rank
            by_rank = self.ranks.gather(self._find_local_bad_tensor())
            bad = [bad_of_rank for bad_of_rank in by_rank if bad_of_rank is not None]
            precision = self.spec.role.precision
            self._bad_tensor_text = min(bad)[2] if bad else bad_sum_message(precision)
        raise NonFiniteError(
            f"{why}. {self._bad_tensor_text} No weight changed in this step (optimizer step "
            f"{self.version + 1}). Try {hint}",
            stats,
        )

    def _find_local_bad_tensor(self) -> tuple[int, int, str] | None:
        """Repeat this rank's micro-batches under observation; return (micro-batch, stage,
        description) of the first bad tensor, or None."""
        together = self.model_parallel.size > 1 or self.waits_in_backward
        since = self._since_step
        micros = ((s, rows, loss) for s, loss in since for rows in self._backward_passes(s))
        candidates: list[tuple[int, int, str]] = []
        start_training(self.model, dropout=self.spec.role.dropout)
        try:
            for number, (share, rows, loss) in enumerate(micros):
                compute = partial(self._scaled_loss, share.batch, rows, loss)
                with nullcontext() if self.compiled is None else self.compiled.paused():
                    bad = self._find_bad(compute, together=together)
                if bad is not None:
                    text = bad_tensor_message(bad, [share.row_numbers[row] for row in rows])
                    candidates.append((number, STAGES.index(bad.stage), text))
                if candidates and not together:
                    break
        except Exception as error:  # it must not prevent the stop or the checkpoint
            if self.waits_in_backward:
                raise
            text = f"The search for the first bad tensor failed: {type(error).__name__}: {error}."
            return len(self._losses), len(STAGES), text
        finally:
            self.model.eval()
        return min(candidates, default=None)

    def _scaled_loss(self, batch: Batch, rows: list[int], loss: Loss) -> Tensor:
        return self._trained().loss_factor * self._micro_loss(batch, rows, loss)[0]

    @torch.no_grad()
    def mix(self, weights: Iterable[tuple[str, Tensor]], alpha: float) -> None:
        """Set weights of a frozen model to alpha x ``weights`` + (1 - alpha) x their own, computed
        in fp32. Buffers are unchanged.

        ``weights``: (HuggingFace name, full tensor), some or all. Every rank gets the same ones.
        Raises ValueError if the model has no such weight or it has another shape.
        """
        assert self.optimizer is None, f"the weights of the {self.role} are trained"
        self.reload()
        parameters = dict(self.model.named_parameters())
        buffers = {name for name, _ in persistent_buffers(self.model)}
        for name, tensor in weights:
            if name in buffers:
                continue
            if name not in parameters:
                raise ValueError(f"the {self.role} has no weight {name}")
            target, source = self._own_part(name, parameters[name].detach(), tensor)
            if target.shape != source.shape:
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)}, which is not that of the {self.role}"
                )
            for own_rows, rows in zip(_in_slices(target), _in_slices(source), strict=True):
                mixed = own_rows.float().lerp(rows.to(target.device).float(), alpha)
                own_rows.copy_(mixed)

    # ---- state -----------------------------------------------------------------------------

    @property
    def state_bytes(self) -> int:
        return self._trained().num_bytes + num_buffer_bytes(self.model)

    def save(self, folder: Path) -> None:
        """Write weights (fp32 masters), moments, EMA, version, and config and tokenizer for export.

        Every rank calls this with a folder that all ranks can access. All ranks return after
        everything is written. Raises OSError on all ranks if one cannot write. Raises ValueError,
        with nothing written, if a weight is not finite or the weights are ruined.
        """
        self._start_save(folder, copy=False).wait()

    def save_async(self, folder: Path) -> PendingSave:
        """Start :meth:`save` for the current state and return a handle.

        An engine that copies its state may still be writing when this returns. ``engine.json`` is
        written last; a folder without it is not a checkpoint.
        """
        return self._start_save(folder, copy=True)

    def _start_save(self, folder: Path, *, copy: bool) -> PendingSave:
        self.reload()
        optimizer = self._trained()
        broken = optimizer.broken_master()
        rest = "and are not saved; resume from an earlier checkpoint with a lower learning rate"
        if self._diverged:
            raise ValueError(f"the weights of the {self.role} diverged {rest}")
        bad_name = next((name for name in self.ranks.gather(broken) if name is not None), None)
        if bad_name is not None:
            raise ValueError(
                f"the weights of the {self.role} are not finite, e.g. {bad_name}, {rest}"
            )
        state = {  # all engine state except tensors
            "role": self.role,
            "version": self.version,
            "skipped_total": self.skipped_total,
            "consecutive_skips": self.consecutive_skips,
            "optimizer": self.spec.role.train.optimizer.state_format,
            "loss_scaler": dict(optimizer.scaler.state_dict()),
            **self.spec.saved_model,
        }
        describe = partial(
            write_description,
            engine=self,
            text=json.dumps(state, indent=1),
            buffers=buffers_now(self.model),
        )
        return self._write(folder, describe, copy=copy)

    def load(self, folder: Path) -> None:
        """Restore a checkpoint that :meth:`save` of any engine wrote, with any number of ranks.
        Raises ValueError if the checkpoint is of another model or role."""
        self.reload()
        optimizer = self._trained()
        state = read_description(folder, self.spec)
        optimizer.load(folder)
        load_buffers(self.model, folder)
        self.version = int(state["version"])
        self.skipped_total = int(state.get("skipped_total", 0))
        self.consecutive_skips = int(state.get("consecutive_skips", 0))
        self._diverged = False
        if state.get("loss_scaler"):  # empty for a constant scale, and a recipe may have changed
            optimizer.scaler.load_state_dict(state["loss_scaler"])


def _in_slices(tensor: Tensor) -> Sequence[Tensor]:
    """Return views of a tensor's rows of about :data:`MIX_BYTES` in fp32."""
    rows = torch.atleast_1d(tensor)
    return rows.split(max(1, MIX_BYTES // (4 * max(1, rows[:1].numel()))))
