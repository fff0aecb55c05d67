"""Exact memory of a model in a train engine on one rank: weights, masters, moments, gradient sums,
gathered tensors and communication buffers.

Bytes per trained parameter (``train/optim.py`` gives the same numbers for the torch engine):

=================================  =========================================================
torch, fp32                        4 weights + 4 gradient + 8 moments = 16
torch, fp16 or bf16                2 weights + 4 masters + 4 gradient sums + 8 moments = 18
  ``grad_accum_dtype`` = the same  2 + 4 + 2 + 8 = 16, and 4 of gradients in the step
torch, sharded over N              (4 masters + 4 gradients + 8 moments) / N = 16 / N
DeepSpeed stage 1, half            2 + 4 sums + (4 + 8 + 4 of the step) / N
DeepSpeed stage 2, half            2 + (4 sums + 4 + 8 + 4 of the step) / N
DeepSpeed stage 3, half            (2 + 4 sums + 4 + 8) / N + 4 of the step for at most 1e9
=================================  =========================================================

The DeepSpeed numbers are derived from the source of 0.19.8 (stage_1_and_2.py, stage3.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from burnish.config.model import Dtype, PrecisionConfig
from burnish.config.train import TrainConfig
from burnish.config.train_engines import DeepSpeedEngine, TorchEngine
from burnish.plan.shapes import ModelShape, rounded_up

Where = Literal["device", "host", "disk"]

SIZES: dict[Dtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
MAX_LIVE = 1_000_000_000
"""DeepSpeed's stage3_max_live_parameters, in entries."""
PREFETCH = 50_000_000
"""DeepSpeed's stage3_prefetch_bucket_size, in entries."""
SUB_GROUP = 1_000_000_000
"""DeepSpeed's sub_group_size, in entries."""
REDUCE_BUCKET = 64 << 20
"""Size in bytes of the chunks in which replicas of the torch engine sum gradients over ranks
(``train/process_group.py``)."""
WEIGHT_BUCKET = 256 << 20
"""Size in bytes of the buckets that the DeepSpeed engine gathers for a weight transfer."""


@dataclass(frozen=True)
class Item:
    """Bytes for one purpose, with their calculation."""

    name: str
    bytes: float
    how: str
    """Calculation of the bytes, as text."""
    where: Where = "device"


@dataclass(frozen=True)
class EngineSetup:
    """One model in one train engine on one rank. ``ranks`` counts the ranks with different rows."""

    shape: ModelShape
    """Shape on one rank: the model, or its tensor-parallel part."""
    train: TrainConfig
    precision: PrecisionConfig
    ranks: int = 1
    trainable: bool = True
    unreleased_gathers: bool = False
    """Assume that weights gathered by stage 3 are never released, as in DeepSpeed 0.16.0 to
    0.16.7."""
    unsharded: ModelShape | None = None
    """The entire model, if ``shape`` is a part of it."""
    saves_in_background: bool = False
    """``checkpoint.in_background``: keep a copy of the saved tensors until they are written."""

    @property
    def model(self) -> ModelShape:
        """Shape of the entire model."""
        return self.unsharded or self.shape

    @property
    def weight_size(self) -> int:
        """Bytes per weight in the compute format."""
        return SIZES[self.precision.dtype]

    @property
    def half(self) -> bool:
        """True if fp32 masters exist in addition to the weights."""
        return self.precision.dtype != "fp32"

    @property
    def trained(self) -> int:
        """Number of trained entries."""
        if not self.trainable:
            return 0
        return self.shape.adapters or self.shape.parameters

    @property
    def frozen(self) -> int:
        """Number of frozen entries."""
        whole = self.shape.parameters + self.shape.adapters
        return whole - self.trained

    @property
    def sharded(self) -> bool:
        """True if weights are gathered layer by layer."""
        engine = self.train.engine
        if isinstance(engine, DeepSpeedEngine):
            return engine.zero_stage == 3
        return engine.sharding == "full" and self.ranks > 1

    def largest(self, kind: str) -> int:
        """Return the number of entries of the largest unit of a kind."""
        return max((u.numel + u.lora for u in self.shape.units if u.kind == kind), default=0)

    @property
    def largest_tensor(self) -> int:
        """Number of entries of the largest trained parameter."""
        if self.shape.adapters and self.trainable:
            return max((u.lora for u in self.shape.units), default=0)
        return max(n for u in self.shape.units for n in u.numels)


def state(setup: EngineSetup) -> list[Item]:
    """Return the items that exist permanently, from the first step on."""
    engine = setup.train.engine
    if isinstance(engine, DeepSpeedEngine):
        return [i for i in _deepspeed_state(setup, engine) if i.bytes]
    items = _sharded_state(setup, engine) if setup.sharded else _replica_state(setup)
    return [i for i in items if i.bytes]


def _replica_state(s: EngineSetup) -> list[Item]:
    n, w = s.trained, s.weight_size
    items = [
        Item("parameters", s.frozen * w + n * w, f"{_m(s.frozen + n)} x {w} B"),
        Item("optimizer", n * 8, f"moments: {_m(n)} x 8 B"),
    ]
    if s.half:
        items.append(Item("optimizer", n * 4, f"fp32 masters: {_m(n)} x 4 B"))
    return items + _ema(s, n, "device")


def _sharded_state(s: EngineSetup, engine: TorchEngine) -> list[Item]:
    n, frozen = _rows(s), rounded_up(s.frozen, s.ranks)
    where: Where = "host" if engine.cpu_offload else "device"
    size = s.weight_size
    return [
        Item("parameters", n * 4, f"fp32 masters: {_part(s, s.trained)} x 4 B", where),
        Item("parameters", frozen * size, f"frozen: {_part(s, s.frozen)} x {size} B", where),
        Item("optimizer", n * 8, f"moments: {_part(s, s.trained)} x 8 B", where),
        *_ema(s, n, where),
        *_being_written(s, n),
    ]


def _rows(s: EngineSetup) -> int:
    """Return the number of trained entries on this rank. FSDP2 shards by rows, and the last ranks
    have fewer."""
    return rounded_up(s.trained, s.ranks)


def _deepspeed_state(s: EngineSetup, engine: DeepSpeedEngine) -> list[Item]:
    n, w, stage = s.trained, s.weight_size, engine.zero_stage
    part = rounded_up(n, s.ranks) if stage else n
    where: Where = "host" if engine.adam_offload else "device"
    share = _part(s, n) if stage else _m(n)
    items = [Item("optimizer", part * 8, f"moments: {share} x 8 B", where)]
    if stage or s.half:
        items.append(Item("optimizer", part * 4, f"fp32 masters: {share} x 4 B", where))
    items += _ema(s, part, where)
    if stage < 3:
        whole = n + s.frozen
        items.append(Item("parameters", whole * w, f"{_m(whole)} x {w} B, replicated"))
        return items
    held: Where = "host" if engine.param_offload else "device"
    both = rounded_up(n + s.frozen, s.ranks)
    items.append(Item("parameters", both * w, f"{_part(s, n + s.frozen)} x {w} B", held))
    small = sum(
        x for u in s.shape.units for x in u.numels if x < engine.param_persistence_threshold
    )
    items.append(Item("parameters", small * w, f"small ones, replicated: {_m(small)} x {w} B"))
    if engine.zero_hpz_partition_size > 1 and s.ranks > 1:
        hpz = min(engine.zero_hpz_partition_size, s.ranks)
        size = rounded_up(n + s.frozen, hpz) * w
        items.append(Item("parameters", size, f"second shard (hpZ): {_m(n + s.frozen)} / {hpz}"))
    if s.trainable:  # a permanent buffer
        sums = SIZES[s.precision.grad_accum_dtype]
        items.append(Item("gradients", part * sums, f"sums: {share} x {sums} B", where))
        if engine.adam_offload:
            items.append(Item("gradients", part * 4, f"fp32, for the step: {share} x 4 B", "host"))
        bucket = engine.reduce_bucket_size * sums
        items.append(
            Item(
                "communication",
                bucket,
                f"reduce_bucket_size {engine.reduce_bucket_size} x {sums} B",
            )
        )
    return items


def _being_written(s: EngineSetup, entries: int) -> list[Item]:
    if not s.saves_in_background or not s.trainable:
        return []
    size = 12 + 4 * (s.train.ema_decay is not None)
    how = f"copy being written: {_part(s, s.trained)} x {size} B"
    return [Item("checkpoint", entries * size, how, "host")]


def _ema(s: EngineSetup, entries: int, where: Where) -> list[Item]:
    if s.train.ema_decay is None or not s.trainable:
        return []
    return [Item("optimizer", entries * 4, f"moving average: {_m(entries)} x 4 B", where)]


# ---- during computation ---------------------------------------------------------------------


def gathered(setup: EngineSetup, stage: str = "forward") -> list[Item]:
    """Return the weights that a sharded engine gathers temporarily in one stage of a pass
    (``activations.STAGES``)."""
    if not setup.sharded:
        return []
    engine, w = setup.train.engine, setup.weight_size
    layer, whole = setup.largest("layer"), setup.shape.parameters
    if isinstance(engine, DeepSpeedEngine):
        if setup.unreleased_gathers:
            how = f"never released (DeepSpeed 0.16.0 to 0.16.7): {_m(whole)} x {w} B"
            return [Item("gathered layers", whole * w, how)]
        units = [u.numel for u in setup.shape.units]
        live = min(whole, max(MAX_LIVE, *units) + PREFETCH)
        how = (
            f"at most max(stage3_max_live_parameters 1e9, largest unit {_m(max(units))}) + "
            f"5e7 prefetched, of {_m(whole)} x {w} B"
        )
        return [Item("gathered layers", live * w, how)]
    rest = setup.largest("rest") + setup.largest("embedding")
    if not engine.reshard_after_forward:
        return [
            Item(
                "gathered layers", whole * w, f"all layers, kept for backward: {_m(whole)} x {w} B"
            )
        ]
    if stage in ("bottom", "ends"):  # there is no next layer
        how = f"(first layer {_m(layer)} + embedding and head {_m(rest)}) x {w} B"
        return [Item("gathered layers", min(whole, layer + rest) * w, how)]
    live = min(whole, 2 * layer + rest)
    how = f"(current and next layer 2 x {_m(layer)} + embedding and head {_m(rest)}) x {w} B"
    items = [Item("gathered layers", live * w, how)]
    return [*items, Item("communication", layer * w, f"all-gather: {_m(layer)} x {w} B")]


def gradients_in_pass(setup: EngineSetup, stage: str, *, accumulates: bool) -> list[Item]:
    """Return gradients and their buffers in one stage of a pass (``activations.STAGES``), for
    DeepSpeed and sharded engines. The gradients of replicas are part of the trace. ``accumulates``:
    gradients of an earlier pass exist."""
    engine = setup.train.engine
    if isinstance(engine, DeepSpeedEngine):
        return _deepspeed_gradients(setup, engine) + _deepspeed_buckets(setup, engine)
    if not setup.sharded:
        return []
    unit, w, items = _largest_trained(setup), setup.weight_size, []
    backward = stage not in ("forward", "head")
    left = {"middle": 2, "bottom": 1}.get(stage, 0)  # layers without gradients so far
    if accumulates or left or stage == "ends":
        items += _shard_sums(setup, engine, without=0 if accumulates else left * unit)
    if engine.reduce_gradients == "once" and (accumulates or backward):
        n = setup.trained
        items.append(Item("gradients", n * 4, f"unsharded until the last pass: {_m(n)} x 4 B"))
    if backward:
        items.append(Item("gradients", unit * w, f"unsharded, largest layer: {_m(unit)} x {w} B"))
    if left or stage == "ends":
        items.append(Item("communication", unit * 4, f"reduce-scatter: {_m(unit)} x 4 B"))
    return items


def gradients_in_step(setup: EngineSetup) -> list[Item]:
    """Return gradients and their buffers during the optimizer step."""
    engine = setup.train.engine
    if not setup.trainable:
        return []
    if isinstance(engine, DeepSpeedEngine):
        return _deepspeed_gradients(setup, engine) + _deepspeed_step(setup, engine)
    return _shard_sums(setup, engine) if setup.sharded else _replica_step(setup)


def _shard_sums(s: EngineSetup, engine: TorchEngine, without: int = 0) -> list[Item]:
    where: Where = "host" if engine.cpu_offload else "device"
    n = max(0, s.trained - without)
    return [Item("gradients", rounded_up(n, s.ranks) * 4, f"sums: {_part(s, n)} x 4 B", where)]


def _replica_step(s: EngineSetup) -> list[Item]:
    items = [Item("gradients", s.trained * 4, f"{_m(s.trained)} x 4 B")]
    if s.ranks > 1:
        items.append(Item("communication", REDUCE_BUCKET, "all-reduce in chunks of 64 MiB"))
    return items


def _deepspeed_gradients(s: EngineSetup, engine: DeepSpeedEngine) -> list[Item]:
    """Return the gradients of stages 0 to 2. The sums of stage 3 are permanent and part of
    ``state``."""
    n, stage = s.trained, engine.zero_stage
    sums = SIZES[s.precision.grad_accum_dtype]
    if stage == 0:
        return [Item("gradients", n * s.weight_size, f"{_m(n)} x {s.weight_size} B")]
    if stage == 1:
        return [Item("gradients", n * sums, f"sums, replicated: {_m(n)} x {sums} B")]
    if stage == 2:
        where: Where = "host" if engine.adam_offload else "device"
        part = rounded_up(n, s.ranks)
        return [Item("gradients", part * sums, f"sums: {_part(s, n)} x {sums} B", where)]
    return []


def _deepspeed_step(s: EngineSetup, engine: DeepSpeedEngine) -> list[Item]:
    n, stage = s.trained, engine.zero_stage
    part = rounded_up(n, s.ranks) if stage else n
    where: Where = "host" if engine.adam_offload else "device"
    if stage == 0:
        return [Item("gradients", n * 4, f"fp32, for the step: {_m(n)} x 4 B")] if s.half else []
    if stage in (1, 2):
        how = f"fp32, for the step: {_part(s, n)} x 4 B"
        return [Item("gradients", part * 4, how, where)]
    if engine.adam_offload:
        return []
    step = min(part, SUB_GROUP)
    return [Item("gradients", step * 4, f"fp32, for the step: {_m(step)} x 4 B")]


def _deepspeed_buckets(s: EngineSetup, engine: DeepSpeedEngine) -> list[Item]:
    sums = SIZES[s.precision.grad_accum_dtype]
    items: list[Item] = []
    if engine.zero_stage < 3:
        size = engine.reduce_bucket_size * sums
        how = f"reduce_bucket_size {engine.reduce_bucket_size} x {sums} B"
        items.append(Item("communication", size, how))
    if s.largest_tensor > engine.reduce_bucket_size:
        copies = 2 if engine.zero_stage == 3 else 1
        size = s.largest_tensor * sums * copies
        how = f"{copies} x largest gradient {_m(s.largest_tensor)} x {sums} B"
        items.append(Item("communication", size, how))
    return items


def _largest_trained(s: EngineSetup) -> int:
    if s.shape.adapters:
        return max(u.lora for u in s.shape.units)
    return max(s.largest(kind) for kind in ("layer", "rest", "embedding"))


def weight_transfer(setup: EngineSetup) -> list[Item]:
    """Return the unsharded items on a rank during a weight transfer to the rollout engine."""
    w = setup.weight_size
    if not setup.sharded:
        if setup.unsharded is None:
            return []
        size = max(n for u in setup.unsharded.units for n in u.numels)
        return [Item("gathered layers", size * w, f"largest weight, unsharded: {_m(size)} x {w} B")]
    if isinstance(setup.train.engine, DeepSpeedEngine):
        size = max(WEIGHT_BUCKET, setup.largest_tensor * w)
        return [Item("gathered layers", size, "bucket of 256 MiB, or the largest weight")]
    unit = max(setup.largest(kind) for kind in ("layer", "rest", "embedding"))
    how = f"largest unit and a copy: 2 x {_m(unit)} x {w} B"
    return [Item("gathered layers", 2 * unit * w, how)]


def checkpoint_bytes(setup: EngineSetup) -> float:
    """Return the bytes that :meth:`TrainEngine.save` writes: masters, two moments, and a moving
    average if enabled."""
    whole = setup.model.adapters or setup.model.parameters
    return setup.trainable * whole * (12.0 + 4 * (setup.train.ema_decay is not None))


def total(items: Iterable[Item], where: Where = "device") -> float:
    """Return the bytes of the items in one place."""
    return sum(i.bytes for i in items if i.where == where)


def _part(s: EngineSetup, entries: int) -> str:
    return _m(entries) if s.ranks == 1 else f"{_m(entries)} / {s.ranks}"


def _m(entries: int) -> str:
    """Format a number of entries."""
    if entries >= 1e9:
        return f"{entries / 1e9:.3f}e9"
    return f"{entries / 1e6:.1f}e6" if entries >= 1e5 else str(entries)
