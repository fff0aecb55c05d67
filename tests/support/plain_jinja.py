"""The environments in which chat templates are rendered: transformers' own, without limits, and the
one with the limits of ``burnish.templates``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from inspect import isgenerator
from itertools import islice
from typing import Any
from unittest.mock import patch

from jinja2 import Environment, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from burnish.template_charges import TemplateLimitError, left_of_budget
from burnish.templates import MAX_WORK, Bounded

ADDRESS = re.compile(r"0x[0-9a-f]{6}", re.IGNORECASE)


@cache
def environments() -> tuple[Environment, Environment]:
    """Return (without limits, with limits)."""
    return _environment(ImmutableSandboxedEnvironment), _environment(Bounded)


def _environment(kind: type) -> Environment:
    compiled = chat_template_utils._compile_jinja_template
    with patch.object(chat_template_utils, "ImmutableSandboxedEnvironment", kind):
        compiled.cache_clear()
        environment = compiled("").environment
    compiled.cache_clear()
    assert type(environment) is kind
    return environment  # type: ignore[no-any-return]


def outcome(compute: Callable[[], Any]) -> Any:
    """Return a description of the result or the error of a computation within a new budget. It is
    equal for equal results; also the items of generators are read."""
    token = left_of_budget.set([MAX_WORK])
    try:
        return _described(compute())
    except Exception as error:
        return "refused" if isinstance(error, TemplateLimitError) else type(error).__name__
    finally:
        left_of_budget.reset(token)


def _described(value: Any) -> Any:
    if isinstance(value, Undefined):
        return "Undefined"
    if isinstance(value, Iterator):
        kind = "generator" if isgenerator(value) else type(value).__name__
        return kind, [_described(item) for item in islice(value, 1000)]
    text = repr(value)
    return type(value).__name__, "at 0x000000" if ADDRESS.search(text) else text
