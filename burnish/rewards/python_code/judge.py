# house: ok it is sent into the sandbox as one file
"""Runs tests on model-written code, inside a sandbox. Run as a program there, not imported.

Three kinds of processes, so that the code cannot forge a result:

- the judge (this process) has the tests. It evaluates every assertion and compares every output
  itself, and it alone holds the descriptors of stdin and stdout. It is not dumpable: processes of
  the same user cannot read its memory or its descriptors.
- the starter is forked before the judge reads the tests, so its memory never contains them. It
  forks the processes that run the code.
- the solution executes the code. In tests with ``calls`` or ``source`` it serves calls over a
  socket: arguments and results are sent as data (JSON), as containers that both sides share
  (``Codec``), or as references to objects that stay in the solution. In tests with ``programs`` it
  is a program with stdin and stdout, once per test.

The judge reads one JSON object from stdin: ``{"nonce", "code", "tests", "test_s", "stop"}`` with
``tests`` one of ``{"programs": [[stdin, stdout], ...]}``, ``{"calls": [[arguments, results], ...],
"name": f}`` and ``{"source": text, "name": f or null}``. Each line that it writes begins with the
nonce: ``{"count": n}``, then ``{"test": i, "why": null or text}`` for each test (null: passed), or
``{"bad_tests": text}``.

Limits of a test: ``test_s`` seconds of CPU time of the solution, and WALL times as many in total.
A reference never equals a value of the tests, and operators combine the two only for objects that
the tests create themselves (``binary_operator``): an object that claims to equal everything passes
no comparison. Only the standard library, Python 3.10+.

Everything that the solution's process sends is data under its control and is checked by the judge:
names (``usable_names``), values (``Codec.decode``), classes (``make_class``), errors
(``new_error``) and requests (``Lent.ask``). A test passes only if its code reached the end without
an error while the solution's process was alive. A statement of the tests that fails is a failed
test, also if it only prepares others.

Reading order: main, Judge, Solution, Lent, Reference; Starter; in the solution serve, Service;
Codec.
"""

from __future__ import annotations
import __future__

import ast
import atexit
import builtins
import contextlib
import copy
import ctypes
import enum
import importlib
import io
import itertools
import json
import keyword
import math
import operator
import os
import re  # house: ok compiles patterns of the tests, in the code's process
import select
import signal
import socket
import struct
import sys
import threading
import types
import typing
from array import array
from collections import (
    ChainMap,
    Counter,
    OrderedDict,
    UserDict,
    UserList,
    UserString,
    defaultdict,
    deque,
    namedtuple,
)
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    import inspect

WALL = 3
MAX_WHY_CHARS = 120
MAX_MESSAGE_BYTES = 32 << 20
PR_SET_DUMPABLE = 4
LITERALS: dict[str, Any] = {"Decimal": Decimal, "bytes": bytes.fromhex}
COPIED: dict[str, Any] = {
    kind.__name__: kind for kind in (range, date, datetime, time, timedelta, timezone)
}
"""Classes of the standard library whose objects (not those of subclasses) are copied."""
AS_JSON = frozenset((bool, str, float))
SMALL = 1 << 63
"""Integers below it, and above its negative, are JSON numbers."""
ENUM_MODULES = frozenset(
    ("calendar", "http", "inspect", "plistlib", "pstats", "re", "signal", "socket", "ssl", "uuid")
)
"""Modules of the standard library whose enums have the same members on both sides."""
PLAIN = frozenset((int, tuple, frozenset, bytes, complex))
"""Classes whose objects are plain data that cannot change."""
SINGLE = {"Ellipsis": ..., "NotImplemented": NotImplemented}


class OutOfTime(BaseException):
    """The test exceeded its time limit."""


class Ended(Exception):
    """The solution's process has ended."""


class BadTests(Exception):
    """The tests cannot be used."""


class CannotSend(TypeError):
    """The code cannot get an object of the tests."""


def set_dumpable(value: int) -> None:
    """Allow or forbid that processes of the same user read this one."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_DUMPABLE, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE) failed")


# The judge


def main() -> None:
    """Run the tests of stdin."""
    set_dumpable(0)
    starter = Starter()
    evaluate_remotely(typing, "get_type_hints")
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
        self.is_timed = self.is_late = False
        self.trust = Trust()
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
            for arguments, results in tests["calls"]:
                if not self.test(self.check_call, tests["name"], arguments, results):
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
        before, self.trust.unsendable = self.solution, None
        if before is not None:
            before.num_compared = 0
        # (Once a second after the limit, for tests that catch every error in a loop.)
        signal.setitimer(signal.ITIMER_REAL, WALL * self.task["test_s"], 1)
        try:
            why = self.reason(function, *arguments)
        except OutOfTime:
            self.is_late = True
        finally:
            self.is_timed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        if self.trust.unsendable is not None:  # (also if the tests caught the error)
            raise BadTests(self.trust.unsendable)
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
        if status != 0:
            raise AssertionError("ended with an error")
        if lines_of(found.decode("utf-8", "replace")) != lines_of(wanted):
            raise AssertionError("wrong output")

    def check_call(self, name: str, arguments: Sequence[Any], results: Sequence[Any]) -> None:
        """Call the function ``name`` and compare its result with those that pass, as JSON, the form
        of the tests."""
        function = self.function(name)
        if as_json(function(*arguments)) not in map(as_json, results):
            raise AssertionError("wrong result")

    def function(self, name: str) -> Any:
        """Return the function ``name`` of the code, or else this method of a new ``Solution``;
        ``Class().name`` and ``Class.name`` are a method of a new ``Class``."""
        kind, _, method = name.replace("()", "").rpartition(".")
        function = None if kind else self.names().get(method)
        if function is None and (kind or "Solution") in self.names():
            made = self.names()[kind or "Solution"]()
            if is_remote(made):
                function = getattr(made, method)  # house: ok a test's name
        if not callable(function):
            raise AssertionError("there is no function " + name)
        return function

    def names(self) -> dict[str, Any]:
        """Return the names that the code defines, from a process that is alive."""
        if self.broken is not None:
            raise Ended(self.broken)
        if self.solution is None or self.solution.ended:
            self.drop_solution()
            try:
                self.trust.classes.clear()
                self.solution = Solution(self.starter, self.task, self.trust)
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
        self.hooks = self.defined - called
        self.steps = [node for node in self.body if checks_something(node, self.defined)]
        tests = [node for node in functions if node.name not in called and is_test(node)]
        classes = [node for node in self.body if isinstance(node, ast.ClassDef)]
        methods = [
            (node, method)
            for node in classes
            for method in node.body
            if isinstance(method, FUNCTIONS_OF_TESTS) and method.name.startswith("test")
        ]
        self.check_that_all_run(functions, [method for _, method in methods])
        modules = imported_modules(self.body)
        self.functions = [node for node in tests if not is_skipped(node, modules)]
        self.methods = [
            (node.name, method.name)
            for node, method in methods
            if not is_skipped(node, modules) and not is_skipped(method, modules)
        ]
        self.count = len(self.steps) + len(self.functions) + len(self.methods)
        if not self.count:
            skipped = tests or methods
            no_tests = "there is no assert, no function test_*, and no method test_*"
            raise BadTests("all tests are skipped" if skipped else no_tests)
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
        trust = judge.trust
        trust.is_stop_named, trust.namespace = "StopIteration" in self.used, self.own
        trust.used = self.used | {name or ""} | imported_names(self.body)
        trust.modules = modules
        classes = [n for part in self.body for n in ast.walk(part) if isinstance(n, ast.ClassDef)]
        trust.closed = {node.name for node in classes if is_class_of_checks(node)}
        code = judge.task["code"]
        trust.open = {n.name for n in classes if n.name in code and has_methods_only(n)}
        self.judge.on_start = self.watch
        self.prepared: dict[str, Solution | None] = {}
        if "get_annotations" in source:
            evaluate_remotely(importlib.import_module("inspect"), "get_annotations")
        if "unittest" in source:
            import unittest

            vars(unittest)["main"] = lambda *_, **__: None  # the classes are run in any case
            for name in ("assertIs", "assertIsNot"):
                identify_operands(unittest.TestCase, name)
        for node in self.body:
            identify(node)
        vars(builtins)[FIRST] = first_reference

    def check_that_all_run(self, functions: Sequence[Any], methods: Sequence[Any]) -> None:
        """Raise BadTests if a test needs arguments or a fixture that nothing gives it."""
        used = names_in(self.body)
        for node in functions:
            if node.name.startswith("test") and not is_test(node) and node.name not in used:
                raise BadTests("the function " + node.name + " needs arguments, so it never runs")
        for node in methods:  # (other decorators may give arguments, as those of unittest.mock do)
            names = [name for name, _ in decorators_of(node) if "mark." not in name]
            if num_required(node) > 1 - ("staticmethod" in names) and not (
                set(names) - {"staticmethod", "classmethod"}
            ):
                raise BadTests("the method " + node.name + " needs arguments, so it never runs")
        for part in (part for node in self.body for part in ast.walk(node)):
            for name, call in decorators_of(part):
                options = {k.arg: ast.unparse(k.value) for k in call.keywords} if call else {}
                is_auto = options.get("autouse", "False") != "False"
                if (name.endswith("fixture") and is_auto) or name.endswith("mark.usefixtures"):
                    raise BadTests(
                        "fixtures of pytest do not run; write setup_method(self) or setup_module()"
                    )

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
        for (name, method), (later, _) in itertools.pairwise([*self.methods, ("", "")]):
            if not self.judge.test(self.call_method, name, method, name != later):
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
            is_of_code = any(error is other for other in ERRORS_OF_CODE)
            if is_of_code or error.code or not is_last:
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
            for name in usable_names(dict.fromkeys(solution.trust.used - bound_names(self.body)))
            if not is_remote(known.get(name))
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
            self.set_up_module()
            with between(self.hook, "function", function):
                refuse_false(finished(function(*arguments)))
        except ImportError as error:
            blame(error)

    def candidate(self) -> Any:
        """Return the function to test."""
        names = self.judge.names()
        functions = [n for n, v in names.items() if is_remote(v) and not is_error_class(v)]
        name = str(self.name or next(reversed(functions), None))
        return names[name] if name in names else self.judge.function(name)

    def call_method(self, name: str, method: str, is_last: bool) -> None:
        """Run a test of a class, of unittest or a plain one. ``is_last``: of its class."""
        self.refresh()
        made = self.own[name]
        unittest = sys.modules.get("unittest")
        try:
            self.set_up_module()
            if unittest is None or not issubclass(made, unittest.TestCase):
                self.call_plain_method(made, method, is_last)
                return
        except ImportError as error:
            blame(error)
        result = unittest.TestResult()
        unittest.TestSuite([made(method)]).run(result)  # (with setUpClass)
        failed = [*result.failures, *result.errors]
        if not result.wasSuccessful() or result.skipped or not result.testsRun:
            raise AssertionError(failed[0][1].strip()[-MAX_WHY_CHARS:] if failed else "skipped")

    def call_plain_method(self, made: Any, method: str, is_last: bool) -> None:
        """Run a test of a class without unittest, with the hooks that pytest calls."""
        self.set_up_once(made.__name__, attribute(made, "setup_class"), made)
        tested = made()
        test = attribute(tested, method)
        try:
            with between(lambda name: attribute(tested, name), "method", test):
                refuse_false(finished(test()))
        finally:
            if is_last:
                call_hook(attribute(made, "teardown_class"), made)

    def set_up_module(self) -> None:
        """Call ``setup_module`` of the tests, or ``setUpModule`` of unittest."""
        name = "setUpModule" if "setUpModule" in self.hooks else "setup_module"
        module = Module()
        module.__dict__ = self.own
        self.set_up_once("", self.hook(name), module)

    def set_up_once(self, part: str, hook: Any, argument: Any) -> None:
        """Call a hook of the module (``part`` is empty) or of a class before its first test, and
        again if the code's process, to which its results may refer, is a new one."""
        if self.prepared.get(part) is not self.judge.solution:
            call_hook(hook, argument)
            self.prepared[part] = self.judge.solution

    def hook(self, name: str) -> Any:
        """Return a function of the tests that they do not call themselves, or None."""
        return self.own.get(name) if name in self.hooks else None


class Module:
    """The names of the tests as attributes, for ``setup_module(module)``."""


def attribute(value: Any, name: str) -> Any:
    """Return a method or hook of a class of the tests, or None."""
    return getattr(value, name, None)  # house: ok a name of the tests


@contextlib.contextmanager
def between(hook: Callable[[str], Any], kind: str, test: Any) -> Iterator[None]:
    """Call the hook ``setup_<kind>`` before a test and ``teardown_<kind>`` after it."""
    call_hook(hook("setup_" + kind), test)
    try:
        yield
    finally:
        call_hook(hook("teardown_" + kind), test)


def call_hook(hook: Any, argument: Any) -> None:
    """Call a hook of the tests, with its argument if it has a parameter, as pytest does."""
    if hook is not None:
        import inspect

        finished(hook(*[argument][: len(inspect.signature(hook).parameters)]))


FIRST = "(first reference)"
"""Builtin of the tests with ``first_reference``. (No name of the tests or the code.)"""


def identify(node: ast.stmt) -> None:
    """Let ``is`` of the tests compare the first references of its operands."""

    def first(value: ast.expr) -> ast.expr:
        if isinstance(value, ast.Constant):
            return value
        function = ast.copy_location(ast.Name(FIRST, ast.Load()), value)
        return ast.copy_location(ast.Call(function, [value], []), value)

    for part in ast.walk(node):
        if isinstance(part, ast.Compare) and any(isinstance(op, IDENTITY) for op in part.ops):
            part.left, part.comparators = first(part.left), [*map(first, part.comparators)]


IDENTITY = (ast.Is, ast.IsNot)


def identify_operands(kind: Any, name: str) -> None:
    """Let a method of unittest compare the first references of its operands."""
    method = vars(kind)[name]

    def compare(self: Any, expr1: Any, expr2: Any, msg: Any = None) -> None:
        method(self, first_reference(expr1), first_reference(expr2), msg)

    setattr(kind, name, compare)


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


def imported_names(body: Sequence[ast.stmt]) -> set[str]:
    """Return the names that statements import from the code, or read as its attributes."""
    nodes = [node for part in body for node in ast.walk(part)]
    names = {n.name for node in nodes if isinstance(node, ast.ImportFrom) for n in node.names}
    return names | {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "solution"
    }


def imported_modules(body: Sequence[ast.stmt]) -> set[str]:
    """Return the modules of the standard library that statements import anywhere."""
    names = set()
    for node in (node for part in body for node in ast.walk(part)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names & sys.stdlib_module_names


def is_class_of_checks(node: ast.ClassDef) -> bool:
    """Return whether a class of the tests contains a check."""
    is_named = node.name.lower().startswith("test")
    return is_named or any(
        is_check(part, set())
        for part in ast.walk(node)
        if part is not node and not isinstance(part, ast.Raise)
    )


def has_methods_only(node: ast.ClassDef) -> bool:
    """Return whether a class has methods only, without values that may be expected results."""
    texts = {id(part.value) for part in ast.walk(node) if isinstance(part, ast.Expr)}
    values = [part for part in ast.walk(node) if isinstance(part, ast.Constant)]
    if any(value.value not in (None, 0, 1, "") and id(value) not in texts for value in values):
        return False
    return all(
        isinstance(part, (*FUNCTIONS_OF_TESTS, ast.Pass, ast.Expr))
        or (isinstance(part, ast.AnnAssign) and part.value is None)
        for part in node.body
    )


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


def decorators_of(node: Any) -> Iterator[tuple[str, ast.Call | None]]:
    """Yield the name (``unittest.skip``) of each decorator of a function or class, and its call."""
    if isinstance(node, (*FUNCTIONS_OF_TESTS, ast.ClassDef)):
        for part in node.decorator_list:
            call = part if isinstance(part, ast.Call) else None
            yield ast.unparse(call.func if call is not None else part), call


def is_skipped(node: Any, modules: set[str]) -> bool:
    """Return whether the tests themselves skip a test: by a mark of unittest or pytest without a
    condition, or with one of constants and ``modules`` of the standard library alone, which the
    code cannot decide."""
    for name, call in decorators_of(node):
        package, _, mark = name.rpartition(".")
        if package not in ("unittest", "pytest.mark"):
            continue
        if mark == "skip":
            return True
        if mark in ("skipIf", "skipUnless", "skipif") and call is not None and call.args:
            names = names_in([ast.Expr(call.args[0])])
            if names <= modules:
                used = {module: importlib.import_module(module) for module in names}
                with contextlib.suppress(Exception):  # (it is raised again when the tests run)
                    condition = ast.Expression(call.args[0])
                    value = eval(compile(condition, "tests.py", "eval"), used)
                    if bool(value) != (mark == "skipUnless"):
                        return True
    return False


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
    is_of_code = any(error is other for other in ERRORS_OF_CODE)
    if is_of_code or (error.name or "").partition(".")[0] == "solution":
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
    """Replace tuples by lists, keys that are numbers, booleans or None by their JSON text, unless
    two keys become equal, and booleans by tuples, which equal no number."""
    if isinstance(value, bool):
        return (value,)
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

    Containers that can change (CONTAINERS) exist on both sides under one number, while both sides
    refer to them: a container that is sent twice is the same object twice. Each message has the
    contents of those that are new or changed, and the numbers that its sender forgets, so both
    sides see the same contents whenever one of them waits.

    Subclasses of list, dict, ... are sent as plain data, so no method of theirs is called by the
    judge."""

    def __init__(self, first_number: int) -> None:
        self.first_number = first_number
        self.new_numbers = itertools.count(first_number, 2)
        """Numbers of this side: even ones of the judge, odd ones of the solution."""
        self.shared: dict[int, Shared] = {}
        self.shared_ids: dict[int, int] = {}
        """Numbers of the shared containers by id."""
        self.blocks: list[Block] = []
        """The shared containers, from the oldest to the newest."""
        self.unsent: list[int] = []
        """Numbers of new containers that the next message must contain."""
        self.outgoing: list[Any] = []
        """Contents for the next message."""
        self.forgotten: list[int] = []
        """Numbers that the next message tells the other side to forget."""
        self.max_idle = 0
        self.num_compared = 0
        """Parts that the calls of the present test compared."""
        self.num_unpacking = 0
        self.classes: dict[tuple[str, tuple[str, ...]], type[tuple[Any, ...]]] = {}
        """Classes of named tuples by name and fields. (Their objects compare as tuples.)"""

    def is_reference(self, value: Any) -> bool:
        """Return whether an object is encoded by reference although its class derives from one of
        plain data."""
        raise NotImplementedError

    def refer(self, value: Any) -> dict[str, Any]:
        """Encode an object that is not plain data."""
        raise NotImplementedError

    def resolve(self, kind: str, content: Any) -> Any:
        """Decode what ``refer`` of the other side encoded."""
        raise NotImplementedError

    def encode(self, value: Any) -> Any:
        """Return JSON of a value."""
        kind = type(value)
        if value is None or kind in AS_JSON or (kind is int and -SMALL < value < SMALL):
            return value
        if kind in CONTAINERS:
            return {"shared": self.share(value)}
        if isinstance(kind, enum.EnumMeta) and is_library_enum(kind):
            name = str(value.name) if value.name in kind.__members__ else None
            value_of = None if name is not None else int(value.value)
            return {"member": [kind.__module__, kind.__name__, name, value_of]}
        if kind not in PLAIN and self.is_reference(value):
            return self.refer(value)
        return self.encode_plain(value)

    def share(self, value: Any) -> int:
        """Return the number of a container, a new one if the other side does not know it."""
        number = self.shared_ids.get(id(value))
        if number is None:
            number = next(self.new_numbers)
            self.unsent.append(number)
            self.adopt(number, value)
        self.shared[number].idle = 0
        return number

    def adopt(self, number: int, value: Any) -> None:
        """Share a container under a number."""
        self.shared[number] = entry = Shared(value)
        self.shared_ids[id(value)] = number
        if not self.blocks or len(self.blocks[-1].entries) >= BLOCK_SIZE:
            self.blocks.append(Block())
        self.blocks[-1].add(number, entry)

    def forget(self, number: int) -> None:
        """Share a container no longer."""
        entry = self.shared.pop(number, None)
        if entry is not None:
            del self.shared_ids[id(entry.value)]
            entry.block.remove(number)
            if not entry.block.entries:
                self.blocks.remove(entry.block)
            entry.value = entry.parts = None  # (what it refers to may be forgotten next)

    def plain(self, value: Any) -> Any:
        """Return JSON of an item of a container."""
        return self.encode(value)

    def collect(self, numbers: list[int]) -> None:
        """Add containers, and all new containers in them, to the next message. If one of them
        cannot be sent, none of them is shared."""
        rows, sent = [], []
        unsent, self.unsent = self.unsent, numbers
        try:
            while self.unsent:
                sent.append(number := self.unsent.pop())
                entry = self.shared[number]
                before = entry.update()
                rows.append([number, *self.contents(entry, before)])
        except BaseException:
            self.forget_both([*sent, *self.unsent])
            raise
        finally:
            self.unsent = unsent
        self.outgoing += rows

    def contents(self, entry: Shared, before: list[Any] | None) -> list[Any]:
        """Return the name and the parts of a container, or only those that changed since the other
        side got ``before``, with their indices and both numbers of parts."""
        name, parts = entry.container.kind.__name__, entry.parts
        # (The order of a set is not the same on both sides.)
        before = parts if before is None else before
        indices = changed_indices(before, parts)
        is_patch = before is not parts and name != "set" and 2 * len(indices) < len(parts)
        sent = [parts[index] for index in indices] if is_patch else parts
        self.num_compared += len(parts) + SENT_AGAIN * len(sent)
        trees = [v if type(v) in AS_JSON else self.plain(v) for v in sent]
        return [name, trees, indices, len(before), len(parts)] if is_patch else [name, trees]

    def collect_new(self) -> None:
        """Add the containers that were encoded since the last message to the next one."""
        unsent, self.unsent = self.unsent, []
        self.collect(unsent)

    def collect_changed(self) -> None:
        """Add the containers that changed since the last message to the next one. Those with an
        object that cannot be sent are shared no longer."""
        if self.num_unpacking:  # (nothing has run that changes them)
            return
        for block in list(self.blocks):
            changed = block.changed()
            self.num_compared += block.cost
            for number in changed:
                with contextlib.suppress(Exception):
                    self.collect([number])

    def forget_both(self, numbers: Iterable[int]) -> None:
        """Share containers no longer, and tell it the other side."""
        for number in numbers:
            self.forget(number)
            self.forgotten.append(number)

    def forget_unused(self) -> None:
        """Share no container to which this side has not referred for ``max_idle`` messages: it may
        change on the other side alone. (An outer container is older than its items.)"""
        if not self.num_unpacking:
            for block in list(self.blocks):
                for number in block.unused(self.max_idle):
                    self.forget_both([number])

    def unpack(self, message: Mapping[str, Any]) -> None:
        """Give the shared containers the contents of a message."""
        self.num_unpacking += 1
        try:
            rows = [(int(n), str(name), *rest) for n, name, *rest in message.get("contents", ())]
            for number, name, parts, *_ in rows:
                if number not in self.shared:
                    self.adopt(self.checked_number(number), BY_NAME[name].make(parts))
            decoded = [[self.decode(part) for part in row[2]] for row in rows]
            for (number, name, _, *patch), parts in zip(rows, decoded, strict=True):
                entry = self.shared[number]
                if BY_NAME[name] is not entry.container:
                    raise TypeError("another class")
                self.num_compared += SENT_AGAIN * len(parts)
                entry.container.fill(entry.value, patched(entry.parts, parts, patch))
                self.num_compared += len(entry.update() or ())
        finally:
            self.num_unpacking -= 1

    def checked_number(self, number: int) -> int:
        """Return the number that the other side gave a container. Raises ValueError if it is one
        of this side."""
        if number % 2 == self.first_number % 2 or number < 0:
            raise ValueError("a number of this side")
        return number

    def attach(self, message: dict[str, Any]) -> None:
        """Put what was collected into a message."""
        if self.outgoing:
            message["contents"], self.outgoing = self.outgoing, []
        if self.forgotten:
            message["forgotten"], self.forgotten = self.forgotten, []

    def forget_told(self, message: Mapping[str, Any]) -> None:
        """Forget the containers that a message says, after it has been decoded."""
        for number in message.get("forgotten", ()):
            self.forget(int(number))

    def encode_plain(self, value: Any) -> Any:
        """Return JSON of a value, also of an object of a subclass of plain data as plain data."""
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            return {"int": hex(int.__index__(value))}
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, complex):
            number = complex_of(value)
            return {"complex": [number.real, number.imag]}
        if isinstance(value, bytes):
            return {"bytes": bytes_of(value).hex()}
        if isinstance(value, bytearray):
            return {"bytes": bytearray.hex(value)}
        name = type(value).__name__
        if COPIED.get(name) is type(value) and (content := parts_of(value)) is not None:
            return {name: [self.encode(part) for part in content]}
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
        if type(value) in VIEWS:
            return {"view": [type(value).__name__, self.encode(dict(value.mapping))]}
        if type(value) is types.GenericAlias:
            return {"alias": [self.encode(value.__origin__), self.encode(value.__args__)]}
        if type(value).__name__ in WRITTEN and is_written(type(value)):
            return {"written": [type(value).__name__, str(value)]}
        if type(value) is types.MappingProxyType:
            return {"mappingproxy": self.encode(dict(value))}
        if type(value) is slice:
            return {"slice": [self.encode(v) for v in (value.start, value.stop, value.step)]}
        if type(value) is memoryview and (buffer := buffer_of(value)) is not None:
            return {"memoryview": [self.encode(buffer), value.format]}
        if type(value) is Decimal:
            return {"Decimal": str(value)}
        if type(value) is Fraction:
            return {"Fraction": [hex(value.numerator), hex(value.denominator)]}
        if value is Ellipsis or value is NotImplemented:
            return {"single": str(value)}
        return self.refer(value)

    def decode(self, tree: Any) -> Any:
        """Return the value of JSON."""
        if not isinstance(tree, dict):
            return tree
        ((kind, content),) = tree.items()
        if kind == "shared":
            entry = self.shared[int(content)]
            entry.idle = 0
            return entry.value
        if kind == "int":
            return int(content, 16)
        if kind == "complex":
            return complex(*content)
        if kind == "Fraction":
            return Fraction(int(content[0], 16), int(content[1], 16))
        if kind == "slice":
            return slice(*[self.decode(item) for item in content])
        if kind in LITERALS:
            return LITERALS[kind](content)
        if kind in ("list", "tuple", "set", "frozenset"):
            make: Callable[[Any], Any] = vars(builtins)[kind]
            return make(self.decode(item) for item in content)
        if kind == "namedtuple":
            return self.row(str(content[0]), tuple(content[1]), content[2])
        if kind in COPIED:
            parts = [self.decode(part) for part in content]
            if kind in ("datetime", "time"):
                return COPIED[kind](*parts[:-1], fold=parts[-1])
            return COPIED[kind](*parts)
        if kind == "member":
            return member_of(*content)
        if kind == "mappingproxy":
            return types.MappingProxyType(self.decode(content))
        if kind == "view":
            return METHODS_OF_VIEWS[content[0]](self.decode(content[1]))
        if kind == "alias":
            return alias_of(*map(self.decode, content))
        if kind == "written":
            module = importlib.import_module(WRITTEN[content[0]])
            return vars(module)[content[0]](str(content[1]))
        if kind == "memoryview":
            view: Any = memoryview(self.decode(content[0]))
            return view if content[1] == "B" else view.cast(content[1])
        if kind == "single":
            return SINGLE[content]
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
PARTS_OF_TIME: dict[type, tuple[str, ...]] = {
    date: DAY,
    time: (*CLOCK, "tzinfo", "fold"),
    datetime: (*DAY, *CLOCK, "tzinfo", "fold"),
    range: ("start", "stop", "step"),
    timedelta: ("days", "seconds", "microseconds"),
}


def parts_of(value: Any) -> Any:
    """Return the arguments that make an object of COPIED (of times, the last one is ``fold``), or
    None if there are none, as for times with a zone of another class than ``timezone``."""
    if isinstance(value, timezone):
        return value.__getinitargs__()  # type: ignore[attr-defined]
    if isinstance(value, (datetime, time)):
        zone = type(value.tzinfo)
        is_copied = zone in (type(None), timezone) or WRITTEN.get(zone.__name__) == "zoneinfo"
        if not is_copied:
            return None
    return operator.attrgetter(*PARTS_OF_TIME[type(value)])(value)


METHODS_OF_VIEWS: dict[str, Any] = {
    type(method({})).__name__: method for method in (dict.keys, dict.values, dict.items)
}
VIEWS = {type(method({})) for method in METHODS_OF_VIEWS.values()}
WRITTEN = {
    "UUID": "uuid",
    "ZoneInfo": "zoneinfo",
    **dict.fromkeys(("PosixPath", "PurePosixPath"), "pathlib"),
    **{
        f"IPv{version}{kind}": "ipaddress"
        for version in (4, 6)
        for kind in ("Address", "Interface", "Network")
    },
}
"""Classes whose objects are copied as their text, and their modules."""


def buffer_of(view: memoryview) -> bytes | bytearray | None:
    """Return the data of a view: a copy of bytes, which cannot change, or the bytearray that is
    viewed as it is. None for parts of one, for several dimensions, and for other objects."""
    try:
        data: Any = view.obj
        is_flat = view.ndim == 1 and view.c_contiguous
        if not is_flat or (view.format != "B" and not view.nbytes):  # (which cannot be cast)
            return None
    except ValueError:  # it was released
        return None
    if type(data) is bytes:
        return bytes(view)
    is_whole = type(data) is bytearray and view.nbytes == len(data) and not view.readonly
    return data if is_whole else None


def is_library_enum(kind: type) -> bool:
    """Return whether a class is an enum of ENUM_MODULES, not another one with the same name."""
    module = sys.modules.get(kind.__module__) if kind.__module__ in ENUM_MODULES else None
    return module is not None and vars(module).get(kind.__name__) is kind


def member_of(module: str, kind: str, name: str | None, value: int | None) -> Any:
    """Return the member of an enum of ENUM_MODULES by its name; of combined flags, by the value.
    Raises ValueError if there is none."""
    if module not in ENUM_MODULES:
        raise ValueError("not an enum of the standard library")
    found = vars(importlib.import_module(module)).get(kind)
    if not isinstance(found, enum.EnumMeta):
        raise ValueError("not an enum")
    return found(value) if name is None else found.__members__[name]


def is_written(kind: type) -> bool:
    """Return whether a class is one of WRITTEN, not another one with the same name."""
    module = sys.modules.get(WRITTEN[kind.__name__])
    return module is not None and vars(module).get(kind.__name__) is kind


def alias_of(origin: Any, arguments: Any) -> Any:
    """Return a class with parameters, such as ``list[int]``."""
    if not isinstance(origin, type) or type(arguments) is not tuple:
        raise TypeError("no class with parameters")
    return types.GenericAlias(origin, arguments)


def identical(parts: list[Any], others: list[Any]) -> bool:
    """Return whether two lists have the same objects as items."""
    return len(parts) == len(others) and all(map(operator.is_, parts, others))


class Container(NamedTuple):
    """A class of containers that can change."""

    kind: Any
    parts: Callable[[Any], list[Any]]
    """Returns what is in a container."""
    fill: Callable[[Any, list[Any]], None]
    """Gives a container the parts of another one."""
    make: Callable[[list[Any]], Any]
    """Returns an empty container, for the JSON of parts."""
    same: Callable[[list[Any], list[Any]], bool] = identical
    """Returns whether a container has not changed between two times."""
    live: Callable[[Any], list[Any]] | None = None
    """Returns iterables of all that may change in a container, if there are such iterables."""


def changed_indices(parts: list[Any], others: list[Any]) -> list[int]:
    """Return the indices of the items of ``others`` that are no items of ``parts`` there."""
    num = min(len(parts), len(others))
    indices: list[int] = []
    for start in range(0, num, 256):  # (most are identical)
        end = min(start + 256, num)
        pair = parts[start:end], others[start:end]
        if not identical(*pair):
            indices += itertools.compress(range(start, end), map(operator.is_not, *pair))
    return [*indices, *range(num, len(others))]


def patched(parts: list[Any], changed: list[Any], patch: Sequence[Any]) -> list[Any]:
    """Return the parts of a container after a change. ``patch``: the indices of the changed parts,
    and the numbers of parts before and after; or empty if all parts changed. Raises an error if
    they do not match."""
    if not patch:
        return changed
    indices, num_before, num_after = patch
    if len(parts) != num_before:
        raise ValueError("changes of other parts")
    result = parts[:num_after]
    for index, part in zip(indices, changed, strict=True):
        if index == len(result):
            result.append(part)
        else:
            result[index] = part
    if len(result) != num_after:
        raise ValueError("parts are missing")
    return result


def fill_list(container: Any, parts: list[Any]) -> None:
    """Fill a list."""
    list.__setitem__(container, slice(None), parts)


def fill_set(container: Any, parts: list[Any]) -> None:
    """Fill a set."""
    items = set(parts)
    set.clear(container)
    set.update(container, items)


def parts_of_dict(container: Any) -> list[Any]:
    """Return each key and its value."""
    kind = OrderedDict if isinstance(container, OrderedDict) else dict
    return [*itertools.chain.from_iterable(kind.items(container))]


def fill_dict(container: Any, parts: list[Any]) -> None:
    """Fill a mapping."""
    items = dict(zip(parts[::2], parts[1::2], strict=True))
    if isinstance(container, OrderedDict):  # (dict.update does not keep its order)
        OrderedDict.clear(container)
        for key, value in items.items():
            OrderedDict.__setitem__(container, key, value)
    else:
        dict.clear(container)
        dict.update(container, items)


FACTORY: Any = vars(defaultdict)["default_factory"]


def fill_defaultdict(container: Any, parts: list[Any]) -> None:
    """Fill a defaultdict."""
    if parts[0] is not None and not callable(parts[0]):
        raise TypeError("a factory that is none")
    fill_dict(container, parts[1:])
    FACTORY.__set__(container, parts[0])


def fill_deque(container: Any, parts: list[Any]) -> None:
    """Fill a deque."""
    deque.clear(container)
    deque.extend(container, parts[1:])


def fill_bytes(container: Any, parts: list[Any]) -> None:
    """Fill an array or a bytearray."""
    if type(container) is bytearray:
        container[:] = parts[-1]  # (of the same size, also if there is a memoryview of it)
        return
    del container[:]
    container.frombytes(parts[-1])


def fill_wrapper(container: Any, parts: list[Any]) -> None:
    """Fill an object that wraps a list, a dict or a str."""
    name, kind = WRAPPERS[type(container)]
    if type(parts[0]) is not kind:
        raise TypeError("another class")
    vars(container)[name] = parts[0]


WRAPPERS: dict[Any, tuple[str, type]] = {
    ChainMap: ("maps", list),
    UserDict: ("data", dict),
    UserList: ("data", list),
    UserString: ("data", str),
}
"""Attributes of the classes of objects that wrap a container or a text, and their classes."""


def mapping(kind: Any) -> Container:
    """Return the row of a class of mappings."""
    return Container(
        kind,
        parts_of_dict,
        fill_dict,
        lambda parts: kind(),
        live=lambda value: [value, value.values()],
    )


def wrapper(kind: Any, name: str) -> Container:
    """Return the row of a class of WRAPPERS."""
    new = object.__new__
    return Container(kind, lambda value: [vars(value)[name]], fill_wrapper, lambda parts: new(kind))


def alone(container: Any) -> list[Any]:
    """Return a container as the only iterable of what may change in it."""
    return [container]


CONTAINERS_OF_PYTHON = (
    Container(list, lambda value: [*list.__iter__(value)], fill_list, lambda parts: [], live=alone),
    Container(set, lambda value: [*set.__iter__(value)], fill_set, lambda parts: set(), live=alone),
    Container(
        defaultdict,
        lambda value: [FACTORY.__get__(value), *parts_of_dict(value)],
        fill_defaultdict,
        lambda parts: defaultdict(),
    ),
    Container(
        deque,
        lambda value: [value.maxlen, *deque.__iter__(value)],
        fill_deque,
        lambda parts: deque(maxlen=parts[0]),
        live=alone,
    ),
    Container(
        bytearray, lambda value: [bytes(value)], fill_bytes, lambda parts: bytearray(), operator.eq
    ),
    Container(
        array,
        lambda value: [value.typecode, value.tobytes()],
        fill_bytes,
        lambda parts: array(parts[0]),
        operator.eq,
    ),
    *map(mapping, (dict, Counter, OrderedDict)),
    *(wrapper(kind, name) for kind, (name, _) in WRAPPERS.items()),
)
FILLED = frozenset((list, set, dict, defaultdict, Counter, OrderedDict, deque))
"""Containers from which classes of the tests may derive: their functions are called as those of
the class of Python, not of the class that derives from it."""
CONTAINERS: dict[Any, Container] = {row.kind: row for row in CONTAINERS_OF_PYTHON}
BY_NAME = {kind.__name__: row for kind, row in CONTAINERS.items()}
KNOWN: dict[str, Any] = {
    kind.__name__: kind for kind in (*COPIED.values(), *CONTAINERS, Decimal, Fraction)
}
"""Classes of the standard library that the code and the tests share."""
BUILTIN_CLASSES: dict[str, type] = {
    kind.__name__: kind
    for kind in (*vars(types).values(), *vars(builtins).values())
    if isinstance(kind, type) and kind.__module__ == "builtins"
}


class Shared:
    """A container that exists on both sides, with its parts at the time of the last message."""

    __slots__ = ("block", "container", "idle", "parts", "value")

    def __init__(self, value: Any) -> None:
        self.value: Any = value
        self.container = CONTAINERS.get(type(value)) or CONTAINERS[value_class(type(value))]
        self.parts: Any = None
        self.idle = 0
        """Messages since this side referred to the container or a message named it."""
        self.block: Block

    def update(self) -> list[Any] | None:
        """Let the parts be the present ones, and return the former ones."""
        before, self.parts = self.parts, self.container.parts(self.value)
        self.block.clear()
        return before

    def has_changed(self) -> bool:
        """Return whether the container changed since the last message, as far as that can be
        seen."""
        with contextlib.suppress(Exception):  # (the code removed what a wrapper wraps)
            parts = self.container.parts(self.value)
            return self.parts is not None and not self.container.same(parts, self.parts)
        return False

    def num_references(self) -> int:
        """Return the number of references to the container."""
        return sys.getrefcount(self.value)


class Block:
    """Up to BLOCK_SIZE shared containers. Finds without a step of Python per container or item
    that none of them changed, and that all of them are used."""

    def __init__(self) -> None:
        self.entries: dict[int, Shared] = {}
        self.clear()

    def add(self, number: int, entry: Shared) -> None:
        """Add a container."""
        self.entries[number], entry.block = entry, self
        self.clear()

    def remove(self, number: int) -> None:
        """Remove a container."""
        del self.entries[number]
        self.clear()

    def clear(self) -> None:
        """Refer to no container or item, before one is changed or removed."""
        self.is_known = False
        """Whether the rest of the attributes describes the containers."""
        self.values: list[Any] = []
        self.fewest: list[int] = []
        """References to each container of ``values`` if nothing else refers to it."""
        self.live: list[Any] = []
        self.sizes: list[int] = []
        self.items: list[Any] = []
        """Items of the iterables in ``live`` at the time of the last message."""
        self.others: list[int] = []
        """Numbers of the containers without such iterables."""
        self.cost = 0

    def changed(self) -> list[int]:
        """Return the numbers of the containers that changed since the last message."""
        if self.is_known and self.is_as_known():
            return [number for number in self.others if self.entries[number].has_changed()]
        self.describe()
        changed = [number for number, entry in self.entries.items() if entry.has_changed()]
        self.is_known = not changed and all(e.parts is not None for e in self.entries.values())
        return changed

    def is_as_known(self) -> bool:
        """Return whether the iterables have the same items as before."""
        try:
            items = itertools.chain.from_iterable(self.live)
            return [*map(len, self.live)] == self.sizes and all(
                map(operator.is_, items, self.items)
            )
        except RuntimeError:  # (another thread of the code changes one)
            return False

    def describe(self) -> None:
        """Remember the present items. What changes from now on is found by comparison with them,
        and what changed before by comparison of the parts, which comes next."""
        self.clear()
        for number, entry in self.entries.items():
            container = entry.container
            is_usual = type(entry.value) is container.kind  # (others may iterate differently)
            live = container.live(entry.value) if is_usual and container.live else []
            self.live += live
            self.values.append(entry.value)
            self.fewest.append(FEWEST + len(live))
            self.cost += PER_CONTAINER + len(entry.parts or ())
            if not live:
                self.others.append(number)
        with contextlib.suppress(RuntimeError):
            self.items = [*itertools.chain.from_iterable(self.live)]
            self.sizes = [*map(len, self.live)]

    def has_unused(self) -> bool:
        """Return whether this side refers to one of the containers no longer, if all are known."""
        counts = map(sys.getrefcount, self.values)
        return any(map(operator.le, counts, self.fewest))

    def unused(self, max_idle: int) -> Iterator[int]:
        """Yield the numbers of the containers to which this side has not referred for more than
        ``max_idle`` messages, each after the one before was forgotten."""
        if not self.is_known:
            self.clear()
        elif not self.has_unused():
            return
        for index, (number, entry) in enumerate(list(self.entries.items())):
            # (A block that is known refers to its containers itself.)
            num_own = 1 + self.fewest[index] - FEWEST if self.is_known else 0
            if entry.num_references() <= UNUSED + num_own:
                entry.idle += 1
                if entry.idle > max_idle:
                    yield number


UNUSED = Shared([]).num_references()
"""References to a container to which nothing else on this side refers."""
FEWEST = next(map(sys.getrefcount, [[]])) + 1
"""The same for one in ``Block.values``, without its iterables."""
BLOCK_SIZE = 64
MAX_IDLE = 16
"""Messages for which the code's side keeps a container that only the tests refer to: they may pass
it to the code again."""
COMPARED_PER_S = 20_000_000
"""Parts of shared containers that the calls of a test compare, to find those that changed, for each
second of its time limit. After that, containers are copied for each call."""
PER_CONTAINER = 10
"""Parts that cost as much as a container."""
SENT_AGAIN = 10
"""Parts that cost as much as one that changed, which is sent again."""


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

    def __init__(self, starter: Starter, task: Mapping[str, Any], trust: Trust) -> None:
        super().__init__(0)
        self.starter, self.trust = starter, trust
        self.ended = False
        self.max_compared = COMPARED_PER_S * task["test_s"]
        self.num_calls = 0
        """Calls that have not returned: more than one if the code calls the tests."""
        self.watched: list[str] = []
        """Plain globals of the code that the tests use and do not bind: they may change with each
        call."""
        self.on_change: Callable[[str, Any], None] = lambda name, value: None
        self.references: dict[int, Any] = {}
        """Objects and classes of the code by number."""
        self.created: dict[int, Any] = {}
        """Objects that the tests created from classes of the code whose operators they may use. A
        call that returns one of them gives another reference, which is not trusted like it, and
        which ``is`` the same object for the tests (``first_reference``)."""
        self.derived: set[int] = set()
        """Numbers of the results of operators with a value of the tests."""
        self.lent = Lent(self)
        self.names: dict[str, Any] = {}
        mine, other = socket.socketpair()
        with other:
            self.pid = starter.server(task["code"], other, task["test_s"])
        self.lines = Lines(mine)
        try:
            self.send({"used": sorted(trust.used)})
            self.names = usable_names(self.exchange())
        except BaseException:
            if status_is_timeout(self.close()):
                raise OutOfTime from None
            raise

    def apply(self, function: str, *arguments: Any, **named: Any) -> Any:
        """Apply a function of FUNCTIONS in the solution."""
        self.begin()
        message = self.encoded_call(arguments, named)
        message |= {"apply": function, "watched": self.watched}
        if patched := [name for name in ("print", "open") if is_patched(name)]:
            message["patched"] = patched
        if classes := self.trust.new_classes():
            message["classes"] = {name: self.refer(kind) for name, kind in classes.items()}
        self.num_calls += 1
        try:
            self.send(message)
            return self.exchange(function)
        finally:
            self.num_calls -= 1

    def encoded_call(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON of arguments. Tests whose arguments cannot be sent cannot be used."""
        try:
            message: dict[str, Any] = {
                "arguments": [self.encode(value) for value in arguments],
                "named": {name: self.encode(value) for name, value in named.items()},
            }
            self.collect_new()
        except CannotSend as error:
            self.trust.unsendable = str(error)
            raise
        return message

    def begin(self) -> None:
        """Collect what the tests changed, and share no longer what they do not need, or too much
        of it, before a message."""
        self.forget_both(self.unsent)  # (of a message that could not be sent)
        self.unsent = []
        self.collect_changed()
        self.forget_unused()
        if self.num_compared > self.max_compared and not self.num_calls:
            self.forget_both(list(self.shared))

    def send(self, tree: dict[str, Any]) -> None:
        """Send a message."""
        if self.ended:
            raise Ended("the code ended its process")
        self.attach(tree)
        if self.lent.containers:
            tree["lent"], self.lent.containers = self.lent.containers, []
        self.lines.send(tree)

    def exchange(self, function: str | None = None) -> Any:
        """Answer requests of the code until the reply comes, and return its value. A reply that is
        not valid ends the process."""
        try:
            reply = self.lines.receive()
            while "ask" in reply:
                self.accept(reply)
                self.send(self.lent.answer(reply))
                reply = self.lines.receive()
            self.accept(reply)
            for name, content in reply.get("names", ()):
                self.renew(name, self.decode(content))
            error = self.error_of(reply["error"], function) if "error" in reply else None
            value = self.decode(reply["value"]) if error is None else None
            self.forget_told(reply)
        except Exception:
            self.ended = True  # (a reply that is not valid: forged)
            raise Ended("the code ended its process") from None
        if error is not None:
            raise error
        return value

    def accept(self, reply: Mapping[str, Any]) -> None:
        """Define the classes of a message, unpack its containers, and print what the code
        printed."""
        for definition in reply.get("classes", ()):
            number = int(definition["number"])
            if number not in self.references:
                kind = self.known_class(definition) or make_class(self, definition)
                self.references[number] = kind
        self.unpack(reply)
        for name, text in reply.get("printed", {}).items():
            if name in ("stdout", "stderr") and vars(sys)[name] is not vars(sys)[f"__{name}__"]:
                vars(sys)[name].write(str(text))

    def known_class(self, definition: Mapping[str, Any]) -> type | None:
        """Return the class of errors of the standard library that a definition describes, if the
        tests import its module, or None."""
        module, name = str(definition["module"]), str(definition["name"])
        if definition["is_error"] is not True or not self.trust.is_imported(module):
            return None
        kind = vars(sys.modules[module]).get(name)
        is_usual = is_error_class(kind) and kind.__eq__ is object.__eq__
        return kind if is_usual and kind.__module__ == module else None

    def renew(self, name: str, value: Any) -> None:
        """Give a watched name of the code its new value."""
        if name not in self.watched:
            raise ValueError("a name that is not watched")
        self.names[name] = value
        self.on_change(name, value)

    def error_of(self, tree: Any, function: str | None) -> BaseException:
        """Return the exception to raise for an error in the solution.

        Only ``next``, and tests that name it, get a StopIteration: it would end a loop of the
        tests before its last check."""
        error = self.decode(tree)
        if not isinstance(error, BaseException):
            raise TypeError("an error that is none")
        ends_loop = isinstance(error, ENDS_LOOPS) and not self.trust.is_stop_named
        if ends_loop and function not in ("next", "run"):
            error = RuntimeError("the code raised " + type(error).__name__)
        if isinstance(error, (ImportError, SystemExit)):
            ERRORS_OF_CODE.append(error)
        return error

    def make_error(self, parts: Mapping[str, Any]) -> BaseException:
        """Return an error with the class, the arguments and the plain attributes that it has in
        the solution."""
        kind = self.decode(parts["class"])
        if not is_error_class(kind):
            raise TypeError("a class of errors that is none")
        arguments = tuple(self.decode(item) for item in parts["args"])
        fields = {str(name): self.decode(item) for name, item in parts["fields"].items()}
        error: BaseException = new_error(kind, arguments, fields)
        if type(kind) is RemoteClass:
            vars(error)[NUMBER] = int(parts["number"])
        error.__cause__ = self.decode(parts["cause"])
        error.__context__ = self.decode(parts["context"])
        error.__suppress_context__ = parts["suppress"] is True
        return error

    def note_created(self, value: Any) -> Any:
        """Return the reference for an object that the tests created by calling a class."""
        names = {n for base in type(value).__mro__ for n in vars(base)}
        if names.isdisjoint(("__contains__", *OPERATORS)) or data_of(value) in MUTABLE_DATA:
            return value
        number = number_of(value)
        if number not in self.created:
            base: Any = data_of(value)
            content = None if base is None else content_of(value)
            self.created[number] = self.new_reference(type(value), number, content)
        return self.created[number]

    def is_created(self, value: Any) -> bool:
        """Return whether the tests created an object by calling a class of the code by its name,
        which all names of the tests for it confirm to be a class."""
        names = [n for n, kind in self.names.items() if kind is type(value) and self.trust.uses(n)]
        are_classes = bool(names) and all(name[0].isupper() and "_" not in name for name in names)
        return are_classes and self.created.get(number_of(value)) is value

    def refer(self, value: Any) -> dict[str, Any]:
        """Encode an object of the tests, or one of the solution."""
        if is_remote(value):
            if solution_of(value) is not self:
                raise Ended("the object's process has ended")
            return {"object": number_of(value)}
        return self.lent.refer(value)

    def is_reference(self, value: Any) -> bool:
        """Return whether an object is one of the solution, or one of the tests with plain data."""
        return is_remote(value) or self.lent.has_data(value)

    def resolve(self, kind: str, content: Any) -> Any:
        """Decode an object of the solution."""
        if kind == "module":
            return MODULE
        if kind == "error":
            return self.make_error(content)
        if kind == "lent":
            return self.lent.objects[content]
        if kind == "builtin":
            return BUILTIN_CLASSES[content]
        if kind == "known":
            return KNOWN[content]
        if kind == "class":
            return self.references[int(content)]
        number, kind_number, data = content
        if number not in self.references:
            reference_class = self.references[int(kind_number)]
            content = self.decode(data)
            self.references[int(number)] = self.new_reference(reference_class, int(number), content)
        elif data_of(self.references[number]) in MUTABLE_DATA:
            reference = self.references[number]
            fill(reference, data_of(reference), self.decode(data))
        return self.references[number]

    def new_reference(self, kind: Any, number: int, content: Any) -> Any:
        """Return a new reference to an object of the solution, with its plain data."""
        if type(kind) is not RemoteClass or is_error_class(kind):
            raise TypeError("no class of objects")
        base = type.__getattribute__(kind, REMOTE)[2]
        new: Any = object.__new__ if base is None else base.__new__
        if base is None:
            reference = new(kind)
        else:
            if type(content) is not base:
                raise TypeError("other data")
            is_filled_later = base in MUTABLE_DATA
            reference = new(kind) if is_filled_later else new(kind, content)
            if is_filled_later:
                fill(reference, base, content)
        object.__setattr__(reference, NUMBER, number)
        return reference

    def close(self) -> int:
        """End the process and return its status."""
        self.ended = True
        self.lines.connection.close()
        return self.starter.end(self.pid)


class Trust:
    """Facts of the tests on which it depends how objects pass between them and the code."""

    def __init__(self) -> None:
        self.unsendable: str | None = None
        """What the present test passes to the code although it cannot be sent."""
        self.is_stop_named = False
        self.used: set[str] = set()
        """Names of the tests that may be names of the code."""
        self.modules: set[str] = set()
        """Names of the modules of the standard library that the tests import anywhere."""
        self.namespace: dict[str, Any] = {}
        self.classes: dict[str, type] = {}
        """Classes of the tests that the solution knows."""
        self.closed: set[str] = set()
        """Names of the classes of the tests that check something: the code must not ask them."""
        self.open: set[str] = set()
        """Names of the classes of the tests that the code may use by name: they have methods only,
        no values of the tests."""

    def uses(self, name: str) -> bool:
        """Return whether the tests use a name."""
        return name in self.used

    def is_imported(self, module: str) -> bool:
        """Return whether the tests import a module of the standard library, and import it. (Not
        unittest: it gives its own errors a meaning, such as a skipped test.)"""
        root = module.partition(".")[0]
        if root == "unittest" or root not in self.modules:
            return False
        __import__(root)
        return module in sys.modules

    def is_of_tests(self, kind: type) -> bool:
        """Return whether a class is defined by the tests, with no base that tests something."""
        if kind.__name__ in self.closed:
            return False
        modules = {base.__module__.partition(".")[0] for base in kind.__mro__}
        is_own = (
            kind.__module__ == "__main__"
            and vars(sys.modules["__main__"]).get(kind.__name__) is not kind
        )
        return is_own and "unittest" not in modules

    def new_classes(self) -> dict[str, type]:
        """Return the classes that the tests defined since the last call, by name."""
        defined = {
            name: kind
            for name, kind in [(name, self.namespace.get(name)) for name in self.open]
            if isinstance(kind, type) and name not in self.classes and self.is_of_tests(kind)
        }
        self.classes |= defined
        return defined


class Lent:
    """Objects of the tests that the code uses: functions, classes and objects of classes of the
    tests, iterators, files in memory, mocks and those of LENT. The code calls them and reads and
    sets public attributes by number; it cannot replace a method or reach anything private.

    Objects of classes that derive from plain data or a container also have it in the code's
    process."""

    def __init__(self, solution: Solution) -> None:
        self.solution = solution
        self.objects: dict[int, Any] = {}
        self.containers: list[Any] = []
        """Rows of new containers for the next message: number, class of Python, reference."""

    def has_data(self, value: Any) -> bool:
        """Return whether the class of an object is one of the tests that derives from plain data or
        a container. (Named tuples are copied.)"""
        kind = type(value)
        if kind.__module__ != "__main__" or value_class(kind) is None:
            return False
        return fields_of(kind) is None and self.solution.trust.is_of_tests(kind)

    def refer(self, value: Any) -> dict[str, Any]:
        """Encode an object of the tests."""
        kind = type(value)
        if isinstance(value, BaseException):
            return {"raised": self.error(value)}
        if isinstance(value, type) and not self.solution.trust.is_of_tests(value):
            module, name = value.__module__, value.__qualname__
            if BUILTIN_CLASSES.get(name) is value:
                return {"builtin": name}
            if module in sys.stdlib_module_names:
                return {"import": [module, name]}
        elif isinstance(value, (types.ModuleType, re.Pattern)):
            return self.copied(value)
        elif not callable(value) and not self.is_usable(value):
            raise CannotSend("pass a " + kind.__name__ + " to the code, which cannot be sent to it")
        self.objects[id(value)] = value
        if isinstance(value, types.FunctionType | types.MethodType | types.BuiltinFunctionType):
            doc = value.__doc__ if type(value.__doc__) is str else None
            return {"call": [id(value), value.__name__, doc]}
        if self.has_data(value):
            return self.with_data(value)
        special = [n for n in SPECIAL if any(n in vars(c) for c in kind.__mro__[:-1])]
        special += ["__dict__"] * is_namespace(value)
        return {"lent": [id(value), kind.__name__, special]}

    def copied(self, value: Any) -> dict[str, Any]:
        """Encode a module of the standard library or a compiled pattern: the code gets its own."""
        self.objects[id(value)] = value
        if isinstance(value, re.Pattern):
            return {"pattern": [id(value), self.solution.encode(value.pattern), value.flags]}
        if value.__name__.partition(".")[0] not in sys.stdlib_module_names:
            raise CannotSend("pass the module " + value.__name__ + " to the code")
        return {"module": [id(value), value.__name__]}

    def with_data(self, value: Any) -> dict[str, Any]:
        """Encode an object whose class derives from plain data or a container."""
        kind = type(value)
        base: Any = value_class(kind)
        bases = [c for c in kind.__mro__ if c is not object and not is_of_python(c)]
        own = {name: part for c in reversed(bases) for name, part in vars(c).items()}
        names = [n for n in SPECIAL if own.get(n) is not None]
        names += ["__getitem__"] * ("__missing__" in own)
        names += [n for n in own if not n.startswith("_") and n in dir(base)]
        row = [id(value), kind.__name__, names]
        if base not in CONTAINERS:
            return {"lent": [*row, self.solution.encode_plain(value)]}
        if id(value) not in self.solution.shared_ids:
            self.containers.append([self.solution.share(value), base.__name__, row])
        return {"lent": row}

    def is_usable(self, value: Any) -> bool:
        """Return whether the code may use an object that is no function."""
        kind = type(value)
        is_iterator = any("__next__" in vars(base) for base in kind.__mro__)
        is_known = kind is object or LENT.get(kind.__name__) == kind.__module__
        is_open = is_iterator or is_file(value) or is_mock(value) or is_known
        return is_open or self.solution.trust.is_of_tests(kind)

    def error(self, error: BaseException) -> dict[str, Any]:
        """Encode an error of the tests."""
        names = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
        arguments = () if isinstance(error, AssertionError) else error.args
        self.objects[id(error)] = error
        try:
            args = [self.solution.encode(item) for item in arguments]
            self.solution.collect_new()
        except Exception:  # (an argument that cannot be sent)
            args = [str(error)]
        return {"number": id(error), "name": type(error).__name__, "names": names, "args": args}

    def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Do what the code asks for, and return the message with the result."""
        try:
            decode = self.solution.decode
            arguments = [decode(item) for item in message["arguments"]]
            named = {str(name): decode(item) for name, item in message["named"].items()}
            self.solution.forget_told(message)
            value = self.ask(str(message["ask"]), message["of"], arguments, named)
            self.solution.begin()
            reply = {"value": self.solution.encode(value)}
            self.solution.collect_new()
            return reply
        except OutOfTime:
            raise
        except BaseException as error:  # becomes data, which the code raises
            return {"error": self.solution.encode(error)}

    def ask(self, request: str, of: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
        """Call a function, or get or set an attribute."""
        if request == "patched" and (of == "input" or is_patched(of)):
            return vars(builtins)[of](*arguments, **named)
        if request == "stdin" and of in ("readline", "read"):
            return str(getattr(sys.stdin, of)(*arguments))  # house: ok a file of the tests
        value = self.objects[of]
        if request == "call":
            return value(*arguments, **named)
        if request == "special":
            return self.special(value, *arguments)
        if request == "isinstance" and isinstance(value, type):
            return isinstance(arguments[0], value)
        if request in ("copy", "deepcopy"):
            return FUNCTIONS[request](value)
        if request == "vars" and is_namespace(value):
            return vars(value)
        name = arguments[0]
        is_class = isinstance(value, type) and self.solution.trust.is_of_tests(value)
        is_usable = self.is_usable(value) or (is_class and request == "get")
        if type(name) is not str or name.startswith("_") or not is_usable:
            raise AttributeError(f"{type(value).__name__!r} object has no attribute {name!r}")
        if request == "get":
            return self.attribute(value, name)
        if is_mock(value) or is_file(value) or callable(vars_of_class(value).get(name)):
            raise AttributeError(f"{type(value).__name__!r} object attribute {name!r} is read-only")
        return setattr(value, name, arguments[1])

    def special(self, value: Any, name: str, *arguments: Any) -> Any:
        """Call a special method."""
        if name not in SPECIAL or not any(name in vars(base) for base in type(value).__mro__):
            raise TypeError(f"{type(value).__name__!r} object has no {name}")
        return FUNCTIONS[SPECIAL[name]](value, *arguments)

    def attribute(self, value: Any, name: str) -> Any:
        """Return a public attribute. Checks of a mock are none, nor are parts of a generator."""
        is_closed = name.startswith("assert") or name.endswith("_mock") or name.startswith("mock_")
        if (is_mock(value) and is_closed) or isinstance(value, types.GeneratorType):
            raise AttributeError(name)
        return getattr(value, name)  # house: ok an attribute of the tests


def vars_of_class(value: Any) -> dict[str, Any]:
    """Return all attributes of the class of an object and of its bases."""
    return {k: v for base in reversed(type(value).__mro__) for k, v in vars(base).items()}


LENT = {
    **{"SimpleNamespace": "types", "Namespace": "argparse", "Random": "random"},
    **{"Queue": "queue", "LifoQueue": "queue", "PriorityQueue": "queue", "Template": "string"},
}
"""Classes of the standard library whose objects the code may use, and their modules."""


def is_namespace(value: Any) -> bool:
    """Return whether an object is a plain set of attributes."""
    name = type(value).__name__
    return name.endswith("Namespace") and LENT.get(name) == type(value).__module__


def value_class(kind: type) -> type | None:
    """Return the class of plain data or of a container from which a class derives, or None."""
    return next((c for c in kind.__mro__ if is_of_python(c)), None)


def is_of_python(kind: type) -> bool:
    """Return whether a class is one of plain data or a container with own storage."""
    return DATA.get(kind.__name__) is kind or kind in FILLED


def is_mock(value: Any) -> bool:
    """Return whether an object is a mock of unittest."""
    mock = sys.modules.get("unittest.mock")
    return mock is not None and isinstance(value, mock.NonCallableMock)


def is_file(value: Any) -> bool:
    """Return whether an object is a file in memory."""
    return type(value) in (io.StringIO, io.BytesIO)


def new_error(kind: Any, arguments: tuple[Any, ...], fields: Mapping[str, Any]) -> BaseException:
    """Return an error with attributes, without calling the functions of its class."""
    base = next(c for c in kind.__mro__ if c.__module__ == "builtins" and is_error_class(c))
    slots = slots_of(base)
    group = vars(builtins).get("BaseExceptionGroup")
    is_group = group is not None and issubclass(base, group)
    error: BaseException = base.__new__(kind, *arguments) if is_group else base.__new__(kind)
    error.args = arguments
    for name, value in fields.items():
        if name in slots:
            with contextlib.suppress(AttributeError):  # (a part that cannot be set)
                slots[name].__set__(error, value)
        elif name.isidentifier() and not name.startswith("__") and name not in METHODS_OF_ERRORS:
            vars(error)[name] = value
    return error


METHODS_OF_ERRORS = ("args", "with_traceback", "add_note")
ERRORS_OF_CODE: list[BaseException] = []
"""Errors of imports and exits that the code raised."""
PATCHABLE: dict[str, Any] = {name: vars(builtins)[name] for name in ("input", "print", "open")}
"""Functions of Python that the code calls as the tests replaced them."""


def is_patched(name: str) -> bool:
    """Return whether the tests replaced one of PATCHABLE."""
    return name in PATCHABLE and vars(builtins)[name] is not PATCHABLE[name]


MODULE = object()
"""Stands for a module among the names of the solution."""
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


class Reference:
    """Base of the classes of objects in the solution, as the tests see them.

    Each class has the special methods that the solution's class defines (``special_method``). A
    reference equals no plain value: otherwise an object whose methods always return true would
    pass every test."""

    def __getattr__(self, name: str) -> Any:
        if name == "__signature__":
            return signature_of(self)
        return solution_of(self).apply("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        solution_of(self).apply("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        solution_of(self).apply("delattr", self, name)

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        return solution_of(self).apply("getattr", self, "__dict__")

    def __eq__(self, other: object) -> bool:
        return (
            is_remote(other)
            and solution_of(self) is solution_of(other)
            and (number_of(self) == number_of(other))
        )

    def __hash__(self) -> int:
        return hash(number_of(self))

    def __copy__(self) -> Any:
        return solution_of(self).apply("copy", self)

    def __deepcopy__(self, memo: Any) -> Any:
        return solution_of(self).apply("deepcopy", self)

    def __dir__(self) -> Any:
        return solution_of(self).apply("dir", self)


class RemoteError:
    """Base of the classes of errors of the solution, as the tests see them."""

    def __getattr__(self, name: str) -> Any:
        if NUMBER not in vars(self) or name.startswith("__"):
            raise AttributeError(name)
        return solution_of(self).apply("getattr", self, name)


class RemoteClass(type):
    """A class of the solution, as the tests see it: with the name and the bases that it has
    there."""

    def __new__(cls, *definition: Any) -> Any:
        raise TypeError("a class of the tests cannot derive from a class of the code")

    def __getattr__(cls, name: str) -> Any:
        if name == "__signature__":
            return signature_of(cls)
        return solution_of(cls).apply("getattr", cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        solution_of(cls).apply("setattr", cls, name, value)

    def __delattr__(cls, name: str) -> None:
        solution_of(cls).apply("delattr", cls, name)

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        created = solution_of(cls).apply("call", cls, *arguments, **named)
        return solution_of(cls).note_created(created) if type(created) is cls else created

    def __instancecheck__(cls, value: Any) -> bool:
        return type.__instancecheck__(cls, value) or (
            is_remote(value) and solution_of(cls).apply("isinstance", value, cls) is True
        )

    def __subclasscheck__(cls, kind: Any) -> bool:
        return type.__subclasscheck__(cls, kind) or (
            type(kind) is RemoteClass and solution_of(cls).apply("issubclass", kind, cls) is True
        )

    @property
    def __annotations__(cls) -> Any:  # type: ignore[override]
        return solution_of(cls).apply("getattr", cls, "__annotations__")

    def __iter__(cls) -> Any:
        return iter(solution_of(cls).apply("iter", cls))

    def __reversed__(cls) -> Any:
        return solution_of(cls).apply("reversed", cls)

    def __len__(cls) -> Any:
        return solution_of(cls).apply("len", cls)

    def __contains__(cls, value: Any) -> Any:
        if is_remote(value) and solution_of(cls) is solution_of(value):
            return solution_of(cls).apply("contains", cls, value) is True
        return any(item is value or item == value for item in cls)

    def __getitem__(cls, key: Any) -> Any:
        return solution_of(cls).apply("getitem", cls, key)

    def __bool__(cls) -> bool:
        return True

    def __dir__(cls) -> Any:
        return solution_of(cls).apply("dir", cls)


NUMBER = "(number)"
REMOTE = "(remote)"
"""Names of attributes with the facts of a reference, and of its class. (No name of the code.)"""


def is_remote(value: Any) -> bool:
    """Return whether a value of the tests is an object or a class of the solution."""
    return type(type(value)) is RemoteClass or type(value) is RemoteClass


def solution_of(value: Any) -> Solution:
    """Return the process of an object or a class of the solution."""
    kind = value if type(value) is RemoteClass else type(value)
    return type.__getattribute__(kind, REMOTE)[0]


def number_of(value: Any) -> int:
    """Return the number of an object or a class in its process."""
    if type(value) is RemoteClass:
        return type.__getattribute__(value, REMOTE)[1]
    return object.__getattribute__(value, NUMBER)


def first_reference(value: Any) -> Any:
    """Return the reference that calls of the code give for an object that the tests created, which
    may be another one than theirs (``Solution.created``); other values as they are."""
    if type(type(value)) is not RemoteClass or is_error_class(type(value)):
        return value
    solution, number = solution_of(value), number_of(value)
    return solution.references[number] if solution.created.get(number) is value else value


def data_of(value: Any) -> type | None:
    """Return the class of plain data from which the class of an object of the solution derives."""
    is_object = type(type(value)) is RemoteClass
    return type.__getattribute__(type(value), REMOTE)[2] if is_object else None


def signature_of(value: Any) -> inspect.Signature:
    """Return the signature of a function or a class of the solution."""
    import inspect

    rows, result = solution_of(value).apply("signature", value)
    empty = inspect.Parameter.empty
    parameters = [
        inspect.Parameter(
            str(name),
            inspect._ParameterKind[kind],
            default=default[0] if default else empty,
            annotation=annotation[0] if annotation else empty,
        )
        for name, kind, default, annotation in rows
    ]
    return inspect.Signature(parameters, return_annotation=result[0] if result else empty)


def evaluate_remotely(module: types.ModuleType, name: str) -> None:
    """Let a function that evaluates annotations do so in the code's process for its objects: their
    annotations may be any text."""
    function = vars(module)[name]

    def evaluate(value: Any, *rest: Any, **named: Any) -> Any:
        if is_remote(value):
            return solution_of(value).apply(name, value, *rest, **named)
        return function(value, *rest, **named)

    vars(module)[name] = evaluate


def make_class(solution: Solution, definition: Mapping[str, Any]) -> RemoteClass:
    """Return the class that stands for one of the solution. Raises an error if its definition is
    not valid."""
    base = DATA.get(definition["data"])
    parents = [solution.decode(tree) for tree in definition["bases"][:MAX_BASES]]
    parents = [p for p in dict.fromkeys(parents) if type(p) is RemoteClass or is_error_class(p)]
    is_error = any(is_error_class(parent) for parent in parents)
    if not any(type(parent) is RemoteClass for parent in parents):
        parents.insert(0, RemoteError if is_error else Reference)
    names = sorted({str(name) for name in definition["special"]} & SPECIAL.keys())
    methods: dict[str, Any] = {"__module__": "solution", "__doc__": definition["doc"]}
    methods |= {name: special_method(name, base) for name in names}
    if base in MUTABLE_DATA:
        methods = {**methods_of_container(base), **methods}
    elif base is not None:
        names = sorted({str(name) for name in definition["replaced"]} & public_names(base))
        methods |= {name: Replaced(name) for name in names}
        methods = {**{n: vars(base)[n] for n in (*COMPARISONS, "__hash__")}, **methods}
    if definition["kind"] in KINDS:
        kind = KINDS[definition["kind"]]
        methods["__class__"] = property(lambda self: kind)
        methods["__doc__"] = property(lambda self: self.__getattr__("__doc__"))
        methods |= METHODS_OF_COROUTINES if kind is types.CoroutineType else {}
    methods[REMOTE] = (solution, int(definition["number"]), base)
    name, new = str(definition["name"]), vars(type)["__new__"]
    if base is not None and not any(issubclass(parent, base) for parent in parents):
        parents.append(base)
    try:
        return new(RemoteClass, name, tuple(parents), methods)
    except TypeError:  # (bases whose order or layout is that of the original only)
        root = (Reference,) if base is None else (Reference, base)
        errors = tuple(parent for parent in parents if is_error_class(parent))[:1]
        return new(RemoteClass, name, (RemoteError, *errors) if errors else root, methods)


MAX_BASES = 32


class Replaced:
    """An attribute of plain data that a class of the code, which derives from it, replaces."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, value: Any, kind: Any) -> Any:
        remote = kind if value is None else value
        return solution_of(remote).apply("getattr", remote, self.name)


def public_names(base: type) -> set[str]:
    """Return the names of the public attributes of a class of plain data."""
    return {name for name in dir(base) if not name.startswith("_")}


def replaced_names(kind: type, base: type) -> list[str]:
    """Return the public attributes of a class of plain data that a class replaces which derives
    from it."""
    own = [c for c in kind.__mro__ if not issubclass(base, c)]
    return sorted({name for c in own for name in vars(c)} & public_names(base))


def is_error_class(kind: Any) -> bool:
    """Return whether a value is a class of errors."""
    return isinstance(kind, type) and BaseException in kind.__mro__


# Special methods of references


def special_method(name: str, base: type | None) -> Callable[..., Any]:
    """Return a special method of a reference. ``base``: the class of plain data from which its
    class derives, or None."""
    if name in COMPARISONS:
        return comparison(name, base)
    if name in OPERATORS:
        return binary_operator(name, base)
    if name == "__contains__":
        return contains(base)
    if name == "__hash__" and base is not None:
        return base.__hash__
    if name == "__exit__":
        return leave
    function = SPECIAL[name]

    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        solution = solution_of(self)
        if name in TO_NUMBER and number_of(self) in solution.derived:
            raise TypeError("the code's result of an operator with a value of the tests")
        return solution.apply(function, self, *arguments, **named)

    return updating(method) if base in MUTABLE_DATA else method


def leave(self: Any, *error: Any) -> None:
    """Leave a ``with`` block. The code cannot suppress its errors: a failed assert is one."""
    solution_of(self).apply("exit", self, *[e for e in error[1:2] if e is not None])


def comparison(name: str, base: type | None) -> Callable[..., Any]:
    """Return a comparison: of objects of the code by the code, of others by their plain data."""

    def method(self: Any, other: Any) -> Any:
        if is_remote(other) and solution_of(self) is solution_of(other):
            result = solution_of(self).apply(SPECIAL[name], self, other)
            return result is True if name in ("__eq__", "__ne__") else result
        if base is None:
            return NotImplemented
        refresh(self)
        return vars(base)[name](self, other)

    return method


def binary_operator(name: str, base: type | None) -> Callable[..., Any]:
    """Return an operator. The code gets a value of the tests only as the operand of an object that
    the tests themselves create from its class, and then the result is no plain value: in
    ``abs(f(1) - 3) < 1e-6`` it would be told the expected value, and could return 0."""
    function = SPECIAL[name]

    def method(self: Any, other: Any, *more: Any) -> Any:
        solution = solution_of(self)
        is_of_code = is_remote(other) and solution is solution_of(other)
        if is_of_code or solution.is_created(self):
            result = solution.apply(function, self, other, *more)
            if is_remote(result) and number_of(result) == number_of(self):
                return self  # (an operator in place)
            if not is_of_code and (not is_remote(result) or data_of(result) is not None):
                raise TypeError("an operator of the code has a plain result for a plain operand")
            if not is_of_code:
                solution.derived.add(number_of(result))
            return result
        if base is None:
            return NotImplemented
        refresh(self)
        return getattr(base, name)(self, other, *more)  # house: ok a class of Python

    return method


def contains(base: type | None) -> Callable[..., Any]:
    """Return ``__contains__``. The code is asked for its own objects, and for those that the tests
    create from its class; else an object that contains everything would pass every test."""

    def method(self: Any, value: Any) -> bool:
        solution = solution_of(self)
        is_asked = is_remote(value) and solution is solution_of(value)
        if is_asked or solution.is_created(self):
            return solution.apply("contains", self, value) is True
        if base is not None:
            refresh(self)
            return vars(base)["__contains__"](self, value)
        return any(item is value or item == value for item in self)

    return method


def methods_of_container(base: type) -> dict[str, Any]:
    """Return the methods of a list, dict or set of the code: those that may change it are called
    there, the others use its present content."""
    methods: dict[str, Any] = {}
    for name in dir(base):
        if name in ("__init__", "__new__", "__class__") or not callable(vars(base).get(name)):
            continue
        if not name.startswith("__"):
            methods[name] = method_of_content(name)
        elif name in IN_PLACE:
            methods[name] = in_place(name)
        elif name in CHANGES:
            methods[name] = special_method(name, base)
        elif name in SPECIAL and vars(base)[name] is not None:
            methods[name] = reading(vars(base)[name])
    return methods


def in_place(name: str) -> Callable[..., Any]:
    """Return an operator that changes its container."""

    def method(self: Any, other: Any) -> Any:
        solution_of(self).apply(SPECIAL[name], self, other)
        refresh(self)
        return self

    return method


def reading(function: Any) -> Callable[..., Any]:
    """Return a method that first gets the content of its container from the code."""

    def method(self: Any, *arguments: Any) -> Any:
        refresh(self)
        return function(self, *arguments)

    return method


def updating(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that then gets the content of its container from the code."""

    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        result = function(self, *arguments, **named)
        refresh(self)
        return result

    return method


def method_of_content(name: str) -> Callable[..., Any]:
    """Return a method that is called in the code's process."""

    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        return solution_of(self).apply("method", self, name, *arguments, **named)

    return updating(method)


def refresh(container: Any) -> None:
    """Get the content of a list, dict or set of the code."""
    base = data_of(container)
    if base in MUTABLE_DATA:
        fill(container, base, solution_of(container).apply("content", container))


def fill(container: Any, base: type | None, content: Any) -> None:
    """Replace the content of a container. Raises TypeError for content of another class."""
    kind: Any = type(content)
    if kind is not base:
        raise TypeError("another type")
    if base is list:
        list.__setitem__(container, slice(None), content)
    elif base is dict:
        dict.clear(container)
        dict.update(container, content)
    elif base is set:
        set.clear(container)
        set.update(container, content)


def run_coroutine(self: Any, value: Any = None) -> NoReturn:
    """Run a coroutine of the code to its end."""
    raise StopIteration(solution_of(self).apply("run", self))


def await_coroutine(self: Any) -> Iterator[Any]:
    """Yield nothing and return the result of a coroutine of the code."""
    yield from ()
    return solution_of(self).apply("run", self)


METHODS_OF_COROUTINES = {
    "send": run_coroutine,
    "throw": lambda self, error, *rest: raise_error(error),
    "close": lambda self: None,
    "__await__": await_coroutine,
}


def raise_error(error: BaseException) -> NoReturn:
    """Raise an error."""
    raise error


DATA: dict[Any, type] = {
    kind.__name__: kind
    for kind in (str, int, float, complex, bytes, list, tuple, set, frozenset, dict)
}
"""Classes of plain data from which classes of the code may derive."""
MUTABLE_DATA = (list, dict, set)
KINDS: dict[Any, type] = {
    "function": types.FunctionType,
    "method": types.MethodType,
    "builtin_function_or_method": types.BuiltinFunctionType,
    "generator": types.GeneratorType,
    "coroutine": types.CoroutineType,
    "async_generator": types.AsyncGeneratorType,
}
"""Classes of Python that references name as their class, for isinstance."""
COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
ARITHMETIC = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow"),
    *("lshift", "rshift", "and", "xor", "or"),
)
OPERATORS = tuple(
    f"__{kind}{name}__"
    for kind in ("", "r", "i")
    for name in ARITHMETIC
    if (kind, name) != ("i", "divmod")
)
TO_NUMBER = (
    *("__abs__", "__int__", "__float__", "__complex__", "__index__", "__round__", "__trunc__"),
    *("__floor__", "__ceil__"),
)
CHANGES = ("__setitem__", "__delitem__", "__getitem__")  # (the last one for ``__missing__``)
IN_PLACE = tuple(f"__i{name}__" for name in ARITHMETIC)
SPECIAL = {
    f"__{name}__": name
    for name in (
        *("eq", "ne", "lt", "le", "gt", "ge", "len", "str", "repr", "format", "bool", "hash"),
        *("int", "float", "complex", "index", "abs", "neg", "pos", "invert", "round", "trunc"),
        *("floor", "ceil", "bytes", "iter", "next", "reversed", "contains", "getitem", "setitem"),
        *("delitem", "call", "enter", "exit", "fspath"),
    )
} | {name: name.strip("_") for name in OPERATORS}
"""All special methods that a reference may have, and the functions of FUNCTIONS for them."""


def operators() -> dict[str, Callable[..., Any]]:
    """Return the functions of the operators in OPERATORS."""
    found: dict[str, Callable[..., Any]] = {"divmod": divmod, "pow": pow, "ipow": operator.ipow}
    for name in ARITHMETIC:
        if name not in found:
            found[name] = vars(operator)[name + "_" * (name in ("and", "or"))]
        if name not in ("divmod", "pow"):
            found["i" + name] = vars(operator)["i" + name]
        found["r" + name] = swapped(found[name])
    return found


def swapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of two operands in the other order."""
    return lambda right, left, *more: function(left, right, *more)


def described_signature(value: Any) -> Any:
    """Return the parameters and the result of a signature, as ``signature_of`` reads them."""
    import inspect

    signature = inspect.signature(value)
    empty = inspect.Parameter.empty
    rows = [
        (p.name, p.kind.name, [d for d in [p.default] if d is not empty],
         [a for a in [p.annotation] if a is not empty])
        for p in signature.parameters.values()
    ]  # fmt: skip
    return rows, [a for a in [signature.return_annotation] if a is not empty]


def annotations_of(value: Any, **named: Any) -> Any:
    """Return the annotations of an object."""
    import inspect

    return inspect.get_annotations(value, **named)


def run(coroutine: Any) -> Any:
    """Run a coroutine to its end."""
    import asyncio

    return asyncio.run(coroutine)


def parts_of_error(error: BaseException | None = None) -> tuple[Any, ...]:
    """Return the arguments of ``__exit__``."""
    return (None, None, None) if error is None else (type(error), error, error.__traceback__)


def content_of(value: Any) -> Any:
    """Return the plain data of an object whose class derives from it, without a call of a method
    of its class."""
    base: Any = data_base(type(value))
    if base in DATA_OF:
        return DATA_OF[base](value)
    return base(base.items(value)) if base is dict else base(base.__iter__(value))


def complex_of(value: complex) -> complex:
    """Return the number of an object whose class derives from complex."""
    return complex(*[vars(complex)[part].__get__(value) for part in ("real", "imag")])


def bytes_of(value: bytes) -> bytes:
    """Return the bytes of an object whose class derives from bytes."""
    return bytes.__getitem__(value, slice(None))


DATA_OF: dict[Any, Callable[[Any], Any]] = {
    str: str.__str__,
    int: int.__index__,
    float: float.__float__,
    complex: complex_of,
    bytes: bytes_of,
}
"""Functions that return the data of an object of a subclass."""


def data_base(kind: type) -> type | None:
    """Return the class of plain data from which a class derives, or None."""
    return next((c for c in kind.__mro__ if DATA.get(c.__name__) is c), None)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **operators(),
    **{name: vars(operator)[name] for name in ("eq", "ne", "lt", "le", "gt", "ge", "index")},
    **{name: vars(operator)[name] for name in ("neg", "pos", "invert", "contains")},
    **{name: vars(operator)[name] for name in ("getitem", "setitem", "delitem")},
    **{name: vars(builtins)[name] for name in ("len", "str", "repr", "format", "bool", "hash")},
    **{name: vars(builtins)[name] for name in ("int", "float", "complex", "abs", "round", "bytes")},
    **{name: vars(builtins)[name] for name in ("iter", "next", "reversed", "dir", "getattr")},
    **{name: vars(builtins)[name] for name in ("setattr", "delattr", "isinstance", "issubclass")},
    **{name: vars(math)[name] for name in ("floor", "ceil", "trunc")},
    **{name: vars(copy)[name] for name in ("copy", "deepcopy")},
    "fspath": os.fspath,
    "call": lambda function, *arguments, **named: function(*arguments, **named),
    "method": lambda value, name, *rest, **named: operator.attrgetter(name)(value)(*rest, **named),
    "enter": lambda value: type(value).__enter__(value),
    "exit": lambda value, *error: type(value).__exit__(value, *parts_of_error(*error)),
    "signature": described_signature,
    "get_type_hints": typing.get_type_hints,
    "get_annotations": annotations_of,
    "content": content_of,
    "run": run,
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
    for source, fd in zip(copies, high, strict=True):
        os.dup2(source, fd)
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
    stdin = io.TextIOWrapper(os.fdopen(0, "rb", closefd=False), "utf-8", "replace")
    stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), "utf-8", "replace")
    vars(sys).update(stdin=stdin, __stdin__=stdin, stdout=stdout, __stdout__=stdout)
    sys.argv = ["program.py"]
    status = 0
    try:
        exec(compile(code, "program.py", "exec", dont_inherit=True), namespace("__main__"))
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        status = 1
    # (As Python ends: after its threads, and then its exit handlers.)
    flushes = [lambda: sys.stdout.flush(), stdout.flush]
    for end in (vars(threading)["_shutdown"], vars(atexit)["_run_exitfuncs"], *flushes):
        with contextlib.suppress(BaseException):
            end()
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
        super().__init__(1)
        self.max_idle = MAX_IDLE
        self.lines = Lines(connection)
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}
        """Numbers of objects by id."""
        self.definitions: list[dict[str, Any]] = []
        """Definitions of classes for the next message."""
        self.defined: set[int] = set()
        self.borrowed: dict[int, Any] = {}
        """Objects of the tests by their number."""
        self.borrowed_ids: dict[int, int] = {}
        """Numbers of functions and errors of the tests by the id of what stands for them."""
        self.kinds: dict[Any, type] = {}
        """Classes that stand for those of the tests."""
        self.in_progress: set[int] = set()
        """Errors that are being encoded, which may contain themselves."""
        self.module: dict[str, Any] = {}
        self.sent: dict[str, Any] = {}
        """Objects of the module's names, as the tests know them."""
        self.streams = {"stdout": Printed(), "stderr": Printed()}
        self.lock = threading.RLock()

    def redirect(self) -> None:
        """Let the tests read what the code prints, and the code what the tests give it to read."""
        vars(sys).update(self.streams, stdin=GivenInput(self))
        vars(builtins)["input"] = self.forwarding("input")

    def forwarding(self, name: str) -> Callable[..., Any]:
        """Return a function that calls one of PATCHABLE as the tests replaced it."""

        def function(*arguments: Any, **named: Any) -> Any:
            if name == "print" and named.get("file") not in (None, sys.stdout):
                return PATCHABLE[name](*arguments, **named)
            named.pop("file", None)
            return self.ask("patched", name, *arguments, **named)

        return function

    def send(self, message: dict[str, Any]) -> None:
        """Send a message, with the new classes and the changed containers, and what was printed."""
        self.collect_changed()
        self.collect_new()
        self.forget_unused()
        self.attach(message)
        if self.definitions:
            message["classes"], self.definitions = self.definitions, []
        printed = {name: stream.take() for name, stream in self.streams.items() if stream.parts}
        if printed:
            message["printed"] = printed
        self.lines.send(message)

    def plain(self, value: Any) -> Any:
        """Encode a value, by reference if it contains itself."""
        try:
            return self.encode(value)
        except RecursionError:
            return self.refer(value)

    def encoded_names(self, used: set[str]) -> list[Any]:
        """Return (name, JSON) of all names of the module. Containers of names that the tests do not
        use are copied, not shared: they may be large, and change with each call."""
        named = {n: v for n, v in self.sent.items() if not isinstance(v, types.ModuleType)}
        pairs = [[n, self.plain(v)] for n, v in named.items() if n in used]
        self.collect_new()
        before = set(self.shared)
        pairs += [[n, self.plain(v)] for n, v in named.items() if n not in used]
        self.collect_new()
        self.forget_both(self.shared.keys() - before)
        return pairs + [[n, {"module": n}] for n in self.sent.keys() - named.keys()]

    def changed_names(self, names: Sequence[str]) -> list[Any]:
        """Return (name, JSON) of those names of the module that are other objects than before, or
        containers that are no longer shared."""
        missing = object()
        now = {name: self.module[name] for name in names if name in self.module}
        changed = {
            name: value
            for name, value in now.items()
            if self.sent.get(name, missing) is not value
            or (type(value) in CONTAINERS and id(value) not in self.shared_ids)
        }
        self.sent |= changed
        return [[name, self.plain(value)] for name, value in changed.items()]

    def is_reference(self, value: Any) -> bool:
        """Return whether an object is not sent as plain data although its class derives from it: it
        may have methods. (Named tuples of modules have none of interest.)"""
        kind = type(value)
        if data_base(kind) in (None, kind):
            return False
        return kind.__module__ == "solution" or fields_of(kind) is None

    def number(self, value: Any) -> int:
        """Return the number of an object, which lives from now on."""
        number = self.numbers.get(id(value))
        if number is None:
            number = self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return number

    def refer(self, value: Any) -> dict[str, Any]:
        """Encode an object by reference."""
        if isinstance(value, type):
            return self.refer_class(value)
        if isinstance(value, BaseException):
            return self.refer_error(value, MAX_CAUSES)
        kind = type(value)
        if issubclass(kind, Borrowed):
            return self.refer_borrowed(value)
        if id(value) in self.borrowed_ids:
            return {"lent": self.borrowed_ids[id(value)]}
        data = None
        if self.is_reference(value):
            data = self.encode_plain(content_of(value) if isinstance(value, tuple) else value)
        return {"object": [self.number(value), self.define(kind), data]}

    def refer_borrowed(self, value: Any) -> Any:
        """Encode an object of the tests, or one with plain data that the code made of its class."""
        try:
            return {"lent": object.__getattribute__(value, NUMBER)}
        except AttributeError:
            if data_base(type(value)) is None:
                raise TypeError("an object that the tests did not make") from None
            return self.encode_plain(value)

    def refer_class(self, kind: type) -> dict[str, Any]:
        """Encode a class."""
        name = kind.__name__
        if BUILTIN_CLASSES.get(name) is kind:
            return {"builtin": name}
        return {"known": name} if KNOWN.get(name) is kind else {"class": self.define(kind)}

    def define(self, kind: type) -> int:
        """Return the number of a class, which the next message defines if it is new."""
        number = self.number(kind)
        if number in self.defined:
            return number
        self.defined.add(number)
        base = data_base(kind) if DATA.get(kind.__name__) is not kind else None
        doc = vars(kind).get("__doc__")
        self.definitions.append(
            {
                "number": number,
                "name": kind.__name__,
                "module": kind.__module__,
                "bases": [self.refer_class(c) for c in kind.__bases__ if c is not object],
                "special": special_names(kind),
                "doc": doc if type(doc) is str else None,
                "kind": kind.__name__ if kind.__module__ == "builtins" else None,
                "data": base.__name__ if base is not None else None,
                "replaced": replaced_names(kind, base) if base is not None else [],
                "is_error": issubclass(kind, BaseException),
            }
        )
        return number

    def refer_error(self, error: BaseException | None, num_causes: int) -> Any:
        """Encode an error with its arguments, its attributes and up to ``num_causes`` causes."""
        if error is None or num_causes == 0 or id(error) in self.in_progress:
            return None
        self.in_progress.add(id(error))
        try:
            return self.parts_of_error(error, num_causes)
        finally:
            self.in_progress.discard(id(error))

    def parts_of_error(self, error: BaseException, num_causes: int) -> Any:
        """Encode an error that is none of those being encoded."""
        if id(error) in self.borrowed_ids:
            return {"lent": self.borrowed_ids[id(error)]}
        kind = type(error)
        fields = {}
        for name in [*slots_of(kind), *vars(error)]:
            with contextlib.suppress(Exception):  # (an attribute that is not set or not plain)
                fields[name] = self.encode(getattr(error, name))  # house: ok the code's attribute
        return {
            "error": {
                "class": self.refer_class(kind),
                "number": self.number(error),
                "args": [self.encode_argument(item) for item in error.args],
                "fields": fields,
                "cause": self.refer_error(error.__cause__, num_causes - 1),
                "context": self.refer_error(error.__context__, num_causes - 1),
                "suppress": error.__suppress_context__,
            }
        }

    def encode_argument(self, value: Any) -> Any:
        """Encode an argument of an error, by reference if nothing else is possible."""
        try:
            return self.plain(value)
        except Exception:
            return self.refer(value)

    def resolve(self, kind: str, content: Any) -> Any:
        """Decode a reference of the tests."""
        if kind == "object":
            return self.objects[content]
        if kind == "builtin":
            return BUILTIN_CLASSES[content]
        if kind == "import":
            module, name = content
            return operator.attrgetter(name)(importlib.import_module(module))
        if kind == "raised":
            return self.borrow_error(content)
        if kind in ("module", "pattern"):
            return self.own_copy(kind, *content)
        if kind == "call":
            number, name, doc = content
            if number not in self.borrowed:
                function = borrowed_function(self, number, name, doc)
                self.borrowed[number], self.borrowed_ids[id(function)] = function, number
            return self.borrowed[number]
        number, name, special, *data = content
        if number not in self.borrowed:
            values = [self.decode(tree) for tree in data]
            self.borrow((number, name, special), type(values[0]) if data else object, values)
        return self.borrowed[number]

    def borrow(self, row: tuple[int, str, Sequence[str]], base: Any, data: Sequence[Any]) -> Any:
        """Return a new object that stands for one of the tests whose class derives from ``base``
        and has its data. ``row``: its number, and the name and the attributes of its class."""
        number, name, special = row
        key = (name, base, *special)
        if key not in self.kinds:
            self.kinds[key] = borrowed_class(self, name, special, base)
        borrowed = base.__new__(self.kinds[key], *data)
        object.__setattr__(borrowed, NUMBER, number)
        self.borrowed[number] = borrowed
        return borrowed

    def unpack(self, message: Mapping[str, Any]) -> None:
        """Give the shared containers the contents of a message, also those of classes of the
        tests."""
        for number, base, row in message.get("lent", ()):
            known = row[0] in self.borrowed
            kind = BY_NAME[base].kind
            self.adopt(number, self.borrowed[row[0]] if known else self.borrow(row, kind, ()))
        super().unpack(message)

    def own_copy(self, kind: str, number: int, *content: Any) -> Any:
        """Return the module or the compiled pattern that is that of the tests."""
        if number not in self.borrowed:
            if kind == "module":
                copied: Any = importlib.import_module(content[0])
            else:
                copied = re.compile(self.decode(content[0]), content[1])
            self.borrowed[number], self.borrowed_ids[id(copied)] = copied, number
        return self.borrowed[number]

    def borrow_error(self, parts: Mapping[str, Any]) -> BaseException:
        """Return an error of the tests."""
        base = vars(builtins)[parts["names"][0]]
        key = (parts["name"], base)
        if base.__name__ != parts["name"] and key not in self.kinds:
            self.kinds[key] = type(parts["name"], (base,), {})
        arguments = [self.decode(item) for item in parts["args"]]
        error: BaseException = self.kinds.get(key, base)(*arguments)
        self.objects.append(error)
        self.borrowed_ids[id(error)] = parts["number"]
        return error

    def ask(self, request: str, of: Any, *arguments: Any, **named: Any) -> Any:
        """Let the tests do something, and do what they ask for in the meantime."""
        with self.lock:
            message = {"ask": request, "of": of, "arguments": [self.encode(v) for v in arguments]}
            message["named"] = {name: self.encode(value) for name, value in named.items()}
            self.send(message)
            while "apply" in (reply := self.lines.receive()):
                self.send(self.reply(reply))
        self.unpack(reply)
        value = self.decode(reply["error" if "error" in reply else "value"])
        self.forget_told(reply)
        if "error" in reply:
            raise value
        return value

    def answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a message."""
        self.unpack(message)
        for name, tree in message.get("classes", {}).items():
            self.module.setdefault(name, self.decode(tree))
        arguments = [self.decode(item) for item in message["arguments"]]
        named = {name: self.decode(item) for name, item in message["named"].items()}
        self.forget_told(message)
        patched = message.get("patched", ())
        vars(builtins).update({name: self.forwarding(name) for name in patched})
        try:
            value = FUNCTIONS[message["apply"]](*arguments, **named)
        finally:
            if patched:
                vars(builtins).update({name: PATCHABLE[name] for name in ("open", "print")})
        return {"value": self.encode(value)}

    def reply(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to a message, also of a call that raised, with the changed names."""
        try:
            reply = self.answer(message)
        except BaseException as error:  # becomes data
            reply = self.failed(error)
        return {**reply, "names": self.changed_names(message["watched"])}

    def failed(self, error: BaseException) -> dict[str, Any]:
        """Return the reply of a call that raised."""
        return {"error": self.refer_error(error, MAX_CAUSES)}


MAX_CAUSES = 4
"""Errors of a chain of causes that the tests see."""


def special_names(kind: type) -> list[str]:
    """Return the special methods of a class, without those of Python's data and of object."""
    bases = [c for c in kind.__mro__ if c is kind or DATA.get(c.__name__) is not c]
    attributes: dict[str, Any] = {}
    for base in bases:
        if base is not object and base is not BaseException:
            attributes = {**vars(base), **attributes}
    is_error = issubclass(kind, BaseException)
    is_python = [n for n in SPECIAL if attributes.get(n) is not None]
    return [n for n in is_python if not is_error or isinstance(attributes[n], types.FunctionType)]


def slots_of(kind: type) -> dict[str, Any]:
    """Return the attributes of errors that Python's own classes of errors define."""
    return {
        name: slot
        for base in kind.__mro__
        if base.__module__ == "builtins" and base is not object
        for name, slot in vars(base).items()
        if isinstance(slot, (types.MemberDescriptorType, types.GetSetDescriptorType))
        and not name.startswith("_")
        and name != "args"
    }


class Borrowed:
    """Base of the classes of objects of the tests, as the code sees them."""


def borrowed_function(service: Service, number: int, name: str, doc: str | None) -> Any:
    """Return a function that calls one of the tests."""

    def function(*arguments: Any, **named: Any) -> Any:
        return service.ask("call", number, *arguments, **named)

    function.__name__ = function.__qualname__ = name
    function.__doc__, function.__module__ = doc, "__main__"
    return function


def borrowed_class(
    service: Service, name: str, special: Sequence[str], base: type = object
) -> type:
    """Return a class of objects of the tests. ``special``: names of the attributes that are those
    of the tests although ``base`` has them."""

    def number(self: Any) -> int:
        return object.__getattribute__(self, NUMBER)

    def special_of(special_name: str) -> Any:
        if special_name == "__dict__":
            return property(lambda self: service.ask("vars", number(self)))
        if not special_name.startswith("__"):
            return property(lambda self: service.ask("get", number(self), special_name))
        if special_name == "__call__":
            return lambda self, *a, **named: service.ask("call", number(self), *a, **named)
        if special_name == "__exit__":
            return lambda self, kind, error, frames: service.ask(
                "special", number(self), special_name, *[e for e in [error] if e is not None]
            )
        return lambda self, *a: service.ask("special", number(self), special_name, *a)

    methods: dict[str, Any] = {n: special_of(n) for n in special}
    methods |= {
        "__getattr__": lambda self, n: service.ask("get", number(self), n),
        "__setattr__": lambda self, n, value: service.ask("set", number(self), n, value),
        "__instancecheck__": lambda self, value: service.ask("isinstance", number(self), value),
        "__copy__": lambda self: service.ask("copy", number(self)),
        "__deepcopy__": lambda self, memo: service.ask("deepcopy", number(self)),
    }
    if "__hash__" not in methods:
        methods["__hash__"] = base.__hash__
    return type(name, (Borrowed,) if base is object else (Borrowed, base), methods)


class Printed(io.TextIOBase):
    """Standard output of the code, which the tests can read."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.room = MAX_PRINTED_CHARS

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Keep a text, as far as there is room."""
        if not isinstance(text, str):
            raise TypeError("write() argument must be str, not " + type(text).__name__)
        if self.room > 0:
            self.parts.append(text[: self.room])
            self.room -= len(text)
        return len(text)

    def take(self) -> str:
        """Return the texts since the last call."""
        text, self.parts, self.room = "".join(self.parts), [], MAX_PRINTED_CHARS
        return text

    @property
    def buffer(self) -> Any:
        """Bytes of the stream."""
        return types.SimpleNamespace(
            write=lambda data: self.write(bytes(data).decode("utf-8", "replace")),
            flush=lambda: None,
        )


MAX_PRINTED_CHARS = 1 << 20


class GivenInput(io.TextIOBase):
    """Standard input of the code: that of the tests."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def readable(self) -> bool:
        return True

    def read(self, *size: Any) -> Any:
        """Return the rest of the input."""
        return self.service.ask("stdin", "read", *size)

    def readline(self, *size: Any) -> Any:  # type: ignore[override]
        """Return the next line."""
        return self.service.ask("stdin", "readline", *size)


def serve(code: str, connection: socket.socket, test_s: float) -> NoReturn:
    """Execute the code, then answer messages until the judge ends the process."""
    service = Service(connection)
    module = service.module = namespace("solution")

    def start(message: Any) -> dict[str, Any]:
        service.redirect()
        exec(compile(code, "solution.py", "exec", dont_inherit=True), module)
        service.sent = {n: v for n, v in module.items() if not n.startswith("__")}
        used = service.lines.receive()["used"]
        return {"value": {"dict": service.encoded_names(set(used))}}

    handle, message = start, None
    while True:
        signal.setitimer(signal.ITIMER_PROF, test_s)
        try:
            reply = handle(message)
        except BaseException as error:
            reply = service.failed(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        service.send(reply)
        message, handle = service.lines.receive(), service.reply


if __name__ == "__main__":
    main()
