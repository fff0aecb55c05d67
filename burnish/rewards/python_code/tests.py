"""Tests of code in a label, and the code in a response."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from burnish.model_text import DOTALL, IGNORECASE, Form, Pattern
from burnish.reasoning_tags import after_reasoning
from burnish.rewards.labels import LabelError

FORMS = (
    "a list of asserts, a list of {input, output}, {inputs, outputs}, {inputs, outputs, fn_name}, "
    "or Python source with asserts or unit tests (docs/rewards.md)"
)
_OPENING = Form(
    r"(?P<before>[ \t]*+(?:(?:[-+*]|[0-9]{1,9}[.)])[ \t]++)*+)(?P<fence>`{3,}+|~{3,}+)(?P<info>.*+)"
)
"""A fence that opens a block, also one that begins an item of a list."""
_MAX_INDENT = 3
"""Columns that a closing fence may be indented, or as many as the opening one."""
_TAB = 4
_CALL_KEYS = ("testtype", "fn_name")
"""Keys with which data sets mark a test of a function."""
PATCHABLE = (
    *("builtins.input", "builtins.print", "builtins.open", "sys.stdin", "sys.stdout", "sys.stderr"),
)
"""Targets of ``unittest.mock.patch`` that reach the code."""
_NAME = Form(r"(?:[^\W\d]\w*(?:\(\))?\.)?[^\W\d]\w*")
_USES_CANDIDATE = Pattern(r"\bcandidate\b|\bdef check\b")
"""A function, or a method of a class (``Solution().f``)."""
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_UNSENDABLE = {
    "logging.getLogger": "a logger",
    "logging.Logger": "a logger",
    **{
        f"threading.{name}": f"a threading.{name}"
        for name in ("Lock", "RLock", "Condition", "Event", "Semaphore", "Barrier", "Thread")
    },
}
"""Functions that make objects which code in another process cannot get, and their results."""
_PYTHON = Form(
    r"\{?\.?(?:(?:i?python|py)-?(?:3(?:\.\d{1,2})?)?|[\w./-]+\.py)(?:[:=,;{}\[(].*)?",
    IGNORECASE | DOTALL,
)
"""First word behind a fence that names Python 3: ``py3``, ``Python3.11``, ``{.python}``,
``python=``, or the name of a file of Python."""


def read_code(response: str, which: Literal["last_block", "all"], prompt: str = "") -> str | None:
    """Return the code in a response, or None if there is none. ``prompt``: the end of what the
    response continues."""
    text = after_reasoning(response, prompt)
    if which == "all":
        return text if text.strip() else None
    blocks = [block for block in _blocks(text) if not block[0] or _PYTHON.fullmatch(block[0])]
    labeled = [block for block in blocks if block[0]]  # one without a label may be output
    return (labeled or blocks)[-1][1] if blocks else None


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield (language, content) of each fenced block of Markdown, as CommonMark reads them: also
    one in a list, whose indent is no part of the content, and a last one that is not closed.

    A block may also be indented less than its list requires, as models write it."""
    block: _Block | None = None
    for line in text.removesuffix("\n").split("\n"):
        if block is None:
            mark = _OPENING.match(line)
            if mark is not None and not (mark["fence"][0] == "`" and "`" in mark["info"]):
                language = (mark["info"].split() or [""])[0]
                block = _Block(mark["fence"], language, len(mark["before"].expandtabs(_TAB)))
        elif block.is_closed_by(line):
            yield block.language, block.content()
            block = None
        else:
            block.lines.append(line)
    if block is not None and any(line.strip() for line in block.lines):
        yield block.language, block.content()


@dataclass
class _Block:
    """A fenced block. ``column``: that of its opening fence."""

    fence: str
    language: str
    column: int
    lines: list[str] = field(default_factory=list)

    def is_closed_by(self, line: str) -> bool:
        """Return whether a line is a fence that is at least as long, and not part of the code."""
        fence = line.strip()
        is_fence = len(fence) >= len(self.fence) and not fence.strip(self.fence[0])
        return is_fence and _indent(line) <= max(self.column, _MAX_INDENT)

    def content(self) -> str:
        """Return the lines without the indent that the fence and the first line have."""
        first = next((line for line in self.lines if line.strip()), "")
        columns = min(self.column, _indent(first))
        if not columns:
            return "".join(line + "\n" for line in self.lines)
        return "".join(
            " " * (_indent(line) - columns) + line.lstrip(" \t") + "\n" for line in self.lines
        )


def _indent(line: str) -> int:
    """Return the number of columns of white space at the beginning of a line."""
    return len(line[: -len(line.lstrip(" \t")) or None].expandtabs(_TAB))


def read_tests(label: Any, entry_point: Any = None) -> dict[str, Any]:
    """Return the tests in a label, as ``judge.py`` reads them.

    ``entry_point``: name of the function to test, for sources with ``check(candidate)``. Raises
    LabelError if the label has none of the known forms.
    """
    if isinstance(label, str) and label.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError, RecursionError):  # it is no JSON, but source
            label = json.loads(label)
    if isinstance(label, str):
        return _source(label, entry_point)
    if isinstance(label, Sequence) and label:
        if all(isinstance(test, str) for test in label):
            return _source("\n".join(label), entry_point)
        if all(isinstance(test, Mapping) and {"input", "output"} <= set(test) for test in label):
            _refuse_calls(label)
            return {"programs": [[_text(t["input"]), _text(t["output"])] for t in label]}
    if isinstance(label, Mapping):
        if isinstance(label.get("source"), str):
            return _source(label["source"], label.get("entry_point", entry_point))
        if {"inputs", "outputs"} <= set(label):
            return _pairs(label["inputs"], label["outputs"], label.get("fn_name"))
    raise LabelError(f"has none of the known forms; write it as one of: {FORMS}")


def _source(text: str, entry_point: Any) -> dict[str, Any]:
    if not text.strip():
        raise LabelError(f"is empty; it needs tests: {FORMS}")
    if problem := _foreign(text):
        raise LabelError(
            f'{problem}; the code runs in another process (docs/rewards.md, "Tests that cannot '
            'work"); change the tests, or leave the row out'
        )
    name = entry_point.strip().removesuffix("()") if isinstance(entry_point, str) else ""
    if name and not _NAME.fullmatch(name):
        if _USES_CANDIDATE.search(text):
            raise LabelError(
                f"has the entry_point {entry_point!r:.60}, which names no function; write f, or "
                "Solution().f for a method"
            )
        name = ""
    return {"source": text, "name": name or None}


@functools.lru_cache(maxsize=4096)
def _foreign(text: str) -> str | None:
    """Return the part of tests that cannot reach the code in its process, or None: a patch of
    anything but its streams, a class that derives from one of the code, and an argument such as a
    lock. (The judge finds other arguments that cannot be sent when the tests run.)"""
    modules = ("patch", "class ", "threading", "logging")
    if not any(module in text for module in modules):
        return None
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # (the judge says it)
    for node in nodes:
        target = _patched(node)
        if target is not None and target not in PATCHABLE:
            return f"patches {target} with unittest.mock"
    sources = {node.module: node for node in nodes if isinstance(node, ast.ImportFrom)}
    names = sources["solution"].names if "solution" in sources else []
    imported = {alias.asname or alias.name for alias in names}
    known = _bound(nodes) - imported | set(vars(builtins))
    if "*" in known:
        return None
    for node in (node for node in nodes if isinstance(node, ast.ClassDef)):
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id not in known:
                return f"has a class {node.name} that derives from {base.id} of the code"
    argument = _unsendable_argument(nodes, known)
    return f"passes {argument} to the code" if argument is not None else None


def _unsendable_argument(nodes: Sequence[ast.AST], known: set[str]) -> str | None:
    """Return an argument of a call of the code that cannot be sent to it, or None."""
    known = known | {node.name for node in nodes if isinstance(node, _FUNCTIONS)}
    known |= {node.arg for node in nodes if isinstance(node, ast.arg)} - {"candidate"}
    imported: dict[str, str] = {}  # full names, by the names that the tests give them
    for node in nodes:
        if isinstance(node, ast.Import):
            imported |= {a.asname or a.name: a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}

    def result_of(node: ast.AST) -> str | None:
        if not isinstance(node, ast.Call):
            return None
        first, _, rest = ast.unparse(node.func).partition(".")
        return _UNSENDABLE.get(imported.get(first, first) + (f".{rest}" if rest else ""))

    assigned: dict[str, set[str | None]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                assigned.setdefault(ast.unparse(target), set()).add(result_of(node.value))
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        root: ast.AST = call.func
        while isinstance(root, ast.Attribute | ast.Call):
            root = root.value if isinstance(root, ast.Attribute) else root.func
        if not isinstance(root, ast.Name) or root.id in known:
            continue
        for part in [*call.args, *(keyword.value for keyword in call.keywords)]:
            results = assigned.get(ast.unparse(part), {None})
            result = result_of(part) or (results.pop() if len(results) == 1 else None)
            if result is not None:
                return result
    return None


def _patched(node: ast.AST) -> str | None:
    """Return the target of a call of ``patch`` or ``patch.dict``, or None for other nodes."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    function, target = ast.unparse(node.func), node.args[0]
    name = function.removeprefix("unittest.").removeprefix("mock.")
    if name not in ("patch", "patch.dict", "patch.multiple"):
        return None
    return str(target.value) if isinstance(target, ast.Constant) else ast.unparse(target)


def _bound(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the names that tests bind."""
    names = {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    names |= {n.name for n in nodes if isinstance(n, ast.ClassDef)}
    imports = [n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom)]
    aliases = [alias for node in imports for alias in node.names]
    return names | {(a.asname or a.name).partition(".")[0] for a in aliases}


def _refuse_calls(tests: Sequence[Mapping[str, Any]]) -> None:
    """Raise LabelError if tests of a function are written as those of a program."""
    for test in tests:
        key = next((key for key in _CALL_KEYS if test.get(key) not in (None, "", "stdin")), None)
        if key is not None:
            raise LabelError(
                f"has a list of {{input, output}} with {key}: {test[key]!r:.60}, so it tests "
                "a function, but a list is for programs; write {inputs, outputs, fn_name}, with "
                "each input as a list of arguments"
            )


def _pairs(inputs: Any, outputs: Any, name: Any) -> dict[str, Any]:
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
        raise LabelError(
            "has inputs and outputs that are not lists, or are empty; write both as lists with one "
            "entry per test"
        )
    if len(inputs) != len(outputs):
        raise LabelError(
            f"has {len(inputs)} inputs and {len(outputs)} outputs; write one output for each input"
        )
    pairs = list(zip(inputs, outputs, strict=True))
    if name is not None and not isinstance(name, str):
        raise LabelError(f"has a fn_name that is not text: {name!r:.60}; write the function's name")
    if not name:
        return {"programs": [[_text(stdin), _text(stdout)] for stdin, stdout in pairs]}
    if not all(isinstance(arguments, list) for arguments in inputs):
        raise LabelError(
            "has a fn_name, and inputs that are not lists of arguments; write each input as a "
            "list, such as [1, 2] for f(1, 2)"
        )
    # Sets of problems write each result in a list (APPS, TACO), which their own judges take off.
    is_wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
    calls = [[arguments, [out, *(out if is_wrapped else ())]] for arguments, out in pairs]
    return {"calls": calls, "name": name}


def _text(value: Any) -> str:
    """Return a text, or the lines of a list as one."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    raise LabelError(
        f"has an input or output that is not text: {value!r:.80}; write it as a string or a list "
        "of lines"
    )
