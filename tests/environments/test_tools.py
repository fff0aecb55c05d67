"""Tools are described from their source, and no mistake of the policy ends the run."""

from __future__ import annotations

import asyncio
import enum
import json
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, TypeAdapter

from burnish.config.episodes import Episodes, ToolEpisodes
from burnish.environments.base import EnvironmentSetupError
from burnish.environments.function_tools import make_tools
from burnish.environments.multi_turn import Message, Start, Step
from burnish.environments.pool import EnvironmentPool, EnvironmentSpec
from burnish.environments.tools import ToolEnvironment
from burnish.jobs.episodes import environment_spec

EPISODES: TypeAdapter[Any] = TypeAdapter(Episodes)


class Unit(enum.Enum):
    KM = "km"
    MILE = "mile"


def search(query: str, limit: int = 5, unit: Unit = Unit.KM) -> list[str]:
    """Search the documents.

    Args:
        query: Words to search for.
        limit: Largest number of results.
    """
    return [f"{query} {i} {unit.value}" for i in range(limit)]


def divide(a: float, b: float) -> float:
    """Divide."""
    return a / b


async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"


def block(seconds: float) -> str:
    """Block."""
    time.sleep(seconds)
    return "blocked"


def leave() -> None:
    """End the process."""
    sys.exit(3)


async def leave_late() -> None:
    """End the process from a coroutine."""
    sys.exit(3)


class Environment(ToolEnvironment):
    tools = (search, divide, wait, block, leave, leave_late)


def calls(*named_arguments: tuple[str, Any]) -> Message:
    tool_calls = [
        {"id": f"call{i:05d}", "type": "function", "function": {"name": name, "arguments": args}}
        for i, (name, args) in enumerate(named_arguments)
    ]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def step(environment: ToolEnvironment, message: Message) -> Step:
    return asyncio.run(environment.step(message))


def answer(name: str, arguments: Any, **options: Any) -> tuple[str, Mapping[str, float]]:
    """Content and counts of one call."""
    result = step(Environment(**options), calls((name, arguments)))
    return result.messages[0]["content"], result.counts


def test_the_schema_has_types_defaults_and_descriptions() -> None:
    (tool,) = make_tools([search]).values()
    assert tool.schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the documents.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "Words to search for."},
                    "limit": {
                        "type": "integer",
                        "default": 5,
                        "description": "Largest number of results.",
                    },
                    "unit": {"$ref": "#/$defs/Unit", "default": "km"},
                },
                "required": ["query"],
                "$defs": {"Unit": {"enum": ["km", "mile"], "title": "Unit", "type": "string"}},
            },
        },
    }
    json.dumps(tool.schema)


def test_names_that_a_model_cannot_have_and_annotated_hints() -> None:
    def odd(
        json: Annotated[str, Field(description="Text.")], model_x: Literal["a", "b"], _x: int = 0
    ) -> str:
        """Odd."""
        return f"{json}{model_x}{_x}"

    (tool,) = make_tools([odd]).values()
    assert list(tool.schema["function"]["parameters"]["properties"]) == ["json", "model_x", "_x"]
    assert tool.schema["function"]["parameters"]["properties"]["json"]["description"] == "Text."
    assert tool.validated({"json": "t", "model_x": "a"}) == {"json": "t", "model_x": "a"}
    assert odd(**tool.validated({"json": "t", "model_x": "b", "_x": "7"})) == "tb7"


def test_the_task_and_the_tools_start_the_episode() -> None:
    start = Environment(system_prompt="Be brief.").reset({"prompt": "How far?"}, 7)
    assert isinstance(start, Start)
    assert [m["role"] for m in start.messages] == ["system", "user"]
    assert [t["function"]["name"] for t in start.tools] == [
        *("search", "divide", "wait", "block", "leave", "leave_late")
    ]
    messages = [{"role": "user", "content": "How far?"}]
    assert Environment().reset({"prompt": messages}, 7).messages == messages


def test_calls_run_in_order_and_results_have_ids_and_names() -> None:
    message = calls(("divide", {"a": 6, "b": 3}), ("search", {"query": "x", "limit": 1}))
    result = step(Environment(), message)
    assert list(result.messages) == [
        {"role": "tool", "tool_call_id": "call00000", "name": "divide", "content": "2.0"},
        {"role": "tool", "tool_call_id": "call00001", "name": "search", "content": '["x 0 km"]'},
    ]
    assert not result.done
    assert result.counts == {"tool_calls": 2, "tool_errors": 0, "tool_timeouts": 0}


def test_a_message_without_calls_ends_the_episode() -> None:
    result = step(Environment(), {"role": "assistant", "content": "5 km"})
    assert result == Step(done=True)


@pytest.mark.parametrize(
    ("name", "arguments", "content"),
    [
        ("divide", {"a": 1, "b": 0}, "error: ZeroDivisionError: float division by zero"),
        (
            "divide",
            {"a": 1, "b": "x", "c": 2},
            "error: ValidationError: b: Input should be a valid number, unable to parse string as "
            "a number; c: Extra inputs are not permitted",
        ),
        ("divide", {"a": 1}, "error: ValidationError: b: Field required"),
        ("divide", [1, 2], "error: TypeError: the arguments of divide must be a JSON object"),
        ("divide", '{"a": 1, "b": 2}', "0.5"),
        ("divide", '{"a": 1', "error: JSONDecodeError: "),
        (
            "divid",
            {},
            "error: UnknownToolError: there is no tool 'divid'; the tools are search, divide",
        ),
        ("leave", {}, "error: RuntimeError: SystemExit: 3"),
        ("leave_late", {}, "error: RuntimeError: SystemExit: 3"),
    ],
)
def test_an_error_is_an_answer(name: str, arguments: Any, content: str) -> None:
    text, counts = answer(name, arguments)
    assert text.startswith(content)
    assert counts["tool_errors"] == int(content.startswith("error"))


@pytest.mark.parametrize("name", ["block", "wait"])
def test_a_call_that_takes_too_long_is_abandoned(name: str) -> None:
    content, counts = answer(name, {"seconds": 2}, timeout_s=0.05)
    assert content == "error: TimeoutError: the call took longer than 0.05 s"
    assert counts == {"tool_calls": 1, "tool_errors": 1, "tool_timeouts": 1}


def test_a_call_after_a_timeout_runs_in_another_thread() -> None:
    message = calls(("block", {"seconds": 2}), ("divide", {"a": 1, "b": 2}))
    begin = time.monotonic()
    result = step(Environment(timeout_s=0.3), message)
    assert [m["content"] for m in result.messages][1] == "0.5"
    assert time.monotonic() - begin < 2


def test_the_calls_of_a_turn_share_a_time_limit() -> None:
    """The first call uses the time of the turn up, so the others do not run."""
    message = calls(("block", {"seconds": 2}), ("divide", {"a": 1, "b": 2}))
    result = step(Environment(timeout_s=60, turn_timeout_s=0.05), message)
    late = "error: TimeoutError: the calls of this turn took longer than 0.05 s together"
    assert [m["content"] for m in result.messages] == [late, late]
    assert result.counts == {"tool_calls": 2, "tool_errors": 2, "tool_timeouts": 2}


@pytest.mark.parametrize(("limit", "fits"), [(10.0, False), (9.0, True)])
def test_a_slow_tool_times_out_before_its_step(limit: float, fits: bool) -> None:
    """Limits of a tool and of all tools: at most 0.9 x 10 s."""
    config = {"tools": ["a.py:b"], "max_tokens": 100, "step_timeout_s": 10, "tool_timeout_s": limit}
    errors = [e for e in EPISODES.validate_python(config).rules() if "step_timeout_s" in e]
    assert len(errors) == (not fits)
    if errors:
        assert "tool_timeout_s=10 must be at most" in errors[0] and "at least 12," in errors[0]
    assert environment_spec(EPISODES.validate_python(config)).options["turn_timeout_s"] == 9


def test_a_long_result_is_cut() -> None:
    content, _ = answer("search", {"query": "x" * 100, "limit": 1}, max_result_chars=10)
    assert content == '["xxxxxxxx\n(cut: 109 characters in total)'


class Shop(ToolEnvironment):
    tools = ("buy", "price", "open_in")

    def reset(self, task: Mapping[str, Any], seed: int) -> Start:
        self.cart: list[str] = []
        return super().reset(task, seed)

    def buy(self, item: str) -> int:
        """Buy an item."""
        self.cart.append(item)
        return len(self.cart)

    @staticmethod
    def price(item: str) -> int:
        """Look up a price."""
        return len(item)

    @classmethod
    def open_in(cls, town: str) -> str:
        """Look up a shop."""
        return f"{cls.__name__} {town}"

    def finish(self, message: Message) -> Mapping[str, float]:
        return {"bought": float("milk" in self.cart)}


def test_methods_are_tools_with_the_state_of_the_episode() -> None:
    shop, other = Shop(), Shop()
    for environment in (shop, other):
        assert "self" not in str(environment.reset({"prompt": "Buy milk."}, 1).tools)
    asked = calls(("buy", {"item": "milk"}), ("price", {"item": "tea"}), ("open_in", {"town": "A"}))
    assert [m["content"] for m in step(shop, asked).messages] == ["1", "3", "Shop A"]
    assert step(shop, {"content": "Done."}).rewards == {"bought": 1.0}
    assert step(other, {"content": "Done."}).rewards == {"bought": 0.0}


def test_calls_of_one_episode_run_in_one_thread() -> None:
    """Some objects, such as connections of sqlite3, may only be used in their own thread."""
    held: list[Any] = []

    def store(x: int) -> str:
        """Store."""
        if not held:
            held.append(sqlite3.connect(":memory:"))
        return str(held[0].execute(f"select {x}").fetchone()[0])

    class Store(ToolEnvironment):
        tools = (store,)

    environment = Store()
    for x in (1, 2):
        assert step(environment, calls(("store", {"x": x}))).messages[0]["content"] == str(x)
    before = threading.active_count()
    environment.close()
    deadline = time.monotonic() + 5
    while threading.active_count() >= before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() < before


def untyped(x) -> str:
    """Return x."""
    return x


def undocumented(x: int) -> int:
    return x


def variadic(*values: int) -> int:
    """Return the sum."""
    return sum(values)


def unserializable(x: threading.Thread) -> str:
    """Return the name."""
    return x.name


def unresolved(x: Missing) -> str:  # type: ignore[name-defined]  # noqa: F821
    """Return x."""
    return str(x)


class Other:
    @staticmethod
    def search(query: str) -> str:
        """Search elsewhere."""
        return query


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ([untyped], "untyped"),
        ([undocumented], "undocumented"),
        ([variadic], "'values'"),
        ([unserializable], "JSON schema"),
        ([unresolved], "NameError"),
        ([lambda x: x], "function"),
        (
            [search, Other.search],
            r"\.search",
        ),
        (["missing.py:search"], "there is no file"),
        (["buyy"], "method"),
    ],
)
def test_a_tool_that_cannot_be_described_is_refused(tools: list[Any], reason: str) -> None:
    with pytest.raises(EnvironmentSetupError, match=reason):
        make_tools(tools, Shop)


def test_the_same_tool_twice_is_one_tool() -> None:
    assert list(make_tools([search, search])) == ["search"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "ToolEnvironment"),
        ({"tools": ["x.py:f"]}, "there is no file"),
        ({"tools": ["math:floor"]}, "'x' cannot"),
        ({"tools": ["{file}:search"], "timeout_s": 0}, "timeout_s"),
    ],
)
def test_wrong_options_are_refused_when_the_worker_starts(
    options: dict[str, Any], reason: str
) -> None:
    options = json.loads(json.dumps(options).replace("{file}", __file__))
    with pytest.raises(EnvironmentSetupError, match=reason):
        ToolEnvironment.check_options(**options)


TOOL_FILE = '''
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One number.
        b: Another number.
    """
    return a + b


def untyped(a):
    """Return a."""
'''


def pool_of(tmp_path: Path, name: str) -> EnvironmentPool:
    path = tmp_path / "my_tools.py"
    path.write_text(TOOL_FILE)
    spec = EnvironmentSpec(
        "burnish.environments.tools:ToolEnvironment", {"tools": [f"{path}:{name}"]}
    )
    return EnvironmentPool(spec, workers=1)


def test_tools_run_in_a_worker_process(tmp_path: Path) -> None:
    async def play() -> None:
        pool = pool_of(tmp_path, "add")
        await pool.start()
        try:
            episode = await pool.open({"prompt": "2 + 3?"}, 1, timeout_s=60)
            assert episode.start.tools[0]["function"]["name"] == "add"
            step = await episode.step(calls(("add", {"a": 2, "b": 3})), timeout_s=60)
            assert step.messages[0]["content"] == "5"
            assert step.counts["tool_calls"] == 1
            assert (await episode.step({"content": "5"}, timeout_s=60)).done
            await episode.close()
        finally:
            await pool.close()

    asyncio.run(play())


def test_the_tools_of_a_recipe_run_in_a_worker_process(tmp_path: Path) -> None:
    path = tmp_path / "my_tools.py"
    path.write_text(TOOL_FILE)
    config = ToolEpisodes(tools=(f"{path}:add",), tool_timeout_s=3, max_tokens=100)

    async def start() -> None:
        pool = EnvironmentPool(environment_spec(config), workers=1)
        try:
            await pool.start()
        finally:
            await pool.close()

    asyncio.run(start())
    assert environment_spec(config).options["timeout_s"] == 3


def test_a_wrong_tool_is_found_when_the_workers_start(tmp_path: Path) -> None:
    async def play() -> None:
        pool = pool_of(tmp_path, "untyped")
        try:
            await pool.start()
        finally:
            await pool.close()

    with pytest.raises(EnvironmentSetupError, match=r"tool untyped.*'a' has no type hint"):
        asyncio.run(play())


def test_a_worker_does_not_import_torch() -> None:
    code = (
        "import sys; from burnish.environments.tools import make_tools\n"
        "def f(x: int = 0) -> int:\n    'Doc.'\n    return x\n"
        "make_tools([f]); assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
