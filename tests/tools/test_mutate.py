"""The mutation check on small projects: what it changes, what it counts, and what it refuses."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "mutate.py"
_SPEC = importlib.util.spec_from_file_location("mutants", TOOL.with_name("mutants.py"))
assert _SPEC is not None and _SPEC.loader is not None
module: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["mutants"] = module  # its dataclasses look there
_SPEC.loader.exec_module(module)

SOURCE = '''
"""A module."""

from unittest import mock

LIMIT = 3.0


@mock.patch.dict("os.environ")
def mean(total, count, *, unused=777):
    """Of something."""
    if count < 1:
        raise ValueError("count is 0")
    return min(total / count, LIMIT)


class Scale:
    FACTOR = 2.0

    def of(self, x):
        return self.FACTOR * x


TABLE = {"mean": mean}
'''
GOOD = """
import pytest
from small.numbers import LIMIT, Scale, TABLE, mean

def test_all():
    assert mean(6, 3) == 2 and mean(-8, 2) == -4 and mean(3, 1) == 3 and LIMIT == 3
    assert mean(99, 2) == 3 and TABLE["mean"] is mean
    assert Scale().of(5) == 10

def test_nothing_to_divide():
    with pytest.raises(ValueError, match="count is 0"):
        mean(1, 0)
"""


def changes(source: str) -> set[str]:
    return {mutant.change for mutant in module.mutants("a.py", source)}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("return a - b", {"a - b -> a + b", "a - b -> a", "return a - b -> return -(a - b)"}),
        ("return a / (n - 1)", {"a / (n - 1) -> a", "n - 1 -> n", "1 -> 2"}),
        ("return x.detach().clamp(min=0)", {"x.detach() -> x", "0 -> 1"}),
        ("return -x", {"-x -> x"}),
        ("return torch.where(mask, x, 0.0)", {"torch.where(mask, x, 0.0) -> x"}),
        ("return f(chosen, rejected)", {"f(chosen, rejected) -> f(rejected, chosen)"}),
        ("return a <= b", {"a <= b -> a < b", "a <= b -> a > b"}),
        ("return min(a, b)", {"min(a, b) -> max(a, b)", "min(a, b) -> a", "min(a, b) -> b"}),
        ("return a & b", {"a & b -> a | b", "a & b -> a", "a & b -> b"}),
        ("return s / num_tokens", {"num_tokens -> num_sequences"}),
    ],
)
def test_mutants_are_typical_mistakes(line: str, expected: set[str]) -> None:
    names = "a, b, n, x, mask, chosen, rejected, s, num_tokens, num_sequences"
    assert changes(f"def f({names}):\n    {line}\n") >= expected


def test_messages_and_unused_defaults_are_not_mutated() -> None:
    found = changes(SOURCE)
    assert not any("count is 0" in c and "pass" not in c for c in found)
    assert not any("777" in c or "module" in c or "something" in c for c in found)
    assert "2.0 -> 4.0" in found and "'mean' -> 'sum'" in found


def test_mutants_are_distinct_from_each_other_and_the_original_and_compile() -> None:
    found = module.mutants("a.py", SOURCE)
    texts = [m.source for m in found]
    assert len(set(texts)) == len(texts) and ast.unparse(ast.parse(SOURCE)) not in texts
    assert len({m.name for m in found}) == len(found)
    for text in texts:
        compile(text, "a.py", "exec")


def run(folder: Path, test: str, equivalent: str = "", *words: str) -> tuple[int, str]:
    """The tool on a project of one module with one file of tests."""
    (folder / "small").mkdir()
    (folder / "small" / "__init__.py").write_text("")
    (folder / "small" / "numbers.py").write_text(SOURCE)
    (folder / "tests").mkdir()
    (folder / "tests" / "test_numbers.py").write_text(test)
    (folder / "same.toml").write_text(equivalent)
    options = ["--root", str(folder), "--source", "small", "--tests", "tests"]
    done = subprocess.run(
        [sys.executable, str(TOOL), *options, "--equivalent", "same.toml", *words],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


SAME = """
[[equivalent]]
reason = "the factor is never 1 of anything else"
mutants = [{names}]
"""


def test_good_tests_kill_every_mutant_and_the_checkout_is_unchanged(tmp_path: Path) -> None:
    code, told = run(tmp_path, GOOD, "", "--min-rate", "1.0")
    assert code == 0, told
    assert "1.000" in told and "\nsurvived:" not in told
    assert (tmp_path / "small" / "numbers.py").read_text() == SOURCE


def test_a_weak_test_leaves_mutants_alive_and_fails_the_run(tmp_path: Path) -> None:
    code, told = run(tmp_path, GOOD.replace("assert Scale().of(5) == 10", "Scale().of(5)"))
    assert code == 1
    assert "survived: numbers.py:of: self.FACTOR * x -> self.FACTOR / x" in told
    assert "survived: numbers.py:Scale: 2.0 -> 4.0" in told


def test_equivalent_mutants_are_counted_separately_unless_a_test_catches_them(
    tmp_path: Path,
) -> None:
    weak = GOOD.replace("assert Scale().of(5) == 10", "assert Scale().of(0) == 0")
    listed = ["numbers.py:of: self.FACTOR * x -> self.FACTOR / x", "numbers.py:Scale: 2.0 -> 4.0"]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    entry = SAME.format(names=", ".join(f'"{n}"' for n in listed[1:]))
    _, told = run(tmp_path / "a", weak, entry)
    assert "equivalent, counted separately: 1" in told and f"\nsurvived: {listed[1]}" not in told
    code, told = run(tmp_path / "b", GOOD, SAME.format(names='"numbers.py:of: gone -> away", '
                     f'"{listed[1]}"'))  # fmt: skip
    assert code == 1
    assert f"caught: {listed[1]}" in told and "not found: numbers.py:of: gone -> away" in told


def test_tests_that_fail_on_the_original_are_an_error(tmp_path: Path) -> None:
    code, told = run(tmp_path, GOOD.replace("== 10", "== 11"))
    assert code == 1 and "the tests fail on the unmodified code" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["gone.py"], "small has no gone.py"),
        (["--only", "no such text"], "nothing to mutate"),
        (["--tests", "elsewhere"], "elsewhere does not exist in"),
    ],
)
def test_nothing_to_mutate_is_an_error(tmp_path: Path, words: list[str], told: str) -> None:
    code, output = run(tmp_path, GOOD, "", *words)
    assert code == 2 and told in output


def test_a_module_that_no_test_imports_has_rate_0(tmp_path: Path) -> None:
    code, told = run(tmp_path, "def test_nothing():\n    assert True\n")
    assert code == 1
    assert "numbers.py                       0         0" in told and "0.000" in told
