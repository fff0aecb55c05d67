"""Rewards from tests of code: every form of tests, and code that tries to forge a result."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from burnish.config.sandbox import BubblewrapSandbox, UnsafeSubprocessSandbox
from burnish.rewards.base import RewardError, RewardInput, SampleError
from burnish.rewards.python_code import reward as module
from burnish.rewards.python_code.config import PythonCodeReward
from burnish.rewards.python_code.reward import PythonCodeScorer
from burnish.rewards.python_code.tests import read_code
from burnish.sandbox import bubblewrap
from burnish.sandbox.base import Program, Result, SandboxError
from burnish.sandbox.make import check_sandbox
from burnish.types import Prompt, Sample

Score = Callable[..., float]


def item_of(response: str, label: Any, **metadata: Any) -> RewardInput:
    sample = Sample(
        sample_id="s", prompt_id="p", group_id=0, prompt_ids=(1,), response_ids=(2,),
        sampler_logprobs=(0.0,), action_mask=(True,), versions=(0,), text=response,
        finish_reason="stop",
    )  # fmt: skip
    prompt = Prompt(id="p", token_ids=(1,), text="Write f.", label=label, metadata=metadata)
    return RewardInput(prompt, sample)


@pytest.fixture(scope="module")
def reward() -> Iterator[PythonCodeScorer]:
    try:
        check_sandbox(BubblewrapSandbox())
    except SandboxError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    made = PythonCodeScorer(PythonCodeReward(score="share", test_timeout_s=1, timeout_s=30))
    yield made
    made.close()


@pytest.fixture
def share(reward: PythonCodeScorer) -> Score:
    """``share(code, label, **metadata)``: share of the tests that the code passes."""

    def score(code: str, label: Any, **metadata: Any) -> float:
        (found,) = reward.score([item_of(f"Text.\n```python\n{code}\n```\n", label, **metadata)])
        if isinstance(found, SampleError):
            raise found
        return found

    return score


ADD = "def f(a, b):\n    return a + b"
STACK = """
class EmptyError(Exception):
    pass
class Stack:
    def __init__(self): self.items = []
    def push(self, *items): self.items.extend(items)
    def pop(self):
        if not self.items: raise EmptyError("empty")
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __eq__(self, other): return self.items == other.items
"""
STACK_TESTS = """
import unittest
from solution import EmptyError

class TestStack(unittest.TestCase):
    def test_order(self):
        stack = Stack()
        stack.push(1, 2)
        self.assertEqual([len(stack), stack.pop(), stack.items], [2, 2, [1]])
    def test_empty(self):
        with self.assertRaises(EmptyError):
            Stack().pop()
    def test_equal(self):
        self.assertEqual(Stack(), Stack())
    def test_wrong(self):
        self.assertEqual(len(Stack()), 1)
def test_plain():
    assert Stack().items == []
"""


@pytest.mark.parametrize(
    ("code", "label", "wanted"),
    [
        (ADD, ["assert f(1, 2) == 3", "assert f('a', 'b') == 'ab'", "assert f(1, 1) == 3"], 2 / 3),
        (ADD, '["assert f(1, 2) == 3"]', 1),
        (ADD, "import math\nx = 2\nassert f(x, 1) == 3\nassert math.isclose(f(.1, .2), .3)", 1),
        (ADD, "def check(candidate):\n    assert candidate(1, 2) == 3", 1),
        (ADD, {"source": "def check(c):\n    assert c(1) == 1", "entry_point": "f"}, 0),
        (ADD, "def check(c):\n    assert c(1, 1) == 2\ncheck(f)", 1),
        *(
            (f"def f(x):\n    return {result}",
             {"inputs": [[1]], "outputs": [{"1": [2], "null": 3}], "fn_name": "f"}, share)
            for result, share in [
                ("{x: (2,), None: 3}", 1), ("{'1': [2], 'null': 3}", 1), ("{x: [3], None: 3}", 0),
                ("{x: [3], '1': [2], None: 3}", 0), ("{x: [3], '1': [2]}", 0),
            ]
        ),
        (ADD, {"inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]], "fn_name": "f"}, 1),
        (ADD, {"inputs": [[1, 2], [[1], [2]]], "outputs": [[3], [[1, 2]]], "fn_name": "f"}, 1),
        (ADD, {"inputs": [[1, 2], [[1], [2]]], "outputs": [[3], [1, 2]], "fn_name": "f"}, 0.5),
        (ADD, {"inputs": [[[1], [2]], [[3], []]], "outputs": [[1, 2], [3]], "fn_name": "f"}, 1),
        *(
            (f"def f(x):\n    return {result}",
             {"inputs": [[1]], "outputs": [output], "fn_name": "f"}, share)
            for result, output, share in [
                ("True", 1, 0), ("x", True, 0), ("1.0", 1, 1), ("True", True, 1),
                ("[{'a': [False]}]", [{"a": [0]}], 0), ("({'a': (False,)},)", [{"a": [False]}], 1),
            ]
        ),
        *(
            (f"print('a')\n{end}", [{"input": "", "output": "a"}], share)
            for end, share in [
                ("input()", 0), ("raise SystemExit(1)", 0), ("assert False", 0), ("exit('x')", 0),
                ("exit()", 1), ("import sys; sys.exit(0)", 1), ("import os; os._exit(3)", 0),
            ]
        ),
        *(
            (f"import atexit, sys, threading, time\n{code}", [{"input": "", "output": "a"}], 1)
            for code in [
                "atexit.register(lambda: sys.__stdout__.write('a'))",
                "threading.Thread(target=lambda: (time.sleep(.02), print('a'))).start()",
            ]
        ),
        ("class Solution:\n    def f(self, a): return (a, a)",
         {"inputs": [[1]], "outputs": [[1, 1]], "fn_name": "f"}, 1),
        ("print(sum(map(int, input().split())))",
         [{"input": "1 2\n", "output": "3\n\n"}, {"input": "1", "output": "2"}], .5),
        ("import sys\nprint(sys.stdin.read()); sys.exit()", {"inputs": ["a"], "outputs": ["a"]}, 1),
        ("if __name__ == '__main__':\n    print('ran')", [{"input": "", "output": "ran"}], 1),
        (STACK, STACK_TESTS, 4 / 5),
        ("def f(x): x.sort()", "x = [2, 1]\nf(x)\nassert x == [1, 2]", 1),
        ("def f(g, x): return g(g(x))",
         "assert f(lambda x: x + 1, 1) == 3\nassert f(abs, -1) == 1", 1),
        ("def f(n): yield from range(n)",
         "assert list(f(3)) == [0, 1, 2]\nassert sum(f(3)) == 3", 1),
        ("def f(): return {1: (2, {3}), None: [b'x', 1.5, 10 ** 5000, 2j]}",
         "assert f() == {1: (2, {3}), None: [b'x', 1.5, 10 ** 5000, 2j]}", 1),
        ("def f(): raise KeyError('x')",
         "try:\n    f()\nexcept KeyError:\n    y = 1\nassert y == 1", 1),
        ("def sum(a, b): return a + b",
         {"source": "assert sum(1, 2) == 3", "entry_point": "sum"}, 1),
        ("from collections import Counter\ndef f(x): return Counter(x)",
         "assert f('aa') == {'a': 2}\nassert f('aab').most_common(1) == [('a', 2)]", 1),
        ("n, seen = 0, []\ndef f(x):\n    global n\n    n += x\n    seen.append(x)\n    return n",
         "a = seen\ndef test():\n    assert f(2) == n == 3 and a == seen == [1, 2]\n"
         "assert n == 0\nf(1)\nassert n == 1 and a == [1]", 1),
        ("n = 3\ndef f(x):\n    global n\n    n = x\n    return x",
         "n = 3 * 1\nassert f(1) == n", 0),
        ("from collections import namedtuple\nP = namedtuple('P', 'x y')\n"
         "def f(x): return P(x, 2)\ndef g(p): return p.y",
         "assert f(1).x == 1\nassert f(1) == (1, 2) == P(1, 2)\nassert g(f(1)) == 2", 1),
        ("import datetime\ndef f(d): return d + datetime.timedelta(1)",
         "import datetime\nassert f(datetime.date(2024, 2, 28)) == datetime.date(2024, 2, 29)", 1),
        ("def f(d):\n    d.rotate(1)\n    return d",
         "from collections import deque\nd = deque([1, 2])\nassert f(d) == d == deque([2, 1])", 1),
        ("a = []\na.append(a)\ndef f(): return range(3)", "assert f() == range(3)", 1),
    ],
)  # fmt: skip
def test_every_form_of_tests(share: Score, code: str, label: Any, wanted: float) -> None:
    assert share(code, label) == pytest.approx(wanted)


def test_the_function_of_check_is_the_columns_or_the_last_one(share: Score) -> None:
    code = "def f(x): return x\ndef g(x): return -x"
    tests = "def check(candidate):\n    assert candidate(1) == 1"
    assert share(code, tests) == 0 and share(code, tests, entry_point="f") == 1


FORGED = {
    "prints markers": "print('{\"test\": 0, \"why\": null}')\nprint('PASSED', 'OK', 'True')",
    "exits early": "import os\nos._exit(0)",
    "exits in the call": "import sys\ndef f(x): sys.exit(0)",
    "patches builtins": (
        "import builtins, sys\n"
        "class AssertionError(Exception): pass\n"
        "builtins.AssertionError = Warning\nbuiltins.__build_class__ = None\n"
        "builtins.all = builtins.any = builtins.isinstance = lambda *a: True\n"
        "sys.exit = sys.excepthook = lambda *a: None\n"
        "def f(x): return 0"
    ),
    "equals everything": (
        "class Any:\n"
        "    def __eq__(self, other): return True\n"
        "    def __ne__(self, other): return False\n"
        "    __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __eq__\n"
        "    def __sub__(self, other): return 0.0\n"
        "    __rsub__ = __add__ = __radd__ = __abs__ = __sub__\n"
        "    def __hash__(self): return 0\n"
        "def f(x): return Any()"
    ),
    "a number that equals everything": (
        "class N(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def f(x): return N(0)"
    ),
    "a list that equals everything": (
        "class L(list):\n    def __eq__(self, other): return True\n"
        "    def __iter__(self): return iter([1, 2, 3])\n"
        "def f(x): return L()"
    ),
    "replaces names of the tests": (
        "import math\nclass math:\n    isclose = staticmethod(lambda *a: True)\n"
        "abs = lambda x: 0\nsorted = list = set = len = lambda *a: 0\ndef f(x): return 5"
    ),
    "reads the memory of all processes": (
        "import os, re\n"
        "def found():\n"
        "    for pid in {p for p in os.listdir('/proc') if p.isdigit()} - {str(os.getpid())}:\n"
        "        try:\n"
        "            memory = os.open(f'/proc/{pid}/mem', os.O_RDONLY)\n"
        "            lines = [line.split() for line in open(f'/proc/{pid}/maps')]\n"
        "        except OSError:\n"
        "            continue\n"
        "        for line in lines:\n"
        "            a, b = (int(x, 16) for x in line[0].split('-'))\n"
        "            if line[1].startswith('rw'):\n"
        "                try: text = os.pread(memory, b - a, a)\n"
        "                except OSError: continue\n"
        "                yield from re.findall(rb'== (42[0-9]{4})', text)\n"
        "def f(x): return int(next(found(), 0))"
    ),
    "writes to every descriptor": (
        "import os\n"
        "line = b'{\"test\": 0, \"why\": null}\\n'\n"
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    try:\n"
        "        for fd in os.listdir(f'/proc/{pid}/fd'):\n"
        "            path = f'/proc/{pid}/fd/{fd}'\n"
        "            try: os.write(os.open(path, os.O_WRONLY | os.O_NONBLOCK), line)\n"
        "            except OSError: pass\n"
        "    except OSError: pass\n"
        "for fd in range(200):\n"
        "    try: os.write(fd, line)\n"
        "    except OSError: pass\n"
        "def f(x): return 0"
    ),
    "kills the judge": (
        "import os, signal\n"
        "for pid in sorted(int(p) for p in os.listdir('/proc') if p.isdigit()):\n"
        "    if pid not in (1, os.getpid()):\n"
        "        try: os.kill(pid, signal.SIGKILL)\n"
        "        except OSError: pass\n"
        "def f(x): return 0"
    ),
    "traces the judge": (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "others = {int(p) for p in os.listdir('/proc') if p.isdigit()} - {1, os.getpid()}\n"
        "traced = [p for p in others if libc.ptrace(0x4206, p, 0, 0) == 0]\n"
        "def f(x): return 424242 if traced else 0"
    ),
    "walks the frames": (
        "import gc, re, sys\n"
        "def texts():\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        yield repr(frame.f_locals) + repr(frame.f_globals)\n"
        "        frame = frame.f_back\n"
        "    yield from (o for o in gc.get_objects() if isinstance(o, (str, list, dict)))\n"
        "def f(x):\n"
        "    found = [m for t in texts() for m in re.findall('(?:42){3}', str(t))]\n"
        "    return int(found[0]) if found else 0"
    ),
    "answers before it is asked": (
        "import os, socket, sys\n"
        "for fd in range(3, 256):\n"
        "    try: os.write(fd, b'{\"value\": true}\\n' * 50)\n"
        "    except OSError: pass\n"
        "def f(x): return True"
    ),
    "replaces modules of the tests": (
        "import os\nfor n in ('unittest', 'json', 'random'):\n"
        "    open(f'/tmp/{n}.py', 'w').write('import os; os._exit(0)')\ndef f(x): return 0"
    ),
}  # fmt: skip
FORGED_TESTS = """
import math, random
assert f(1) == 424242
assert 424242 == f(1)
assert not f(1) != 424242
assert abs(f(1) - 424242) < 0.5
assert math.isclose(f(1), 424242)
assert f(1) in [424242] and f(1) > 424241
assert {f(1)} == {424242} and [f(1)] == [424242]
assert sorted([f(1)]) == [424242] and isinstance(f(1), int)
def test_more():
    import unittest
    unittest.TestCase().assertEqual(f(1), 424242)
    unittest.TestCase().assertAlmostEqual(f(1), 424242)
"""


@pytest.mark.parametrize("name", FORGED)
def test_results_cannot_be_forged(share: Score, name: str) -> None:
    code = FORGED[name]
    assert share(code, FORGED_TESTS) == 0
    assert share(code, {"inputs": [[1]], "outputs": [424242], "fn_name": "f"}) == 0
    assert share(code + "\ntry: print(f(1))\nexcept Exception: pass",
                 [{"input": "1", "output": "424242"}]) == 0  # fmt: skip
    assert share("def f(x): return 424242", FORGED_TESTS) == 1, "the tests can be passed"


@pytest.mark.slow
def test_what_ends_or_hangs_fails_alone(reward: PythonCodeScorer, share: Score) -> None:
    code = (
        "import os, time\ndef f(x):\n    if x == 1: time.sleep(600)\n    if x == 2: os._exit(0)\n"
    )
    code += "    if x == 3:\n        while True: pass\n    return x"
    reward.take_counts()
    assert share(code, [f"assert f({i}) == {i}" for i in range(5)]) == 2 / 5
    programs = [{"input": f"{i}", "output": f"{i}"} for i in range(5)]
    assert share(f"{code}\nprint(f(int(input())))", programs) == 2 / 5
    assert share("while True: pass", ["assert f(1) == 1"] * 50) == 0
    assert share("while True: print('x' * 1000)", programs) == 0
    assert share("import os\nwhile True:\n    os.fork()", ["assert f(1) == 1"]) == 0
    assert reward.take_counts() == {"no_code": 0, "timeouts": 3}


def test_all_or_nothing_and_what_is_counted() -> None:
    """Shares: 2 of 2; 1 of 3, because the second test fails and the third is not run; no code."""
    made = PythonCodeScorer(PythonCodeReward())
    try:
        fenced = f"```python\n{ADD}\n```"
        found = made.score([
            item_of(fenced, ["assert f(1, 2) == 3", "assert f(0, 0) == 0"]),
            item_of(fenced, ["assert f(1, 2) == 3", "assert f(0, 0) == 1", "assert f(0, 0) == 0"]),
            item_of("no code", ["assert f(1, 2) == 3"]),
        ])  # fmt: skip
        assert found == [1, 0, 0]
        assert made.take_counts() == {"no_code": 1, "timeouts": 0}
        total, count = made.take_means()["tests_passed_frac"]
        assert total == pytest.approx(4 / 3) and count == 3
    finally:
        made.close()


@pytest.mark.parametrize(
    ("label", "says"),
    [
        (None, "none of the known forms"),
        ("", "is empty"),
        ("f(1) equals 1", "not Python source"),
        ("x = 1", "there is no assert"),
        ("import no_such_module\nassert f(1) == 1", "cannot import: No module named"),
        (
            {"inputs": ["1"], "outputs": []},
            "0 outputs; write one output for each input",
        ),
        ([{"input": 1, "output": "1"}], "not text: 1"),
        ([1], "none of the known forms"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "tests a function"),
        ([{"input": "1", "output": "1", "fn_name": "f"}], "tests a function"),
        ({"inputs": [[1]], "outputs": [1], "fn_name": 5}, "fn_name that is not text"),
    ],
)
def test_a_bad_label_is_an_error_of_its_own_row(
    reward: PythonCodeScorer, label: Any, says: str
) -> None:
    good = item_of(f"```\n{ADD}\n```", ["assert f(1, 2) == 3"])
    bad = item_of(f"```\n{ADD}\n```", label)
    first, second = reward.score([bad, good])
    assert isinstance(first, SampleError) and says in str(first) and second == 1


def test_the_recipe_of_the_documentation_is_valid() -> None:
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml code\n(.*?)```", page, re.DOTALL)
    (entry,) = yaml.safe_load(text)["rewards"]
    config = PythonCodeReward(**entry)
    assert config.sandbox.max_concurrent == 16 and not config.broken_rules()
    assert "limit of all tests" in PythonCodeReward(timeout_s=1).broken_rules()[0]


def test_where_the_code_is() -> None:
    text = "```python\nold\n```\n</think>\n```py\na\n```\n```json\n{}\n```\n```\nb\n``` \n"
    text += "```bash\nc\n```"
    assert read_code(text, "last_block") == "a\n"
    output = "```python\na\n```\nOutput:\n```\n1\n```"
    assert read_code(output, "last_block") == "a\n"
    assert read_code(output.replace("python", ""), "last_block") == "1\n"
    assert read_code("x</think>code", "all") == "code"
    assert read_code("Done.", "last_block") is None and read_code(" ", "all") is None


def test_no_sandbox_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: None)
    with pytest.raises(RewardError, match="reward 'python_code': bubblewrap is not installed"):
        PythonCodeScorer(PythonCodeReward())


@pytest.mark.parametrize("obstacle", [None, "no output", "another version"])
def test_the_judge_is_compiled_once_or_else_runs_from_its_source(
    obstacle: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = UnsafeSubprocessSandbox(
        kind="unsafe_subprocess", output_bytes=1000 if obstacle == "no output" else 1 << 20
    )
    reward = PythonCodeScorer(PythonCodeReward(sandbox=sandbox))
    if obstacle == "another version":  # the first bytes of bytecode
        reward._compiled = module._JUDGE.read_bytes(), b"\0" * 16
    commands, run = [], reward._sandbox.run

    async def recorded(program: Program) -> Result:
        commands.append(program.command[-1])
        return await run(program)

    monkeypatch.setattr(reward._sandbox, "run", recorded)
    for _ in range(2):
        items = [item_of(f"```\n{ADD}\n```", [f"assert f(1, 2) == {n}"]) for n in (3, 4)]
        assert reward.score(items) == [1, 0]
    reward.close()
    expected = {
        None: [module._COMPILE, *["judge.pyc"] * 4],
        "no output": [module._COMPILE, *["judge.py"] * 4],
    }
    if obstacle == "another version":
        assert commands.count("judge.py") == 4 and commands.count("judge.pyc") <= 2
    else:
        assert commands == expected[obstacle]


def test_a_sandbox_that_fails_is_no_score(
    reward: PythonCodeScorer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The judge does not begin."""
    sandbox = UnsafeSubprocessSandbox(kind="unsafe_subprocess", python="/bin/true")
    with pytest.raises(RewardError, match="programs cannot be run"):
        PythonCodeScorer(PythonCodeReward(sandbox=sandbox))
    broken = tmp_path / "judge.py"
    broken.write_text("raise SystemExit('no prctl')")
    monkeypatch.setattr(module, "_JUDGE", broken)
    with pytest.raises(RewardError, match=r"did not begin: exit 1.*no prctl"):
        reward.score([item_of(f"```\n{ADD}\n```", ["assert f(1, 2) == 3"])])
