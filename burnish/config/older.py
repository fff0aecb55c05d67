"""Read the keys of older recipes that are now in a section of their own, or in another one.

A key that has an effect only together with another one is nested below it, so that a recipe cannot
set it alone. Recipes and saved runs of earlier versions have both keys side by side; their values
are moved before validation, and a notice names the present keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple, Optional

from burnish.config.base import Node, OlderKeys, Section, switched_by
from burnish.config.schema import is_list, item_of, kinds_of, nodes_in, value_of
from burnish.optimizers.kinds import OptimizerConfig


class MovedKey(NamedTuple):
    """An older key that a recipe sets, and the present one. Both are dotted paths."""

    older: str
    present: str


def move_older_keys(tree: Any, annotation: Any, path: str = "") -> Iterator[MovedKey]:
    """Move the values of older keys in the recipe ``tree``, in place, and yield the keys whose
    values differ from their defaults.
    ``annotation``: type of ``tree``. ``path``: its dotted path, with a dot at the end."""
    if isinstance(tree, dict):
        cls = class_of(tree, annotation)
        for older in () if cls is None else cls.older_keys:
            yield from (MovedKey(path + key, path + present) for key, present in older.move(tree))
        for key, value in tree.items():
            below = type_below(annotation, key) if cls is None else type_below(cls, key)
            yield from move_older_keys(value, below, f"{path}{key}.")
    elif isinstance(tree, list):
        item = item_of(annotation) if is_list(annotation) else annotation
        for number, value in enumerate(tree):
            yield from move_older_keys(value, item, f"{path}{number}.")


@cache
def type_below(annotation: Any, key: str) -> Any:
    """Return the type of a key of a mapping of type ``annotation``, also of an older key; None if
    the key is unknown."""
    for cls in nodes_in(annotation):
        if key in cls.model_fields:
            return cls.model_fields[key].annotation
    for cls in nodes_in(annotation):
        for older in cls.older_keys:
            name = older.keys[key][0] if key in older.keys else key
            if key in older.keys or key == older.switch:
                section: Any = cls.model_fields[older.section].annotation
                return Optional[type_below(section, name)]  # noqa: UP045 (built at run time)
    return value_of(annotation)


def present_value(tree: Mapping[str, Any], annotation: Any, key: str) -> Any:
    """Return the value of a key of the mapping ``tree`` of type ``annotation``, also of an older
    key whose value was moved; None if it is not set."""
    if key in tree:
        return tree[key]
    for cls in nodes_in(annotation):
        for older in cls.older_keys:
            section = tree.get(older.section)
            if key in older.keys and isinstance(section, dict):
                return section.get(older.keys[key][0])
    return None


def present_path(path: str, cls: type[Node]) -> str:
    """Return the dotted path below ``cls`` with the present name of its first key.

    >>> from burnish.config import SFTConfig
    >>> present_path("eval_sets.math", SFTConfig), present_path("data", SFTConfig)
    ('eval.sets.math', 'data')
    """
    first, dot, rest = path.partition(".")
    for older in cls.older_keys:
        if first in older.keys:
            return f"{older.section}.{older.keys[first][0]}{dot}{rest}"
    return path


def notice(moved: Sequence[MovedKey]) -> str:
    """Return a sentence that names the present keys."""
    pairs = ", ".join(dict.fromkeys(f"{key.older} -> {key.present}" for key in moved))
    return f"keys of an older form, which are still read: {pairs}"


def class_of(tree: Mapping[str, Any], annotation: Any) -> type[Node] | None:
    """Return the class of a mapping; of several kinds the one that it names."""
    for cls in nodes_in(annotation):
        kinds = kinds_of(cls)
        if not kinds or tree.get("kind", cls.model_fields["kind"].default) in kinds:
            return cls
    return None


# --- older keys of AdamW

OLDER_ADAM_KEYS = OlderKeys(
    "optimizer",
    "",
    switched_by("kind"),
    {"adam_betas": ("betas", [0.9, 0.95]), "adam_eps": ("eps", 1e-8)},
)
"""``train.adam_betas`` and ``train.adam_eps``, which are now keys of an optimizer. They applied to
``train.optimizer`` and ``critic.optimizer``, whichever of the two was set before or after them."""


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
