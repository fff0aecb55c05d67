"""Memory profiles of the torch engine: replicas, and shards (FSDP2).

Bytes per trained parameter (``train/optim.py`` gives the same numbers):

=================================  =========================================================
fp32                               4 weights + 4 gradient + 8 moments = 16
fp16 or bf16                       2 weights + 4 masters + 4 gradient sums + 8 moments = 18
  ``grad_accum_dtype`` = the same  2 + 4 + 2 + 8 = 16, and 4 of gradients in the step
sharded over N                     (4 masters + 4 gradients + 8 moments) / N = 16 / N
=================================  =========================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from burnish.config.roles import TrainRole
from burnish.config.train_engines import TorchEngine
from burnish.distributed.process_group import BUCKET_BYTES
from burnish.plan.engine_profile import Suggestion, TrainEngineProfile
from burnish.plan.model_state import (
    Item,
    Where,
    checkpoint_bytes,
    entries_text,
    in_step,
    moments,
    moving_average,
    share_text,
)
from burnish.plan.shapes import rounded_up


class TorchProfile(TrainEngineProfile):
    """Parts that replicas and shards have in common."""

    @property
    def options(self) -> TorchEngine:
        """``train.engine`` of the recipe."""
        return cast(TorchEngine, self.setup.train.engine)

    def loading(self, *, from_folder: bool, gpu: bool) -> list[Item]:
        """Return the temporary memory of loading: one weight at a time with ``cpu_offload``."""
        if self.size_before_sharding is None or not self.options.cpu_offload:
            return super().loading(from_folder=from_folder, gpu=gpu)
        largest = Item("parameters", 4.0 * self.setup.largest_weight, "largest weight")
        read = self._read_on_host()
        return [largest, read if gpu else replace(read, where="device")]

    @classmethod
    def alternatives(cls, role: TrainRole) -> list[list[str]]:
        """Return overrides for replicas, and for each way to shard."""
        if role.ranks == 1:
            return [[]]
        key = "train.engine."
        full = f"{key}sharding=full"
        return [
            [],
            [
                f"{key}sharding=none",
                f"{key}cpu_offload=false",
                f"{key}reshard_after_forward=true",
                f"{key}reduce_gradients=every_pass",
            ],
            [full, f"{key}reshard_after_forward=false", f"{key}cpu_offload=false"],
            [full, f"{key}reshard_after_forward=true", f"{key}cpu_offload=false"],
            [full, f"{key}reshard_after_forward=true", f"{key}cpu_offload=true"],
        ]

    @classmethod
    def savings(cls, role: TrainRole) -> Iterator[Suggestion]:
        """Yield shards, then shards in host memory."""
        engine, key = cast(TorchEngine, role.train.engine), "train.engine."
        if role.ranks == 1:
            return
        if engine.sharding == "none" and engine.ranks_per_row == 1:
            effect = "shards weights, gradients and moments; more communication"
            yield Suggestion((f"{key}sharding=full",), effect)
        elif engine.sharding == "full" and not engine.cpu_offload:
            effect = (
                "weights, gradients and moments offloaded to host memory; slower optimizer step"
            )
            yield Suggestion((f"{key}cpu_offload=true",), effect)

    def _nf4(self, parts: int) -> list[Item]:
        """Return this rank's codes of 4-bit weights, all their scales, and the largest of these
        matrices, which a pass dequantizes."""
        s, quantized = self.setup, self.setup.shape.quantized
        if not quantized:
            return []
        n, largest = sum(quantized), max(quantized)
        return [
            Item("parameters", n / 2 / parts, f"NF4 codes: {entries_text(n)} x 0.5 B / {parts}"),
            Item("parameters", s.scale_bytes, "scales of NF4 weights"),
            Item(
                "gathered layers",
                largest * s.weight_size,
                f"dequantized matrix: {entries_text(largest)} x {s.weight_size} B",
            ),
        ]


class ReplicaProfile(TorchProfile):
    """The model, or its tensor-parallel part, complete on every rank."""

    def state(self) -> list[Item]:
        """Return weights, moments, masters and moving average."""
        s, n, w = self.setup, self.setup.trained, self.setup.weight_size
        whole = s.frozen + n - sum(s.shape.quantized)
        items = [
            Item("parameters", whole * w, f"{entries_text(whole)} x {w} B"),
            *self._nf4(1),
            *moments(s),
        ]
        if s.half:
            items.append(Item("optimizer", n * 4, f"fp32 masters: {entries_text(n)} x 4 B"))
        return [i for i in (*items, *moving_average(s, n, "device")) if i.bytes]

    def gradients_in_pass(self, stage: str, *, accumulates: bool, traced: float) -> list[Item]:
        """Return the traced gradients."""
        return [Item("gradients", traced, f"traced; stage {stage}")]

    def gradients_in_step(self) -> list[Item]:
        """Return fp32 gradients, and the bucket in which they are summed over ranks."""
        n = self.setup.trained
        items = [Item("gradients", n * 4, f"{entries_text(n)} x 4 B"), *in_step(self.setup)]
        if self.setup.ranks > 1:
            formula = f"all-reduce in chunks of {BUCKET_BYTES >> 20} MiB"
            items.append(Item("communication", BUCKET_BYTES, formula))
        return items

    def saving(self, *, gpu: bool) -> list[Item]:
        """Return one kind of tensors, serialized."""
        size = 4.0 * self.setup.trained
        where: Where = "host" if gpu else "device"
        return [Item("optimizer", size, "bytes of one set of tensors (masters or a moment)", where)]

    def traffic(self, *, passes: float, updates: int, trains: bool) -> float:
        """Return the bytes sent: gradients are summed once per optimizer step."""
        return self._traffic_of_sums(updates, trains)

    @property
    def stepped_entries(self) -> float:
        """Trained entries that this rank updates in an optimizer step: all."""
        return float(self.setup.trained)


class ShardedProfile(TorchProfile):
    """A shard of weights, gradients and moments on each rank (FSDP2)."""

    gathers = True

    @property
    def _home(self) -> Where:
        return "host" if self.options.cpu_offload else "device"

    def state(self) -> list[Item]:
        """Return this rank's masters, frozen weights, moments, moving average, and the copy of a
        checkpoint that is written in the background."""
        s, size, where = self.setup, self.setup.weight_size, self._home
        plain = s.frozen - sum(s.shape.quantized)
        n, frozen = rounded_up(s.trained, s.ranks), rounded_up(plain, s.ranks)
        items = [
            Item("parameters", n * 4, f"fp32 masters: {share_text(s, s.trained)} x 4 B", where),
            Item("parameters", frozen * size, f"frozen: {share_text(s, plain)} x {size} B", where),
            *self._nf4(s.ranks),
            *moments(s, where, ranks=s.ranks),
            *moving_average(s, n, where),
        ]
        if s.saves_in_background and s.trainable:
            entry_bytes = checkpoint_bytes(replace(s, unsharded=None)) / max(1, s.trained)
            formula = f"copy being written: {share_text(s, s.trained)} x {entry_bytes:g} B"
            items.append(Item("checkpoint", n * entry_bytes, formula, "host"))
        return [i for i in items if i.bytes]

    def gathered(self, stage: str = "forward") -> list[Item]:
        """Return this layer, the next one, and the weights outside of layers; or the model if it
        stays gathered for backward."""
        s, w = self.setup, self.setup.weight_size
        layer, whole = s.largest("layer"), s.shape.parameters + s.shape.adapters
        rest = s.largest("rest") + s.largest("embedding")
        if not self.options.reshard_after_forward:
            formula = f"all layers, kept for backward: {entries_text(whole)} x {w} B"
            return [Item("gathered layers", whole * w, formula)]
        ends = f"embedding and head {entries_text(rest)}"
        if stage in ("bottom", "ends"):  # there is no next layer
            formula = f"(first layer {entries_text(layer)} + {ends}) x {w} B"
            return [Item("gathered layers", min(whole, layer + rest) * w, formula)]
        live = min(whole, 2 * layer + rest)
        formula = f"(current and next layer 2 x {entries_text(layer)} + {ends}) x {w} B"
        gather = Item("communication", layer * w, f"all-gather: {entries_text(layer)} x {w} B")
        return [Item("gathered layers", live * w, formula), gather]

    def gradients_in_pass(self, stage: str, *, accumulates: bool, traced: float) -> list[Item]:
        """Return shards of the sums so far, the gradient of one layer, and its reduce-scatter."""
        s, w = self.setup, self.setup.weight_size
        unit = max(unit.num_trained for unit in s.shape.units)
        items: list[Item] = []
        backward = stage not in ("forward", "head")
        left = {"middle": 2, "bottom": 1}.get(stage, 0)  # layers without gradients so far
        if accumulates or left or stage == "ends":
            items += self._sums(without=0 if accumulates else left * unit)
        if self.options.reduce_gradients == "once" and (accumulates or backward):
            n = s.trained
            items.append(
                Item("gradients", n * 4, f"unsharded until the last pass: {entries_text(n)} x 4 B")
            )
        if backward:
            formula = f"unsharded, largest layer: {entries_text(unit)} x {w} B"
            items.append(Item("gradients", unit * w, formula))
        if left or stage == "ends":
            formula = f"reduce-scatter: {entries_text(unit)} x 4 B"
            items.append(Item("communication", unit * 4, formula))
        return items

    def gradients_in_step(self) -> list[Item]:
        """Return this rank's shard of the fp32 sums, and the matrix that the optimizer gathers."""
        return [*self._sums(), *in_step(self.setup, ranks=self.setup.ranks)]

    def _sums(self, without: int = 0) -> list[Item]:
        s = self.setup
        n = max(0, s.trained - without)
        formula = f"sums: {share_text(s, n)} x 4 B"
        return [Item("gradients", rounded_up(n, s.ranks) * 4, formula, self._home)]

    def weight_transfer(self) -> list[Item]:
        """Return the largest gathered unit, and the copies that the receiver owns."""
        unit, w = self.setup.largest_unit, self.setup.weight_size
        formula = f"largest unit and a copy: 2 x {entries_text(unit)} x {w} B"
        return [Item("gathered layers", 2 * unit * w, formula)]

    def loading(self, *, from_folder: bool, gpu: bool) -> list[Item]:
        """Return the temporary memory of loading: ranks read their own rows of a model folder."""
        if not from_folder:
            return super().loading(from_folder=from_folder, gpu=gpu)
        formula = "largest weight; each rank reads its own rows"
        return [Item("parameters", 4.0 * self.setup.largest_weight / self.setup.ranks, formula)]

    def saving(self, *, gpu: bool) -> list[Item]:
        """Return this rank's state, copied to host memory if it is on a GPU."""
        if not gpu:
            return []
        parts = self.setup.ranks
        if self.setup.unsharded is not None:
            parts *= self.options.tensor_parallel_size
        size = checkpoint_bytes(self.setup) / parts
        return [Item("optimizer", size, "copy of this rank's state", "host")]

    def traffic(self, *, passes: float, updates: int, trains: bool) -> float:
        """Return the bytes sent: every pass gathers weights and scatters gradients."""
        return self._traffic_of_gathers(passes, trains)

    @property
    def stepped_entries(self) -> float:
        """Trained entries that this rank updates in an optimizer step: its shard."""
        return self.setup.trained / self.setup.ranks
