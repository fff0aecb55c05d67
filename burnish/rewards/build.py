"""Build the rewards and weights of a recipe's ``rewards``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from burnish.config.base import module_of
from burnish.config.explain import nearest
from burnish.config.rewards import RESERVED_NAMES, reward_names
from burnish.rewards.base import Reward, RewardError
from burnish.rewards.config import RewardSettings
from burnish.rewards.model.config import ModelReward

Functions = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class RewardInputs:
    """Arguments of ``make_reward`` besides the config."""

    name: str
    """Name of the reward, unique in the recipe."""
    function: Callable[..., Any] | None
    """Function that the caller passed for this reward."""
    entries: Sequence[RewardSettings]
    """All rewards of the recipe."""
    model_reward: Callable[[ModelReward], Reward] | None
    tokenizer: PreTrainedTokenizerBase | None
    """The policy's."""


def build_rewards(
    configs: Sequence[RewardSettings],
    *,
    functions: Functions | None = None,
    model_reward: Callable[[ModelReward], Reward] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> list[tuple[Reward, float]]:
    """Return (reward, weight) for each entry of a recipe's ``rewards``, in order, with unique
    names.

    ``functions`` maps entry names to callables, for entries without a ``function``. If there is
    one callable and one such entry, they match regardless of names. ``model_reward`` builds
    rewards of kind ``model``; it gets the config with the name filled in. ``tokenizer``: the
    policy's, for the texts that rewards read of episodes.

    Raises RewardError if an entry has no callable, a function cannot be loaded, or no entry uses a
    given callable.
    """
    names = reward_names(configs)
    matched = _match(configs, names, functions or {})
    if reserved := [name for name in names if name in RESERVED_NAMES]:
        raise RewardError(
            f"reward name {reserved[0]!r} is reserved for metrics; give the reward another name"
        )
    weighted: list[tuple[Reward, float]] = []
    for i, (entry, name) in enumerate(zip(configs, names, strict=True)):
        inputs = RewardInputs(name, matched.get(i), configs, model_reward, tokenizer)
        weighted.append((module_of(entry, "reward").make_reward(entry, inputs), entry.weight))
    return weighted


def check_rewards(configs: Sequence[RewardSettings]) -> None:
    """Check what the rewards of a recipe need, before any model is loaded. Raises RewardError if
    no server of a reward accepts connections."""
    for i, entry in enumerate(configs):
        if entry.has_check:
            module_of(entry, "reward").check(entry, f"rewards.{i}")


def named_functions(given: Any) -> dict[str, Callable[..., Any]]:
    """Return the functions that a caller passed by name: one callable has none. Raises
    RewardError if ``given`` is neither a callable nor a mapping of names to callables, pairs of
    these, or empty."""
    if callable(given):
        return {"": given}
    try:
        functions = {} if given is None else dict(given)
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"rewards={_short(given)} is no callable; pass one, or several by the names of their "
            'entries in the recipe: rewards={"name": callable}'
        ) from error
    for name, function in functions.items():
        if not callable(function):
            raise RewardError(f"rewards[{name!r}]={_short(function)} is no callable; pass one")
    return functions


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _match(
    configs: Sequence[RewardSettings], names: Sequence[str], functions: Functions
) -> dict[int, Callable[..., Any]]:
    """Return the given callable of each entry, by the entry's index."""
    open_entries = [i for i, c in enumerate(configs) if c.needs_callable]
    keys = {i: configs[i].name or (names[i] if names[i] in functions else "") for i in open_entries}
    if len(open_entries) == 1 and len(functions) == 1:
        keys = {open_entries[0]: next(iter(functions))}
    for i, key in keys.items():
        if key not in functions:
            given = ", ".join(functions)
            have = (
                f"those given are {given}{nearest(key, functions)}" if given else "none was given"
            )
            have = "the callable that was given has no name" if "" in functions else have
            raise RewardError(
                f"rewards.{i}{f' ({key!r})' if key else ''} is of kind function but names no "
                f"function, and {have}. Set rewards.{i}.function=path/to/file.py:name (or "
                "package.module:name), or pass a callable to burnish.run under the entry's name: "
                'rewards={"name": callable}'
            )
    unused = [key for key in functions if key not in keys.values()]
    if unused:
        raise RewardError(
            f"no reward of the recipe uses the given function {unused[0]!r}; add "
            f"{{kind: function, name: {unused[0]}}} to 'rewards', or do not pass it"
        )
    return {i: functions[key] for i, key in keys.items()}
