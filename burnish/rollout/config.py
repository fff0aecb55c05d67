"""The contract of a rollout engine's config: its settings, and the facts that rules, plans and
runtimes need. Free of torch.

A kind is a folder. ``config.py``: a subclass of :class:`RolloutEngineSettings`. ``engine.py``: the
engine, and a function ``make_engine`` with the arguments of ``rollout/base.py``. ``memory.py``:
what a plan asks (``plan/rollout_role.py``). ``kinds.py`` is the registry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from burnish.config.base import Node


class RolloutEngineSettings(Node, ABC):
    """Settings of one kind of rollout engine."""

    kind: str
    uses_transformers: ClassVar[bool] = False
    """True if it samples with the trainer's own model code: at any temperature, with log-probs that
    need no comparison with the trainer's, and possibly with the trainer's own tensors."""
    on_servers: ClassVar[bool] = False
    """True if running servers sample, so that the job starts no worker."""
    keeps_cache_on_update: ClassVar[bool] = True
    """True if responses can continue with the cache of older weights (``in_flight: continue``)."""

    not_spmd: ClassVar[str | None] = None
    """Reason why ranks of a launcher (``cluster.runtime=spmd``) cannot each have an engine; None:
    they can."""

    @property
    @abstractmethod
    def slots(self) -> int:
        """Maximum number of responses that a worker (or server) decodes at once."""

    @property
    def may_share_weights(self) -> bool:
        """Return whether it uses the policy's tensors if it is in the same process."""
        return False

    @property
    def tensor_parallel(self) -> int:
        """Number of processes, each on a GPU, that share one copy of the model."""
        return 1

    @property
    def sleeps(self) -> bool:
        """Return whether it frees memory after every rollout for training."""
        return False

    def num_workers(self, ranks: int) -> int:
        """Return the number of engines that sample, for ``ranks`` of the recipe's cluster."""
        return ranks
