"""Programs whose data is shared with their tests: results, arguments, attributes, globals."""

from __future__ import annotations

from typing import Any

from metamorphic.base import Draw

MAKE = {
    "list": ("[1, 2]", "{}.append({})"),
    "dict": ("{'a': 1}", "{}[str({})] = 5"),
    "set": ("{1, 2}", "{}.add({})"),
    "deque": ("deque([1, 2], maxlen=4)", "{}.appendleft({})"),
    "defaultdict": ("defaultdict(int, a=1)", "{}['z'] += {}"),
    "bytearray": ("bytearray(b'ab')", "{}.append({})"),
    "Counter": ("Counter('aab')", "{}.update({{'a': {}}})"),
    "OrderedDict": ("OrderedDict(b=1, a=2)", "{}.__setitem__('b', {})"),
    "UserList": ("UserList([1, 2])", "{}.append({})"),
    "array": ("array('i', [1, 2])", "{}.append({})"),
    "grid": ("[[1], [2]]", "{}[0].append({})"),
}
"""Classes of containers: how to make one, and how to change it by a number."""
IMPORTS = "from array import array\nfrom collections import *\nimport copy\n"
CODE = """
STORE = {make}
def fresh(): return {make}
def store(): return {of_store}
def echo(x): return {of_x}
def twice(x): return [{of_x}, x]
def rows():
    row = {make}
    return (row, [row, {of_row}])
def keep(x, kept=[]):
    kept.append({of_x})
    return kept
def change(x):
    {change_x}
def call(function, x):
    function({of_x})
    return x
class Box:
    common = {make}
    def __init__(self, x):
        self.x, self.new = {of_x}, {make}
    def get(self): return self.x
    def touch(self):
        {change_self}
"""
SEEN = """
def seen(x):
    items = x.items() if hasattr(x, 'items') else x
    return type(x).__name__, sorted(map(repr, items)), len(x)
"""
SOURCES = (
    *("fresh()", "store()", "STORE", "echo({})", "twice({})[0]", "rows()[0]", "rows()[1][1]"),
    *(
        "keep({})[-1]",
        "keep({})[0]",
        "Box({}).get()",
        "Box({}).x",
        "Box.common",
        "box.x",
        "box.new",
    ),
    *("box.get()", "{make}", "(box, [{}])[1][0]", "call(lambda x: None, {})", "copy.copy(box).x"),
)
"""Expressions of the tests, of a variable."""


def program_of(draw: Draw) -> tuple[str, str]:
    """Return code, which may copy where it should not, and tests that the right code passes."""
    rng = draw.rng
    make, change = MAKE[draw.one(container=list(MAKE))]
    aliased = {"of_store": "STORE", "of_x": "x", "of_row": "row"}
    copied = {name: f"copy.copy({value})" for name, value in aliased.items()}
    wrong = draw.one(wrong=["", "", *aliased])
    parts = {"make": make, "change_x": change.format("x", 7)}
    parts["change_self"] = change.format("self.x", 8) + "; " + change.format("self.new", 9)
    right = IMPORTS + CODE.format(**parts, **aliased)
    code = IMPORTS + CODE.format(
        **parts, **{n: copied[n] if n == wrong else aliased[n] for n in aliased}
    )
    lines = [f"v0 = {make}", "box = Box(v0)"]
    for number in range(1, rng.randint(3, 9)):
        old = f"v{rng.randrange(number)}"
        lines.append(
            f"v{number} = " + rng.choice(SOURCES).replace("{make}", make).replace("{}", old)
        )
        old = f"v{rng.randrange(number + 1)}"
        changes = [change.format(old, rng.randint(3, 9)), f"change({old})", "box.touch()"]
        changes += [f"call(change, {old})", f"box.x = {old}", f"Box.common = {old}", ""]
        lines.append(rng.choice(changes))
    tests = "\n".join(line for line in lines if line)
    tests = f"{IMPORTS}{SEEN}{tests}\n"
    return code, tests + asserts_of(right, tests)


def asserts_of(code: str, tests: str) -> str:
    """Return asserts about all variables of tests, which hold for the code."""
    scope: dict[str, Any] = {}
    exec(code + tests, scope)
    values = {name: v for name, v in scope.items() if name[0] == "v" and name[1:].isdigit()}
    lines = [f"assert seen({name}) == {scope['seen'](value)!r}" for name, value in values.items()]
    for name, value in values.items():
        lines += [f"assert {name} {is_of(value, v)} {n}" for n, v in values.items() if n < name]
    return "\n".join(lines)


def is_of(value: Any, other: Any) -> str:
    """Return the operator for two objects, of identity."""
    return "is" if value is other else "is not"


def passes_directly(code: str, tests: str) -> bool:
    """Return whether this process runs the code and its tests without an AssertionError."""
    try:
        exec(code + tests, {})
    except AssertionError:
        return False
    return True
