"""Memory profile of the DeepSpeed engine, stages 0 to 3.

Bytes per trained parameter, derived from the source of 0.19.8 (stage_1_and_2.py, stage3.py):

=============  ==========================================================
stage 1, half  2 + 4 sums + (4 + 8 + 4 of the step) / N
stage 2, half  2 + (4 sums + 4 + 8 + 4 of the step) / N
stage 3, half  (2 + 4 sums + 4 + 8) / N + 4 of the step for at most 1e9
=============  ==========================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from burnish.config.roles import TrainRole
from burnish.config.train_engines import DeepSpeedEngine
from burnish.plan.engine_profile import Suggestion, TrainEngineProfile
from burnish.plan.model_state import (
    EngineSetup,
    Item,
    Where,
    entries_text,
    in_step,
    moments,
    moving_average,
    share_text,
)
from burnish.plan.shapes import rounded_up
from burnish.train.deepspeed.zero import WEIGHT_BUCKET_BYTES

MAX_LIVE = 1_000_000_000
"""DeepSpeed's stage3_max_live_parameters, in entries."""
PREFETCH = 50_000_000
"""DeepSpeed's stage3_prefetch_bucket_size, in entries."""
SUB_GROUP = 1_000_000_000
"""DeepSpeed's sub_group_size, in entries."""


class DeepSpeedProfile(TrainEngineProfile):
    """ZeRO shards of state (stage 1), gradients (2) and weights (3)."""

    def __init__(self, setup: EngineSetup) -> None:
        super().__init__(setup)
        self._stage = self.options.zero_stage
        self.gathers = self._stage == 3

    @property
    def options(self) -> DeepSpeedEngine:
        """``train.engine`` of the recipe."""
        return cast(DeepSpeedEngine, self.setup.train.engine)

    @property
    def _home(self) -> Where:
        """Memory of masters, moments and gradient shards."""
        return "host" if self.options.adam_offload else "device"

    @property
    def _part(self) -> int:
        """Number of entries of the optimizer state on this rank."""
        n = self.setup.trained
        return rounded_up(n, self.setup.ranks) if self._stage else n

    # ---- always there ----------------------------------------------------------------------

    def state(self) -> list[Item]:
        """Return moments, masters, moving average and weights; at stage 3 also gradient sums and
        the bucket for reductions, which are never freed."""
        s, n, w, part = self.setup, self.setup.trained, self.setup.weight_size, self._part
        share = share_text(s, n) if self._stage else entries_text(n)
        items = moments(s, self._home, ranks=s.ranks if self._stage else 1)
        if self._stage or s.half:
            formula = f"fp32 masters: {share} x 4 B"
            items.append(Item("optimizer", part * 4, formula, self._home))
        items += moving_average(s, part, self._home)
        if self.gathers:
            items += self._weight_shards()
            if s.trainable:
                formula = f"sums: {share} x {s.sum_size} B"
                items.append(Item("gradients", part * s.sum_size, formula, self._home))
                if self.options.adam_offload:
                    formula = f"fp32, for the step: {share} x 4 B"
                    items.append(Item("gradients", part * 4, formula, "host"))
                items.append(self._bucket())
        else:
            whole = n + s.frozen
            formula = f"{entries_text(whole)} x {w} B, replicated"
            items.append(Item("parameters", whole * w, formula))
        return [i for i in items if i.bytes]

    def _weight_shards(self) -> list[Item]:
        s, w, options = self.setup, self.setup.weight_size, self.options
        held: Where = "host" if options.param_offload else "device"
        whole = s.trained + s.frozen
        weights = (w.numel for u in s.shape.units for w in (*u.base, *u.adapters))
        small = sum(x for x in weights if x < options.param_persistence_threshold)
        formula = f"{share_text(s, whole)} x {w} B"
        items = [
            Item("parameters", rounded_up(whole, s.ranks) * w, formula, held),
            Item("parameters", small * w, f"small ones, replicated: {entries_text(small)} x {w} B"),
        ]
        if options.zero_hpz_partition_size > 1 and s.ranks > 1:
            hpz = min(options.zero_hpz_partition_size, s.ranks)
            formula = f"second shard (hpZ): {entries_text(whole)} / {hpz}"
            items.append(Item("parameters", rounded_up(whole, hpz) * w, formula))
        return items

    def _bucket(self) -> Item:
        entries, sums = self.options.reduce_bucket_size, self.setup.sum_size
        return Item("communication", entries * sums, f"reduce_bucket_size {entries} x {sums} B")

    # ---- in a pass ---------------------------------------------------------------------------

    def gathered(self, stage: str = "forward") -> list[Item]:
        """Return the weights that stage 3 gathers: up to its limit, and the prefetched ones."""
        if not self.gathers:
            return []
        s, w, whole = self.setup, self.setup.weight_size, self.setup.shape.parameters
        if s.unreleased_gathers:
            formula = f"never released (DeepSpeed 0.16.0 to 0.16.7): {entries_text(whole)} x {w} B"
            return [Item("gathered layers", whole * w, formula)]
        largest = max(u.numel for u in s.shape.units)
        live = min(whole, max(MAX_LIVE, largest) + PREFETCH)
        formula = (
            f"at most max(stage3_max_live_parameters 1e9, largest unit {entries_text(largest)}) "
            f"+ 5e7 prefetched, of {entries_text(whole)} x {w} B"
        )
        return [Item("gathered layers", live * w, formula)]

    def gradients_in_pass(self, stage: str, *, accumulates: bool, traced: float) -> list[Item]:
        """Return gradient sums and the buckets in which they are reduced, in every stage."""
        items = self._sums()
        if not self.gathers:
            items.append(self._bucket())
        largest, sums = self.setup.largest_trained, self.setup.sum_size
        if largest > self.options.reduce_bucket_size:
            copies = 2 if self.gathers else 1
            formula = f"{copies} x largest gradient {entries_text(largest)} x {sums} B"
            items.append(Item("communication", largest * sums * copies, formula))
        return items

    def _sums(self) -> list[Item]:
        """Return the gradients of stages 0 to 2. The sums of stage 3 are permanent."""
        s, n, sums = self.setup, self.setup.trained, self.setup.sum_size
        if self._stage == 0:
            formula = f"{entries_text(n)} x {s.weight_size} B"
            return [Item("gradients", n * s.weight_size, formula)]
        if self._stage == 1:
            return [Item("gradients", n * sums, f"sums, replicated: {entries_text(n)} x {sums} B")]
        if self._stage == 2:
            formula = f"sums: {share_text(s, n)} x {sums} B"
            return [Item("gradients", self._part * sums, formula, self._home)]
        return []

    # ---- between passes ----------------------------------------------------------------------

    def gradients_in_step(self) -> list[Item]:
        """Return gradient sums, their fp32 form, and the matrix that Muon gathers."""
        return [*self._sums(), *self._fp32_gradients(), *in_step(self.setup, whole_stacks=True)]

    def _fp32_gradients(self) -> list[Item]:
        s, part = self.setup, self._part
        if self._stage == 0:
            formula = f"fp32, for the step: {entries_text(part)} x 4 B"
            return [Item("gradients", part * 4, formula)] if s.half else []
        if self._stage in (1, 2):
            formula = f"fp32, for the step: {share_text(s, s.trained)} x 4 B"
            return [Item("gradients", part * 4, formula, self._home)]
        if self.options.adam_offload:
            return []
        step = min(part, SUB_GROUP)
        return [Item("gradients", step * 4, f"fp32, for the step: {entries_text(step)} x 4 B")]

    def weight_transfer(self) -> list[Item]:
        """Return the bucket of weights that stage 3 gathers at a time."""
        if not self.gathers:
            return super().weight_transfer()
        size = max(WEIGHT_BUCKET_BYTES, self.setup.largest_weight * self.setup.weight_size)
        formula = f"bucket of {WEIGHT_BUCKET_BYTES >> 20} MiB, or the largest weight"
        return [Item("gathered layers", size, formula)]

    def saving(self, *, gpu: bool) -> list[Item]:
        """Return the fp32 weight that rank 0 gathers and writes at a time."""
        size = 8.0 * self.setup.largest_trained
        where: Where = "host" if gpu else "device"
        return [Item("parameters", size, "largest weight in fp32, and its bytes", where)]

    # ---- loading -----------------------------------------------------------------------------

    def loading(self, *, from_folder: bool, gpu: bool) -> list[Item]:
        """Return the temporary memory of loading: ``zero_init`` shards while reading."""
        if not self.options.zero_init:
            return super().loading(from_folder=from_folder, gpu=gpu)
        s, size = self.setup, self.size_read
        part = s.model.parameters / s.ranks * (0 if size == s.weight_size else size)
        formula = "zero_init: shards in the format of the file + largest weight, unsharded"
        return [Item("parameters", s.largest_weight * size + part, formula)]

    @property
    def size_before_sharding(self) -> int | None:
        """Bytes per weight on the device before sharding. The fp32 weights stay in host memory
        (``train/engines.py``)."""
        moved = self.setup.trainable or self.gathers
        return self.setup.weight_size if moved else None

    # ---- time --------------------------------------------------------------------------------

    def traffic(self, *, passes: float, updates: int, trains: bool) -> float:
        """Return the bytes sent: stage 3 gathers in every pass; the others sum gradients in every
        pass."""
        if self.gathers:
            return self._traffic_of_gathers(passes, trains)
        return self._traffic_of_sums(passes, trains)

    @property
    def stepped_entries(self) -> float:
        """Trained entries that this rank updates in an optimizer step: its shard from stage 1
        on."""
        return self.setup.trained / (self.setup.ranks if self._stage else 1)

    # ---- settings ----------------------------------------------------------------------------

    @classmethod
    def alternatives(cls, role: TrainRole) -> list[list[str]]:
        """Return overrides for stages 1 to 3, with and without offload."""
        ways = [(stage, adam, False) for stage in (1, 2, 3) for adam in (False, True)]
        alternatives: list[list[str]] = [[]]
        for stage, adam_offload, param_offload in (*ways, (3, True, True)):
            shards_weights = stage == 3
            values = {
                "zero_stage": stage,
                "adam_offload": str(adam_offload).lower(),
                "param_offload": str(param_offload).lower(),
                "zero_init": str(shards_weights and bool(role.model.path)).lower(),
                **({} if shards_weights else {"zero_hpz_partition_size": 1}),
            }
            alternatives.append([f"train.engine.{name}={value}" for name, value in values.items()])
        return alternatives

    @classmethod
    def savings(cls, role: TrainRole) -> Iterator[Suggestion]:
        """Yield higher stages, then offload."""
        engine, key = cast(DeepSpeedEngine, role.train.engine), "train.engine."
        for stage in range(engine.zero_stage + 1, 4) if role.ranks > 1 else ():
            held = {1: "masters and moments", 2: "gradients", 3: "weights"}[stage]
            yield Suggestion((f"{key}zero_stage={stage}",), f"shards {held}; more communication")
        if not engine.adam_offload and engine.zero_stage:
            effect = "masters and moments offloaded to host memory; slower optimizer step"
            yield Suggestion((f"{key}adam_offload=true",), effect)
        if not engine.param_offload and engine.zero_stage == 3:
            effect = "weight shards offloaded to host memory; slower"
            yield Suggestion((f"{key}param_offload=true",), effect)
