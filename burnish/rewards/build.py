"""Build the rewards and weights of a recipe's ``rewards``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from burnish.config import rewards as config
from burnish.config.explain import nearest
from burnish.config.rewards import RESERVED_NAMES, RewardConfig, reward_names
from burnish.environments.importing import LoadError, load_object
from burnish.rewards.base import Reward, RewardError
from burnish.rewards.environment import EnvironmentReward
from burnish.rewards.episode import EpisodeReward
from burnish.rewards.function import FunctionReward
from burnish.rewards.math import MathReward
from burnish.rewards.openrlhf import PREFIX, OpenRLHFReward
from burnish.rewards.python_code import PythonCodeReward
from burnish.rewards.remote import RemoteReward

Functions = Mapping[str, Callable[..., Any]]


def build_rewards(
    configs: Sequence[RewardConfig],
    *,
    functions: Functions | None = None,
    model_reward: Callable[[config.ModelReward], Reward] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> list[tuple[Reward, float]]:
    """Return (reward, weight) for each entry of a recipe's ``rewards``, in order, with unique
    names.

    ``functions`` maps entry names to callables, for entries without a ``function``. If there is
    one callable and one such entry, they match regardless of names. ``model_reward`` builds
    rewards of kind ``model``; it gets the config with the name filled in. ``tokenizer``: the
    policy's, for the texts that rewards of kind ``remote`` send.

    Raises RewardError if an entry has no callable, a function cannot be loaded, or no entry uses a
    given callable.
    """
    matched = _match(configs, functions or {})
    names = _allowed_names(configs)
    entries = [c for c in configs if isinstance(c, config.EpisodeReward)]
    listed = [c.reward for c in entries if c.reward is not None]
    build = partial(_build, model_reward=model_reward, tokenizer=tokenizer, listed=listed)
    return [
        (build(c, name, matched.get(i)), c.weight)
        for i, (c, name) in enumerate(zip(configs, names, strict=True))
    ]


def _build(
    entry: RewardConfig,
    name: str,
    callable_: Callable[..., Any] | None,
    *,
    model_reward: Callable[[config.ModelReward], Reward] | None,
    tokenizer: PreTrainedTokenizerBase | None,
    listed: Collection[str],
) -> Reward:
    if isinstance(entry, config.FunctionReward):
        if callable_ is None and (entry.function or "").startswith(PREFIX):
            return OpenRLHFReward(
                str(entry.function), name=name, tokenizer=tokenizer, timeout_s=entry.timeout_s
            )
        function = _load(entry.function, name) if callable_ is None else callable_
        return FunctionReward(function, name=name, timeout_s=entry.timeout_s)
    if isinstance(entry, config.MathReward):
        return MathReward(name=name, timeout_s=entry.timeout_s, num_workers=entry.num_workers)
    if isinstance(entry, config.PythonCodeReward):
        return PythonCodeReward(entry, name=name)
    if isinstance(entry, config.EnvironmentReward):
        return EnvironmentReward(name=name, timeout_s=entry.timeout_s)
    if isinstance(entry, config.EpisodeReward):
        return EpisodeReward(entry.reward, name=name, per_turn=entry.per_turn, listed=listed)
    if isinstance(entry, config.RemoteReward):
        return RemoteReward(entry, name=name, tokenizer=tokenizer)
    if model_reward is None:
        raise RewardError(
            f"reward {name!r} is of kind model, but this job was started without model_reward, "
            "which builds such rewards"
        )
    return model_reward(entry.model_copy(update={"name": name}))


def _load(spec: str | None, name: str) -> Callable[..., Any]:
    try:
        return load_object(spec or "")  # type: ignore[no-any-return]  # FunctionReward checks it
    except LoadError as error:
        raise RewardError(f"reward {name!r}: function {error}") from error


def _match(configs: Sequence[RewardConfig], functions: Functions) -> dict[int, Callable[..., Any]]:
    """Return the given callable of each entry, by the entry's index."""
    open_entries = [
        i
        for i, c in enumerate(configs)
        if isinstance(c, config.FunctionReward) and c.function is None
    ]
    keys = {i: configs[i].name or "" for i in open_entries}
    if len(open_entries) == 1 and len(functions) == 1:
        keys = {open_entries[0]: next(iter(functions))}
    for i, key in keys.items():
        if key not in functions:
            names = ", ".join(functions)
            have = f"{names} were given{nearest(key, functions)}" if functions else "none was given"
            raise RewardError(
                f"rewards.{i}{f' ({key!r})' if key else ''} is of kind function but names no "
                f"function, and {have}. Set rewards.{i}.function=path/to/file.py:name (or "
                "package.module:name), or pass a callable to burnish.run under the entry's name"
            )
    unused = [key for key in functions if key not in keys.values()]
    if unused:
        raise RewardError(
            f"no reward of the recipe uses the given function {unused[0]!r}; add "
            f"{{kind: function, name: {unused[0]}}} to 'rewards', or do not pass it"
        )
    return {i: functions[key] for i, key in keys.items()}


def _allowed_names(configs: Sequence[RewardConfig]) -> list[str]:
    names = reward_names(configs)
    for name in names:
        if name in RESERVED_NAMES:
            raise RewardError(
                f"reward name {name!r} is reserved for metrics; give the reward another name"
            )
    return names
