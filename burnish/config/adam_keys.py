"""The older keys ``train.adam_betas`` and ``train.adam_eps``, which are now keys of an optimizer.

They applied to ``train.optimizer`` and ``critic.optimizer``, whichever of the two was set before or
after them."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from burnish.config.base import OlderKeys, Section, switched_by
from burnish.config.older import MovedKey, class_of
from burnish.optimizers.kinds import OptimizerConfig

OLDER_ADAM_KEYS = OlderKeys(
    "optimizer",
    "",
    switched_by("kind"),
    {"adam_betas": ("betas", [0.9, 0.95]), "adam_eps": ("eps", 1e-8)},
)


class OlderAdamValues:
    """Values of the older keys of a recipe, while its overrides are applied."""

    def __init__(self) -> None:
        self._train: Any = None
        self._values: dict[str, Any] = {}

    def restore(self, tree: dict[str, Any]) -> Iterator[MovedKey]:
        """Set the older keys again if an override has replaced ``train.optimizer`` without its own
        values, and copy them to ``critic.optimizer``, in place. Yield the copied keys whose values
        differ from their defaults. Call it before the older keys are moved: for the recipe, and
        after each override."""
        train = tree.get("train")
        if not isinstance(train, dict):
            return
        is_override = train is self._train
        if not is_override:
            self._train, self._values = train, {}
        latest = {key: deepcopy(train[key]) for key in OLDER_ADAM_KEYS.keys if key in train}
        self._values |= latest
        optimizer = _section(train.get("optimizer")) or {}
        for key, value in self._values.items():
            if OLDER_ADAM_KEYS.keys[key][0] not in optimizer:
                train[key] = deepcopy(value)
        yield from self._copy_to_critic(tree.get("critic"), latest if is_override else {})

    def _copy_to_critic(self, critic: Any, overrides: dict[str, Any]) -> Iterator[MovedKey]:
        """``overrides``: values that also replace those that the critic has."""
        section = _section(critic.get("optimizer")) if isinstance(critic, dict) else None
        cls = None if section is None else class_of(section, OptimizerConfig)
        if section is None or cls is None:
            return
        for key, value in self._values.items():
            name, default = OLDER_ADAM_KEYS.keys[key]
            if name in cls.model_fields and (name not in section or key in overrides):
                section[name] = deepcopy(value)
                critic["optimizer"] = section
                if value != default:
                    yield MovedKey(f"train.{key}", f"critic.optimizer.{name}")


def with_critic_values(tree: Any) -> Any:
    """Return the tree of a recipe with the values of the older keys also in
    ``critic.optimizer``."""
    if not isinstance(tree, dict):
        return tree
    sections = {k: dict(tree[k]) for k in ("train", "critic") if isinstance(tree.get(k), dict)}
    tree = {**tree, **sections}
    list(OlderAdamValues().restore(tree))
    return tree


def _section(optimizer: Any) -> Section:
    """Return the mapping of an optimizer in a recipe; None if it is not set."""
    return dict(optimizer) if isinstance(optimizer, dict) else OLDER_ADAM_KEYS.begin(optimizer)
