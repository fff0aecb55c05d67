"""Results of tools of every Python type have a stable text, or a clear error."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import pathlib
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from burnish.environments.base import EnvironmentSetupError
from burnish.environments.function_tools import make_tools
from burnish.environments.results import ToolResultError, as_text
from burnish.environments.tools import ToolEnvironment


class Color(enum.Enum):
    RED = "red"


class Model(BaseModel):
    at: datetime.date
    tags: set[int]


@dataclasses.dataclass
class Point:
    x: int
    labels: frozenset[str]


Pair = collections.namedtuple("Pair", "left right")


class Plain:
    """An object without a text."""


class Broken:
    def __str__(self) -> str:
        raise KeyError("nothing")


class Holder:
    def __repr__(self) -> str:
        return f"Holder({Plain()!r})"


def numbers() -> Iterator[int]:
    yield 1


DAY = datetime.date(2026, 1, 2)
TEXTS = [
    ("as it is <x at 0x7f>", "as it is <x at 0x7f>"),
    ("lone \ud800", "lone \ufffd"),
    (None, "null"),
    (True, "true"),
    (1.5, "1.5"),
    ({"a": [1, (2, None)], 3: "é"}, '{"a": [1, [2, null]], "3": "é"}'),
    ({("a", 1): 2, Color.RED: 3}, '{"[\\"a\\", 1]": 2, "red": 3}'),
    ({10, 9, 2.5}, "[2.5, 9, 10]"),
    (frozenset({"b", "a"}), '["a", "b"]'),
    ({1, "a", (2, 3)}, '["a", 1, [2, 3]]'),
    (b"caf\xc3\xa9", "café"),
    ([bytearray(b"a"), memoryview(b"b")], '["a", "b"]'),
    (Color.RED, "red"),
    (Point(1, frozenset({"z", "y"})), '{"x": 1, "labels": ["y", "z"]}'),
    (Pair(1, {2}), '{"left": 1, "right": [2]}'),
    (Model(at=DAY, tags={3}), '{"at": "2026-01-02", "tags": [3]}'),
    (np.arange(4).reshape(2, 2), "[[0, 1], [2, 3]]"),
    ([np.float32(0.5), np.int64(2), np.bool_(True)], "[0.5, 2, true]"),
    (torch.tensor([1.5]), "[1.5]"),
    ({"b": 1, "a": 2}.keys(), '["b", "a"]'),
    (collections.deque([1]), "[1]"),
    (range(2), "[0, 1]"),
    (collections.Counter("aab"), '{"a": 2, "b": 1}'),
    ([DAY, decimal.Decimal("1.10"), pathlib.Path("a/b")], '["2026-01-02", "1.10", "a/b"]'),
]


@pytest.mark.parametrize(("value", "text"), TEXTS, ids=[str(i) for i in range(len(TEXTS))])
def test_a_result_has_the_documented_text(value: Any, text: str) -> None:
    assert as_text(value) == text


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


ODD = [
    *(Plain(), [Plain()], {"a": Plain()}, Holder(), Broken(), numbers(), lambda: 1),
    *(iter([1]), map(str, [1]), b"\xff\xfe", nested(5000), np.array([Plain()])),
]


@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)
def test_a_result_without_a_text_is_an_error_without_an_address(value: Any) -> None:
    with pytest.raises(ToolResultError) as caught:
        as_text(value)
    assert " at 0x" not in str(caught.value)


def test_sets_have_the_same_text_in_every_process() -> None:
    program = "from burnish.environments.results import as_text; print(as_text({'a', 'b', 'c'}))"
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert texts == {'["a", "b", "c"]\n'}


def plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that hides that a function is a coroutine function."""

    @functools.wraps(function)
    def inside(*args: Any, **named: Any) -> Any:
        return function(*args, **named)

    return inside


@plainly
async def later(text: str) -> str:
    """Answer after a while."""
    await asyncio.sleep(0)
    return text


@plainly
async def fails() -> str:
    """Raise after a while."""
    await asyncio.sleep(0)
    raise ValueError(f"{Plain()!r} is wrong")


@plainly
async def leaves() -> str:
    """End the process."""
    sys.exit(3)


@plainly
async def hangs() -> str:
    """Never answer."""
    await asyncio.Event().wait()
    return ""


@plainly
def yields() -> Iterator[int]:
    """Yield a number."""
    yield 1


def gives_object() -> Any:
    """Return an object."""
    return Plain()


class Tools(ToolEnvironment):
    tools = (later, fails, leaves, hangs, yields, gives_object)

    async def finish(self, message: Any) -> dict[str, float]:  # type: ignore[override]
        return {"answered": 1.0}


def test_what_a_tool_returns_is_awaited() -> None:
    environment = Tools(timeout_s=0.2)
    names = ("later", "fails", "leaves", "hangs", "later", "yields", "gives_object")
    tool_calls = [
        {"id": f"c{i}", "function": {"name": name, "arguments": arguments}}
        for i, name in enumerate(names)
        for arguments in [{"text": "ok"} if name == "later" else {}]
    ]
    step = asyncio.run(
        environment.step({"role": "assistant", "content": "", "tool_calls": tool_calls})
    )
    texts = [message["content"] for message in step.messages]
    assert texts[0] == texts[4] == "ok"
    assert texts[1].startswith("error: ValueError: ") and texts[1].endswith("at 0x...> is wrong")
    assert texts[2] == "error: RuntimeError: SystemExit: 3"
    assert texts[3].startswith("error: TimeoutError")
    assert texts[5].startswith("error: ToolResultError: ") and "yielding" in texts[5]
    assert texts[6].startswith("error: ToolResultError: ") and "define __str__" in texts[6]
    assert not any(re.search("0x[0-9a-f]", text) for text in texts)
    assert step.counts == {"tool_calls": 7, "tool_errors": 5, "tool_timeouts": 1}
    assert asyncio.run(environment.step({"content": "4"})).rewards == {"answered": 1.0}
    environment.close()


def generator() -> Iterator[int]:
    """Yield."""
    yield 1


async def async_generator() -> AsyncIterator[int]:
    """Yield."""
    yield 1


@pytest.mark.parametrize("tool", [generator, async_generator])
def test_generator_functions_are_refused_before_the_run(tool: Any) -> None:
    with pytest.raises(EnvironmentSetupError, match="generator function"):
        make_tools([tool])
