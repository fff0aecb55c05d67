"""What an environment is: numbered tasks, each a question in text and a score for the answer.

Gymnasium's ``reset``/``step`` on text: :meth:`Environment.item` is the reset, and the item's number
is the whole state, so a prompt can be scored in another process or after a resume. The data source
and the reward share one environment through :func:`make_environment`. Not here: tokens, engines,
groups (``rollout/runner.py``).

Reading order of this package: base, importing, reasoning_gym.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, runtime_checkable

from burnish.config.explain import nearest
from burnish.environments.importing import LoadError, load_object


class EnvironmentSetupError(ValueError):
    """An environment that cannot be made: which name or option is wrong, and the nearest."""


@dataclass(frozen=True)
class StepResult:
    """What the environment says about a response. Example: ``StepResult(reward=1.0)``."""

    reward: float
    done: bool = True
    """False: it goes on and ``observation`` is its next message."""
    observation: str = ""


@runtime_checkable
class Environment(Protocol):
    """``size`` tasks, the same for the same options and seed, whatever was asked before."""

    name: str
    """Name in prompt ids and metrics."""

    def __len__(self) -> int:
        """Number of items."""
        ...

    def item(self, i: int) -> Mapping[str, Any]:
        """Item ``i`` (0 <= i < len) as a data row: ``prompt``, ``label``, more that fits JSON."""
        ...

    def step(self, i: int, response: str) -> StepResult:
        """The score of ``response`` to item ``i``. Nonsense scores low; it is no error."""
        ...


BUILT_IN = ("reasoning_gym",)


def make_environment(name: str, options: Mapping[str, Any], *, size: int, seed: int) -> Environment:
    """The environment ``name``; the same arguments give the same object.

    ``name`` is ``reasoning_gym``, or ``package.module:Class`` or ``path/to/file.py:Class`` of your
    own, whose constructor is called with ``(options, size=size, seed=seed)``. ``size``: number of
    items, from 1. ``options`` must be what JSON can hold: they travel with every prompt to the
    reward.

    Raises EnvironmentSetupError: unknown name or option, missing package, or an object that is not
    an :class:`Environment`.
    """
    try:
        as_json = json.dumps(options, sort_keys=True)
    except TypeError as error:
        raise EnvironmentSetupError(
            f"environment {name!r}: options {dict(options)!r} do not fit into JSON ({error}); they "
            "travel with every prompt, so use strings, numbers, booleans, lists and mappings only"
        ) from None
    return _make(name, as_json, size, seed)


@cache
def _make(name: str, options_json: str, size: int, seed: int) -> Environment:
    options = json.loads(options_json)
    if name == "reasoning_gym":
        from burnish.environments.reasoning_gym import ReasoningGym

        return ReasoningGym(options, size=size, seed=seed)
    if ":" not in name:
        raise EnvironmentSetupError(
            f"there is no environment {name!r}{nearest(name, BUILT_IN)}; built in: "
            f"{', '.join(BUILT_IN)}; your own is package.module:Class or path/to/file.py:Class"
        )
    return _make_own(name, options, size=size, seed=seed)


def _make_own(name: str, options: Mapping[str, Any], *, size: int, seed: int) -> Environment:
    try:
        made = load_object(name)(options, size=size, seed=seed)
    except LoadError as error:
        raise EnvironmentSetupError(f"environment {error}") from error
    except Exception as error:
        raise EnvironmentSetupError(
            f"environment {name}: calling it with (options, size={size}, seed={seed}) raised "
            f"{type(error).__name__}: {error}; options were {dict(options)!r}"
        ) from error
    if not isinstance(made, Environment):
        raise EnvironmentSetupError(
            f"environment {name} made a {type(made).__name__} that lacks some of what environments "
            "need: name, __len__(), item(i), step(i, response); see burnish/environments/base.py"
        )
    return made
