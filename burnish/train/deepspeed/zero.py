"""ZeRO adapters: Burnish's settings as DeepSpeed configuration, and the location of DeepSpeed's
state.

This module does not import deepspeed; its objects are passed as arguments. Their attributes were
taken from the source of the versions that ``engine.py`` accepts. Reading order: ds_config,
ZeroAdamW, ZeroMuon, ZeroScaler, ZeroOptimizer, find_shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from burnish.config.train_engines import DeepSpeedEngine
from burnish.distributed.process_group import SINGLE, RankGroup
from burnish.optimizers.config import AdamOptimizer
from burnish.optimizers.muon.config import Muon
from burnish.optimizers.muon.rule import Matrix, MuonOptimizer, hidden_matrices
from burnish.train.base import StepStats
from burnish.train.host_memory import tensors_in
from burnish.train.optim import lr_factor
from burnish.train.spec import EngineSpec
from burnish.train.state import Shard, ShardedState, Shards

WEIGHT_BUCKET_BYTES = 256 << 20
"""Full tensors that stage 3 gathers at a time for a weight transfer."""


def ds_config(spec: EngineSpec, *, on_gpu: bool) -> dict[str, Any]:
    """Return the DeepSpeed configuration of an engine. ``on_gpu``: the engine computes on a GPU.

    Batch sizes in it are nominal. With ``managed_gradient_accumulation`` off, a step contains every
    pass made before ``step()``, regardless of their number.
    """
    train, engine = spec.role.train, spec.role.train.engine
    assert isinstance(engine, DeepSpeedEngine)
    sums = spec.role.precision.grad_accum_dtype
    clips_itself = engine.zero_stage == 0 and spec.role.precision.dtype == "fp32"
    half: dict[str, Any] = {}
    if spec.role.precision.dtype == "bf16":
        half = {"bf16": {"enabled": True}}
    elif spec.role.precision.dtype == "fp16":
        scaling = spec.role.precision.fp16
        half["fp16"] = {
            **scaling.model_dump(),
            "enabled": True,
            "loss_scale": scaling.loss_scale or 0,
            "min_loss_scale": int(scaling.min_loss_scale),
        }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0 if clips_itself else train.max_grad_norm or 0.0,
        "data_types": {"grad_accum_dtype": sums},
        "communication_data_type": sums,
        "zero_optimization": zero_section(engine, on_gpu=on_gpu),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **half,
    }


def zero_section(engine: DeepSpeedEngine, *, on_gpu: bool) -> dict[str, Any]:
    """Return the section ``zero_optimization``. State offloaded from a GPU is pinned, so that
    copies overlap with compute and run at the full speed of the link."""
    on_host = {"device": "cpu", "pin_memory": on_gpu}
    section: dict[str, Any] = {
        "stage": engine.zero_stage,
        "reduce_bucket_size": engine.reduce_bucket_size,
    }
    if engine.adam_offload:
        section["offload_optimizer"] = on_host
    if engine.param_offload:
        section["offload_param"] = on_host
    if engine.zero_stage == 3:
        section["stage3_param_persistence_threshold"] = engine.param_persistence_threshold
        section["zero_hpz_partition_size"] = engine.zero_hpz_partition_size
    return section


class ZeroAdamW(torch.optim.AdamW):
    """torch's AdamW, which compiles nothing. DeepSpeed's own optimizers are C++ extensions that are
    built at first use.

    It steps over flat shards; ``hold`` makes a step leave them unchanged. ``checks``: check and
    clip the gradient here, because DeepSpeed does so at stages 1 to 3 only. With
    ``train.optimizer.kind=muon``, :class:`ZeroMuon` steps the first group of parameters.
    """

    def __init__(self, model: nn.Module, spec: EngineSpec) -> None:
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        settings = spec.role.train.optimizer
        assert isinstance(settings, AdamOptimizer)
        self.hidden: dict[str, bool] = {}
        """Parameters that Muon trains -> whether their rows are two matrices."""
        if isinstance(settings, Muon):
            shapes = {n: shape_of(p) for n, p in trained.items()}
            self.hidden = hidden_matrices(model, shapes, settings)
        self.muon: ZeroMuon | None = None
        """Set after DeepSpeed has made the flat shards."""
        rest = [p for n, p in trained.items() if n not in self.hidden]
        groups = [
            {"params": [trained[n] for n in self.hidden], "weight_decay": 0.0},
            {
                "params": [p for p in rest if len(shape_of(p)) >= 2],
                "weight_decay": spec.role.train.weight_decay,
            },
            {"params": [p for p in rest if len(shape_of(p)) < 2], "weight_decay": 0.0},
        ]
        super().__init__(
            [g for g in groups if g["params"]],
            lr=spec.role.lr or spec.role.train.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )
        self.hold = self.checks = False
        self.max_norm = spec.role.train.max_grad_norm
        self.overflow = False
        self._global_grad_norm = 0.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one update, unless ``hold`` is set, or ``checks`` is set and the gradient is not
        finite."""
        if self.checks:
            params = [p for group in self.param_groups for p in group["params"]]
            norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
            self._global_grad_norm = float(norm)
            self.overflow = not bool(torch.isfinite(norm))
            if self.max_norm is not None and not self.overflow:
                torch.nn.utils.clip_grads_with_norm_(params, self.max_norm, norm)
        if self.hold or (self.checks and self.overflow):
            return
        if self.muon is None:
            super().step()
            return
        stepped: list[tuple[Tensor, Tensor | None]] = []
        for group in self.param_groups:
            for flat in group["params"]:
                if self.muon.step(flat, group["lr"]):
                    stepped.append((flat, flat.grad))
                    flat.grad = None  # AdamW leaves it unchanged
        super().step()
        for flat, grad in stepped:  # with adam_offload DeepSpeed reuses the tensor
            flat.grad = grad


class ZeroMuon:
    """Muon over the matrices in ZeRO's flat shards, which divide a matrix at any entry.

    DeepSpeed has already summed, unscaled and clipped the gradient. Its own Muon (0.19.8) is not
    used: it orthogonalizes before it clips, so the clipped norm is not that of the gradient.
    """

    def __init__(
        self,
        adamw: ZeroAdamW,
        shards: Shards,
        spec: EngineSpec,
        *,
        stage: int,
        device: torch.device,
    ) -> None:
        """``adamw``: its state has the momentum of each flat shard. ``device``: that of the
        iterations."""
        muon = spec.role.train.optimizer
        assert isinstance(muon, Muon)
        self._state, lr = adamw.state, spec.role.lr or spec.role.train.lr
        self._lr_ratio = (muon.matrix_lr or lr) / lr
        held = [s for s in shards.all if s.name in adamw.hidden]
        counts = [[s.numel for s in held]]
        if not shards.replicated:
            counts = shards.ranks.gather([s.count for s in held])
        nothing = torch.empty(0, device=shards.flats[0].device)
        self._flats: dict[int, list[tuple[Shard, Matrix]]] = {}
        for i, shard in enumerate(held):
            # Stages 1 and 2 have one flat shard of all matrices, of which a rank may have none.
            flat = shards.flats[0] if stage in (1, 2) else shard.flat
            view = nothing.clone() if shard.flat is None else shard.of(shard.flat)
            matrix = Matrix(
                view, shard.shape, adamw.hidden[shard.name], counts=tuple(c[i] for c in counts)
            )
            self._flats.setdefault(id(flat), []).append((shard, matrix))
        every = [matrix for part in self._flats.values() for _, matrix in part]
        decay = spec.role.train.weight_decay
        self._muon = MuonOptimizer(every, muon, weight_decay=decay, device=device)
        self._muon.shards = SINGLE if shards.replicated else shards.ranks

    @torch.no_grad()
    def step(self, flat: Tensor, lr: float) -> bool:
        """Update the matrices of a flat shard; return whether it is one of matrices. All ranks call
        this for the same part of the model."""
        held = self._flats.get(id(flat), ())
        if not held:
            return False
        assert flat.grad is not None
        momentum = self._state[flat].setdefault("momentum", torch.zeros_like(flat))
        for shard, matrix in held:
            if shard.flat is not None:
                matrix.master.grad = shard.of(flat.grad)
                self._muon.state[matrix.master]["momentum"] = shard.of(momentum)
        self._muon.param_groups[0]["lr"] = lr * self._lr_ratio
        self._muon.update([matrix for _, matrix in held])
        for _, matrix in held:
            matrix.master.grad = None
        return True


class ZeroScaler:
    """DeepSpeed's loss scaler as a :class:`burnish.train.loss_scaler.LossScaler`. DeepSpeed updates
    it in its own step."""

    def __init__(self, scaler: Any) -> None:
        """``scaler``: DeepSpeed's scaler; None: the dtype needs none."""
        self._scaler = scaler
        self.adapts = scaler is not None and bool(scaler.dynamic)
        if self.adapts:
            scaler.raise_error_at_min_scale = False  # the step reports the floor

    @property
    def scale(self) -> float:
        """Factor by which the loss of the next backward pass is multiplied."""
        return 1.0 if self._scaler is None else float(self._scaler.cur_scale)

    def update(self, overflow: bool) -> None:
        """Update the scale for a step that bypassed DeepSpeed."""
        if self._scaler is not None:
            self._scaler.update_scale(overflow)

    def fields(self) -> dict[str, Any]:
        """Return a copy of the state of DeepSpeed's scaler."""
        return {} if self._scaler is None else dict(vars(self._scaler))

    def restore_at_floor(self, before: Mapping[str, Any]) -> bool:
        """Undo an overflow that could not halve the scale because it was at its floor; return
        whether it was one. ``before``: :meth:`fields` before the step."""
        if not self.adapts:
            return False
        halves = 1 in (before["delayed_shift"], before["cur_hysteresis"])
        at_floor = bool(halves and before["cur_scale"] == before["min_scale"])
        if at_floor:
            vars(self._scaler).update(before)
        return at_floor

    def state_dict(self) -> dict[str, float | int]:
        """Return the state in the format of
        :class:`burnish.train.loss_scaler.DynamicLossScaler`."""
        if not self.adapts:
            return {}
        scaler = self._scaler
        return {
            "scale": float(scaler.cur_scale),
            "left": int(scaler.cur_hysteresis),
            "clean_steps": int(scaler.cur_iter - scaler.last_overflow_iter - 1),
        }

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Restore :meth:`state_dict`; does nothing for a constant scale."""
        if not self.adapts:
            return
        scaler = self._scaler
        scaler.cur_scale = float(state["scale"])
        scaler.cur_hysteresis = min(int(state["left"]), scaler.delayed_shift)
        scaler.cur_iter, scaler.last_overflow_iter = int(state["clean_steps"]), -1


class ZeroOptimizer:
    """Gradients and trained state, managed by DeepSpeed. Implements
    :class:`burnish.train.optim.EngineOptimizer`."""

    def __init__(
        self,
        model: nn.Module,
        engine: Any,
        adamw: ZeroAdamW,
        *,
        spec: EngineSpec,
        ranks: RankGroup,
        masters: Mapping[str, Tensor],
    ) -> None:
        """``engine``: DeepSpeed's engine over ``model`` and ``adamw``. ``masters``: unrounded
        weights."""
        config = spec.role.train.engine
        assert isinstance(config, DeepSpeedEngine)
        self._engine, self._adamw, self._spec, self._ranks = engine, adamw, spec, ranks
        self._stage = config.zero_stage
        self._has_gradient = False
        adamw.checks = self._stage == 0 and spec.role.precision.dtype == "fp32"
        adamw.state.clear()  # stage 0 in bf16 starts with an empty step
        self.scaler = ZeroScaler(vars(engine.optimizer).get("loss_scaler"))
        shards = find_shards(model, engine.optimizer, stage=self._stage, ranks=ranks)
        shards.take(masters)  # DeepSpeed initialized its masters from rounded weights
        if adamw.hidden:
            adamw.muon = ZeroMuon(adamw, shards, spec, stage=self._stage, device=engine.device)
        self.state = ShardedState(shards, adamw.state, spec.role.train.ema_decay, muon=adamw.hidden)

    @property
    def loss_factor(self) -> float:
        """The loss scale times the number of ranks; DeepSpeed divides gradients by that number."""
        return self.scaler.scale * self._ranks.size

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss``. DeepSpeed multiplies by the loss scale. It does not divide
        by accumulation steps, because none are configured."""
        self._engine.backward(loss * self._ranks.size, scale_wrt_gas=False)
        self._has_gradient = True

    def step(self, version: int, *, finite_loss: bool, ranks: RankGroup) -> StepStats:
        """Run DeepSpeed's step: reduce, unscale, check, clip and update."""
        train = self._spec.role.train
        rate = (self._spec.role.lr or train.lr) * lr_factor(version, train, self._spec.total_steps)
        stats = StepStats(
            grad_norm=0.0,
            lr=rate,
            loss_scale=self.scaler.scale,
            scaled=self._spec.role.precision.dtype == "fp16",
        )
        if not self._has_gradient:  # DeepSpeed cannot step without one
            self.scaler.update(False)
            self.state.follow()
            return stats
        before, optimizer = self.scaler.fields(), self._engine.optimizer
        for group in optimizer.param_groups:
            group["lr"] = rate
        self._adamw.hold = not finite_loss
        self._engine.step()
        self._has_gradient = False
        overflow = bool(optimizer.overflow)
        stats = replace(
            stats,
            grad_norm=float(self._engine.get_global_grad_norm()),
            skipped=overflow or not finite_loss,
            overflow=overflow,
            at_floor=overflow and self.scaler.restore_at_floor(before),
        )
        if not stats.skipped:
            self.state.follow()
        return stats

    def held_tensors(self) -> Iterable[Tensor]:
        """Return the flat masters, the moments and the moving average. Gradients are in
        :func:`buffers_of`."""
        adam = tensors_in(dict(self._adamw.state))
        return [*self.state.shards.flats, *adam, *self.state.ema.values()]

    def broken_master(self) -> str | None:
        """Return the name of a trained parameter whose shard on this rank is not finite, if any."""
        for shard in self.state.shards.all:
            if shard.flat is not None and not bool(shard.of(shard.flat).isfinite().all()):
                return shard.name
        return None

    @property
    def num_bytes(self) -> int:
        return self.state.num_bytes

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Read this rank's shards of a checkpoint of any engine."""
        self.state.load(folder)
        publish(self._engine.optimizer, stage=self._stage)
        self._ranks.any(False)  # no rank trains while another still reads


# ---- shards --------------------------------------------------------------------------------


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Return whether DeepSpeed stores this parameter in shards. Its own tensor is then usually
    empty."""
    return hasattr(parameter, "ds_tensor")  # house: ok DeepSpeed's mark


def shards_of(parameter: Any) -> list[Tensor]:
    """Return this rank's shard of a parameter; empty if DeepSpeed stores it whole."""
    return [parameter.ds_tensor] if is_partitioned(parameter) else []


def shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of the unsharded parameter."""
    slice_of: Any = parameter
    return tuple(slice_of.ds_shape) if is_partitioned(parameter) else tuple(parameter.shape)


def find_shards(model: nn.Module, optimizer: Any, *, stage: int, ranks: RankGroup) -> Shards:
    """Return the shards of this rank: the location of each trained parameter's fp32 master in
    DeepSpeed's ``optimizer``."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    parts = vars(optimizer)
    if stage == 3:
        flats = parts["fp32_partitioned_groups_flat"]
        shards = [_shard_of_stage_3(optimizer, flats, name, p) for name, p in named]
    elif stage:
        # ZeRO-1 with bf16 uses another class, with another name for the same attribute.
        flats = parts.get("single_partition_of_fp32_groups") or parts["fp32_groups_flat_partition"]
        shards = [_shard_of_stage_1_and_2(flats, name, p) for name, p in named]
    else:
        masters = {id(p): p for _, p in named}
        if "fp32_groups" in parts:
            weights = itertools.chain(*parts["fp16_groups"])
            halves = zip(weights, itertools.chain(*parts["fp32_groups"]), strict=True)
            masters = {id(weight): master for weight, master in halves}
        flats = [masters[id(p)] for _, p in named]
        shards = [
            Shard(name, tuple(p.shape), count=p.numel(), flat=flat)
            for (name, p), flat in zip(named, flats, strict=True)
        ]
    return Shards(shards, flats, ranks, replicated=stage == 0)


def _shard_of_stage_3(optimizer: Any, flats: list[Tensor], name: str, parameter: Any) -> Shard:
    """Return a shard of stage 3, which splits each parameter into equal parts, the last padded."""
    group, offset, count = optimizer.grad_position[optimizer.get_param_id(parameter)]
    total = int(parameter.ds_numel)
    start = min(total, count * int(parameter.ds_zero_partition_rank))
    count = min(count, total - start)
    return Shard(name, shape_of(parameter), start, count, flats[group], offset)


def _shard_of_stage_1_and_2(flats: list[Tensor], name: str, parameter: Any) -> Shard:
    """Return a shard of stage 1 or 2, which concatenates all parameters of a group and splits the
    result into equal parts."""
    shape, mapping = tuple(parameter.shape), parameter._hp_mapping
    if mapping is None:
        return Shard(name, shape)
    source, place = mapping.lp_fragment_address, mapping.hp_fragment_address
    flat = flats[mapping.param_group_index]
    return Shard(name, shape, source.start, source.numel, flat, place.start)


def buffers_of(optimizer: Any) -> Iterator[Tensor]:
    """Yield the tensors that DeepSpeed's ``optimizer`` keeps: flat weights, masters and gradients,
    and the buffers of its communication."""
    parts = vars(optimizer)
    yield from tensors_in(parts)
    for bucket in dict(parts.get("ipg_buckets") or {}).values():
        yield from tensors_in(vars(bucket))


def publish(optimizer: Any, *, stage: int) -> None:
    """Copy the masters into the compute weights, on all ranks."""
    parts = vars(optimizer)
    if stage == 3:
        optimizer._partition_all_parameters()  # persistent parameters are gathered again below
        for group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
        optimizer.invalidate_secondary_tensor()
    elif stage:
        optimizer.update_lp_params()
    elif "fp32_groups" in parts:
        for masters, weights in zip(parts["fp32_groups"], parts["fp16_groups"], strict=True):
            torch._foreach_copy_(weights, masters)


def buckets(model: nn.Module, most_bytes: int) -> Iterator[dict[str, nn.Parameter]]:
    """Yield parameters by name, in order, in buckets of up to ``most_bytes`` of full tensors. An
    adapter stays with its base weight. A larger unit is a bucket of its own."""
    units: dict[str, dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        owner = name.partition(".base_layer.")[0].partition(".lora_")[0]
        units.setdefault(owner, {})[name] = parameter
    bucket: dict[str, nn.Parameter] = {}
    size = 0
    for unit in units.values():
        num_bytes = sum(torch.Size(shape_of(p)).numel() * p.element_size() for p in unit.values())
        if bucket and size + num_bytes > most_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket |= unit
        size += num_bytes
    yield bucket


def forget_ended_groups(library: Any) -> None:
    """Release DeepSpeed's copies of process groups that torch has destroyed since (an earlier job
    of this process)."""
    groups = library.utils.groups
    held = groups._WORLD_GROUP
    if held is not None and held not in torch.distributed.distributed_c10d._world.pg_group_ranks:
        groups._release_process_group_references()
