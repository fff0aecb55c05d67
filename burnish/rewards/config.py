"""The contract of a reward's config: its settings, and the facts that rules and checks need. Free
of torch.

A kind is a folder with its name. ``config.py``: a subclass of :class:`RewardSettings`.
``reward.py``: a reward with the interface of ``rewards/base.py``, and a function
``make_reward(config, inputs)`` that returns it (``inputs``: ``RewardInputs`` of
``rewards/build.py``). ``kinds.py`` is the registry.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from burnish.config.base import Node


class RewardSettings(Node):
    """Keys and facts of every reward."""

    runs_alone: ClassVar[bool] = True
    """False if it needs a server, a model or an episode, so that ``burnish check`` cannot call it
    on a row."""
    reads_label: ClassVar[bool] = False
    """True if it can use only labels of some forms. ``reward.py`` then has ``check_label(prompt)``,
    which raises LabelError."""
    has_check: ClassVar[bool] = False
    """True if something can be checked before a model is loaded. ``reward.py`` then has
    ``check(config, key)``, which raises RewardError. ``key``: that of the reward in the recipe."""

    name: str | None = None
    """Name in metrics and samples. None: derived from the kind."""
    weight: float = 1.0
    """The total reward is the weighted sum of all rewards."""
    running_norm: Literal["mean_std", "std"] | None = None
    """Normalize before the weight by mean and standard deviation of all scores of the run so far,
    this step's included. mean_std: (score - mean) / std. std: score / std, which keeps the sign.
    Saved in checkpoints. The metric ``reward/<name>``, the column ``reward_parts`` of samples,
    dynamic sampling's bounds and evaluation use the plain score; ``reward/mean``, ``reward/std``
    and the column ``reward`` the normalized one. Refused in generate and score. None: off."""
    kind: str

    @property
    def needs_callable(self) -> bool:
        """Return whether it calls a function that the recipe does not name."""
        return False

    @property
    def credits_turns(self) -> bool:
        """Return whether each turn of an episode is credited with its own reward."""
        return False
