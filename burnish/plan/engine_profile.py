"""Memory profile of a train engine: the hooks by which the planner learns its memory, traffic and
settings.

An engine's options name its profile (``TrainEngineFacts.memory_profile`` in
``config/train_engines.py``). The planner asks nothing else about an engine, so a new engine needs
one subclass of :class:`TrainEngineProfile` here. The other parts of a plan (activations, rows,
process overhead) are the same for all engines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pkgutil import resolve_name

from burnish.config.roles import TrainRole
from burnish.config.train_engines import TrainEngineFacts
from burnish.plan.model_state import EngineSetup, Item, entries_text, total


@dataclass(frozen=True)
class Suggestion:
    """Suggested change of the recipe, with its cost."""

    overrides: tuple[str, ...]
    cost: str


class TrainEngineProfile(ABC):
    """Memory and traffic of one model in one train engine, on one rank.

    Hooks return :class:`Item` lists. An item names its column of the plan, its calculation, and
    whether it is in device or host memory.
    """

    gathers = False
    """True if weights are gathered layer by layer in a pass."""

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup

    # ---- always there ----------------------------------------------------------------------

    @abstractmethod
    def state(self) -> list[Item]:
        """Return the items that exist permanently, from the first step on: weights, fp32 masters,
        moments, moving average, and buffers that the engine never frees."""

    # ---- in a pass ---------------------------------------------------------------------------

    def gathered(self, stage: str = "forward") -> list[Item]:
        """Return the weights that are gathered temporarily in one stage of a pass
        (``activations.STAGES``). Default: none."""
        return []

    @abstractmethod
    def gradients_in_pass(self, stage: str, *, accumulates: bool, traced: float) -> list[Item]:
        """Return gradients and their buffers in one stage of a training pass. ``accumulates``:
        gradients of an earlier pass exist. ``traced``: bytes of the gradients of a model that is
        not sharded, counted by the trace."""

    # ---- between passes ----------------------------------------------------------------------

    @abstractmethod
    def gradients_in_step(self) -> list[Item]:
        """Return gradients and their buffers during the optimizer step of a trained model."""

    def weight_transfer(self) -> list[Item]:
        """Return the unsharded items on a rank during a weight transfer to the rollout engine.
        Default: a tensor-parallel rank assembles one weight at a time."""
        if self.setup.unsharded is None:
            return []
        size = max(w.numel for u in self.setup.unsharded.units for w in u.base)
        w = self.setup.weight_size
        formula = f"largest weight, unsharded: {entries_text(size)} x {w} B"
        return [Item("gathered layers", size * w, formula)]

    @abstractmethod
    def saving(self, *, gpu: bool) -> list[Item]:
        """Return the temporary memory of writing a checkpoint. ``gpu``: the engine computes on a
        GPU, so host memory is separate."""

    # ---- loading -----------------------------------------------------------------------------

    def loading(self, *, from_folder: bool, gpu: bool) -> list[Item]:
        """Return the temporary memory of loading the model, in addition to its state.

        Default: the entire model is read into host memory and moved to the device. There it is
        sharded if ``size_before_sharding`` is set. ``from_folder``: the weights are in a model
        folder, whose rows can be read one by one. ``gpu``: as in :meth:`saving`."""
        size = self.size_before_sharding
        read = [self._read_on_host()] if gpu else []
        if size is None:
            return read
        whole = self.setup.model.parameters
        parameters = total(i for i in self.state() if i.name == "parameters")
        formula = f"unsharded on every rank while loading: {whole / 1e9:.3f}e9 x {size} B"
        return [Item("parameters", max(0.0, whole * size - parameters), formula), *read]

    @property
    def size_read(self) -> int:
        """Bytes per weight as read: fp32 if all weights are trained."""
        setup = self.setup
        return 4 if setup.trainable and not setup.shape.adapters else setup.weight_size

    @property
    def size_before_sharding(self) -> int | None:
        """Bytes per weight of the entire model on the device before it is sharded there. None: the
        model is not sharded after the load."""
        sharded = self.gathers or self.setup.unsharded is not None
        return self.size_read if sharded else None

    def _read_on_host(self) -> Item:
        whole, size = self.setup.model.parameters, self.size_read
        return Item(
            "parameters", whole * size, f"model file: {whole / 1e9:.3f}e9 x {size} B", "host"
        )

    # ---- time --------------------------------------------------------------------------------

    @abstractmethod
    def traffic(self, *, passes: float, updates: int, trains: bool) -> float:
        """Return the bytes that a rank sends in the ``passes`` of one step with ``updates``
        optimizer steps. ``trains``: the passes add to the gradient."""

    @property
    @abstractmethod
    def stepped_entries(self) -> float:
        """Trained entries that this rank updates in an optimizer step."""

    def _traffic_of_gathers(self, passes: float, trains: bool) -> float:
        """Return the bytes that a rank sends if every pass gathers all weights (a training pass
        twice) and scatters gradient sums."""
        setup = self.setup
        weights = setup.shape.parameters * setup.weight_size * (2.0 if trains else 1.0)
        sums = setup.trained * setup.sum_size * float(trains)
        return passes * (weights + sums) * (setup.ranks - 1) / setup.ranks

    def _traffic_of_sums(self, times: float, trains: bool) -> float:
        """Return the bytes that a rank sends if it sums whole gradients over ranks ``times``
        times."""
        several = trains and self.setup.ranks > 1
        return 2.0 * self.setup.trained * self.setup.sum_size * times if several else 0.0

    # ---- settings ----------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def alternatives(cls, role: TrainRole) -> list[list[str]]:
        """Return the overrides of each way to shard and offload a role's model with the same
        engine, for ``burnish plan --fit``. The first is empty: the recipe's own way."""

    @classmethod
    @abstractmethod
    def savings(cls, role: TrainRole) -> Iterator[Suggestion]:
        """Yield the changes of the engine's settings that reduce the state on each rank, cheapest
        first, for the report of a run out of memory."""


def profile_class(engine: TrainEngineFacts, ranks: int = 1) -> type[TrainEngineProfile]:
    """Return the profile that an engine's options name. Only its module is imported. ``ranks``:
    ranks with different rows."""
    profile: type[TrainEngineProfile] = resolve_name(engine.memory_profile(ranks=ranks))
    return profile


def profile_of(setup: EngineSetup) -> TrainEngineProfile:
    """Return the profile of one model in its engine."""
    return profile_class(setup.train.engine, setup.ranks)(setup)
