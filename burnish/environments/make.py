"""Create environments by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from burnish.config.explain import nearest
from burnish.environments.base import Environment, EnvironmentSetupError
from burnish.environments.importing import LoadError, load_object
from burnish.environments.reasoning_gym import ReasoningGym

BUILT_IN = ("reasoning_gym",)


def make_environment(name: str, options: Mapping[str, Any], *, size: int, seed: int) -> Environment:
    """Create the environment ``name``. The same arguments return the same object.

    ``name`` is ``reasoning_gym``, or a user's ``package.module:Class`` or
    ``path/to/file.py:Class``, which is called with ``(options, size=size, seed=seed)``. ``size``:
    number of items, at least 1. ``options`` must be JSON-serializable, because they are sent to the
    reward with every prompt.

    Raises EnvironmentSetupError if a name or option is unknown, a package is missing, or the object
    is not an :class:`Environment`.
    """
    try:
        as_json = json.dumps(options, sort_keys=True)
    except TypeError as error:
        raise EnvironmentSetupError(
            f"environment {name!r}: options {dict(options)!r} cannot be written as JSON "
            f"({error}); every prompt contains them, so use only strings, numbers, booleans, "
            "lists and mappings"
        ) from None
    return _make(name, as_json, size, seed)


@cache
def _make(name: str, options_json: str, size: int, seed: int) -> Environment:
    options = json.loads(options_json)
    if name == "reasoning_gym":
        return ReasoningGym(options, size=size, seed=seed)
    if ":" not in name:
        raise EnvironmentSetupError(
            f"there is no environment {name!r}{nearest(name, BUILT_IN)}; built in: "
            f"{', '.join(BUILT_IN)}; give your own as package.module:Class or "
            "path/to/file.py:Class"
        )
    try:
        environment = load_object(name)(options, size=size, seed=seed)
    except LoadError as error:
        raise EnvironmentSetupError(f"environment {error}") from error
    except Exception as error:
        raise EnvironmentSetupError(
            f"environment {name}: calling it with (options, size={size}, seed={seed}) raised "
            f"{type(error).__name__}: {error}; options were {dict(options)!r}"
        ) from error
    if not isinstance(environment, Environment):
        raise EnvironmentSetupError(
            f"environment {name} created a {type(environment).__name__} that lacks members of an "
            "environment: name, __len__(), item(i), step(i, response); see "
            "burnish/environments/base.py"
        )
    return environment
