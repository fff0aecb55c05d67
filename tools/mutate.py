"""Mutation testing: ``python tools/mutate.py`` makes small mistakes one by one and counts those
that the tests detect.

    python tools/mutate.py [FILE ...] [--min-rate 0.95] [--max-survivors N] [--list]

Works on a copy of the tree; the checkout is not modified. The tests of ``--tests`` first run
unchanged, and the functions that each test calls are recorded. Every mutant (``mutants.py``) is
then tested by the tests that call its function, up to the first failure. Tests that found the most
mistakes so far run first. Each mutant runs in a fork of one process in which pytest has collected
the tests, so that everything is imported once.

A mutant survives if no test fails on it. ``--equivalent`` lists the mutants that cannot be
distinguished from the original, with the reasons. They are counted separately and still run; one
that is detected, or that no longer exists, is an error. Reading order: main, run_all, Plugin,
install."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from mutants import Mutant, mutants

ROOT = Path(__file__).resolve().parents[1]
CACHES = shutil.ignore_patterns("__pycache__", ".*", "*.pyc")


@dataclass
class Project:
    """A copy of the files needed to run the tests, and recorded facts about them."""

    folder: Path
    source: Path
    """Folder with the modules to change, relative to ``folder``."""
    tests: str
    seconds: float
    """Timeout of a mutant; a longer one counts as hung."""
    calls: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """``file.py:function`` -> tests that call it, the fastest first."""
    kills: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """``file.py:function`` -> number of its mutants that each test detected."""

    def module(self, file: str) -> str:
        """Return the dotted name of a file of the source."""
        return ".".join([*self.source.parts, file.removesuffix(".py")]).removesuffix(".__init__")

    def order(self, where: str) -> list[str]:
        """Return the tests for a mutant in ``where``, the most likely to fail first."""
        tests = self.calls[where] if self.calls[where] else self.calls["*"]
        caught = self.kills[where]
        return sorted(tests, key=lambda test: -caught[test])


@dataclass(frozen=True)
class Result:
    """Result of one mutant."""

    mutant: Mutant
    outcome: str
    """``killed`` (a test's assertion failed), ``crashed`` (the changed code raised something else),
    ``hung`` or ``survived``."""
    test: str = ""


def copy_of(root: Path, source: Path, tests: str, into: Path) -> Path:
    """Copy the packages and the tests of ``root`` to a new folder."""
    for name in {source.parts[0], Path(tests).parts[0]}:
        shutil.copytree(root / name, into / name, ignore=CACHES)
    for path in ("pyproject.toml",):
        if (root / path).is_file():
            shutil.copy(root / path, into)
    return into


def in_fork(work: Callable[[], Any], seconds: float) -> Any:
    """Return the result of ``work`` in a child process; None if it took too long or died."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):  # it must not get out of the child
            os.close(read)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            with os.fdopen(write, "w") as pipe:
                json.dump(work(), pipe)
            code = 0
        os._exit(code)
    os.close(write)
    text, deadline = b"", time.monotonic() + seconds
    while True:
        ready, _, _ = select.select([read], [], [], max(0.0, deadline - time.monotonic()))
        part = os.read(read, 1 << 16) if ready else b""
        if not part:
            break
        text += part
    os.close(read)
    if not ready:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return json.loads(text) if text and ready else None


class Plugin:
    """A pytest plugin that runs some of the collected tests in forks."""

    def __init__(self, project: Project, todo: Sequence[Mutant]) -> None:
        self.project, self.todo = project, todo
        self.results: list[Result] = []
        self.items: dict[str, Any] = {}
        self.failed, self.assertion, self.error = "", False, ""

    def pytest_collection(self) -> None:
        """Configure Hypothesis: always the same examples, without shrinking."""
        with contextlib.suppress(ImportError):
            from hypothesis import Phase, settings

            phases = (Phase.explicit, Phase.generate)
            settings.register_profile(
                "mutate", derandomize=True, database=None, deadline=None, phases=phases
            )
            settings.load_profile("mutate")

    def pytest_runtestloop(self, session: Any) -> bool:
        """Run all mutants instead of the tests."""
        if session.testsfailed:
            return False
        self.items = {item.nodeid: item for item in session.items}
        for file in {mutant.where.partition(":")[0] for mutant in self.todo}:
            importlib.import_module(self.project.module(file))  # no test may have imported it
        self._baseline()
        for i, mutant in enumerate(self.todo, start=1):
            result = self._attempt(mutant)
            self.results.append(result)
            if result.outcome in ("survived", "hung"):
                print(f"[{i}/{len(self.todo)}] {result.outcome}: {mutant.name}", file=sys.stderr)
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record the first test that failed, and whether its assertion failed."""
        if report.failed and not self.failed:
            self.failed, self.error = report.nodeid, str(report.longrepr)
            crash = getattr(report.longrepr, "reprcrash", None)  # house: ok pytest's own object
            prefixes = ("assert", "Assertion", "Failed: DID NOT RAISE", "torch.autograd.gradcheck")
            self.assertion = crash is None or crash.message.startswith(prefixes)

    def _run(self, names: Sequence[str]) -> None:
        """Run tests in this process, up to the first that fails."""
        items = [self.items[name] for name in names]
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                return

    def _baseline(self) -> None:
        """Run the tests unchanged, and record the functions that each calls. Raises SystemExit if
        one fails."""
        source = str(self.project.folder / self.project.source)
        calls: dict[str, list[str]] = {}
        seconds: dict[str, float] = {}

        def work() -> dict[str, Any]:
            for name in self.items:
                seen: set[str] = set()
                begin = time.perf_counter()
                sys.setprofile(partial(_note, source, seen))
                self._run([name])
                sys.setprofile(None)
                seconds[name], calls[name] = time.perf_counter() - begin, sorted(seen)
                if self.failed:
                    break
            return {"calls": calls, "seconds": seconds, "failed": self.failed, "text": self.error}

        tested = in_fork(work, 1200)
        if not tested or tested["failed"]:
            raise SystemExit(f"the tests fail on the unmodified code:\n{tested and tested['text']}")
        for test in sorted(tested["calls"], key=tested["seconds"].__getitem__):
            for where in [*tested["calls"][test], "*"]:
                self.project.calls[where].append(test)

    def _attempt(self, mutant: Mutant) -> Result:
        """Run the tests of the mutant's function against it."""
        project, order = self.project, self.project.order(mutant.where)
        file = mutant.where.partition(":")[0]
        name = project.module(file)

        def work() -> dict[str, Any]:
            try:
                install(sys.modules[name], mutant.source)
            except Exception:  # whatever it is: every test that imports the module would fail
                return {"failed": "(at import)", "assertion": False}
            self._run(order)
            return {"failed": self.failed, "assertion": self.assertion}

        tested = in_fork(work, project.seconds) if order else {"failed": ""}
        if tested is None:
            return Result(mutant, "hung")
        if not tested["failed"]:
            return Result(mutant, "survived")
        project.kills[mutant.where][tested["failed"]] += 1
        return Result(mutant, "killed" if tested["assertion"] else "crashed", tested["failed"])


def _note(source: str, seen: set[str], frame: Any, event: str, argument: Any) -> None:
    code = frame.f_code
    if code.co_filename.startswith(source):
        names = code.co_qualname.partition(".<locals>")[0].split(".")
        seen.add(f"{Path(code.co_filename).name}:{names[-1]}")
        seen.add(f"{Path(code.co_filename).name}:{names[0]}")


def install(module: ModuleType, source: str) -> None:
    """Replace the content of ``module`` with ``source``, also for modules that already imported
    from it. Functions keep their identity and get new code, and dicts get new entries. Other values
    are replaced under the same name wherever they occur."""
    new: dict[str, Any] = {"__name__": module.__name__, "__package__": module.__package__}
    exec(compile(source, str(module.__file__), "exec", dont_inherit=True), new)
    old = vars(module)
    twins = {id(new[name]): value for name, value in old.items() if name in new}
    for name, value in new.items():
        before = old.get(name)
        if name.startswith("__") or before is value:
            continue
        if isinstance(before, FunctionType):
            _become(before, value)
        elif isinstance(before, type):
            _become_class(before, value)
        elif isinstance(before, dict):
            before.clear()
            before.update({key: twins.get(id(part), part) for key, part in value.items()})
        else:
            for other in [m for m in sys.modules.values() if vars(m).get(name) is before]:
                vars(other)[name] = value


def _become_class(known: type, other: type) -> None:
    for key, part in vars(other).items():
        if isinstance(part, FunctionType):
            _become(vars(known)[key], part)
        elif not key.startswith("__"):
            setattr(known, key, part)


def _become(function: FunctionType, other: FunctionType) -> None:
    """Replace the code of a function, also if both are wrapped by an external decorator
    (``torch.no_grad``)."""
    function, other = inspect.unwrap(function), inspect.unwrap(other)
    function.__code__ = other.__code__
    function.__defaults__, function.__kwdefaults__ = other.__defaults__, other.__kwdefaults__


def run_all(project: Project, todo: Sequence[Mutant]) -> list[Result]:
    """Return every mutant's result. Raises SystemExit if the tests cannot be collected or fail."""
    import pytest

    os.chdir(project.folder)
    sys.path.insert(0, str(project.folder))
    plugin = Plugin(project, todo)
    off = [word for name in ("cacheprovider", "faulthandler") for word in ("-p", f"no:{name}")]
    options = ["-q", "-s", *off, "-m", "not slow", f"--rootdir={project.folder}"]
    code = pytest.main([*options, project.tests], plugins=[plugin])
    if len(plugin.results) != len(todo):
        raise SystemExit(
            f"the tests of {project.tests} could not be run (pytest exit code {code!r})"
        )
    return plugin.results


def read_equivalent(path: Path) -> dict[str, str]:
    """Return ``file.py:function: change`` -> reason, of mutants that no test can distinguish from
    the original."""
    if not path.is_file():
        return {}
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("equivalent", [])
    return {name: entry["reason"] for entry in entries for name in entry["mutants"]}


def report(
    results: Sequence[Result], equivalent: dict[str, str], complete: bool
) -> tuple[float, int]:
    """Print the table and the survivors. Return the rate and the number of survivors. Raises
    SystemExit if the list of equivalent mutants is wrong."""
    apart = [r for r in results if r.mutant.name in equivalent]
    counted = [r for r in results if r.mutant.name not in equivalent]
    survivors = [r for r in counted if r.outcome == "survived"]
    files: dict[str, Counter[str]] = defaultdict(Counter)
    for r in counted:
        files[r.mutant.where.partition(":")[0]][r.outcome] += 1
    heads = ("killed", "crashed", "hung", "survived")
    print(f"{'':24s}{''.join(f'{h:>10s}' for h in heads)}{'rate':>10s}")
    for name, numbers in [*sorted(files.items()), ("all", sum(files.values(), Counter()))]:
        total = numbers.total()
        rate = 1 - numbers["survived"] / max(total, 1)
        print(f"{name:24s}{''.join(f'{numbers[h]:10d}' for h in heads)}{rate:10.3f}")
    print(f"equivalent, counted separately: {len(apart)}")
    for r in survivors:
        print(f"survived: {r.mutant.name}  (line {r.mutant.line})")
    wrong = [f"caught: {r.mutant.name} ({r.test})" for r in apart if r.outcome != "survived"]
    known = {r.mutant.name for r in results}
    wrong += [f"not found: {name}" for name in equivalent if complete and name not in known]
    if wrong:
        raise SystemExit("the list of equivalent mutants is wrong:\n" + "\n".join(wrong))
    return 1 - len(survivors) / max(len(counted), 1), len(survivors)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, run all mutants and report. Return 1 if too many survive."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", help="names of modules; default: all of --source")
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--source", type=Path, default=Path("burnish/algorithms"))
    parser.add_argument("--tests", default="tests/algorithms")
    parser.add_argument("--equivalent", type=Path, default=Path("tools/equivalent_mutants.toml"))
    parser.add_argument("--min-rate", type=float, default=0.95)
    parser.add_argument("--max-survivors", type=int)
    parser.add_argument("--only", default="", help="mutants whose name contains this text")
    parser.add_argument(
        "--seconds", type=float, default=120, help=("seconds after which a mutant counts as hung")
    )
    parser.add_argument("--list", action="store_true", help="list the mutants without running any")
    args = parser.parse_args(argv)
    paths = sorted((args.root / args.source).glob("*.py"))
    if unknown := {Path(f).name for f in args.files} - {p.name for p in paths}:
        parser.error(
            f"{args.source} has no {', '.join(sorted(unknown))}; give names of its modules"
        )
    if not (args.root / args.tests).exists():
        parser.error(f"{args.tests} does not exist in {args.root}; give the tests' folder or file")
    chosen = [p for p in paths if not args.files or p.name in {Path(f).name for f in args.files}]
    todo = [m for p in chosen for m in mutants(p.name, p.read_text(encoding="utf-8"))]
    todo = [m for m in todo if args.only in m.name]
    if not todo:
        parser.error(f"nothing to mutate in {args.source} (--only {args.only!r})")
    if args.list:
        print("\n".join(f"{m.line:4d}  {m.name}" for m in todo))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        copied = copy_of(args.root, args.source, args.tests, Path(folder).resolve())
        project = Project(copied, args.source, args.tests, args.seconds)
        results = run_all(project, todo)
    complete = not args.files and not args.only
    rate, survivors = report(results, read_equivalent(args.root / args.equivalent), complete)
    too_many = args.max_survivors is not None and survivors > args.max_survivors
    return int(rate < args.min_rate or too_many)


if __name__ == "__main__":
    sys.exit(main())
