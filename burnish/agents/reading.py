"""Validated access to the JSON bodies of requests.

Every error names the JSON path of the wrong value, such as ``messages[0].content[1].type``, and the
value that is expected there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from burnish.agents.calls import CallError, invalid, well_formed

MAX_DEPTH = 100
"""Maximum depth of lists and objects in a body."""
MAX_VALUES = 1_000_000
"""Maximum values in a body: texts, numbers, lists and objects."""
MAX_STOP = 16
"""Maximum stop texts of a call."""
MAX_UNREAD = 16
"""Maximum parameters that a call names as unread."""
NO_INFLUENCE = frozenset(
    {
        *("user", "metadata", "safety_identifier", "request_id", "service_tier", "priority"),
        *("store", "prompt_cache_key", "prompt_cache_retention", "cache_salt", "cache_control"),
        *("betas", "anthropic_beta", "anthropic_version"),
    }
)
"""Parameters that name the client or the call, or are about storage, caches and scheduling. No
response depends on them."""
_INT64 = 2**63
_MIN_TOP_P = 1e-6
_NO_PUNCTUATION = str.maketrans("", "", "_-.")
_SHOWN = 60  # characters of a wrong value that an error contains

T = TypeVar("T")
D = TypeVar("D")


@dataclass(frozen=True, slots=True)
class Json:
    """A value of a JSON body with its path. All methods raise CallError (400).

    Example: ``Json({"n": 2}, "").need("n").integer(1, 128)`` is 2.
    """

    value: Any
    path: str
    seen: set[str] | None = field(default=None, repr=False, compare=False)
    """Paths of the values that were read, without those in lists. None: not recorded."""

    @property
    def label(self) -> str:
        """Return the path for use in a sentence."""
        return self.path or "the request body"

    def wrong(self, expected: str) -> CallError:
        """Return the error for a value that is not ``expected``."""
        shown = json.dumps(self.value)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
        return invalid(self.path or None, f"{self.label} must be {expected}, got {shown}")

    def child(self, key: str) -> Json:
        """Return the value of a key, None if it is missing."""
        path = f"{self.path}.{key}" if self.path else key
        if self.seen is not None:
            self.seen.add(path)
        return Json(self.mapping().get(key), path, self.seen)

    def get(self, key: str) -> Json | None:
        """Return the value of a key, or None if it is missing or null."""
        node = self.child(key)
        return None if node.value is None else node

    def need(self, key: str) -> Json:
        """Return the value of a key that must be present."""
        node = self.child(key)
        if node.value is None:
            raise invalid(node.path, f"{node.path} is missing")
        return node

    def read(self, key: str, method: Callable[[Json], T], default: D) -> T | D:
        """Return ``method`` of the value of a key, or ``default`` if it is missing or null."""
        node = self.get(key)
        return default if node is None else method(node)

    def mapping(self) -> Mapping[str, Any]:
        """Return the value, which must be an object."""
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        return self.value

    def items(self) -> list[Json]:
        """Return the items of a list."""
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        return [Json(item, f"{self.path}[{number}]") for number, item in enumerate(self.value)]

    def text(self) -> str:
        """Return the value, which must be a string."""
        if not isinstance(self.value, str):
            raise self.wrong("a string")
        return self.value

    def name(self) -> str:
        """Return the value, which must be a string of visible characters."""
        if not isinstance(self.value, str) or not self.value.strip():
            raise self.wrong("a non-empty string")
        return self.value

    def boolean(self) -> bool:
        """Return the value, which must be true or false."""
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def integer(self, low: int, high: int = _INT64 - 1) -> int:
        """Return the value, which must be an integer from ``low`` to ``high``. JSON does not
        distinguish 4.0 from 4."""
        is_whole = isinstance(self.value, float) and self.value.is_integer()
        if not (is_whole or _is_integer(self.value)) or not low <= self.value <= high:
            limit = f"from {low} to {high}" if high < _INT64 - 1 else f"of at least {low}"
            raise self.wrong(f"an integer {limit}")
        return int(self.value)

    def number(self, low: float, high: float) -> float:
        """Return the value, which must be a number from ``low`` to ``high``."""
        is_number = _is_integer(self.value) or isinstance(self.value, float)
        if not is_number or not low <= self.value <= high:
            raise self.wrong(f"a number from {low:g} to {high:g}")
        return float(self.value)

    def one_of(self, options: Sequence[str]) -> str:
        """Return the value, which must be one of ``options``."""
        if not isinstance(self.value, str) or self.value not in options:
            raise self.wrong(" or ".join(map(repr, options)))
        return self.value


@dataclass(frozen=True)
class Parameter:
    """A parameter that a dialect does not implement."""

    reason: str
    """Cause, and the alternative if there is one."""
    neutral: tuple[Any, ...] = ()
    """Values that are equal to leaving the parameter out. None always is."""


def checked_body(body: Any) -> Json:
    """Return the root of a request body, with lone surrogates replaced by U+FFFD.

    Raises CallError (400) if the body is no object, is nested more than MAX_DEPTH deep, has more
    than MAX_VALUES values, or contains a number that is not finite.
    """
    root = Json(checked_value(body, ""), "", set())
    root.mapping()
    return root


def checked_value(value: Any, path: str, *, finite: bool = True) -> Any:
    """Return parsed JSON in well-formed form. ``path``: its path in the body.

    Raises CallError (400) if it exceeds a limit or, with ``finite``, if it contains a number that
    is not finite.
    """
    check = _Check(path, finite=finite)
    check.visit([value])
    return value if check.is_well_formed else well_formed(value)


def unsupported_parameters(root: Json, known: Mapping[str, Parameter]) -> dict[str, str]:
    """Return parameter -> reason for those in ``known`` that the body sets to another value than
    the neutral ones."""
    return {
        name: parameter.reason
        for name, parameter in known.items()
        if (node := root.get(name)) is not None and node.value not in parameter.neutral
    }


def ignored_parameters(root: Json, known: Mapping[str, tuple[Any, ...]]) -> tuple[str, ...]:
    """Return the parameters in ``known`` (name -> neutral values) that the body sets to another
    value."""
    return tuple(
        name
        for name, neutral in known.items()
        if (node := root.get(name)) is not None and node.value not in neutral
    )


def unread_parameters(root: Json) -> tuple[str, ...]:
    """Return the parameters of a body that nothing has read and that are not neutral, also those in
    objects of which something was read (``stream_options.name``). Call it last.

    Names that are no names of parameters are returned as ``other``, as are those after
    MAX_UNREAD.
    """
    seen = root.seen or set()
    names = [
        name
        for name in _present_names(root.value, "")
        if name not in seen and name not in NO_INFLUENCE
    ]
    for key in sorted({path.partition(".")[0] for path in seen if "." in path}):
        if isinstance(value := root.value.get(key), dict):
            names += [name for name in _present_names(value, f"{key}.") if name not in seen]
    usable = [
        name for name in names if name.isascii() and name.translate(_NO_PUNCTUATION).isalnum()
    ]
    usable = [name for name in usable if len(name) <= _SHOWN][:MAX_UNREAD]
    return (*usable, *["other"] * (len(usable) < len(names)))


def unread_keys(
    messages: Json, read_keys: Callable[[Mapping[str, Any]], Collection[str]]
) -> list[str]:
    """Return ``PATH.KEY`` for each key that some of ``messages`` has in addition to its
    ``read_keys``, with the path of the list. The templates of some families read keys of their own,
    which rows of data pass to them. Empty values are left out.

    Keys that are no identifiers are returned as ``other``, as are those after MAX_UNREAD.
    """
    keys: set[str] = set()
    for each in messages.items():
        message = each.mapping()
        keys |= {key for key, value in message.items() if value} - set(read_keys(message))
    unread = sorted(keys - NO_INFLUENCE)
    usable = [key for key in unread if key.isidentifier() and len(key) <= _SHOWN][:MAX_UNREAD]
    names = [f"{messages.path}.{key}" for key in usable]
    return names + ["other"] * (len(usable) < len(unread))


def _present_names(mapping: Mapping[str, Any], prefix: str) -> list[str]:
    """Return the names of the values that are not null."""
    return [f"{prefix}{key}" for key, value in mapping.items() if value is not None]


def stop_texts(node: Json) -> tuple[str, ...]:
    """Return stop texts: a string, or a list of strings."""
    items = [node] if isinstance(node.value, str) else node.items()
    if len(items) > MAX_STOP:
        raise invalid(node.path, f"{node.path} has {len(items)} texts; use at most {MAX_STOP}")
    for item in items:
        if not item.text():
            raise item.wrong("a non-empty string")
    return tuple(item.text() for item in items)


def sampling_parameters(root: Json) -> dict[str, Any]:
    """Return the sampling parameters that all APIs share, as arguments of ModelCall."""
    top_k = root.read("top_k", lambda node: node.integer(-1), 0)
    return {
        "temperature": root.read("temperature", lambda node: node.number(0, 100), None),
        # 0 leaves the most probable token, as every small value does.
        "top_p": root.read("top_p", lambda node: max(_MIN_TOP_P, node.number(0, 1)), None),
        "top_k": top_k if top_k > 0 else None,
        "seed": root.read("seed", lambda node: node.integer(-_INT64), None),
        "stream": root.read("stream", Json.boolean, False),
        "template_kwargs": root.read("chat_template_kwargs", Json.mapping, {}),
    }


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class _Check:
    """Checks of the limits of parsed JSON."""

    def __init__(self, path: str, *, finite: bool) -> None:
        self.root = path
        self.finite = finite
        self.path: list[str | int] = []
        self.num_values = 0
        self.is_well_formed = True

    def visit(self, value: dict[str, Any] | list[Any]) -> None:
        """Check everything in an object or a list. Raises CallError.

        Leaves are checked here and not in a call of their own, because a prompt of token ids has
        very many.
        """
        self.num_values += len(value)
        if self.num_values > MAX_VALUES:
            raise invalid(None, f"the request body has more than {MAX_VALUES} values")
        if len(self.path) > MAX_DEPTH:
            del self.path[5:]
            raise self._error(f"is nested more than {MAX_DEPTH} deep")
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            kind = type(item)
            if kind is str:
                self._check_text(item)
            elif kind is dict or kind is list:
                self.path.append(key)
                self.visit(item)
                self.path.pop()
            elif kind is float and not math.isfinite(item):
                self.is_well_formed = False
                self.path.append(key)
                if self.finite:
                    raise self._error(f"is {item}, which is not a JSON number")
                self.path.pop()
        if isinstance(value, dict):
            self._check_text("".join(value))

    def _check_text(self, text: str) -> None:
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                self.is_well_formed = False

    def _error(self, problem: str) -> CallError:
        inner = self.path[1:]  # the first one is that of the value itself
        keys = (f"[{key}]" if isinstance(key, int) else f".{key[:_SHOWN]}" for key in inner)
        path = f"{self.root}{''.join(keys)}".removeprefix(".")
        return invalid(path or None, f"{path or 'the request body'} {problem}")
