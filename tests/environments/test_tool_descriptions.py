"""Texts, schemas and defaults of tools: nothing of a function is lost on its way to the policy."""

from __future__ import annotations

import asyncio
import datetime
import enum
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from burnish.environments.base import EnvironmentSetupError
from burnish.environments.docstrings import ToolTexts, read_docstring
from burnish.environments.function_tools import make_tools
from burnish.environments.tools import ToolEnvironment
from burnish.tool_arguments import argument_problem


@pytest.mark.parametrize(
    ("docstring", "description", "q", "n"),
    [
        ("Search.\n\nArgs:\n    q: Words.\n    n: Most.", "Search.", "Words.", "Most."),
        (
            "Search.\n\nArgs:\n    q (str): Words.\n    n (int, optional): Most. Defaults to 1.",
            *("Search.", "Words.", "Most. Defaults to 1."),
        ),
        (
            "Search.\n\nArguments:\n  q (Callable[[int], str]): Words:\n    a (b): c\n\n    d\n"
            "  *n: Most.",
            *("Search.", "Words: a (b): c d", "Most."),
        ),
        ("Search.\n\nParameters:\n    q, n (int): Both.", "Search.", "Both.", "Both."),
        (
            "Search.\n\nArgs:\n    q: Words, see\n    http://x.y:1 for more\n\n"
            "Keyword Args:\n    n: Most.\n\nMore text.",
            *("Search.\n\nMore text.", "Words, see http://x.y:1 for more", "Most."),
        ),
        ("Search.\nArgs:\nq: Words.\nn: Most.\n\nEnd.", "Search.\n\nEnd.", "Words.", "Most."),
        (
            "Search.\n\nArgs:\n    q: Words.\n\nNote:\n    Case matters.\n\nReturns:\n    str: Hits"
            "\n\nRaises:\n    ValueError: Never.\nExample:\n    search('x')",
            *("Search.\n\nNote:\n    Case matters.\n\nExample:\n    search('x')", "Words.", None),
        ),
        ("Search.\n\nReturns: the hits.", "Search.", None, None),
        ("Search. Returns: the hits. Args: none.",) * 2 + (None, None),
        (
            "Search.\n\nArgs:\n    q: Words.\n    old (int): Gone.\n        Really.\n    n: Most.",
            *("Search.\n\nArgs:\n    old (int): Gone.\n        Really.", "Words.", "Most."),
        ),
        ("Search.\n\nArgs:\n    q: Words.\n  n: Most.", "Search.", "Words.", "Most."),
        ("Search.\n\nArgs:\n    what it takes",) * 2 + (None, None),
        ("Search.\n\nArgs:",) * 2 + (None, None),
        ("Search.\n\nParameters\n----------\nq : str\n    Words.",) * 2 + (None, None),
        ("Search.\n\n:param q: Words.\n:returns: Hits.",) * 2 + (None, None),
    ],
)
def test_every_word_of_a_docstring_is_read(
    docstring: str, description: str, q: str | None, n: str | None
) -> None:
    texts = {name: text for name, text in (("q", q), ("n", n)) if text is not None}
    assert read_docstring(docstring, ["q", "n"]) == ToolTexts(description, texts)


def test_descriptions_are_in_the_schema() -> None:
    def search(q: str, n: Annotated[int, Field(description="Most.")] = 1) -> str:
        """Search.

        Args:
            q (str): Words.

        Note:
            Case matters.
        """
        return q * n

    function = make_tools([search])["search"].schema["function"]
    assert function["description"] == "Search.\n\nNote:\n    Case matters."
    texts = {k: v["description"] for k, v in function["parameters"]["properties"].items()}
    assert texts == {"q": "Words.", "n": "Most."}


class Unit(enum.Enum):
    KM = "km"


@dataclass
class Point:
    x: int = 0
    tags: frozenset[str] = frozenset()


class Model(BaseModel):
    start: int = Field(alias="from")
    items: list[int] = Field(default_factory=lambda: [1])


def hinted(
    a: Annotated[int, Field(default=5)],
    b: Annotated[list[int], Field(default_factory=lambda: [7])],
    c: Annotated[int, Field(alias="other", gt=0)] = 1,
    *,
    d: int = Field(3, description="Third."),
    e: int = Field(gt=2),
) -> str:
    """Take defaults that only pydantic knows."""
    return repr((a, b, c, d, e))


def without_json(
    a: float = math.inf,
    b: frozenset[str] = frozenset({"y", "x", "z"}),
    c: Unit = Unit.KM,
    d: datetime.date = datetime.date(2024, 1, 2),
    e: Point = Point(1),
    f: Any = print,
    g: list[float] = [math.nan],  # noqa: B006
    h: Annotated[float, Field(default=-math.inf)] = 0.5,
) -> str:
    """Take defaults that are no JSON."""
    return repr((a, sorted(b), c, d, e, f, g, h))


def nested(m: Model, p: Point = Point(2)) -> str:
    """Take objects."""
    return repr((m.start, m.items, p))


def called(function: Callable[..., str], arguments: dict[str, Any]) -> str:
    """Return the result of a call of the policy."""

    class Environment(ToolEnvironment):
        tools = (function,)

    call = {"name": function.__name__, "arguments": arguments}
    message = {"role": "assistant", "tool_calls": [{"id": "1", "function": call}]}
    return str(asyncio.run(Environment().step(message)).messages[0]["content"])


@pytest.mark.filterwarnings("ignore::pydantic.json_schema.PydanticJsonSchemaWarning")
@pytest.mark.parametrize(
    ("function", "arguments", "result"),
    [
        (hinted, {"e": 4}, "(5, [7], 1, 3, 4)"),
        (hinted, {"a": 1, "b": [], "c": 2, "d": 0, "e": 3}, "(1, [], 2, 0, 3)"),
        (without_json, {}, without_json()),
        (without_json, {"a": 1, "h": 2}, without_json(1.0, h=2.0)),
        (nested, {"m": {"from": 3}}, "(3, [1], Point(x=2, tags=frozenset()))"),
    ],
)
def test_what_the_schema_accepts_is_called_with_pythons_defaults(
    function: Callable[..., str], arguments: dict[str, Any], result: str
) -> None:
    schema = make_tools([function])[function.__name__].schema
    parameters = schema["function"]["parameters"]
    json.dumps(schema, allow_nan=False)
    assert argument_problem(parameters, arguments) is None
    assert called(function, arguments) == result


@pytest.mark.parametrize("arguments", [{}, {"e": 2}, {"other": 2, "e": 4}, {"c": 0, "e": 4}])
def test_the_schema_and_the_call_refuse_the_same(arguments: dict[str, Any]) -> None:
    assert called(hinted, arguments).startswith("error: ValidationError")


@pytest.mark.filterwarnings("ignore::pydantic.json_schema.PydanticJsonSchemaWarning")
def test_only_defaults_that_json_has_are_in_the_schema() -> None:
    schema = make_tools([without_json])["without_json"].schema
    properties = schema["function"]["parameters"]["properties"]
    assert {k: v["default"] for k, v in properties.items() if "default" in v} == {
        **{"b": ["x", "y", "z"], "c": "km", "d": "2024-01-02"},
        **{"e": {"x": 1, "tags": []}, "h": 0.5},
    }


def test_sets_have_one_order_in_all_processes(tmp_path: Path) -> None:
    code = dedent("""
        from burnish.environments.function_tools import make_tools
        from dataclasses import dataclass, field
        from pydantic import BaseModel, Field
        @dataclass
        class D:
            s: set[str] = field(default_factory=lambda: {*'abcdefgh'})
        class M(BaseModel):
            s: set[str] = Field({*'abcdefgh'}, alias='t')
        def f(
            a: set[str] = {*'abcdefgh'},
            b: dict[str, set[str]] = {'k': {*'abcdefgh'}},
            c: D = D(),
            d: list[M] = [M()],
            e: frozenset[tuple[str, frozenset[str]]] = frozenset({('a', frozenset('abcdef'))}),
        ) -> str:
            "Take sets."
        print(make_tools([f])['f'].schema)
    """)
    (tmp_path / "show.py").write_text(code)
    texts = set()
    for seed in ("1", "2"):
        variables = os.environ | {"PYTHONHASHSEED": seed}
        texts.add(subprocess.check_output([sys.executable, tmp_path / "show.py"], env=variables))
    assert len(texts) == 1


def test_a_number_that_json_lacks_is_refused() -> None:
    def bounded(x: Annotated[float, Field(examples=[math.inf])]) -> str:
        """Show an example."""
        return str(x)

    with pytest.raises(EnvironmentSetupError, match="bounded"):
        make_tools([bounded])
