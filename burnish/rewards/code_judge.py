# house: ok it is sent into the sandbox as one file
"""Runs tests on model-written code, inside a sandbox. Run as a program there, not imported.

Three kinds of processes, so that the code cannot forge a result:

- the judge (this process) has the tests. It evaluates every assertion and compares every output
  itself, and it alone holds the descriptors of stdin and stdout. It is not dumpable: processes of
  the same user cannot read its memory or its descriptors.
- the starter is forked before the judge reads the tests, so its memory never contains them. It
  forks the processes that run the code.
- the solution executes the code. In tests with ``calls`` or ``source`` it serves calls over a
  socket: arguments and results are sent as data (JSON), or as references to objects that stay in
  the solution. In tests with ``programs`` it is a program with stdin and stdout, once per test.

The judge reads one JSON object from stdin: ``{"nonce", "code", "tests", "test_s", "stop"}`` with
``tests`` one of ``{"programs": [[stdin, stdout], ...]}``, ``{"calls": [[arguments, result], ...],
"name": f}`` and ``{"source": text, "name": f or null}``. Each line that it writes begins with the
nonce: ``{"count": n}``, then ``{"test": i, "why": null or text}`` for each test (null: passed), or
``{"bad_tests": text}``.

Limits of a test: ``test_s`` seconds of CPU time of the solution, and WALL times as many in total.
A reference never equals a value of the tests, and no operator combines the two: an object that
claims to equal everything passes no comparison. Only the standard library, Python 3.10+.

Everything that the solution's process sends is data under its control and is checked by the judge:
names (``usable_names``), values (``Codec.decode``), errors (``Solution.error_class``). A test
passes only if its code reached the end without an error while the solution's process was alive. A
statement of the tests that fails is a failed test, also if it only prepares others.

Reading order: main, Judge, Solution, Reference; Starter; serve (in the solution), Codec.
"""

from __future__ import annotations

import __future__
import ast
import builtins
import contextlib
import ctypes
import io
import json
import keyword
import operator
import os
import select
import signal
import socket
import struct
import sys
import types
from collections import Counter, OrderedDict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn

WALL = 3
MAX_WHY_CHARS = 120
MAX_MESSAGE_BYTES = 32 << 20
PR_SET_DUMPABLE = 4
LITERALS: dict[str, Any] = {"Decimal": Decimal, "bytes": bytes.fromhex}
COPIED: dict[str, Any] = {
    kind.__name__: kind for kind in (range, date, datetime, time, timedelta, Counter, OrderedDict)
}
"""Classes of the standard library whose objects (not those of subclasses) are copied."""


class OutOfTime(BaseException):
    """The test exceeded its time limit."""


class Ended(Exception):
    """The solution's process has ended."""


class BadTests(Exception):
    """The tests cannot be used."""


def set_dumpable(value: int) -> None:
    """Allow or forbid that processes of the same user read this one."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE) failed")


# The judge


def main() -> None:
    """Run the tests of stdin."""
    set_dumpable(0)
    starter = Starter()
    task = json.loads(sys.stdin.buffer.read())
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull, "r+") as nothing:  # prints of test code are no results
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    judge = Judge(task, starter, lambda **line: tell(out, task["nonce"], line))
    try:
        judge.run()
    except BadTests as error:
        tell(out, task["nonce"], {"bad_tests": str(error)[:MAX_WHY_CHARS]})
    starter.kill()
    os._exit(0)


def tell(out: Any, nonce: str, line: Mapping[str, Any]) -> None:
    """Write one line of results."""
    out.write(nonce + " " + json.dumps(line) + "\n")
    out.flush()


class Judge:
    """Runs the tests one after the other."""

    def __init__(self, task: Mapping[str, Any], starter: Starter, say: Callable[..., None]) -> None:
        self.task, self.starter, self.say = task, starter, say
        self.solution: Solution | None = None
        self.broken: str | None = None
        self.tested = 0
        self.is_timed = self.is_late = self.is_stop_named = False
        self.on_start: Callable[[Solution], None] = lambda solution: None
        signal.signal(signal.SIGALRM, self._alarm)

    def _alarm(self, number: int, frame: Any) -> None:
        if self.is_timed:
            self.is_late = True
            raise OutOfTime

    def run(self) -> None:
        """Run all tests of the task."""
        tests = self.task["tests"]
        if "programs" in tests:
            self.say(count=len(tests["programs"]))
            for given, wanted in tests["programs"]:
                if not self.test(self.check_program, given, wanted):
                    return
        elif "calls" in tests:
            self.say(count=len(tests["calls"]))
            for arguments, wanted in tests["calls"]:
                if not self.test(self.check_call, tests["name"], arguments, wanted):
                    return
        else:
            SourceTests(self, tests["source"], tests["name"]).run()

    def test(self, check: Callable[..., None], *arguments: Any) -> bool:
        """Run one test and report it. Returns whether to go on."""
        why = self.guarded(check, *arguments)
        self.report(why)
        return why is None or not self.task["stop"]

    def report(self, why: str | None) -> None:
        """Report the result of the next test."""
        self.say(test=self.tested, why=why)
        self.tested += 1

    def guarded(self, function: Callable[..., None], *arguments: Any) -> str | None:
        """Return why a call failed, or None. Ends the solution's process if it is late, also if the
        tests caught the error of the time limit."""
        self.is_late, self.is_timed = False, True
        before = self.solution
        # (Once a second after the limit, for tests that catch every error in a loop.)
        signal.setitimer(signal.ITIMER_REAL, WALL * self.task["test_s"], 1)
        try:
            why = self.reason(function, *arguments)
        except OutOfTime:
            self.is_late = True
        finally:
            self.is_timed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        if self.is_late:
            self.drop_solution()
            return "timeout"
        lost = before if before is not None and before.ended else self.solution
        if lost is not None and lost.ended:
            is_timeout = lost is self.solution and self.drop_solution()
            return "timeout" if is_timeout else why or "the code ended its process"
        return why

    def reason(self, function: Callable[..., None], *arguments: Any) -> str | None:
        """Return why a call failed, or None. Raises OutOfTime and BadTests."""
        try:
            function(*arguments)
        except (OutOfTime, BadTests):
            raise
        except BaseException as error:  # becomes data: the test failed
            return describe(error)
        return None

    def check_program(self, given: str, wanted: str) -> None:
        """Run the code as a program and compare its output."""
        limit = 2 * len(wanted.encode()) + (64 << 10)
        pid, output = self.starter.program(self.task["code"], given, self.task["test_s"])
        try:
            found, status = self.starter.read_to_end(output, limit)
        except OutOfTime:
            raise
        finally:
            self.starter.end(pid)
            os.close(output)
        if len(found) > limit:
            raise AssertionError("too much output")
        if status_is_timeout(status):
            raise OutOfTime
        if lines_of(found.decode("utf-8", "replace")) != lines_of(wanted):
            raise AssertionError("wrong output" if status == 0 else "ended with an error")

    def check_call(self, name: str, arguments: Sequence[Any], wanted: Any) -> None:
        """Call the function ``name`` and compare its result as JSON, the form of the tests."""
        function = self.names().get(name)
        if function is None and "Solution" in self.names():
            made = self.names()["Solution"]()
            if isinstance(made, Reference):
                function = getattr(made, name)  # house: ok a test's name
        if not callable(function):
            raise AssertionError("there is no function " + name)
        if as_json(function(*arguments)) != as_json(wanted):
            raise AssertionError("wrong result")

    def names(self) -> dict[str, Any]:
        """Return the names that the code defines, from a process that is alive."""
        if self.broken is not None:
            raise Ended(self.broken)
        if self.solution is None or self.solution.ended:
            self.drop_solution()
            try:
                self.solution = Solution(self.starter, self.task)
                self.solution.is_stop_named = self.is_stop_named
                self.on_start(self.solution)
            except BaseException as error:
                self.broken = describe(error)
                raise
        return self.solution.names

    def drop_solution(self) -> bool:
        """End the solution's process. Returns whether its limit of CPU time had ended it."""
        solution, self.solution = self.solution, None
        return solution is not None and status_is_timeout(solution.close())


class SourceTests:
    """Tests in Python source: asserts and other checks at the top level, functions ``test_*``,
    unittest classes, and ``check(candidate)``."""

    def __init__(self, judge: Judge, source: str, name: str | None) -> None:
        self.judge, self.name = judge, name
        try:
            self.body = ast.parse(source).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise BadTests("the tests are not Python source: " + describe(error)) from None
        self.futures = future_flags(self.body)
        functions = [n for n in self.body if isinstance(n, FUNCTIONS_OF_TESTS)]
        self.defined = {node.name for node in functions}
        called = {name for node in self.body for name in called_names(node)} & self.defined
        self.steps = [node for node in self.body if checks_something(node, self.defined)]
        self.functions = [node for node in functions if node.name not in called and is_test(node)]
        self.methods = [
            (node.name, method.name)
            for node in self.body
            if isinstance(node, ast.ClassDef)
            for method in node.body
            if isinstance(method, FUNCTIONS_OF_TESTS) and method.name.startswith("test")
        ]
        self.count = len(self.steps) + len(self.functions) + len(self.methods)
        if not self.count:
            raise BadTests("there is no assert, no function test_*, and no method test_*")
        self.check_that_all_run(functions)
        # (A program under ``if __name__ == "__main__"`` is part of the tests.)
        self.own: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
        self.given: dict[str, Any] = {}
        self.modules = sys.stdlib_module_names & {
            node.value.id
            for part in self.body
            for node in ast.walk(part)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        }
        self.used = names_in(self.body)
        self.judge.is_stop_named = "StopIteration" in self.used
        self.judge.on_start = self.watch
        if "unittest" in source:
            import unittest

            vars(unittest)["main"] = lambda *_, **__: None  # the classes are run in any case

    def check_that_all_run(self, functions: Sequence[Any]) -> None:
        """Raise BadTests if a test function needs arguments that nothing gives it."""
        used = names_in(self.body)
        for node in functions:
            if node.name.startswith("test") and not is_test(node) and node.name not in used:
                raise BadTests("the function " + node.name + " needs arguments, so it never runs")

    def run(self) -> None:
        """Run the statements in order, then the functions and the methods."""
        self.judge.say(count=self.count)
        for node in self.body:
            is_last = node is self.body[-1]
            if node in self.steps:
                if not self.judge.test(self.execute, node, is_last):
                    return
            elif (why := self.judge.guarded(self.execute, node, is_last)) is not None:
                # Later tests depend on it, and it is a failed test itself.
                self.judge.say(count=self.count + 1)
                self.judge.report(why)
                return
        for function in self.functions:
            if not self.judge.test(self.call, function):
                return
        for name, method in self.methods:
            if not self.judge.test(self.call_method, name, method):
                return

    def execute(self, node: ast.stmt, is_last: bool) -> None:
        """Execute a statement of the tests with the names of the code."""
        self.refresh()
        try:
            if isinstance(node, ast.Expr) and is_claim(node.value, self.defined):
                code = compile(ast.Expression(node.value), "tests.py", "eval", self.futures, True)
                refuse_false(eval(code, self.own), is_or(node.value))
            else:
                module = ast.Module([node], [])
                exec(compile(module, "tests.py", "exec", self.futures, True), self.own)
        except ImportError as error:
            blame(error)
        except SystemExit as error:
            if isinstance(error, RemoteError) or error.code or not is_last:
                raise AssertionError("the tests or the code called exit") from None

    def refresh(self) -> None:
        """Add the names of the code, unless the tests, Python or the standard library define
        them."""
        names = self.judge.names()
        module = types.ModuleType("solution")
        vars(module).update({n: None if v is MODULE else v for n, v in names.items()})
        sys.modules["solution"] = module
        for name, value in names.items():
            if name in self.own and self.own[name] is not self.given.get(name):
                continue
            if name != self.name and name in self.modules:
                value = __import__(name)
            elif value is MODULE or (name in vars(builtins) and name != self.name):
                continue
            self.own[name] = self.given[name] = value

    def watch(self, solution: Solution) -> None:
        """Let a new process of the code report changes of its plain globals that the tests use."""
        known = solution.names
        solution.watched = [
            name
            for name in usable_names(dict.fromkeys(self.used - bound_names(self.body)))
            if not isinstance(known.get(name), Reference)
            and known.get(name) is not MODULE
            and (name in known or name not in vars(builtins))
            and name not in self.modules
        ]
        solution.on_change = self.renew

    def renew(self, name: str, value: Any) -> None:
        """Give a name its new value, unless the tests define it."""
        vars(sys.modules["solution"])[name] = value
        if name not in self.own or self.own[name] is self.given.get(name, self):
            self.own[name] = self.given[name] = value

    def call(self, node: Any) -> None:
        """Call a function of the tests; one with a parameter, with the function to test."""
        self.refresh()
        function = self.own[node.name]
        arguments = [self.candidate()] if num_required(node) else []
        try:
            refuse_false(finished(function(*arguments)))
        except ImportError as error:
            blame(error)

    def candidate(self) -> Any:
        """Return the function to test."""
        names = self.judge.names()
        functions = [n for n, value in names.items() if isinstance(value, Reference)]
        name = self.name or next(reversed(functions), None)
        if name not in names:
            raise AssertionError("there is no function " + str(name))
        return names[name]

    def call_method(self, name: str, method: str) -> None:
        """Run a test of a class, of unittest or a plain one."""
        self.refresh()
        made = self.own[name]
        unittest = sys.modules.get("unittest")
        try:
            if unittest is None or not issubclass(made, unittest.TestCase):
                refuse_false(finished(getattr(made(), method)()))  # house: ok a test's name
                return
        except ImportError as error:
            blame(error)
        result = unittest.TestResult()
        unittest.TestSuite([made(method)]).run(result)  # (with setUpClass)
        failed = [*result.failures, *result.errors]
        if not result.wasSuccessful() or result.skipped or not result.testsRun:
            raise AssertionError(failed[0][1].strip()[-MAX_WHY_CHARS:] if failed else "skipped")


FUNCTIONS_OF_TESTS = (ast.FunctionDef, ast.AsyncFunctionDef)
NAMED = (*FUNCTIONS_OF_TESTS, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)
BLOCKS = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.Match)


def parts_run_by(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that a statement executes: without the bodies of functions and classes."""
    left = [node]
    while left:
        part = left.pop()
        yield part
        if not isinstance(part, (*FUNCTIONS_OF_TESTS, ast.ClassDef, ast.Lambda)):
            left += ast.iter_child_nodes(part)


def called_names(node: ast.AST) -> set[str]:
    """Return the names of the functions that a statement calls."""
    calls = [part for part in parts_run_by(node) if isinstance(part, ast.Call)]
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)}


def future_flags(body: Sequence[ast.stmt]) -> int:
    """Return the flags for ``compile`` of the features that tests import from ``__future__``."""
    flags = 0
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            for alias in node.names:
                feature = vars(__future__).get(alias.name)
                flags |= feature.compiler_flag if feature is not None else 0
    return flags


def names_in(body: Sequence[ast.stmt]) -> set[str]:
    """Return all names that statements use."""
    nodes = [node for part in body for node in ast.walk(part)]
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def bound_names(body: Sequence[ast.stmt]) -> set[str]:
    """Return all names that statements bind, anywhere in them."""
    bound = set()
    for node in (node for part in body for node in ast.walk(part)):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, NAMED):
            bound.add(str(node.name))
    return bound


def checks_something(node: ast.stmt, defined: set[str]) -> bool:
    """Return whether a statement of the top level is a test: an assert, a comparison, a call of a
    function of the tests or of one like ``assertEqual``, or a block with one of them."""
    if isinstance(node, ast.Expr) and is_claim(node.value, defined):
        return True
    if isinstance(node, ast.Expr):
        return any(is_check(part, defined) for part in parts_run_by(node))
    if isinstance(node, BLOCKS):  # (an exit at the end of the tests is no test)
        functions = defined | {"exit", "quit"}
        return any(is_check(part, functions) for part in parts_run_by(node))
    return isinstance(node, ast.Assert)


def is_check(node: ast.AST, functions: set[str]) -> bool:
    """Return whether a part of a statement may fail on purpose: it is an assert, raises, or calls
    one of ``functions`` or one like ``assertEqual``."""
    if isinstance(node, ast.Call):
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else ""
        name = function.id if isinstance(function, ast.Name) else name
        return name in functions or name.startswith("assert")
    return isinstance(node, (ast.Assert, ast.Raise))


def is_claim(node: ast.expr, defined: set[str]) -> bool:
    """Return whether an expression without an assert claims something: False means failed.
    ``defined``: the functions of the tests."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in {"all", "any", "isinstance"} | defined
    is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return is_not or isinstance(node, (ast.Compare, ast.BoolOp))


def num_required(node: Any) -> int:
    """Return the number of parameters of a function of the tests that have no default."""
    arguments = node.args
    positional = len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
    return positional + sum(default is None for default in arguments.kw_defaults)


def is_test(node: Any) -> bool:
    """Return whether a function of the tests runs: ``test_*`` without arguments, or with the
    function to test."""
    required = num_required(node)
    if node.name == "check":
        return required <= 1
    takes_candidate = required == 1 and [a.arg for a in node.args.args][:1] == ["candidate"]
    return node.name.startswith("test") and (required == 0 or takes_candidate)


def finished(value: Any) -> Any:
    """Return the result of a function of the tests, also of a coroutine function."""
    if isinstance(value, types.CoroutineType):
        import asyncio

        return asyncio.run(value)
    return value


def is_or(node: ast.expr) -> bool:
    """Return whether an expression is like ``f(1) == 2 or print("wrong")``."""
    return isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or)


def refuse_false(value: Any, must_be_true: bool = False) -> None:
    """Raise AssertionError if a claim of the tests is False, or not true."""
    if value is False or (must_be_true and not value):
        raise AssertionError("a result of the tests is False")


def blame(error: ImportError) -> NoReturn:
    """Raise the error of an import again: the code's if it lacks a name or raised it, else
    BadTests, because the tests need a module that is not installed."""
    if isinstance(error, RemoteError) or (error.name or "").partition(".")[0] == "solution":
        raise error
    raise BadTests("the tests cannot import: " + str(error)) from None


def describe(error: BaseException) -> str:
    """Return the type and the text of an error, which may be the solution's."""
    try:
        return (type(error).__name__ + ": " + str(error))[:MAX_WHY_CHARS]
    except Exception:
        return type(error).__name__


def lines_of(text: str) -> str:
    """Return the lines without white space at their ends and without empty lines at the end."""
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip()


def as_json(value: Any) -> Any:
    """Replace tuples by lists, and keys that are numbers, booleans or None by their JSON text,
    unless two keys become equal."""
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        plain = {json_key(key): as_json(item) for key, item in value.items()}
        return plain if len(plain) == len(value) else value
    return value


def json_key(key: Any) -> Any:
    """Return a key of a mapping as JSON has it."""
    return json.dumps(key) if key is None or isinstance(key, (int, float)) else key


def status_is_timeout(status: int) -> bool:
    """Return whether a process was ended by its limit of CPU time."""
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGXCPU)


# Data between judge and solution


class Codec:
    """Values as JSON: plain data by value, everything else by reference.

    Subclasses of list, dict, ... are sent as plain data, so no method of theirs is called by the
    judge."""

    def __init__(self) -> None:
        self.classes: dict[tuple[str, tuple[str, ...]], type[tuple[Any, ...]]] = {}
        """Classes of named tuples by name and fields. (Their objects compare as tuples.)"""

    def refer(self, value: Any) -> dict[str, Any]:
        """Encode an object that is not plain data."""
        raise NotImplementedError

    def resolve(self, kind: str, content: Any) -> Any:
        """Decode what ``refer`` of the other side encoded."""
        raise NotImplementedError

    def encode(self, value: Any) -> Any:
        """Return JSON of a value."""
        if value is None or value is True or value is False:
            return value
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            return {"int": hex(int.__index__(value))}
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, complex):
            return {"complex": [complex(value).real, complex(value).imag]}
        if isinstance(value, (bytes, bytearray)):
            return {"bytes": bytes(value).hex()}
        if type(value) in (deque, *COPIED.values()) and (content := parts_of(value)) is not None:
            return {type(value).__name__: self.encode(content)}
        fields = fields_of(type(value)) if isinstance(value, tuple) else None
        if fields is not None and len(fields) == tuple.__len__(value):
            self.classes.setdefault((type(value).__name__, fields), type(value))
            cells = [self.encode(item) for item in tuple.__iter__(value)]
            return {"namedtuple": [type(value).__name__, list(fields), cells]}
        for kind in (list, tuple, set, frozenset):
            if isinstance(value, kind):
                items = kind.__iter__(value)  # type: ignore[arg-type]  # (not a subclass's)
                return {kind.__name__: [self.encode(item) for item in items]}
        if isinstance(value, dict):
            pairs = [[self.encode(k), self.encode(v)] for k, v in dict.items(value)]
            return {"dict": pairs}
        if type(value) is Decimal:
            return {"Decimal": str(value)}
        if type(value) is Fraction:
            return {"Fraction": [hex(value.numerator), hex(value.denominator)]}
        return self.refer(value)

    def decode(self, tree: Any) -> Any:
        """Return the value of JSON."""
        if not isinstance(tree, dict):
            return tree
        ((kind, content),) = tree.items()
        if kind == "int":
            return int(content, 16)
        if kind == "complex":
            return complex(*content)
        if kind == "Fraction":
            return Fraction(int(content[0], 16), int(content[1], 16))
        if kind in LITERALS:
            return LITERALS[kind](content)
        if kind in ("list", "tuple", "set", "frozenset"):
            make: Callable[[Any], Any] = vars(builtins)[kind]
            return make(self.decode(item) for item in content)
        if kind == "namedtuple":
            return self.row(str(content[0]), tuple(content[1]), content[2])
        if kind == "deque" or kind in COPIED:
            return whole(kind, self.decode(content))
        if kind == "dict":
            return {self.decode(key): self.decode(value) for key, value in content}
        return self.resolve(kind, content)

    def row(self, name: str, fields: tuple[str, ...], items: Sequence[Any]) -> Any:
        """Return a named tuple. Raises ValueError if its names are not those of one."""
        if (name, fields) not in self.classes:
            self.classes[name, fields] = namedtuple(name, fields)  # type: ignore[misc]
        if len(items) != len(fields):
            raise ValueError("a named tuple of another length")
        return tuple.__new__(self.classes[name, fields], map(self.decode, items))


def fields_of(kind: type) -> tuple[str, ...] | None:
    """Return the names of the fields of a class of named tuples, or None for other classes."""
    found = (vars(base).get("_fields") for base in kind.__mro__)
    fields = next((fields for fields in found if type(fields) is tuple and fields), ())
    names = (kind.__name__, *fields)
    are_usable = fields and all(type(name) is str and name.isidentifier() for name in names)
    if not are_usable or len(set(fields)) < len(fields):
        return None
    return None if any(n.startswith("_") or keyword.iskeyword(n) for n in names) else fields


DAY, CLOCK = ("year", "month", "day"), ("hour", "minute", "second", "microsecond")
PARTS_OF_TIME: dict[type, tuple[str, ...]] = {date: DAY, time: CLOCK, datetime: DAY + CLOCK}


def parts_of(value: Any) -> Any:
    """Return plain data from which ``whole`` makes an object of COPIED or a deque, or None if there
    is none, as for times with a time zone."""
    if isinstance(value, range):
        return [value.start, value.stop, value.step]
    if isinstance(value, timedelta):
        return [value.days, value.seconds, value.microseconds]
    if isinstance(value, (datetime, time)) and value.tzinfo is not None:
        return None
    if isinstance(value, (date, time)):
        return list(operator.attrgetter(*PARTS_OF_TIME[type(value)])(value))
    if isinstance(value, deque):
        return [list(value), value.maxlen]
    return list(value.items())


def whole(kind: str, parts: Any) -> Any:
    """Return the object of ``parts_of``."""
    if kind == "deque":
        return deque(*parts)
    if kind in ("Counter", "OrderedDict"):
        return COPIED[kind](dict(parts))
    return COPIED[kind](*parts)


class Lines:
    """JSON messages over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.buffer = connection, b""

    def send(self, tree: Any) -> None:
        """Send a message. Raises Ended if nobody reads it."""
        try:
            self.connection.sendall(json.dumps(tree).encode("utf-8", "surrogatepass") + b"\n")
        except OSError:
            raise Ended("the code ended its process") from None

    def receive(self) -> Any:
        """Return the next message. Raises Ended if there is none."""
        parts = [self.buffer]
        total = len(self.buffer)
        while b"\n" not in parts[-1]:
            try:
                parts.append(self.connection.recv(1 << 20))
            except OSError:
                parts.append(b"")
            total += len(parts[-1])
            if not parts[-1] or total > MAX_MESSAGE_BYTES:
                raise Ended("the code ended its process")
        line, _, self.buffer = b"".join(parts).partition(b"\n")
        return json.loads(line.decode("utf-8", "surrogatepass"))


class Solution(Codec):
    """The judge's side of a process that serves the code."""

    def __init__(self, starter: Starter, task: Mapping[str, Any]) -> None:
        super().__init__()
        self.starter = starter
        self.ended = self.is_stop_named = False
        self.watched: list[str] = []
        """Plain globals of the code that the tests use and do not bind: they may change with each
        call."""
        self.on_change: Callable[[str, Any], None] = lambda name, value: None
        self.callbacks: dict[int, Callable[..., Any]] = {}
        self.errors: dict[int, type[BaseException]] = {}
        mine, other = socket.socketpair()
        with other:
            self.pid = starter.server(task["code"], other, task["test_s"])
        self.lines = Lines(mine)
        try:
            self.names = usable_names(self.exchange())
        except BaseException:
            if status_is_timeout(self.close()):
                raise OutOfTime from None
            raise

    def apply(self, function: str, *arguments: Any, **named: Any) -> Any:
        """Apply a function of FUNCTIONS in the solution, and update arguments that it changed."""
        self.send(
            {
                "apply": function,
                "arguments": [self.encode(value) for value in arguments],
                "named": {name: self.encode(value) for name, value in named.items()},
                "watched": self.watched,
            }
        )
        return self.exchange(arguments, function)

    def send(self, tree: Any) -> None:
        """Send a message."""
        if self.ended:
            raise Ended("the code ended its process")
        self.lines.send(tree)

    def exchange(self, arguments: Sequence[Any] = (), function: str | None = None) -> Any:
        """Answer calls of functions of the tests until the reply comes, and return its value. A
        reply that is not valid ends the process."""
        while True:
            try:
                reply = self.lines.receive()
                if "call" in reply:
                    self.send(self.called(reply))
                    continue
                for name, content in reply.get("names", ()):
                    self.renew(name, self.decode(content))
                if "error" in reply:
                    raise self.error_of(reply["error"], function)
                for index, content in reply.get("changed", ()):
                    update(arguments[index], self.decode(content))
                return self.decode(reply["value"])
            except RemoteError:
                raise
            except Exception:
                self.ended = True  # (a reply that is not valid: forged)
                raise Ended("the code ended its process") from None

    def renew(self, name: str, value: Any) -> None:
        """Give a watched name of the code its new value, a container in place."""
        if name not in self.watched:
            raise ValueError("a name that is not watched")
        old = self.names.get(name)
        if type(value) is type(old) and isinstance(old, (list, dict, set, deque)):
            update(old, value)
            return
        self.names[name] = value
        self.on_change(name, value)

    def called(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Call a function of the tests for the solution, and return the message with its result."""
        try:
            arguments = [self.decode(item) for item in message["arguments"]]
            return {"value": self.encode(self.callbacks[message["call"]](*arguments))}
        except OutOfTime:
            raise
        except BaseException as error:  # becomes data, which the code raises
            return {"error": describe(error)}

    def error_of(self, error: Mapping[str, Any], function: str | None) -> BaseException:
        """Return the exception to raise for an error in the solution: of the same class if it is
        built in, else of a class that stands for it.

        Only ``next``, and tests that name it, get a StopIteration: it would end a loop of the
        tests before its last check."""
        raised = self.error_class(error)(str(error["text"]))
        if isinstance(raised, ENDS_LOOPS) and function != "next" and not self.is_stop_named:
            return StoppedError("the code raised " + type(raised).__name__)
        return raised

    def error_class(self, error: Mapping[str, Any]) -> type[BaseException]:
        """Return the class that stands for an exception class of the solution. One that is not
        based on Exception, such as SystemExit, is no Exception in the tests either."""
        number = int(error["class"])
        if number not in self.errors:
            found = [vars(builtins).get(str(name)) for name in error["names"]]
            bases = [c for c in found if isinstance(c, type) and issubclass(c, BaseException)]
            bases = [c for c in bases if c.__name__ not in SEVERAL_ARGUMENTS]
            base = next(iter(bases), BaseException)
            self.errors[number] = type(str(error["names"][0]), (RemoteError, base), {})
        return self.errors[number]

    def refer(self, value: Any) -> dict[str, Any]:
        """Encode an object of the tests."""
        if isinstance(value, Reference):
            if vars(value)["_solution"] is not self:
                raise Ended("the object's process has ended")
            return {"object": vars(value)["_number"]}
        if isinstance(value, type) and value.__module__ == "builtins":
            return {"builtin": value.__name__}
        if callable(value) and not isinstance(value, type):
            self.callbacks[id(value)] = value
            return {"call": id(value)}
        raise TypeError("a test passes a " + type(value).__name__ + ", which cannot be sent")

    def resolve(self, kind: str, content: Any) -> Any:
        """Decode an object of the solution."""
        if kind == "error_class":
            return self.error_class(content)
        if kind == "module":
            return MODULE
        return Reference(self, int(content))

    def close(self) -> int:
        """End the process and return its status."""
        self.ended = True
        self.lines.connection.close()
        return self.starter.end(self.pid)


MODULE = object()
"""Stands for a module among the names of the solution."""

SEVERAL_ARGUMENTS = (
    *("UnicodeDecodeError", "UnicodeEncodeError", "UnicodeTranslateError", "ExceptionGroup"),
)
"""Exceptions that cannot be created from a text."""


class RemoteError(BaseException):
    """Base of errors that were raised in the solution."""


class StoppedError(RemoteError, RuntimeError):
    """The solution raised an error that would end a loop of the tests."""


ENDS_LOOPS = (StopIteration, StopAsyncIteration, GeneratorExit)


def usable_names(names: Any) -> dict[str, Any]:
    """Return the names of the solution that tests may see. Others, such as ``__builtins__``, would
    change what the tests themselves do."""
    if type(names) is not dict:
        raise Ended("the code ended its process")
    return {
        name: value
        for name, value in names.items()
        if type(name) is str and name.isidentifier() and not name.startswith("__")
    }


def update(container: Any, value: Any) -> None:
    """Give a list, dict or set of the tests the content that the solution gave its copy."""
    if type(value) is not type(container):
        raise TypeError("another type")
    if isinstance(container, list):
        container[:] = value
    elif isinstance(container, (dict, set)):
        container.clear()
        container.update(value)
    elif isinstance(container, deque):
        container.clear()
        container.extend(value)


class Reference:
    """An object in the solution, as the tests see it.

    Operators work between references only, and a reference equals no value: otherwise an object
    whose methods always return true would pass every test."""

    def __init__(self, solution: Solution, number: int) -> None:
        vars(self).update(_solution=solution, _number=number)

    def __getattr__(self, name: str) -> Any:
        return vars(self)["_solution"].apply("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)["_solution"].apply("setattr", self, name, value)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return vars(self)["_solution"].apply("call", self, *arguments, **named)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Reference):
            return False
        same = vars(self)["_solution"] is vars(other)["_solution"]
        return same and vars(self)["_solution"].apply("eq", self, other) is True

    def __ne__(self, other: object) -> bool:
        if not isinstance(other, Reference):
            return True
        return vars(self)["_solution"].apply("ne", self, other) is True

    def __hash__(self) -> int:
        return vars(self)["_solution"].apply("hash", self)

    def __iter__(self) -> Iterator[Any]:
        found = vars(self)["_solution"].apply("iter", self)
        return found if isinstance(found, Reference) else iter(found)

    def __next__(self) -> Any:
        return vars(self)["_solution"].apply("next", self)

    def __enter__(self) -> Any:
        return self.__getattr__("__enter__")()

    def __exit__(self, *error: object) -> bool:
        return self.__getattr__("__exit__")(None, None, None) is True


def add_operators() -> None:
    """Define the operators of Reference that one function of FUNCTIONS implements."""
    for name in ("len", "str", "repr", "bool", "int", "float", "index", "getitem", "setitem"):
        add_operator(name, False)
    add_operator("delitem", False)
    for name in BINARY:
        add_operator(name, True)


def add_operator(name: str, only_references: bool) -> None:
    """Define one operator. ``only_references``: refuse other operands."""

    def method(self: Reference, *others: Any) -> Any:
        if only_references and not all(isinstance(other, Reference) for other in others):
            return NotImplemented
        return vars(self)["_solution"].apply(name, self, *others)

    setattr(Reference, "__" + name.rstrip("_") + "__", method)


BINARY = ("lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "or_")
FUNCTIONS = {
    **{name: vars(operator)[name] for name in (*BINARY, "eq", "ne", "index")},
    **{name: vars(operator)[name] for name in ("getitem", "setitem", "delitem")},
    **{name: vars(builtins)[name] for name in ("len", "str", "repr", "bool", "int", "float")},
    **{name: vars(builtins)[name] for name in ("hash", "iter", "next", "getattr", "setattr")},
    "call": lambda function, *arguments, **named: function(*arguments, **named),
}


# The starter and the processes that it forks


class Starter:
    """The judge's side of the starter. One process runs at a time."""

    def __init__(self) -> None:
        self.control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            self.control.close()
            with contextlib.suppress(BaseException):
                start_all(other)
            os._exit(1)
        other.close()
        self.running: int | None = None

    def server(self, code: str, connection: socket.socket, test_s: float) -> int:
        """Start a process that serves calls over ``connection``. Returns its id."""
        return self.start(b"s", test_s, (connection.fileno(), memory_file(code)))

    def program(self, code: str, given: str, test_s: float) -> tuple[int, int]:
        """Start the code as a program. Returns its id and the descriptor of its output."""
        output, write = os.pipe()
        pid = self.start(b"p", test_s, (memory_file(given), memory_file(code), write))
        os.close(write)
        return pid, output

    def start(self, kind: bytes, test_s: float, fds: Sequence[int]) -> int:
        """Ask for a process, after the last one. Closes the descriptors of files."""
        if self.running is not None:
            self.end(self.running)
        try:
            socket.send_fds(self.control, [kind + struct.pack("d", test_s)], list(fds))
            reply = self.control.recv(8)
        except OSError:
            reply = b""
        finally:
            for fd in fds[:2] if kind == b"p" else fds[1:]:
                os.close(fd)
        if len(reply) != 4:
            raise Ended("the code ended the process that starts it")
        (self.running,) = struct.unpack("i", reply)
        return self.running

    def read_to_end(self, output: int, limit: int) -> tuple[bytes, int]:
        """Return what a program writes until it ends, and its status."""
        found = b""
        sources: list[Any] = [output, self.control]
        while len(found) <= limit:
            ready, _, _ = select.select(sources, [], [])
            if output in ready:
                chunk = os.read(output, 1 << 16)
                found += chunk
                if not chunk:
                    sources.remove(output)
            elif self.control in ready:
                return found, self.status()
        return found, 0

    def status(self) -> int:
        """Return the status of the process, once it has ended."""
        reply = self.control.recv(8)
        self.running = None
        if len(reply) != 4:
            raise Ended("the code ended the process that starts it")
        return struct.unpack("i", reply)[0]

    def end(self, pid: int) -> int:
        """Kill a process and its group, and return its status, or 0 if it has been read."""
        for kill in (os.killpg, os.kill):  # (it may not have begun its group yet)
            with contextlib.suppress(OSError):
                kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError, Ended):
            return self.status() if self.running == pid else 0
        return 0

    def kill(self) -> None:
        """End the starter."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)


def memory_file(text: str) -> int:
    """Return a descriptor at the start of an anonymous file with ``text``."""
    fd = os.memfd_create("file")
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(text.encode("utf-8", "surrogatepass"))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def start_all(control: socket.socket) -> None:
    """Fork a process for each request, and report its id and its status. Runs in the starter."""
    with open(os.devnull, "r+") as nothing:
        for fd in range(3):
            os.dup2(nothing.fileno(), fd)
    while True:
        request, fds, _, _ = socket.recv_fds(control, 16, 4)
        if not request:
            return
        pid = os.fork()
        if pid == 0:
            try:
                become(request, fds)
            finally:
                os._exit(1)
        for fd in fds:
            os.close(fd)
        control.send(struct.pack("i", pid))
        control.send(struct.pack("i", os.waitpid(pid, 0)[1]))


def become(request: bytes, fds: Sequence[int]) -> None:
    """Become the process of a request. Keeps only its descriptors."""
    os.setpgid(0, 0)
    (test_s,) = struct.unpack("d", request[1:])
    copies = [os.dup(fd) for fd in fds]
    high = [fd + 100 for fd in range(len(copies))]
    for copy, fd in zip(copies, high, strict=True):
        os.dup2(copy, fd)
    os.closerange(3, 100)
    set_dumpable(1)
    with os.fdopen(high[1], "rb") as file:
        code = file.read().decode("utf-8", "surrogatepass")
    if request[:1] == b"p":
        os.dup2(high[0], 0)
        os.dup2(high[2], 1)
        os.closerange(100, 110)
        signal.setitimer(signal.ITIMER_PROF, test_s)
        run_program(code)
    else:
        serve(code, socket.socket(fileno=high[0]), test_s)


def run_program(code: str) -> NoReturn:
    """Run the code as a program and exit."""
    sys.stdin = io.TextIOWrapper(os.fdopen(0, "rb", closefd=False), "utf-8", "replace")
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), "utf-8", "replace")
    sys.argv = ["program.py"]
    status = 0
    try:
        exec(compile(code, "program.py", "exec", dont_inherit=True), namespace("__main__"))
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        status = 1
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    os._exit(status & 255)


def namespace(name: str) -> dict[str, Any]:
    """Return the globals of a module that begins to execute, which pickle and dataclasses find in
    sys.modules."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    return vars(module)


class Service(Codec):
    """The solution's side: executes the code and applies functions to its objects."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self.lines = Lines(connection)
        self.objects: list[Any] = []
        self.module: dict[str, Any] = {}
        self.sent: dict[str, Any] = {}
        """JSON of the module's names, as the tests know them."""

    def plain(self, value: Any) -> Any:
        """Encode a value, by reference if it contains itself."""
        try:
            return self.encode(value)
        except RecursionError:
            return self.refer(value)

    def changed_names(self, names: Sequence[str]) -> list[Any]:
        """Return (name, JSON) of those names of the module that changed since they were sent."""
        now = {name: self.plain(self.module[name]) for name in names if name in self.module}
        changed = [[name, tree] for name, tree in now.items() if self.sent.get(name, ...) != tree]
        self.sent |= dict(changed)
        return changed

    def refer(self, value: Any) -> dict[str, Any]:
        """Encode an object by reference."""
        self.objects.append(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"error_class": self.class_of(value)}
        return {"object": len(self.objects) - 1}

    def resolve(self, kind: str, content: Any) -> Any:
        """Decode a reference of the tests."""
        if kind == "object":
            return self.objects[content]
        if kind == "builtin":
            return vars(builtins)[content]
        return lambda *arguments: self.call_back(content, arguments)

    def call_back(self, number: int, arguments: Sequence[Any]) -> Any:
        """Call a function of the tests."""
        self.lines.send({"call": number, "arguments": [self.encode(v) for v in arguments]})
        reply = self.lines.receive()
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return self.decode(reply["value"])

    def class_of(self, error: type[BaseException]) -> dict[str, Any]:
        """Return the description of an exception class."""
        names = [c.__name__ for c in error.__mro__]
        return {"class": id(error), "names": names}

    def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a message."""
        arguments = [self.decode(item) for item in message["arguments"]]
        before = [mutable_json(item) for item in message["arguments"]]
        named = {name: self.decode(item) for name, item in message["named"].items()}
        value = self.encode(FUNCTIONS[message["apply"]](*arguments, **named))
        changed = []
        for index, old in enumerate(before):
            if old is not None and (new := self.encode(arguments[index])) != old:
                changed.append([index, new])
        return {"value": value, "changed": changed}

    def reply(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a message, also of a call that raised, with the changed names."""
        try:
            reply = self.answer(message)
        except BaseException as error:  # becomes data
            reply = self.failed(error)
        return {**reply, "names": self.changed_names(message["watched"])}

    def failed(self, error: BaseException) -> dict[str, Any]:
        """Return the reply of a call that raised."""
        return {"error": {**self.class_of(type(error)), "text": describe(error)}}


def mutable_json(tree: Any) -> Any:
    """Return the JSON of a list, dict or set, and None for others."""
    return tree if isinstance(tree, dict) and not MUTABLE.isdisjoint(tree) else None


MUTABLE = {"list", "dict", "set", "deque", "Counter", "OrderedDict"}


def serve(code: str, connection: socket.socket, test_s: float) -> NoReturn:
    """Execute the code, then answer messages until the judge ends the process."""
    service = Service(connection)
    module = service.module = namespace("solution")

    def start(message: Any) -> dict[str, Any]:
        exec(compile(code, "solution.py", "exec", dont_inherit=True), module)
        found = [(n, v) for n, v in module.items() if not n.startswith("__")]
        pairs = [[n, service.plain(v)] for n, v in found if not isinstance(v, types.ModuleType)]
        service.sent = dict(pairs)
        modules = [[n, {"module": n}] for n, v in found if isinstance(v, types.ModuleType)]
        return {"value": {"dict": pairs + modules}}

    handle, message = start, None
    while True:
        signal.setitimer(signal.ITIMER_PROF, test_s)
        try:
            reply = handle(message)
        except BaseException as error:
            reply = service.failed(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        service.lines.send(reply)
        message, handle = service.lines.receive(), service.reply


add_operators()

if __name__ == "__main__":
    main()
