# house: ok one engine, whose parts share its state
"""The train engine over DeepSpeed: ZeRO stages 0 to 3. The only file that imports deepspeed.

What DeepSpeed does here: shards, gathering, reducing over ranks, the loss scale, clipping, offload.
What it does not: micro-batches, the learning rate, counting steps and checkpoints are Burnish's, as
in ``torch.py``, so that a run gives the same numbers and its checkpoints can change the engine.

Reading order: ``forward_backward``, ``optim_step``. docs/engines.md has what is mapped to what.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from burnish.config.model import Dtype
from burnish.config.train import DeepSpeedEngine, engine_rules
from burnish.errors import BurnishError
from burnish.models import buffers as state
from burnish.models.checks import check_compute_dtype, check_head
from burnish.models.dropout import start_training
from burnish.models.half_linear import use_fp32_products
from burnish.models.load import DTYPES, describe
from burnish.models.lora import merged_weights
from burnish.train.base import Loss, NonFiniteError, StepStats
from burnish.train.batching import fill_rows
from burnish.train.diagnose import first_bad_tensor, sum_is_bad, where_bad, why_stop
from burnish.train.forward import BatchForward, Forward, enable_checkpointing, no_rows, zero_of
from burnish.train.optim import lr_factor
from burnish.train.process_group import SINGLE, RankGroup
from burnish.train.spec import EngineSpec
from burnish.train.state import (
    ShardedState,
    description,
    read_description,
    take_counts,
    write_description,
)
from burnish.train.torch import parts_of
from burnish.train.zero import (
    ZeroAdamW,
    buckets,
    ds_config,
    find_shards,
    forget_ended_groups,
    is_at_floor,
    is_partitioned,
    publish,
    restore_scaler,
    scaler_state,
    zero_section,
)
from burnish.types import Batch, FinishedSave, PendingSave, Stats

OLDEST = Version("0.19.8")
WEIGHT_BUCKET_BYTES = 256 << 20


class DeepSpeedError(BurnishError, RuntimeError):
    """DeepSpeed is missing, of a version that cannot be used, or asked for what it cannot do."""


class DeepSpeedTrainEngine:
    """One model in one role, its state in shards over ``ranks``. Implements
    :class:`burnish.train.base.TrainEngine`.

    Every rank has an engine and calls the same methods in the same order with the same whole
    batches. Gradients are those of the global denominators: DeepSpeed averages over ranks, so the
    loss is multiplied by their number first; it is told of no accumulation, so it divides by none.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: EngineSpec,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        ranks: RankGroup = SINGLE,
    ) -> None:
        config = spec.train.engine
        assert isinstance(config, DeepSpeedEngine)
        for problem in engine_rules(spec.train, spec.precision):
            raise DeepSpeedError(problem)
        self._library = _deepspeed()
        _join(self._library, ranks)
        self.model, self.spec, self.role, self.config = model, spec, spec.role, config
        self.tokenizer, self.ranks = tokenizer, ranks
        self.version = 0
        self.skipped_total = self.consecutive_skips = 0
        self._since_step: list[tuple[Batch, Loss]] = []
        self._losses: list[Tensor] = []
        self.device = torch.device(_accelerator(self._library).current_device_name())
        parts = Forward(model, spec.role, spec.train, temperature=spec.temperature)
        parts.distill_target = spec.load_distill_target(self.device)
        self.forward = BatchForward(model, parts)
        self.scalar = parts.scalar
        self.body: PreTrainedModel = parts.body
        self._state: ShardedState | None = None
        self._scaler: Any = None
        self._start()
        use_fp32_products(model)
        self._check_model()

    # ---- set-up ----------------------------------------------------------------------------

    def _start(self) -> None:
        """Cast, hand the model to DeepSpeed, and give it the masters unrounded."""
        if not self.spec.trainable:
            self.model.requires_grad_(False)
        masters = self._cast()
        self._adamw = ZeroAdamW(self.model, self.spec) if self.spec.trainable else None
        self.engine: Any = None
        if self.spec.trainable or self.config.zero_stage == 3:
            with _on_this_machine(self._library):
                config = ds_config(self.spec, on_gpu=self.device.type != "cpu")
                self.engine, *_ = self._library.initialize(
                    model=self.forward, optimizer=self._adamw, config=config
                )
        else:  # nothing to cut and nothing to step
            self.forward.to(self.device)
        if self._adamw is not None:
            self._adamw.checks = self.config.zero_stage == 0 and not self._half
            self._adamw.state.clear()  # stage 0 in bf16 makes a step over nothing to begin with
            self._scaler = vars(self.engine.optimizer).get("loss_scaler")
            if self._scaler is not None and self._scaler.dynamic:
                self._scaler.raise_error_at_min_scale = False  # at_floor is found without a raise
            shards = find_shards(
                self.model, self.engine.optimizer, stage=self.config.zero_stage, ranks=self.ranks
            )
            shards.take(masters)  # DeepSpeed made its own of rounded weights
            ema_decay = self.spec.train.ema_decay
            self._state = ShardedState(shards, self._adamw.state, ema_decay)
            if self.spec.train.gradient_checkpointing:
                enable_checkpointing(self.body)
        self.model.eval()

    @property
    def _half(self) -> bool:
        return self.spec.precision.dtype != "fp32"

    def _cast(self) -> dict[str, Tensor]:
        """Move weights to the device in the compute format; return the trained ones in fp32, where
        they were loaded (whole, or this rank's shard if the model was loaded in shards), if that is
        another format."""
        dtype, masters = DTYPES[self.spec.precision.dtype], {}
        for name, parameter in self.model.named_parameters():
            held = (
                [parameter, vars(parameter)["ds_tensor"]]
                if is_partitioned(parameter)
                else [parameter]
            )
            if parameter.requires_grad and self._half:
                masters[name] = held[-1].detach().float()
            if is_partitioned(parameter):  # DeepSpeed decides where its shards are
                for tensor in held:
                    tensor.data = tensor.data.to(dtype)
            else:
                parameter.data = parameter.data.to(self.device, dtype)
        return masters

    def _check_model(self) -> None:
        """What loading could not look at, because the weights were in shards."""
        check_compute_dtype(self.body, describe(self.spec.model), backward=self.spec.trainable)
        if self.config.zero_stage == 3 and not self.scalar:
            check_head(self.model, describe(self.spec.model))

    # ---- computing -------------------------------------------------------------------------

    def logprobs(self, batch: Batch) -> Tensor:
        """[M] fp32 log-probs of the action tokens, without gradient."""
        assert not self.scalar, f"a {self.role} has values, not log-probs"
        return self._no_grad_pass(batch)

    def values(self, batch: Batch) -> Tensor:
        """[M] fp32: values of action states (critic) or scores on last tokens (reward), without
        gradient."""
        assert self.scalar, f"a {self.role} has log-probs, not values"
        return self._no_grad_pass(batch)

    def states(self, batch: Batch) -> Tensor:
        """[M, H] hidden states from which action tokens are predicted, without gradient."""
        assert not self.scalar, f"a {self.role} has values, not a vocabulary"
        return self._no_grad_pass(batch, states=True)

    @torch.no_grad()
    def measure(self, batch: Batch, loss: Loss) -> Stats:
        """What ``loss`` measures over ``batch``, over all ranks, without gradient."""
        stats, forward = Stats(), self.engine or self.forward
        for rows in self._split(batch):
            if rows or self.config.zero_stage == 3:
                stats = stats + self._micro_loss(forward, batch, rows, loss)[1]
        return self.ranks.sum_stats(stats)

    def forward_backward(self, batch: Batch, loss: Loss) -> Stats:
        """Add the gradient of ``loss`` over ``batch``; returns the sum of the micro-batches'
        stats over all ranks."""
        assert self._adamw is not None, f"the {self.role} engine is frozen"
        stats = Stats()
        self._since_step.append((batch, loss))
        start_training(self.model, dropout=self.spec.dropout)
        for rows in self._split(batch):
            scalar, micro_stats = self._micro_loss(self.engine, batch, rows, loss)
            self.engine.backward(scalar * self.ranks.size, scale_wrt_gas=False)
            self._losses.append(scalar.detach())
            stats = stats + micro_stats
        self.model.eval()
        if self.device.type == "cuda":  # optim_step would wait here anyway
            torch.cuda.synchronize(self.device)
        return self.ranks.sum_stats(stats)

    def _micro_loss(
        self, forward: Callable[..., Any], batch: Batch, rows: list[int], loss: Loss
    ) -> tuple[Tensor, Stats]:
        """Loss and stats of one pass; without rows a loss whose gradient is 0 everywhere, because
        ranks wait for each other in every module of a sharded model."""
        micro = (batch.select(rows) if rows else no_rows(batch)).to(self.device)
        tensors = forward(micro, with_entropy=self.spec.with_entropy and not self.scalar)
        if not rows:
            return zero_of(tensors), Stats()
        scalar, stats = loss(self.forward.parts.named(tensors), micro)
        alike = self.config.zero_stage < 3 and scalar.requires_grad
        return (scalar if alike else scalar + zero_of(tensors)), stats

    @torch.no_grad()
    def _no_grad_pass(self, batch: Batch, *, states: bool = False) -> Tensor:
        out = torch.zeros(batch.tokens.numel())
        if states:
            out = self.forward.parts.no_states(batch, DTYPES[self.spec.precision.dtype])
        forward, found = self.engine or self.forward, list[tuple[list[int], Tensor]]()
        for rows in self._split(batch):
            if not rows and self.config.zero_stage < 3:
                continue
            micro = (batch.select(rows) if rows else no_rows(batch)).to(self.device)
            result = forward(micro, states=states)[0]
            if rows:
                found.append((rows, result))
            if states:  # [m, H] each: too large to wait on the device for the others
                fill_rows(out, batch, found)
                found = []
        fill_rows(out, batch, found)
        self.ranks.all_reduce_([out])  # exact: an entry is 0 on all ranks but one
        return out

    def _split(self, batch: Batch) -> list[list[int]]:
        """Rows of this rank's micro-batches: as many on all ranks, some perhaps without rows."""
        return parts_of(batch, self.spec, self.ranks, self.forward.parts.layout)

    # ---- stepping --------------------------------------------------------------------------

    def optim_step(self) -> StepStats:
        """Reduce, unscale, check, clip, step, schedule. With a loss or gradient that is not finite
        nothing moves and ``skipped`` is set.

        Raises NonFiniteError with the first bad tensor at the floor of the loss scale, and after
        ``max_consecutive_skips`` skipped steps in a row.
        """
        assert self._state is not None, f"the {self.role} engine is frozen"
        finite_loss = not self._losses or bool(torch.stack(self._losses).isfinite().all())
        finite_loss = not self.ranks.any(not finite_loss)
        stats = self._step(finite_loss)
        if stats.skipped:
            self.skipped_total += 1
            adapts = self._scaler is not None and self._scaler.dynamic
            self.consecutive_skips += not (adapts and finite_loss)
        else:
            self.version += 1
            self.consecutive_skips = 0
            self._state.follow()
        stats = replace(stats, skipped_total=self.skipped_total)
        try:
            self._raise_if_diverged(stats)
        finally:
            self._since_step, self._losses = [], []
        return stats

    def _step(self, finite_loss: bool) -> StepStats:
        assert self._adamw is not None
        lr = (self.spec.lr or self.spec.train.lr) * lr_factor(
            self.version, self.spec.train, self.spec.total_steps
        )
        scale, before = self.loss_scale, dict(vars(self._scaler)) if self._scaler else {}
        scaled = self.spec.precision.dtype == "fp16"
        if not self._losses:  # there is no gradient, which DeepSpeed cannot step over
            if self._scaler is not None:
                self._scaler.update_scale(False)
            return StepStats(grad_norm=0.0, lr=lr, loss_scale=scale, scaled=scaled)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self._adamw.hold = not finite_loss
        self.engine.step()
        overflow = bool(self.engine.optimizer.overflow)
        at_floor = overflow and is_at_floor(before)
        if at_floor:
            vars(self._scaler).update(before)
        return StepStats(
            grad_norm=float(self.engine.get_global_grad_norm()),
            lr=lr,
            skipped=overflow or not finite_loss,
            overflow=overflow,
            loss_scale=scale,
            scaled=scaled,
            at_floor=at_floor,
        )

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by. (Besides that, by the number of ranks: DeepSpeed
        divides by it.)"""
        return 1.0 if self._scaler is None else float(self._scaler.cur_scale)

    def _raise_if_diverged(self, stats: StepStats) -> None:
        """Raise NonFiniteError where the steps to come would be skipped as well."""
        reason = why_stop(
            stats,
            role=self.role,
            skips=self.consecutive_skips,
            limit=self.spec.train.max_consecutive_skips,
            precision=self.spec.precision,
        )
        if reason is None:
            return
        if not stats.at_floor:
            self.consecutive_skips = 0  # who goes on from here has as many tries again
        raise NonFiniteError(
            f"{reason[0]}. {self._first_bad()} Nothing moved in this step (optimizer step "
            f"{self.version + 1}). Try {reason[1]}",
            stats,
        )

    def _first_bad(self) -> str:
        """Where the gradient of the step stops being finite, on the first rank where it does. All
        ranks compute all their micro-batches once more."""
        found: list[str] = []
        start_training(self.model, dropout=self.spec.dropout)
        for batch, loss in self._since_step:
            for rows in self._split(batch):
                compute = partial(self._scaled_loss, batch, rows, loss)
                bad = first_bad_tensor(self.model, compute, to_the_end=True)
                if bad is not None:
                    found.append(where_bad(bad, rows))
        self.model.eval()
        for text in self.ranks.gather(found[0] if found else None):
            if text is not None:
                return text
        return sum_is_bad(self.spec.precision)

    def _scaled_loss(self, batch: Batch, rows: list[int], loss: Loss) -> Tensor:
        scale = self.loss_scale * self.ranks.size
        return scale * self._micro_loss(self.forward, batch, rows, loss)[0]

    # ---- weights and state -----------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(HuggingFace name, full tensor) in the compute dtype, LoRA merged. All ranks take part.

        Under stage 3 a bucket of weights is gathered at a time: a tensor is good until the next is
        asked for.
        """
        if self.config.zero_stage < 3:
            yield from merged_weights(self.model)
            return
        for bucket in buckets(self.model, WEIGHT_BUCKET_BYTES):
            with self._library.zero.GatheredParameters(list(bucket.values())):
                yield from merged_weights(self.model, only=bucket.keys())
        yield from state.persistent_buffers(self.model)

    @property
    def state_bytes(self) -> int:
        """Size of what :meth:`save` writes."""
        assert self._state is not None
        return self._state.num_bytes + state.num_buffer_bytes(self.model)

    def save(self, folder: Path) -> None:
        """fp32 masters, moments, EMA, version, as the torch engine; all ranks take part."""
        assert self._state is not None, f"the {self.role} engine is frozen"
        text = description(self, self.spec, scaler_state(self._scaler))
        now = state.buffers_now(self.model)
        self._state.save(folder, partial(write_description, folder, self, text, now))

    def save_async(self, folder: Path) -> PendingSave:
        """:meth:`save`, at once: rank 0 writes for all."""
        self.save(folder)
        return FinishedSave()

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Take back what an engine's :meth:`save` wrote, with any number of ranks. Every rank reads
        its own shards. Raises ValueError for a checkpoint of another model or role."""
        assert self._state is not None, f"the {self.role} engine is frozen"
        told = read_description(folder, self.spec)
        self._state.load(folder)
        state.load_buffers(self.model, folder)
        publish(self.engine.optimizer, stage=self.config.zero_stage)
        take_counts(self, told)
        restore_scaler(self._scaler, told["loss_scaler"])
        self.ranks.any(False)  # no rank trains on while another still reads


# ---- the library ---------------------------------------------------------------------------


def _deepspeed() -> Any:
    """The package. Raises DeepSpeedError where it is missing or of a version that is refused."""
    try:
        import deepspeed
    except ImportError as error:
        raise DeepSpeedError(
            f"train.engine.kind=deepspeed needs the package deepspeed, and importing it failed "
            f"({error}); install it with: pip install 'burnish[deepspeed]', or use "
            "train.engine.kind=torch"
        ) from None
    check_version(deepspeed.__version__)
    import deepspeed.accelerator
    import deepspeed.comm.torch

    deepspeed.utils.logger.setLevel(logging.WARNING)
    return deepspeed


def _accelerator(library: Any) -> Any:
    return library.accelerator.get_accelerator()


def check_version(version: str) -> None:
    """Raise DeepSpeedError for a version of DeepSpeed that trains wrongly, or too large."""
    found = Version(version)
    if Version("0.16.0") <= found < Version("0.16.8"):
        raise DeepSpeedError(
            f"DeepSpeed {version} does not release gathered weights under ZeRO-3 with gradient "
            "checkpointing (0.16.0 to 0.16.7: its pull request 6726, taken back by 7258), so that "
            f"memory grows with the depth of the model; install {OLDEST} or newer"
        )
    if found < OLDEST:
        raise DeepSpeedError(
            f"DeepSpeed {version} does not check gradients in fp32 and bf16 at stage 3, so that a "
            f"step over one that is not finite ruins the weights; install {OLDEST} or newer"
        )


def _join(library: Any, ranks: RankGroup) -> None:
    """DeepSpeed's communication over the process group that is there; a group of one process is
    made where there is none."""
    accelerator = _accelerator(library)
    if not torch.distributed.is_initialized() and ranks.size == 1:
        backend = accelerator.communication_backend_name()
        torch.distributed.init_process_group(
            "gloo" if accelerator.device_name() == "cpu" else backend,
            store=torch.distributed.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
        )
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 0
    if world != ranks.size:
        raise DeepSpeedError(
            f"this engine was given {ranks.size} ranks and torch.distributed has {world}: "
            "DeepSpeed works over the whole process group; start as many processes as the engine "
            "has ranks"
        )
    forget_ended_groups(library)
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed insists on it; launchers set it
    with _on_this_machine(library):
        library.init_distributed(verbose=False)


@contextmanager
def _on_this_machine(library: Any) -> Iterator[None]:
    """Two things that DeepSpeed does on a CPU and that are not wanted, put aside inside.

    It builds a C++ extension for shared memory when it starts (about 40 s, and needs a compiler),
    which training does without. And it refuses fp16 where oneDNN has no fp16 products; Burnish
    computes them through fp32 (``models/half_linear.py``).
    """
    accelerator = _accelerator(library)
    module: Any = sys.modules["deepspeed.comm.torch"]
    if accelerator.device_name() != "cpu" or "build_shm_op" not in vars(module):
        yield
        return
    build, supported = module.build_shm_op, accelerator.is_fp16_supported
    module.build_shm_op, accelerator.is_fp16_supported = lambda: None, lambda: True
    try:
        yield
    finally:
        module.build_shm_op, accelerator.is_fp16_supported = build, supported


@contextmanager
def loading(engine: DeepSpeedEngine, dtype: Dtype, ranks: RankGroup) -> Iterator[None]:
    """Inside, transformers cuts the weights it reads into shards at once (``zero_init``); without
    ``zero_init`` nothing is different. ``dtype``: the one that the model is loaded in."""
    if not engine.zero_init:
        yield
        return
    library = _deepspeed()
    _join(library, ranks)
    on_gpu = torch.device(_accelerator(library).current_device_name()).type != "cpu"
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero_section(engine, on_gpu=on_gpu),
        **({dtype: {"enabled": True}} if dtype != "fp32" else {}),
    }
    keep = HfDeepSpeedConfig(config)  # transformers holds it weakly
    try:
        yield
    finally:
        del keep
        unset_hf_deepspeed_config()
