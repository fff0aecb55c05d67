"""The judge of code: every statement of the tests counts, and the code's process is not trusted.

Each attack is wrong code that tries to get a reward, in every form of tests. f(x) should be 3 * x.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from burnish.config.sandbox import BubblewrapSandbox
from burnish.rewards.base import SampleError
from burnish.rewards.labels import LabelError
from burnish.rewards.python_code.config import PythonCodeReward
from burnish.rewards.python_code.reward import PythonCodeScorer
from burnish.rewards.python_code.tests import read_tests
from burnish.sandbox.base import SandboxError
from burnish.sandbox.make import check_sandbox
from tests.rewards.code_pairs import read_pairs
from tests.rewards.test_python_code_reward import item_of

Scores = Callable[..., list[float | SampleError]]
RIGHT = "def f(x): return 3 * x"
WRONG = "def f(x): return x"


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


@pytest.fixture(scope="module")
def scores(reward: PythonCodeScorer) -> Scores:
    """``scores(code, labels)``: share of the tests that the code passes, for each label."""
    return lambda code, labels: reward.score(
        [item_of(f"```python\n{code}\n```\n", label) for label in labels]
    )


STATEMENTS = [
    "assert f(7) == 21",
    "for a in (0, 7):\n    assert f(a) == 3 * a",
    "with open('/dev/null'):\n    assert f(7) == 21",
    "if f(7) != 21:\n    raise ValueError",
    "import sys\nif f(7) != 21:\n    sys.exit(1)",
    "while f(7) != 21:\n    raise ValueError",
    "try:\n    assert f(7) == 21\nexcept KeyError:\n    pass",
    "match f(7):\n    case 21: pass\n    case _: raise ValueError",
    "def run():\n    assert f(7) == 21\nrun()",
    "def run():\n    return f(7) == 21\nrun()",
    "def run():\n    assert f(7) == 21\nif __name__ == '__main__':\n    run()",
    "import unittest\nunittest.TestCase().assertEqual(f(7), 21)",
    "f(7) == 21",
    "all(f(a) == 3 * a for a in (0, 7))",
    "f(7) == 21 or print('wrong')",
    "def test_f():\n    assert f(7) == 21",
    "def test_f(x=7):\n    assert f(x) == 21",
    "def test_f():\n    return f(7) == 21",
    "async def test_f():\n    assert f(7) == 21",
    "def test_f(candidate):\n    assert candidate(7) == 21",
    "def check(candidate):\n    assert candidate(7) == 21",
    "from solution import f\nassert f(7) == 21",
    "import solution\nassert solution.f(7) == 21",
    "from solution import *\nassert f(7) == 21",
    "class TestF:\n    def test(self): assert f(7) == 21",
    "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(7), 21)\n"
    "if __name__ == '__main__':\n    unittest.main()",
    "import unittest\nclass T(unittest.TestCase):\n    @classmethod\n"
    "    def setUpClass(cls): cls.want = 21\n"
    "    def test(self): self.assertEqual(f(7), self.want)",
    "import unittest\nclass T(unittest.IsolatedAsyncioTestCase):\n"
    "    async def test(self): self.assertEqual(f(7), 21)",
]


@pytest.mark.parametrize("code", [RIGHT, WRONG, "x = 1"], ids=["right", "wrong", "no function"])
def test_every_statement_that_checks_something_is_a_test(scores: Scores, code: str) -> None:
    assert scores(code, STATEMENTS) == [float(code == RIGHT)] * len(STATEMENTS)


OF_CLASS = "class TestF:\n    @classmethod\n    def setup_class(cls): cls.seen = []\n"
HOOKS = [
    "class TestF:\n    def setup_method(self): self.x = 7\n"
    "    def test_a(self): assert f(self.x) == 21",
    "class Base:\n    def setup_method(self, method): self.name = method.__name__\n"
    "class TestF(Base):\n    def test_a(self): assert self.name == 'test_a' and f(7) == 21",
    OF_CLASS + "    def test_a(self):\n        self.seen.append(f(7))\n        assert f(7) == 21\n"
    "    def test_b(self): assert self.seen == [21]",
    "class TestF:\n    def setup_class(self): self.x = 7\n"
    "    def test_a(self): assert f(self.x) == 21",
    "import sys\nclass TestA:\n"
    "    def setup_method(self): self.out, sys.stdout = sys.stdout, None\n"
    "    def teardown_method(self): sys.stdout = self.out\n"
    "    def test_a(self): assert sys.stdout is None and f(7) == 21\n"
    "def test_b(): assert sys.stdout is not None and f(7) == 21\n"
    "class TestB:\n    def test_c(self): assert sys.stdout is not None and f(7) == 21",
    "V = []\nclass TestA:\n    @classmethod\n    def teardown_class(cls): V.append(1)\n"
    "    def test_a(self): assert f(7) == 21 and not V\n"
    "    def test_b(self): assert f(7) == 21 and not V\n"
    "class TestB:\n    def test_c(self): assert f(7) == 21 and V",
    "V = None\ndef setup_module():\n    global V\n    V = 7\ndef test_a(): assert f(V) == 21",
    "def setup_module(module): module.V = 7\ndef test_a(): assert f(V) == 21",
    "V = []\ndef setup_module(): V.append(f(7))\ndef test_a(): assert f(7) == 21\n"
    "class TestF:\n    def test_b(self): assert V == [21]",
    "V = []\ndef setup_function(): V.append(1)\ndef teardown_function(function): V.append(2)\n"
    "def test_a(): assert f(7) == 21 and V == [1]\n"
    "def test_b(): assert f(7) == 21 and V == [1, 2, 1]",
    "V = []\ndef setup_module(): V.append(7)\nsetup_module()\n"
    "def test_a(): assert f(7) == 21 and V == [7]",
    "import unittest\nV = None\ndef setUpModule():\n    global V\n    V = 7\n"
    "class T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(V), 21)",
    "class TestF:\n    async def setup_method(self): self.x = 7\n"
    "    async def test_a(self): assert f(self.x) == 21",
]


@pytest.mark.parametrize("name", ["f", "Solution().f", "Solution.f", " Solution().f "])
def test_the_function_to_test_may_be_a_method(scores: Scores, name: str) -> None:
    """LeetCodeDataset names methods as ``Solution().f``."""
    check = "def check(candidate):\n    assert candidate(x=7) == 21"
    labels: list[Any] = [{"source": check, "entry_point": name}]
    labels += [{"inputs": [[7]], "outputs": [21], "fn_name": name.strip()}]
    for function, expected in (("x * 3", 1.0), ("x", 0.0)):
        code = f"class Solution:\n    def f(self, x): return {function}"
        assert scores(code, labels) == [expected] * 2
        assert scores(code.replace("Solution", "Other"), labels) == [0] * 2
    plain = [float(name == "f")] * 2
    assert scores(RIGHT, labels) == plain and scores(WRONG, labels) == [0] * 2


def test_an_entry_point_that_names_no_function_is_refused_if_it_is_used() -> None:
    check = "def check(candidate):\n    assert candidate(7) == 21"
    for name in ("no such", "Solution(1).f", "f(1)", "a.b.c"):
        with pytest.raises(LabelError, match="names no function"):
            read_tests({"source": check, "entry_point": name})
        assert read_tests("assert f(7) == 21", name)["name"] is None
    assert read_tests(check, "")["name"] is None and read_tests(check, "f()")["name"] == "f"
    assert read_tests("candidates = [2]\nassert f(7) == 21", "src/f.py")["name"] is None


def test_a_candidate_may_be_a_value_of_the_code(scores: Scores) -> None:
    labels = [
        {"source": "def check(candidate):\n    assert candidate[1] == 3", "entry_point": "primes"}
    ]
    assert scores("primes = [2, 3]", labels) == [1] and scores("primes = [2, 4]", labels) == [0]


@pytest.mark.parametrize("code", [RIGHT, WRONG, "x = 1"], ids=["right", "wrong", "no function"])
def test_hooks_of_pytest_and_unittest_prepare_the_tests(scores: Scores, code: str) -> None:
    assert [score == 1 for score in scores(code, HOOKS)] == [code == RIGHT] * len(HOOKS)


def test_a_hook_that_fails_is_a_failed_test(scores: Scores) -> None:
    tests = "class TestF:\n    def {}_method(self): assert f(7) == 21\n    def test_a(self): pass"
    for hook in ("setup", "teardown"):
        assert scores(RIGHT, [tests.format(hook)]) == [1]
        assert scores(WRONG, [tests.format(hook)]) == [0]


def test_a_class_is_prepared_again_for_a_new_process_of_the_code(scores: Scores) -> None:
    """The first test ends the process to which the object of the class belongs."""
    code = "import os\nclass A:\n    def f(self): return 21\n    def end(self): os._exit(0)"
    tests = (
        "class TestA:\n    @classmethod\n    def setup_class(cls): cls.a = A()\n"
        "    def test_a(self): self.a.end()\n    def test_b(self): assert self.a.f() == 21"
    )
    assert scores(code, [tests]) == [0.5]


MARKS = (
    "import sys, types\npytest = types.SimpleNamespace(mark=types.SimpleNamespace(\n"
    "    skip=lambda **_: lambda test: test, skipif=lambda *_, **__: lambda test: test))\n"
)
"""Marks of pytest, which the sandbox may lack."""
SKIPPED = [
    "{}import unittest\nclass T(unittest.TestCase):\n    @unittest.skip('later')\n"
    "    def test_a(self): self.assertEqual(f(7), 0)\n",
    "{}import sys, unittest\nclass T(unittest.TestCase):\n"
    "    @unittest.skipIf(sys.version_info > (3,), 'old')\n"
    "    def test_a(self): self.assertEqual(f(7), 0)\n",
    "{}import sys, unittest\n@unittest.skipUnless(sys.platform == 'no', 'x')\n"
    "class T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(7), 0)\n",
    f"{{}}{MARKS}@pytest.mark.skip(reason='later')\ndef test_a(): assert f(7) == 0\n",
    f"{{}}{MARKS}class TestF:\n    @pytest.mark.skipif(sys.platform != 'no', reason='')\n"
    "    def test_a(self): assert f(7) == 0\n",
]


@pytest.mark.parametrize("code", [RIGHT, WRONG], ids=["right", "wrong"])
def test_tests_that_skip_themselves_are_left_out(scores: Scores, code: str) -> None:
    labels = [tests.format("assert f(7) == 21\n") for tests in SKIPPED]
    assert scores(code, labels) == [float(code == RIGHT)] * len(SKIPPED)
    for found in scores(code, [tests.format("") for tests in SKIPPED]):
        assert isinstance(found, SampleError) and "all tests are skipped" in str(found)


def test_code_cannot_decide_which_tests_are_skipped(scores: Scores) -> None:
    """A condition that reads the code is no reason to leave a test out."""
    begin = "import unittest, sys\nclass T(unittest.TestCase):\n    def test_b(self): pass\n"
    test = "    def test_a(self): self.assertEqual(f(7), 21)\n"
    code = "LATER = True\nimport sys\nsys.platform = 'no'\ndef f(x): return x"
    for condition in ("LATER", "f(7) == 7", "'LATER' in globals()"):
        assert scores(code, [f"{begin}    @unittest.skipIf({condition}, 'x')\n{test}"]) == [0.5]
    assert scores(code, [f"{begin}    @unittest.skipIf(sys.platform == 'no', 'x')\n{test}"]) == [
        0.5
    ]
    assert scores(
        code, [f"{begin}    def test_a(self): self.skipTest('x') if f(7) == 7 else 0"]
    ) == [0.5]


@pytest.mark.parametrize(
    "end",
    [
        "for a in (7,):\n    assert f(a) == 21",
        "with open('/dev/null'):\n    {21: 1}[f(7)]",
        "if True:\n    {21: 1}[f(7)]",
        "{21: 1}[f(7)]",
        "x = {21: 1}[f(7)]",
        "class A:\n    x = {21: 1}[f(7)]",
        "{21: print}[f(7)]()",
        "del {21: [0]}[f(7)][0]",
        "import sys\nsys.exit(f(7) != 21)",
    ],
)
def test_an_end_of_the_tests_that_fails_is_no_pass(scores: Scores, end: str) -> None:
    """The first of two tests passes, f(0) == 0; the end is the second one."""
    tests = [f"assert f(0) == 0\n{end}"]
    assert scores(RIGHT, tests) == [1] and scores(WRONG, tests) == [0.5]


def test_a_statement_that_prepares_and_fails_ends_the_tests_as_failed(scores: Scores) -> None:
    """One of three: the second assert is not run, and the assignment is a failed test."""
    tests = ["assert f(0) == 0\nx = {21: 1}[f(7)]\nassert f(1) == 3"]
    assert scores(WRONG, tests) == [pytest.approx(1 / 3)] and scores(RIGHT, tests) == [1]


ATTACKS = {
    "reports builtins": "__builtins__ = {'len': len}\nf = lambda x: x",
    "reports builtins as a subclass of str": (
        "class N(str):\n    def startswith(self, *a): return False\n"
        "globals()[N('__builtins__')] = {}\nglobals()[N('__name__')] = 'x'\nf = lambda x: x"
    ),
    "reports names over the protocol": (
        "import json, os\n"
        "def line(names): return json.dumps({'value': {'dict': names}}).encode() + b'\\n'\n"
        "for fd in range(3, 256):\n"
        "    try: os.write(fd, line([['__builtins__', {'dict': []}], ['f', {'object': 0}],\n"
        "                            ['__import__', {'object': 0}], [{'list': []}, 1]]))\n"
        "    except OSError: pass\n"
        "f = lambda x: x"
    ),
    "is no mapping of names": (
        "import os\nfor fd in range(3, 256):\n"
        "    try: os.write(fd, b'{\"value\": {\"object\": 0}}\\n')\n"
        "    except OSError: pass\nf = lambda x: x"
    ),
    "equals everything": (
        "class E(int):\n    __eq__ = __le__ = __ge__ = lambda *a: True\n"
        "    __ne__ = lambda *a: False\n    __hash__ = int.__hash__\n"
        "class O:\n    __eq__ = E.__eq__\n    __hash__ = lambda s: hash(21)\n"
        "f = lambda x: E(x) if x % 2 else O()"
    ),
    "has all types": (
        "class M(type):\n    __instancecheck__ = __subclasscheck__ = lambda *a: True\n"
        "class O(metaclass=M):\n    __class__ = int\n    __getattr__ = lambda *a: O()\n"
        "    __call__ = __getattr__\nf = lambda x: O()"
    ),
    "exits with 0": "import sys\ndef f(x): sys.exit(0)",
    "exits when it is loaded": "def f(x): return x\nraise SystemExit(0)",
    "ends its process": "import os\ndef f(x): os._exit(0)",
    "registers an exit handler": (
        "import atexit, os, sys\natexit.register(lambda: os._exit(0))\ndef f(x): sys.exit()"
    ),
    "stops loops": "def f(x): raise StopIteration",
    "stops generators": "def f(x): raise GeneratorExit",
    "interrupts": "def f(x): raise KeyboardInterrupt",
    "skips": "import unittest\ndef f(x): raise unittest.SkipTest('skip')",
    "asserts nothing": (
        "import unittest, builtins\nfor n in dir(unittest.TestCase):\n"
        "    if n.startswith('assert'): setattr(unittest.TestCase, n, lambda *a: None)\n"
        "builtins.AssertionError = Exception\nunittest.TestResult.wasSuccessful = lambda s: True\n"
        "def f(x): return x"
    ),
    "replaces names of the tests": (
        "class unittest:\n    class TestCase: pass\n"
        "def assertEqual(*a): pass\nrun = check = test_f = T = TestF = lambda *a: None\n"
        "all = print = open = lambda *a: True\nclass sys: exit = print\ndef f(x): return x"
    ),
    "prints a result": (
        "import sys\nfor out in (sys.stdout, sys.stderr, sys.__stdout__):\n"
        "    print('{\"test\": 0, \"why\": null}', 'OK', 21, file=out, flush=True)\ndef f(x): pass"
    ),
    "sends a pickle": (
        "import os\nclass P:\n    def __reduce__(self): return os._exit, (0,)\n"
        "    def __repr__(self): return '20'\ndef f(x): return P()"
    ),
    "looks for the expected value": (
        "import gc, sys\ndef f(x):\n    seen, frame = [], sys._getframe()\n"
        "    while frame:\n        seen += [*frame.f_locals.values()]\n"
        "        frame = frame.f_back\n"
        "    return 21 if '21' in repr([*seen, *gc.get_objects()][:200_000]) and x == 7.5 else x"
    ),
    "a thread that outlives": (
        "import os, threading, time\ndef run():\n    while True:\n"
        "        for fd in range(3, 256):\n"
        "            try: os.write(fd, b'{\"value\": true}\\n')\n"
        "            except OSError: pass\n        time.sleep(.001)\n"
        "def f(x):\n    threading.Thread(target=run).start()\n    time.sleep(.05)\n    return x"
    ),
    "a process that outlives": (
        "import os, time\ndef f(x):\n    if os.fork() == 0:\n        time.sleep(60)\n    return x"
    ),
    "recurses": "def f(x): return f(x)",
    "returns deep lists": (
        "def f(x):\n    y = []\n    for _ in range(900): y = [y]\n    return y"
    ),
    "reads the files of the tests": (
        "import glob\ntexts = ''\n"
        "for p in [*glob.glob('/tmp/**', recursive=True), *glob.glob('*'),\n"
        " *glob.glob('/proc/*/fd/*'),"
        " *glob.glob('/proc/*/cmdline'), *glob.glob('/proc/*/environ')]:\n"
        "    try: texts += open(p, errors='replace').read(1 << 20)\n"
        "    except Exception: pass\n"
        "def f(x): return 21 if 'f(7) == 21' in texts else x"
    ),
    "changes modules": (
        "import sys, types\nfor n in ('solution', 'unittest', 'json', 'tests', '__main__'):\n"
        "    sys.modules[n] = types.ModuleType(n)\n"
        "sys.modules['solution'].f = lambda x: 3 * x - 1\n"
        "def f(x): return x"
    ),
    "deletes files": (
        "import os, shutil\nfor p in ('.', '/tmp', os.path.dirname(os.__file__)):\n"
        "    shutil.rmtree(p, ignore_errors=True)\ndef f(x): return x"
    ),
    "kills everything": (
        "import os, signal\ndef f(x):\n"
        "    for s in (signal.SIGALRM, signal.SIGSTOP, signal.SIGKILL):\n"
        "        for p in range(2, 40):\n"
        "            try:\n                if p != os.getpid(): os.kill(p, s)\n"
        "            except OSError: pass\n    return x"
    ),
    "deletes the function": "def f(x): return x\ndel f",
    "a property that changes": (
        "class O:\n    n = 0\n    def __index__(self): O.n += 1; return O.n\n"
        "    __int__ = __len__ = __index__\ndef f(x): return O()"
    ),
    "suppresses errors": (
        "class C:\n    __enter__ = lambda s: s\n    __exit__ = lambda *a: True\n"
        "    __call__ = __getattr__ = lambda s, *a: s\n"
        "def f(x): return C()"
    ),
    "contains everything": (
        "class M(type):\n    __contains__ = __eq__ = __instancecheck__ = lambda *a: True\n"
        "    __hash__ = lambda c: hash(21)\n    __sub__ = lambda *a: 0.0\n"
        "class f(metaclass=M):\n    def __init__(s, x): pass\n"
        "    __contains__ = __eq__ = __lt__ = __gt__ = lambda *a: True\n"
        "    __sub__ = __abs__ = __mod__ = lambda *a: 0.0\n    __hash__ = lambda s: hash(21)\n"
    ),
    "is data that equals everything": (
        "class L(list):\n    __eq__ = __contains__ = lambda *a: True\n"
        "    __ne__ = lambda *a: False\n"
        "class N(float):\n    __eq__ = L.__eq__\n    __ne__ = L.__ne__\n"
        "    __sub__ = __rsub__ = __abs__ = lambda *a: 0.0\n    __hash__ = lambda s: hash(21)\n"
        "f = lambda x: L([x]) if x == 7.5 else N(1)"
    ),
    "raises what unittest skips": (
        "import unittest.case\ndef f(x): raise unittest.case._ShouldStop('x')"
    ),
    "raises errors that hide": (
        "class E(ValueError):\n    __eq__ = lambda *a: True\n    args = property(lambda s: 1 / 0)\n"
        "    def __str__(s): raise SystemExit(0)\n"
        "def f(x):\n    e = E()\n    e.x = e.__cause__ = e\n    raise e"
    ),
    "asks the tests": (
        "import gc\ndef f(x):\n"
        "    s, = (o for o in gc.get_objects() if type(o).__name__ == 'Service')\n"
        "    for q in [('patched', 'open', '/proc/self/mem'), ('patched', 'eval', '0'),\n"
        "              ('stdin', '__class__'), ('special', 0, '__eq__'), ('get', 0, 'x')]:\n"
        "        try: return s.ask(*q)\n        except Exception: pass\n"
        "    s.answer = lambda m: {'argument': -1, 'changed': []}\n    return x"
    ),
    "empties the arguments": (
        "def f(x):\n    if isinstance(x, list): x.clear()\n    return x"
    ),
    "raises what the tests catch": (
        "class A(KeyError, AssertionError): pass\ndef f(x): raise A('x') if x < 7 else SystemExit"
    ),
}  # fmt: skip
OTHER_FORMS: list[Any] = [
    "assert abs(f(7) - 21) < 0.5",
    ["assert f(7) == 21", "assert 21 == f(7)", "assert not f(7) != 21"],
    ["assert [f(7)] == [21]", "assert {f(7)} == {21}", "assert f(7) in (21,)"],
    "for got, want in zip(map(f, [7]), [21], strict=True):\n    assert got == want",
    "n = 0\nfor got in map(f, [7, 7]):\n    assert got == 21\n    n += 1\nassert n == 2",
    "results = [f(x) for x in [7]]\nassert results == [21]",
    "try:\n    y = f(7)\nexcept Exception:\n    y = 0\nassert y == 21",
    {"inputs": [[7]], "outputs": [21], "fn_name": "f"},
    {"inputs": [[7], [8]], "outputs": [21, 24], "fn_name": "f"},
]


@pytest.mark.parametrize("name", ATTACKS)
def test_wrong_code_gets_nothing_in_any_form(
    scores: Scores, name: str, reward: PythonCodeScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attack meets a quarter of the statements and all other forms."""
    if name == "kills everything":  # the stopped judge is waited for
        shorter = reward._config.model_copy(update={"timeout_s": 10})
        monkeypatch.setattr(reward, "_config", shorter)
    statements = STATEMENTS[list(ATTACKS).index(name) % 4 :: 4]
    found = scores(ATTACKS[name], [*statements, *OTHER_FORMS])
    assert found == [0] * len(found)
    program = ATTACKS[name] + "\nprint(f(int(input())))"
    assert scores(program, [[{"input": "7", "output": "21"}]]) == [0]


def test_operators_of_objects_of_the_code_forge_nothing(reward: PythonCodeScorer) -> None:
    labels = [
        "with f(7) as y:\n    assert y == 21",
        "assert 21 in f(7)",
        "class Case:\n    def __init__(self): self.want = 21\nassert f(7) == Case().want",
    ]
    asks = "def f(x):  # Case\n    try: return Case().want\n    except Exception: return x"
    names = ("equals everything", "has all types", "suppresses errors", "contains everything")
    codes = [asks, *(ATTACKS[name] for name in names)]
    items = [item_of(f"```python\n{code}\n```", label) for code in codes for label in labels]
    assert reward.score(items) == [0] * len(items)


def test_a_result_that_is_the_object_of_the_tests_is_not_trusted_like_it(scores: Scores) -> None:
    """The operators of ``s`` are used, because the tests made it; those of ``s.f(7)`` are not,
    although it is ``s``."""
    code = (
        "class Solution:\n    f = lambda s, x: s\n"
        "    __contains__ = __eq__ = __index__ = lambda *a: True\n"
        "    __sub__ = __mod__ = lambda *a: 0.0\n    __iter__ = lambda s: iter(())"
    )
    lines = ["assert 21 in s.f(7)", "r = s.f(7)\nassert 21 in r", "assert abs(s.f(7) - 21) < 1"]
    lines += ["assert 21 in (s.f(7) if s.f(7) is s else ())", "assert s.f(7) == 21"]
    found = scores(code, [f"s = Solution()\n{line}" for line in lines])
    assert found == [0] * len(lines)
    assert scores(code, ["s = Solution()\nassert s.f(7) is s and 21 in s"]) == [1]


def test_the_forms_are_passed_by_right_code(scores: Scores) -> None:
    assert scores(RIGHT, OTHER_FORMS) == [1] * len(OTHER_FORMS)
    program = RIGHT + "\nprint(f(int(input())))"
    assert scores(program, [[{"input": "7", "output": "21"}]]) == [1]


def test_right_code_passes_and_wrong_code_fails_as_in_python(reward: PythonCodeScorer) -> None:
    """(The relation ``code_passes_as_in_python`` compares the same pairs with python3.)"""
    pairs = read_pairs()
    right = reward.score([item_of(f"```python\n{p.right}\n```", p.tests) for p in pairs])
    assert [p.name for p, score in zip(pairs, right, strict=True) if score != 1] == []
    wrong = reward.score([item_of(f"```python\n{p.wrong}\n```", p.tests) for p in pairs])
    assert [p.name for p, score in zip(pairs, wrong, strict=True) if score == 1] == []


FORGED_MESSAGES = {
    "a number of the tests": "m['contents'] = [[10**6, 'list', [21]]]",
    "a number that is none": "m['contents'] = [[float('nan'), 'list', [21]]]",
    "another class": "m['contents'] = [[0, 'dict', []]]",
    "no container": "m['contents'] = [[7, 'object', []]]",
    "no contents": "m['contents'] = None",
    "forgets everything": "m['forgotten'] = list(range(-5, 50))",
    "an unknown number": "m['value'] = {'shared': 999}",
    "no factory": "m['contents'] = [[9, 'defaultdict', [5]]]; m['value'] = {'shared': 9}",
    "parts of other parts": "m['contents'] = [[0, 'list', [21], [0], 9, 9]]",
    "parts that are missing": "m['contents'] = [[0, 'list', [21], [5], 1, 6]]",
    "parts of nothing": "m['contents'] = [[9, 'list', [21], [0], 0, 1]]",
    "a class of the tests": "m['lent'] = [[9, 'list', [0, 'x', []]]]; m['value'] = {'shared': 9}",
    "a pattern": "m['value'] = {'pattern': [0, 'x', 0]}",
    "a key that changes": "m['contents'] = [[9, 'dict', [{'shared': 9}, 1]]]",
    "a function": "m['value'] = {'builtin': 'eval'}",
    "a module": "m['value'] = {'written': ['os', 'x']}",
    "an enum of another module": "m['value'] = {'member': ['ast', 'AST', 'x', None]}",
    "no enum": "m['value'] = {'member': ['signal', 'signal', None, 2]}",
    "no member": "m['value'] = {'member': ['http', 'HTTPStatus', '__class__', None]}",
    "no buffer": "m['value'] = {'memoryview': [21, 'B']}",
    "no format": "m['value'] = {'memoryview': [{'bytes': '00'}, 'Z']}",
    "no time": "m['value'] = {'time': [{'list': []}]}",
    "an open class": "m['value'] = {'alias': [21, {'tuple': []}]}",
}


def test_forged_containers_give_nothing(reward: PythonCodeScorer) -> None:
    code = (
        "import gc\ndef f(x):\n"
        "    s, = (o for o in gc.get_objects() if type(o).__name__ == 'Service')\n"
        "    old = s.attach\n    def attach(m): old(m); {}\n    s.attach = attach\n    return x"
    )
    tests = ["x = [7]\nassert f(x) is x and x[0] * 3 == 21 and f(7) == 21", "assert f(7) == 21"]
    items = [
        item_of(f"```python\n{code.replace('{}', forged)}\n```", label)
        for forged in FORGED_MESSAGES.values()
        for label in tests
    ]
    assert reward.score(items) == [pytest.approx(0)] * len(items)


def test_objects_that_the_tests_lend_give_nothing_else(reward: PythonCodeScorer) -> None:
    """Code that gets an object looks in all ways for a way to the tests' process: modules, frames,
    globals and private attributes. It returns 21 if it finds one."""
    asks = (
        "import gc\ndef f(x):\n"
        "    s, = (o for o in gc.get_objects() if type(o).__name__ == 'Service')\n"
        "    for n in [*s.borrowed, *map(id, (x,))]:\n"
        "        for q in [('get', n, '__class__'), ('get', n, '__dict__'), ('get', n, '_x'),\n"
        "                  ('vars', n), ('get', n, 'modules'), ('get', n, 'x'), ('call', n, 7),\n"
        "                  ('special', n, '__getattribute__', 'x'), ('special', n, '__reduce__'),\n"
        "                  ('set', n, 'bit_length', 7), ('isinstance', n, 7)]:\n"
        "            try: s.ask(*q)\n            except Exception: continue\n"
        "            return 21\n"
        "    return x"
    )
    lent = ["object()", "__import__('sys')", "re.compile('x')"]
    labels = [f"import re\nx = {value}\nassert f(x) == 21" for value in lent]
    items = [item_of(f"```python\n{asks}\n```", label) for label in labels]
    assert reward.score(items) == [0] * len(items)


def test_annotations_are_evaluated_by_the_code(scores: Scores) -> None:
    """The texts of annotations are untrusted: in the tests' process they could report a pass."""
    code = "import os\ndef f(x: 'os._exit(0)'): return x"
    tests = [
        "import typing\ntyping.get_type_hints(f)\nassert f(7) == 7",
        "import inspect\ninspect.get_annotations(f, eval_str=True)\nassert f(7) == 7",
    ]
    assert scores(code, tests) == [0, 0]
    assert scores("def f(x: 'int'): return x", tests) == [1, 1]


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        (
            "from unittest.mock import patch\nwith patch('time.time'):\n    assert f(7) == 21",
            "time",
        ),
        (
            "from unittest import mock\nwith mock.patch('solution.g'):\n    assert f(7)",
            "solution.g",
        ),
        ("class A(B): pass\nassert A().f(7) == 21", "derives from B"),
        ("import threading\nassert f(threading.Lock())", "passes a threading.Lock"),
        ("from threading import Lock as L\nlock = L()\nassert f.g(1).h(x=lock)", "threading.Lock"),
        ("import logging\nlog = logging.getLogger()\nassert f(log)", "passes a logger"),
        ("from solution import B\nclass A(B): pass\nassert A().f(7) == 21", "derives from B"),
    ],
)
def test_tests_that_cannot_reach_the_code_are_refused(tests: str, reason: str) -> None:
    with pytest.raises(LabelError, match=reason):
        read_tests(tests)
    read_tests("import unittest\nclass A(unittest.TestCase): pass\nclass B(A): pass\nassert f(7)")
    locks = "import threading\ndef run(g): g(threading.Lock())\nx = threading.Lock()\nx = 7\n"
    read_tests(f"{locks}run(print)\nwith threading.Lock(): assert f(x)")


def test_code_that_ends_as_the_tests_expect_passes(scores: Scores) -> None:
    """Errors of the code reach the tests as themselves: also SystemExit, and a StopIteration that
    the tests name."""
    code = (
        "import sys\nclass Stop(Exception): pass\n"
        "def stop(): raise StopIteration\ndef leave(): sys.exit(3)\ndef own(): raise Stop\n"
        "def items(): yield 1"
    )
    tests = """
import unittest
class T(unittest.TestCase):
    def test_stop(self):
        with self.assertRaises(StopIteration): stop()
    def test_leave(self):
        with self.assertRaises(SystemExit): leave()
    def test_exit_is_no_exception(self):
        try: leave()
        except Exception: self.fail()
        except SystemExit: pass
    def test_own(self):
        with self.assertRaises(Stop): own()
    def test_items(self):
        it = items()
        self.assertEqual(next(it), 1)
        with self.assertRaises(StopIteration): next(it)
"""
    assert scores(code, [tests]) == [1]


def test_tests_that_catch_every_error_do_not_hide_the_end_of_the_process(scores: Scores) -> None:
    tests = ["def test():\n    try: f(1)\n    except: pass"]
    assert scores("import os\ndef f(x): os._exit(0)", tests) == [0]
    assert scores("import time\ndef f(x): time.sleep(60)", tests) == [0]
    assert scores("def f(x): raise ValueError", tests) == [1]


LOCK = "import threading\nclass Box:\n    def __init__(self): self.lock = threading.Lock()\n"
"""A lock that is not seen before the tests run."""


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ("from no_such_module import f\nassert f(7) == 21", "cannot import"),
        ("def test():\n    import no_such_module", "cannot import"),
        ("class T:\n    def test(self):\n        import no_such_module", "cannot import"),
        ("assert f(7) == 21\ndef test_more(fixture): pass", "needs arguments"),
        ("class T:\n    def test_a(self, capsys): pass", "method test_a needs arguments"),
        (
            "import pytest\nclass T:\n    @pytest.mark.parametrize('x', [7])\n"
            "    def test_a(self, x): assert f(x) == 21",
            "needs arguments",
        ),
        ("import pytest\n@pytest.mark.parametrize('x', [7])\ndef test(x): pass", "needs arguments"),
        (
            "import pytest\nclass T:\n    @pytest.fixture(autouse=True)\n"
            "    def set_up(self): self.x = 7\n    def test_a(self): assert f(self.x) == 21",
            "fixtures of pytest do not run",
        ),
        (f"{LOCK}f(Box().lock)\nassert f(7) == 21", "pass a lock to the code"),
        (f"{LOCK}try: f([Box().lock])\nexcept Exception: pass\nassert f(7) == 21", "a lock"),
        (f"{LOCK}class T:\n    def test(self): f(Box().lock)", "pass a lock to the code"),
    ],
)
@pytest.mark.parametrize("code", [RIGHT, WRONG], ids=["right", "wrong"])
def test_tests_that_cannot_run_are_a_bad_label_for_every_code(
    scores: Scores, label: str, reason: str, code: str
) -> None:
    (found,) = scores(code, [label])
    assert isinstance(found, SampleError) and reason in str(found)


def test_an_import_error_of_the_code_is_not_the_labels(scores: Scores) -> None:
    code = "def f(x): raise ImportError('x', name='y')"
    assert scores(code, STATEMENTS) == [0] * len(STATEMENTS)
