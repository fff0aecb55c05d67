"""Containers that two processes share: both sides see the same contents after each message."""

from __future__ import annotations

import builtins
import json
import random
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import pytest

from burnish.config.sandbox import UnsafeSubprocessSandbox
from burnish.rewards.python_code.config import PythonCodeReward
from burnish.rewards.python_code.judge import Codec
from burnish.rewards.python_code.reward import PythonCodeScorer
from tests.rewards.test_python_code_reward import item_of


class Side(Codec):
    """One side, with what it refers to."""

    def __init__(self, first_number: int) -> None:
        super().__init__(first_number)
        self.roots: list[Any] = []

    def is_reference(self, value: Any) -> bool:
        return False

    def refer(self, value: Any) -> dict[str, Any]:
        return {"builtin": value.__name__}

    def resolve(self, kind: str, content: Any) -> Any:
        return vars(builtins)[content]

    def send(self, other: Side) -> dict[str, Any]:
        """Send the changes. Returns the message."""
        self.collect_changed()
        self.forget_unused()
        message: dict[str, Any] = {"roots": [self.encode(value) for value in self.roots]}
        self.collect_new()
        self.attach(message)
        received = json.loads(json.dumps(message))
        other.unpack(received)
        other.roots = [other.decode(tree) for tree in received["roots"]]
        other.forget_told(received)
        return message


def change(rng: random.Random, value: Any, others: list[Any]) -> None:
    """Change a container in one of the ways of its class."""
    item = rng.choice([rng.randrange(9), "t", None, True, 1.0, 1, rng.choice(others)])
    if isinstance(value, dict):
        key, keys = rng.randrange(40), list(value)
        rng.choice([
            lambda: value.__setitem__(key, item),
            lambda: value.pop(rng.choice(keys or [0]), None),
            lambda: dict.update(value, {key + n: n for n in range(20)}),
            lambda: isinstance(value, OrderedDict) and keys and value.move_to_end(keys[0]),
            lambda: isinstance(value, defaultdict) and setattr(value, "default_factory", int),
        ])()  # fmt: skip
    elif isinstance(value, set):
        rng.choice([value.add, value.discard])(rng.randrange(20))
    else:
        rng.choice([
            lambda: value.append(item),
            lambda: value and value.pop(),
            lambda: value and value.__setitem__(rng.randrange(len(value)), item),
            lambda: value.insert(len(value) // 2, item) if len(value) < 20 else value.reverse(),
            lambda: value.extend(range(rng.randrange(20))) if len(value) < 50 else value.clear(),
        ])()  # fmt: skip


def graph(values: list[Any]) -> Any:
    """Return contents and identities of containers."""
    numbers: dict[int, int] = {}

    def describe(value: Any) -> Any:
        if not isinstance(value, (list, dict, set, deque)):
            return type(value).__name__, value
        if id(value) in numbers:
            return "seen", numbers[id(value)]
        numbers[id(value)] = len(numbers)
        name = type(value).__name__
        if isinstance(value, dict):
            factory = value.default_factory if isinstance(value, defaultdict) else None
            return name, factory, [(key, describe(item)) for key, item in value.items()]
        return name, [*map(describe, sorted(value) if isinstance(value, set) else value)]

    return [describe(value) for value in values]


KINDS: list[Any] = [list, dict, set, deque, Counter, OrderedDict, lambda: defaultdict(list)]


@pytest.mark.parametrize("seed", range(30))
def test_both_sides_have_the_same_graph_of_containers(seed: int) -> None:
    """More containers than a block has, of all classes, which contain each other."""
    rng, sides = random.Random(seed), (Side(0), Side(1))
    sides[0].roots = [rng.choice(KINDS)() for _ in range(rng.choice([3, 150]))]
    for turn in range(12):
        mine, other = sides[turn % 2], sides[1 - turn % 2]
        for value in rng.choices(mine.roots, k=rng.randrange(8)):
            change(rng, value, mine.roots)
        if rng.random() < 0.3:
            mine.roots.pop(rng.randrange(len(mine.roots)))
            mine.roots.append(rng.choice(KINDS)())
        mine.send(other)
        assert graph(mine.roots) == graph(other.roots)


@pytest.mark.parametrize(
    ("value", "do"),
    [
        (list(range(10_000)), lambda value: value.append(7)),
        (list(range(10_000)), lambda value: value.pop()),
        (list(range(10_000)), lambda value: value.__setitem__(77, "x")),
        (dict.fromkeys(range(10_000), 0), lambda value: value.__setitem__(77, "x")),
        (dict.fromkeys(range(10_000), 0), lambda value: value.__setitem__(-1, "x")),
        ([[n] for n in range(2_000)], lambda value: value[77].append(7)),
        (deque(range(10_000)), lambda value: value.append(7)),
    ],
)
def test_only_changes_are_sent(value: Any, do: Any) -> None:
    sides = Side(0), Side(1)
    sides[0].roots = [value]
    sides[0].send(sides[1])
    assert "contents" not in sides[1].send(sides[0])
    do(sides[1].roots[0])
    assert len(json.dumps(sides[1].send(sides[0]))) < 200
    assert sides[0].roots == sides[1].roots and sides[0].roots[0] is value
    assert "contents" not in sides[0].send(sides[1])


def test_a_container_that_is_passed_again_is_not_sent_again() -> None:
    """The other side refers to it only during a call."""
    sides = Side(0), Side(1)
    sides[1].max_idle = 2
    value = [[n] for n in range(300)]
    for _ in range(5):
        sides[0].roots = [value]
        message = sides[0].send(sides[1])
        sides[1].roots = []
        sides[1].send(sides[0])
    assert "contents" not in message
    for _ in range(3):
        sides[0].roots, sides[1].roots = [], []
        sides[0].send(sides[1])
        sides[1].send(sides[0])
    assert 0 not in sides[0].shared and 0 not in sides[1].shared


def test_containers_that_one_side_needs_no_more_are_forgotten() -> None:
    sides = Side(0), Side(1)
    sides[0].roots = [[[n] for n in range(300)]]
    sides[0].send(sides[1])
    assert len(sides[0].shared) == len(sides[1].shared) == 301
    del sides[1].roots[0][100:]
    sides[1].send(sides[0])
    sides[0].send(sides[1])
    assert len(sides[0].shared) == len(sides[1].shared) == 101


def score(code: str, tests: str, **options: Any) -> float:
    """Return the score of code by its tests."""
    sandbox = UnsafeSubprocessSandbox(kind="unsafe_subprocess")
    reward = PythonCodeScorer(PythonCodeReward(sandbox=sandbox, **options))
    (result,) = reward.score([item_of(f"```python\n{code}\n```", tests)])
    reward.close()
    assert isinstance(result, float)
    return result


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        (
            "import functools\n@functools.cache\ndef f(n): return [n]",
            "r = [f(i) for i in range(2000)]\nassert r == [[i] for i in range(2000)]",
        ),
        (
            "memo = {}\ndef f(n): memo[n] = n",
            "for i in range(1000): f(i)\nassert len(memo) == 1000",
        ),
        (
            "class G:\n    def __init__(self, g): self.g = g\n"
            "    def at(self): return self.g[1][1]",
            "x = [[0] * 300 for _ in range(300)]\ng = G(x)\n"
            "x[1][1] = 2\nfor _ in range(300): assert g.at() == 2",
        ),
    ],
    ids=["many", "growing", "large"],
)
def test_shared_data_has_a_bounded_cost(code: str, tests: str) -> None:
    """Within 2 s of CPU time."""
    assert score(code, tests, test_timeout_s=2) == 1


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        (
            "def put(g, i): g[i][i] = 1",
            "g = [[0] * 300 for _ in range(300)]\nfor i in range(300): put(g, i)\n"
            "assert sum(map(sum, g)) == 300",
        ),
        (
            "G = {i: [] for i in range(2000)}\ndef edge(a, b): G[a].append(b)",
            "for i in range(1500): edge(i, i + 1)\nassert G[7] == [8] and G[1500] == []",
        ),
        (
            "from heapq import heappush as push, heappop as pop",
            "h = []\nfor i in range(2000): push(h, -i)\n"
            "assert [pop(h) for _ in range(2000)] == list(range(-1999, 1))",
        ),
    ],
    ids=["grid", "graph", "heap"],
)
def test_calls_with_large_shared_data_pass(code: str, tests: str) -> None:
    """Within 15 s in total, the default limit of a test."""
    assert score(code, tests) == 1
