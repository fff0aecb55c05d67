"""The contract of data from which a reward model learns (job ``rm``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar


class RewardData(ABC):
    """Facts of a kind of rows (``data.kind``). ``jobs/reward_model.py`` has its losses."""

    losses: ClassVar[tuple[str, ...]]
    """Values of ``loss``; the first is the default."""
    rows_per_unit: ClassVar[int] = 1
    """Rows of one item: 2 for a pair."""
    weighs_outputs: ClassVar[bool] = False
    """True if the reward is a weighted sum of the model's outputs."""

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the model's outputs. Empty: one output without a name, or unknown."""
        return ()

    @property
    def default_weights(self) -> tuple[float, ...] | None:
        """Weights of the outputs if the recipe has none. None: it needs them."""
        return None

    @abstractmethod
    def metrics(self, *, weighted: bool) -> Iterable[str]:
        """Return the names after ``eval/`` of the metrics of an evaluation. ``weighted``: the
        weights of the outputs are known."""

    def loss_problem(self, loss: str) -> str | None:
        """Return why ``loss``, which is none of ``losses``, cannot be used; None for the sentence
        that names the kind of its rows."""
        return None

    def model_rules(
        self, held_out: Mapping[str, Any], loss: str | None, weights: Mapping[str, float] | None
    ) -> Iterator[str]:
        """Yield an error for each setting of the model that does not fit the rows. ``held_out``:
        evaluation sections of the same kind by their place in the recipe."""
        yield from ()
