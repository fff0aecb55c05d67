"""Optimizer: fp32 master weights, fp32 gradient sums, loss scaling, schedules, clipping and EMA.
The update itself is that of ``train.optimizer`` (``optimizers/rule.py``).

Model state per trained parameter, with AdamW:

- fp32 training: 4 (weight) + 4 (gradient) + 8 (moments) = 16 bytes.
- fp16 and bf16: 2 (weight) + 4 (gradient sum) + 4 (master) + 8 (moments) = 18 bytes, plus 2 bytes
  per gradient in flight.
- ``grad_accum_dtype`` equal to the compute dtype: 2 + 2 + 4 + 8 = 16 bytes, plus 4 for the gradient
  during the step.

Gradients are allocated from backward to step only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from burnish.config.model import PrecisionConfig
from burnish.config.train import TrainConfig
from burnish.distributed.process_group import SINGLE, RankGroup
from burnish.distributed.tensor_parallel import TensorParallelPlan
from burnish.host_copies import HostStream
from burnish.models.buffers import plain_name
from burnish.models.islands import fp32_names
from burnish.models.load import DTYPES
from burnish.models.tensor_files import TensorFiles, TensorShard, tensor_sets
from burnish.optimizers.rule import RuleInputs, StateShard, Trained, make_rules
from burnish.train.base import StepStats
from burnish.train.host_memory import tensors_in
from burnish.train.loss_scaler import LossScaleFloorError, LossScaler, make_loss_scaler
from burnish.train.state import check_names


def lr_factor(step: int, config: TrainConfig, total_steps: int) -> float:
    """Return the learning rate at optimizer step ``step`` (from 0) as a fraction of the peak.

    Warm-up is linear over ``lr_warmup_steps``, or ``ceil(lr_warmup_ratio x total)`` steps, and is
    above 0 at step 0. After warm-up the schedule (:mod:`burnish.config.schedule`) runs to
    ``total_steps``.
    """
    warmup = config.lr_warmup_steps
    if warmup is None:
        warmup = math.ceil(config.lr_warmup_ratio * total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    first = config.lr_scheduler.first_step(warmup, total_steps)
    progress = min(1.0, max(0, step - first) / max(1, total_steps - first))
    return config.lr_scheduler.factor(progress)


MEASURED_FROM = 0.5
"""Weights are measured once the learning rates of all steps taken so far add up to this sum."""
MAX_GROWTH = 100.0
"""Weights that are this many times as large as at the start have lost their pretrained values."""


class EngineOptimizer(Protocol):
    """Gradients and trained state of an engine."""

    @property
    def scaler(self) -> LossScaler:
        """The loss scaler."""
        ...

    @property
    def loss_factor(self) -> float:
        """Factor by which ``backward`` multiplies a loss: the loss scale times any factor by which
        a library divides gradients."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss``, multiplied by :attr:`loss_factor`, to the sum."""
        ...

    def step(self, version: int, *, finite_loss: bool, ranks: RankGroup) -> StepStats:
        """Sum over ranks, unscale, check, clip, step, and clear the gradient.

        ``version``: number of steps taken so far. ``finite_loss``: must be the same on all ranks.
        If the loss or the gradient is not finite, only the loss scale changes.
        """
        ...

    def held_tensors(self) -> Iterable[Tensor]:
        """Return all tensors kept between steps, on this rank: masters, gradients, moments, moving
        average."""
        ...

    def broken_master(self) -> str | None:
        """Return the name of a trained parameter of this rank that is not finite, if any."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the saved state, over all ranks."""
        ...

    def load(self, folder: Path) -> None:
        """Read this rank's part of a saved state. Raises ValueError if the state is of another
        model."""
        ...


class Optimizer:
    """Update of a model's trainable parameters, in fp32 for every compute dtype.

    With fp16 and bf16 the loaded weights become the fp32 masters and the model gets rounded copies.
    Gradients of fp32 models are stored in ``parameter.grad``. For half precision with fp32 sums,
    each micro-batch's gradient is added to an fp32 sum as soon as it is complete; its
    half-precision copy is then freed.
    """

    def __init__(  # house: ok the settings of an engine, all of them keywords
        self,
        model: nn.Module,
        config: TrainConfig,
        *,
        lr: float,
        total_steps: int,
        precision: PrecisionConfig = PrecisionConfig(),
        tp_plan: TensorParallelPlan | None = None,
        device: torch.device | None = None,
    ) -> None:
        """``tp_plan``: tensor-parallel plan, if several ranks compute the model together.
        ``device``: compute device; None: that of the weights."""
        self.tp_plan = tp_plan
        self.config, self.peak_lr, self.total_steps = config, lr, total_steps
        self.scaler: LossScaler = make_loss_scaler(precision)
        self.scaled = precision.dtype == "fp16"
        self.sums_fp32 = precision.grad_accum_dtype == "fp32"
        self.names, self.params = zip(
            *[(n, p) for n, p in model.named_parameters() if p.requires_grad], strict=True
        )
        self.half = precision.dtype != "fp32"
        """True if the model has half-precision weights in addition to the masters."""
        self.rows: dict[str, tuple[int, int]] = {}
        """[begin, end) of this rank's rows of a parameter; a missing name means all rows."""
        self.shapes = {n: tuple(p.shape) for n, p in zip(self.names, self.params, strict=True)}
        """Shapes of the full parameters."""
        if tp_plan is not None:
            all_rows = {n: (0, shape[0]) for n, shape in self.shapes.items() if shape}
            self.rows = {name: tp_plan.rows(name, rows) for name, rows in all_rows.items()}
            self.shapes = {name: tp_plan.shape(name, shape) for name, shape in self.shapes.items()}
        self.shard_ranks = 1
        """Ranks over which rows are sharded."""
        self._fp32_names = fp32_names(model, DTYPES[precision.dtype])
        self.masters = self._take_masters(DTYPES[precision.dtype])
        trained = [
            Trained(n, p, m, self.shapes[n], self.shard_ranks)
            for n, p, m in zip(self.names, self.params, self.masters, strict=True)
        ]
        self.rules = make_rules(
            RuleInputs(model, trained, config, lr, device or self.masters[0].device, tp_plan)
        )
        """Update rules, each of some of the masters."""
        self._rule_of = {m: rule for rule in self.rules for m in rule.masters}
        self.ema = [m.detach().clone() for m in self.masters] if config.ema_decay else None
        self._start_norms, self._moved = self._norms(), 0.0
        """Norms of the initial weights, kept on their device and read only if needed."""

    def _take_masters(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the fp32 weights that the optimizer steps; the model computes in ``dtype``."""
        for parameter in self.params:
            parameter.data = parameter.data.float()
        masters: list[Tensor] = [p.detach() if self.half else p for p in self.params]
        if not self.half:
            return masters
        for name, master, parameter in zip(self.names, masters, self.params, strict=True):
            target_dtype = torch.float32 if plain_name(name) in self._fp32_names else dtype
            parameter.data = master.to(target_dtype, copy=True)
            if self.sums_fp32:
                parameter.register_post_accumulate_grad_hook(_adds_to(master))
        return masters

    @property
    def loss_factor(self) -> float:
        return self.scaler.scale

    def backward(self, loss: Tensor) -> None:
        (loss * self.scaler.scale).backward()

    def step(
        self, version: int, *, finite_loss: bool = True, ranks: RankGroup = SINGLE
    ) -> StepStats:
        """Sum over ranks, unscale, check, clip and step; then clear the gradient.

        If the loss or the gradient is not finite, only the loss scale changes. All ranks see the
        same sum and therefore make the same decision. ``finite_loss`` must be the same on all
        ranks.
        """
        grads, scale = self.gradients(ranks), self.scaler.scale
        if grads and scale != 1.0:
            torch._foreach_div_(grads, scale)
        norm = self._norm(grads, ranks)
        lr = self.peak_lr * lr_factor(version, self.config, self.total_steps)
        overflow = not bool(torch.isfinite(norm))
        skipped = overflow or not finite_loss
        if not skipped:
            if self.config.max_grad_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(self.masters, self.config.max_grad_norm, norm)
            for rule in self.rules:
                rule.step(lr, self._shard_group(ranks))
            self._publish()
            self._moved += lr
        self.zero_grad()
        at_floor = False
        try:
            self.scaler.update(overflow)
        except LossScaleFloorError:
            at_floor = True
        return StepStats(
            grad_norm=float(norm),
            lr=lr,
            skipped=skipped,
            overflow=overflow,
            loss_scale=scale,
            scaled=self.scaled,
            at_floor=at_floor,
            growth=1.0 if skipped else self._growth(ranks),
        )

    def _shard_group(self, ranks: RankGroup) -> RankGroup:
        """Return the ranks over which the rows of the weights are sharded: here none."""
        return SINGLE

    def _growth(self, ranks: RankGroup) -> float:
        """Return the size of the trained weights relative to the start (ratio of root mean squares,
        the latter at least 1e-3).

        AdamW changes a weight by about the learning rate per step. Weights are therefore not
        measured before the rates of all steps add up to :data:`MEASURED_FROM`, which usual rates
        never reach.
        """
        if self._moved < MEASURED_FROM or not self.masters:
            return 1.0
        count = float(sum(m.numel() for m in self.masters))
        squares = [
            sum(float(norm) ** 2 for norm in norms) for norms in (self._norms(), self._start_norms)
        ]
        sums = torch.tensor([*squares, count], dtype=torch.float64)
        ranks.all_reduce_([sums])
        now, start = ((sums[:2] / sums[2]).sqrt()).tolist()
        return float(now / max(start, 1e-3))

    @torch.no_grad()
    def _norms(self) -> Sequence[Tensor]:
        """Return the norm of each trained weight, over the entries that this rank holds."""
        return torch._foreach_norm(self.masters, dtype=torch.float64) if self.masters else ()

    @torch.no_grad()
    def gradients(self, ranks: RankGroup = SINGLE) -> list[Tensor]:
        """Return the fp32 gradient since the last step, summed over ranks, still multiplied by the
        loss scale. Contains the parameters that have a gradient on any rank."""
        if self.half and not self.sums_fp32:
            for master, parameter in zip(self.masters, self.params, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
        if ranks.size > 1:
            somewhere = ranks.any_across([m.grad is not None for m in self.masters])
            for master, there in zip(self.masters, somewhere, strict=True):
                if there and master.grad is None:  # no row of this rank used it
                    master.grad = torch.zeros_like(master)
        grads = [m.grad for m in self.masters if m.grad is not None]
        if self.tp_plan is None:
            ranks.all_reduce_(grads)
        else:
            self.tp_plan.data_parallel.all_reduce_(grads)
            self.tp_plan.sum_partial(self._named_gradients())
        return grads

    def _named_gradients(self) -> dict[str, Tensor]:
        pairs = zip(self.names, self.masters, strict=True)
        return {name: m.grad for name, m in pairs if m.grad is not None}

    def _norm(self, grads: Sequence[Tensor], ranks: RankGroup) -> Tensor:
        """Return the L2 norm of the full gradient, bitwise equal on every rank."""
        if self.tp_plan is not None:
            return self.tp_plan.norm(self._named_gradients(), self.tp_plan.model_parallel)
        return torch.nn.utils.get_total_norm(grads)

    @torch.no_grad()
    def _publish(self) -> None:
        """Copy the masters into the model's half-precision weights and update the moving
        average."""
        if self.half:
            torch._foreach_copy_(list(self.params), self.masters)
        if self.ema is not None:
            assert self.config.ema_decay is not None
            torch._foreach_lerp_(self.ema, self.masters, 1.0 - self.config.ema_decay)

    def zero_grad(self) -> None:
        """Free the gradient."""
        for master, parameter in zip(self.masters, self.params, strict=True):
            master.grad = parameter.grad = None

    def held_tensors(self) -> Iterable[Tensor]:
        gradients = [m.grad for m in self.masters if m.grad is not None]
        state = [t for rule in self.rules for t in tensors_in(dict(rule.optimizer.state))]
        return [*self.masters, *gradients, *state, *(self.ema or ())]

    def broken_master(self) -> str | None:
        for name, master in zip(self.names, self.masters, strict=True):
            if not bool(master.isfinite().all()):
                return str(name)
        return None

    @property
    def num_bytes(self) -> int:
        total = 0
        for kind, tensors in self.tensors().items():
            for name, tensor in tensors.items():
                shard = self._state_shard(kind, name)
                full_shape = shard.shape if shard is not None else self.shapes[name]
                entries = math.prod(full_shape) if shard is not None or tensor.ndim else 1
                total += tensor.element_size() * entries
        return total

    def _state_shard(self, kind: str, name: str) -> StateShard | None:
        """Return this rank's part of a state that has another shape than its parameter. None: the
        state has the shape of the parameter, or is one number."""
        layout = self._rule_of[self.masters[self.names.index(name)]].layouts.get(kind)
        if layout is None:
            return None
        shape = self.shapes[name]
        columns = None if self.tp_plan is None else self.tp_plan.columns(name)
        whole = (0, shape[0]), (0, shape[-1])
        return layout(shape, self.rows.get(name, whole[0]), columns or whole[1])

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of a checkpoint, by kind and parameter name, without copying them."""
        kinds: dict[str, dict[str, Tensor]] = {"master": {}}
        for rule in self.rules:
            kinds |= {kind: {} for kind in rule.kinds}
        for name, master in zip(self.names, self.masters, strict=True):
            kinds["master"][name] = master.detach()
            for kind, value in self._rule_of[master].state(master).items():
                kinds[kind][name] = value
        if self.ema is not None:
            kinds["ema"] = dict(zip(self.names, self.ema, strict=True))
        return kinds

    def load(self, folder: Path) -> None:
        """Restore the tensors of a checkpoint; read only this rank's rows. Raises ValueError if the
        checkpoint is of another model."""
        self.load_tensors(tensor_sets(folder))

    @torch.no_grad()
    def load_tensors(self, kinds: Mapping[str, TensorFiles]) -> None:
        """Restore the output of :meth:`tensors`; read only this rank's rows. Raises ValueError if
        names or shapes differ from this model's."""
        have = kinds["master"]
        check_names(have, self.shapes)
        for rule in self.rules:
            rule.optimizer.state.clear()  # a checkpoint of step 0 has no moments
        for i, (name, master) in enumerate(zip(self.names, self.masters, strict=True)):
            master.copy_(self._own(have, name))
            self._restore(name, master, kinds)
            if self.ema is not None:  # an EMA enabled after that save starts from these weights
                self.ema[i].copy_(self._own(kinds.get("ema", have), name))
        if self.half:
            torch._foreach_copy_(list(self.params), self.masters)

    def _restore(self, name: str, master: Tensor, kinds: Mapping[str, TensorFiles]) -> None:
        """Read this rank's part of the state of one parameter. Raises ValueError if it is of
        another optimizer."""
        rule = self._rule_of[master]
        have = {kind for kind in kinds if name in kinds[kind]} - {"master", "ema", "buffer"}
        if have - set(rule.kinds):
            raise ValueError(
                f"the checkpoint has {', '.join(sorted(have))} of {name}, but "
                f"train.optimizer.kind={self.config.optimizer.kind} trains it with "
                f"{', '.join(rule.kinds)}; resume with the optimizer of that run"
            )
        state: dict[str, Tensor] = {}
        for kind in have:
            files, shard = kinds[kind], self._state_shard(kind, name)
            if shard is None:
                state[kind] = self._own(files, name) if files.shape(name) else files.read(name)
                continue
            rows, plan = files.read(name, shard.rows), self.tp_plan
            state[kind] = rows if plan is None else plan.own_part(name, rows, shard.dims)
        if state:
            rule.restore(master, state)

    def _own(self, files: TensorFiles, name: str) -> Tensor:
        """Return this rank's part of a tensor in a checkpoint."""
        read = files.read(name, self.rows.get(name))
        return read if self.tp_plan is None else self.tp_plan.own_part(name, read)

    def tensor_shards(self, *, copy: bool) -> dict[str, dict[str, TensorShard]]:
        """Return this rank's shards, on the CPU, for a checkpoint that several ranks write.

        ``copy``: the shards do not change while training continues. All ranks take part.
        """
        kinds: dict[str, dict[str, TensorShard]] = {}
        with HostStream() as stream:
            for kind, tensors in self.tensors().items():
                shards = {name: self._tensor_shard(kind, name, t) for name, t in tensors.items()}
                kinds[kind] = {
                    name: replace(shard, tensor=stream.copy(shard.tensor))
                    if copy or shard.tensor.device.type != "cpu"
                    else shard
                    for name, shard in shards.items()
                }
        return kinds

    def _tensor_shard(self, kind: str, name: str, tensor: Tensor) -> TensorShard:
        shard, plan = self._state_shard(kind, name), self.tp_plan
        if not tensor.ndim:
            tensor_shard = TensorShard(tensor, 0, ())
        else:
            rows, shape, dims = self.rows[name], self.shapes[name], None
            if shard is not None:
                if shard.dims[0] != 0 and rows[0] != 0:  # the first rank with this part writes it
                    tensor = tensor[:0]
                rows, shape, dims = shard.rows, shard.shape, shard.dims
            if plan is None:
                tensor_shard = TensorShard(tensor, rows[0], shape)
            else:
                tensor_shard = plan.tensor_shard(name, tensor, rows=rows, shape=shape, dims=dims)
        return tensor_shard


def _adds_to(master: Tensor) -> Callable[[Tensor], None]:
    """Return a hook that adds a parameter's complete gradient to the master's fp32 sum and frees
    it."""

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return hook
