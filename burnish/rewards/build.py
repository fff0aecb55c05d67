"""Build the rewards and weights of a recipe's ``rewards``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from burnish.rewards.reachable import check_servers
from burnish.rewards.remote import RemoteReward

Functions = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class RewardInputs:
    """The inputs of a reward besides its config."""

    name: str
    """Name of the reward, unique in the recipe."""
    function: Callable[..., Any] | None
    """Function that the caller passed for this reward."""
    entries: Sequence[RewardConfig]
    """All rewards of the recipe."""
    model_reward: Callable[[config.ModelReward], Reward] | None
    tokenizer: PreTrainedTokenizerBase | None
    """The policy's."""


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
    policy's, for the texts that rewards read of episodes.

    Raises RewardError if an entry has no callable, a function cannot be loaded, or no entry uses a
    given callable.
    """
    matched = _match(configs, functions or {})
    weighted: list[tuple[Reward, float]] = []
    for i, (entry, name) in enumerate(zip(configs, _allowed_names(configs), strict=True)):
        inputs = RewardInputs(name, matched.get(i), configs, model_reward, tokenizer)
        weighted.append((KINDS[entry.kind].build(entry, inputs), entry.weight))
    return weighted


def check_rewards(configs: Sequence[RewardConfig]) -> None:
    """Check what the rewards of a recipe need, before any model is loaded. Raises RewardError if
    no server of a reward accepts connections."""
    for i, entry in enumerate(configs):
        if (check := KINDS[entry.kind].check) is not None:
            check(entry, f"rewards.{i}")


def _function_reward(entry: config.FunctionReward, inputs: RewardInputs) -> Reward:
    name, timeout_s, function = inputs.name, entry.timeout_s, inputs.function
    if function is None and (entry.function or "").startswith(PREFIX):
        return OpenRLHFReward(
            str(entry.function), name=name, tokenizer=inputs.tokenizer, timeout_s=timeout_s
        )
    function = _load(entry.function, name) if function is None else function
    return FunctionReward(function, name=name, timeout_s=timeout_s)


def _model_reward(entry: config.ModelReward, inputs: RewardInputs) -> Reward:
    if inputs.model_reward is None:
        raise RewardError(
            f"reward {inputs.name!r} is of kind model, but this job was started without "
            "model_reward, which builds such rewards"
        )
    return inputs.model_reward(entry.model_copy(update={"name": inputs.name}))


def _episode_reward(entry: config.EpisodeReward, inputs: RewardInputs) -> Reward:
    rewards = (e.reward for e in inputs.entries if e.kind == "episode")
    listed = [reward for reward in rewards if reward is not None]
    return EpisodeReward(entry.reward, name=inputs.name, per_turn=entry.per_turn, listed=listed)


def _load(spec: str | None, name: str) -> Callable[..., Any]:
    try:
        return load_object(spec or "")  # type: ignore[no-any-return]  # FunctionReward checks it
    except LoadError as error:
        raise RewardError(f"reward {name!r}: function {error}") from error


def _match(configs: Sequence[RewardConfig], functions: Functions) -> dict[int, Callable[..., Any]]:
    """Return the given callable of each entry, by the entry's index."""
    open_entries = [i for i, c in enumerate(configs) if c.needs_callable]
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


class RewardKind(NamedTuple):
    """The code of one kind of reward."""

    build: Callable[[Any, RewardInputs], Reward]
    """Called with the config of an entry of this kind."""
    check: Callable[[Any, str], None] | None = None
    """Checks what the reward needs before any model is loaded, given the config of an entry and its
    key in the recipe. Raises RewardError."""


KINDS: Mapping[str, RewardKind] = {
    "function": RewardKind(_function_reward),
    "model": RewardKind(_model_reward),
    "math": RewardKind(
        lambda entry, inputs: MathReward(
            name=inputs.name,
            timeout_s=entry.timeout_s,
            num_workers=entry.num_workers,
            tokenizer=inputs.tokenizer,
        )
    ),
    "python_code": RewardKind(
        lambda entry, inputs: PythonCodeReward(entry, name=inputs.name, tokenizer=inputs.tokenizer)
    ),
    "environment": RewardKind(
        lambda entry, inputs: EnvironmentReward(name=inputs.name, timeout_s=entry.timeout_s)
    ),
    "episode": RewardKind(_episode_reward),
    "remote": RewardKind(
        lambda entry, inputs: RemoteReward(entry, name=inputs.name, tokenizer=inputs.tokenizer),
        check=check_servers,
    ),
}
"""``kind`` -> code. The configs are in ``config/rewards.py``."""
