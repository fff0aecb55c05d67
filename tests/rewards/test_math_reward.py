"""MathScorer: equality as mathematics, in processes that can be lost."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from burnish.config.rewards import FailurePolicy, ShapingConfig
from burnish.rewards.base import RewardError, RewardInput
from burnish.rewards.math import reward as math_reward
from burnish.rewards.math.reward import MathScorer
from burnish.rewards.math.text import judge, read_label
from burnish.rewards.reward_set import RewardSet
from burnish.types import Group

_SPEC = importlib.util.spec_from_file_location(
    "math_pairs", Path(__file__).parent / "math_pairs.py"
)
assert _SPEC is not None and _SPEC.loader is not None
math_pairs: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(math_pairs)
PAIRS, KNOWN_DISAGREEMENTS = math_pairs.PAIRS, math_pairs.KNOWN_DISAGREEMENTS

MakeGroup = Callable[..., Group]
HANGS = r"\boxed{9^{9^{9^9}}}"
"""Comparing it with a number makes sympy raise integers to powers that no machine holds."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """Every worker process started in this test."""
    processes: list[subprocess.Popen[str]] = []

    def popen(*args: Any, **kwargs: Any) -> subprocess.Popen[str]:
        processes.append(subprocess.Popen(*args, **kwargs))
        return processes[-1]

    class Spy:
        PIPE, TimeoutExpired = subprocess.PIPE, subprocess.TimeoutExpired
        Popen = staticmethod(popen)

    monkeypatch.setattr(math_reward, "subprocess", Spy)
    return processes


@pytest.fixture(scope="module")
def shared() -> Iterator[MathScorer]:
    reward = MathScorer(timeout_s=30.0)  # CPU seconds; no comparison with it is meant to time out
    yield reward
    reward.close()


def _items(group: Group) -> list[RewardInput]:
    return [RewardInput(group.prompt, sample) for sample in group.samples]


@pytest.mark.parametrize(
    ("label", "right", "wrong"),
    [
        ("1/2", r"The answer is $\frac{1}{2}$", "so it's 3"),
        ("1/2", r"\boxed{0.5}", ""),
        ("x^2+1", r"\boxed{1+x^2}", r"\boxed{x^2}"),
        ("so 48/2 = 24, and 48 + 24 = 72\n#### 72", "It is 72.", "It is 24."),
        (42, "42", "41"),
        (1e-05, "0.00001", "1"),
        (r"\boxed{7}", "$7$", "$8$"),
        ('["27"]', r"\boxed{27}", r"\boxed{28}"),
        ('["Paris"]', "The answer is Paris.", r"\boxed{[Paris]}"),
        (' [ "no solution" ]', r"\boxed{\text{no solution}}", r"\boxed{0}"),
        (r'["\\frac{1}{2}"]', "It is 1/2.", "It is 2."),
        (r'["\frac{1}{2}"]', r"\boxed{\frac{1}{2}}", r"\boxed{2}"),
        ('["[1, 2]"]', r"\boxed{[1, 2]}", r"\boxed{(1, 2)}"),
        ("[1, 2]", r"\boxed{[1, 2]}", r"\boxed{(1, 2)}"),
        ('["A"]', "The answer is A", "The answer is B"),
    ],
)
def test_equal_as_mathematics_is_1_and_anything_else_0(
    label: Any, right: str, wrong: str, shared: MathScorer, make_group: MakeGroup
) -> None:
    assert shared.score(_items(make_group(0, [right, wrong], label=label))) == [1.0, 0.0]


def test_more_than_97_of_100_answers_are_scored_as_by_a_person(
    shared: MathScorer, make_group: MakeGroup
) -> None:
    """All pairs but those that are listed as known to differ agree. Every pair that is fixed has
    to be taken from that list."""
    items = [
        _items(make_group(i, [text], label=label))[0] for i, (label, text, _) in enumerate(PAIRS)
    ]
    scores = shared.score(items)
    differ = [pair for pair, score in zip(PAIRS, scores, strict=True) if score != float(pair[2])]
    assert differ == KNOWN_DISAGREEMENTS
    assert len(PAIRS) >= 200 and len(differ) < 0.03 * len(PAIRS)


def test_adversarially_slow_text_is_parsed_in_one_pass(
    shared: MathScorer, make_group: MakeGroup
) -> None:
    """Tens of thousands of unclosed openings: quadratic scans would take minutes."""
    hostile = [r"\boxed{" * 50_000, "answer is " * 50_000, "####" * 50_000, "$" * 50_000]
    hostile += [r"\boxed{5 " + "a.." * 90 + "!}", r"\boxed{1" + " and" * 70 + "}"]
    hostile += [r"\boxed{1}" + " " * 50_000 + r"\boxed{2}", "1e999999999999", "9" * 50_000]
    label = read_label("7")
    for text in hostile:
        assert judge(label, text) is not True


def test_words_are_compared_as_text_and_this_is_logged_once(
    make_group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    reward = MathScorer()
    items = _items(make_group(0, [r"\boxed{Monday}", "on Friday"], label="Monday"))
    assert [reward.score(items), reward.score(items)] == [[1.0, 0.0], [1.0, 0.0]]
    assert [r.getMessage()[:62] for r in caplog.records] == [
        "reward 'math': 2 labels of this call are words, not mathematic"
    ]


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (None, "data.label_key"),
        ("", "missing value"),
        (float("nan"), "missing value"),
        ("nan", "missing value"),
        ("None", "missing value"),
        ([1, 2], "is a list"),
        ('["1", "2"]', "is a list"),
        ('[""]', "missing value"),
        ({"answer": 1}, "is a dict"),
        ("She sold four of them because the shop had no more left", "a sentence of 12 words"),
        pytest.param(10**5000, "more than 400 digits", id="huge"),
    ],
)
def test_an_empty_label_is_a_failure_and_not_0(
    label: Any, message: str, shared: MathScorer, make_group: MakeGroup
) -> None:
    with pytest.raises(RewardError, match=message) as caught:
        shared.score(_items(make_group(0, ["3"], label=label)))
    assert "'q:0/0'" in str(caught.value)


def test_a_hung_comparison_is_0_counted_and_its_worker_replaced(
    make_group: MakeGroup, started: list[subprocess.Popen[str]]
) -> None:
    reward = MathScorer(timeout_s=0.5)
    rewards = RewardSet(
        [(reward, 1.0)],
        on_failure=FailurePolicy(),
        shaping=ShapingConfig(),
        generate_max_len=4,
    )
    try:
        scored = rewards.score([make_group(0, [HANGS, "1/2"], label="1/2")])
    finally:
        rewards.close()
    assert [sample.reward for sample in scored.groups[0].samples] == [0.0, 1.0]
    stats = scored.stats.floats()
    assert (stats["reward/math/timeouts"], stats["reward/math/errors"]) == (1, 0)
    assert len(started) == 2 and all(process.poll() is not None for process in started)


def test_a_worker_that_is_killed_is_counted_as_an_error_and_replaced(
    make_group: MakeGroup, started: list[subprocess.Popen[str]]
) -> None:
    reward = MathScorer(timeout_s=30.0)
    try:
        assert reward.score(_items(make_group(0, ["1"], label="1"))) == [1.0]
        started[0].kill()
        started[0].wait()
        assert reward.score(_items(make_group(0, ["1", "1"], label="1"))) == [0.0, 1.0]
        assert reward.take_counts() == {"timeouts": 0, "errors": 1}
    finally:
        reward.close()


HOSTILE = (
    *(r"\boxed{" + "(" * n + ")" * n + "}" for n in (10, 1000, 100_000)),
    *(r"\boxed{" + "{" * n + "}" * n + "}" for n in (1000, 100_000)),
    *(rf"\boxed{{{base}^{{{base}^{{{base}}}}}}}" for base in (9, 99, 999)),
    *(rf"$\frac{{{n}}}{{0}}$" for n in (0, 1, "x")),
    *(rf"\boxed{{{text}}}" for text in ("NaN", "nan", "inf", "-\\infty", "\\infty", "None", "zoo")),
    *(rf"\boxed{{{text}}}" for text in ("__import__('os').system('id')", "exec('1')", "lambda: 7")),
    *(
        rf"\boxed{{{text}}}"
        for text in ("().__class__", "open('/etc/passwd')", "{{8}}", "%s", "$(id)")
    ),
    *(rf"\boxed{{{n}!}}" for n in (10**6, 10**9)),
    *("\\frac{1}" * n for n in (1, 1000)),
    *("\\sqrt{" * n + "7" + "}" * n for n in (10, 10_000)),
    *(
        text * 10_000
        for text in ("$", "$$", "\\[", "\\boxed", "####", "<think>", "7,", "\x00", "\u202e")
    ),
    *(
        f"\\boxed{{{text}}}"
        for text in ("\ud800", "\x00", "\u202e7", "７７", "٣", "VII", "7" * 100_000)
    ),
    *(
        f"\\boxed{{{text}}}"
        for text in ("7; 8", "7 or 8", "[6, 8]", "x \\in R", "7 = 8", "-7", "7i")
    ),
)


@pytest.mark.slow
def test_hostile_answers_score_0_and_the_next_right_one_1(make_group: MakeGroup) -> None:
    assert len(HOSTILE) >= 50
    reward = MathScorer(timeout_s=0.5)
    try:
        scores = reward.score(_items(make_group(0, [*HOSTILE, r"\boxed{7}"], label="7")))
    finally:
        reward.close()
    assert [HOSTILE[i][:40] for i, score in enumerate(scores[:-1]) if score] == []
    assert scores[-1] == 1.0


def test_a_worker_has_a_limit_of_memory(
    make_group: MakeGroup, started: list[subprocess.Popen[str]]
) -> None:
    reward = MathScorer()
    try:
        assert reward.score(_items(make_group(0, ["1"], label="1"))) == [1.0]
        limit = psutil.Process(started[0].pid).rlimit(psutil.RLIMIT_AS)
    finally:
        reward.close()
    assert limit == (2 << 30, 2 << 30)


def test_close_ends_every_process_and_scoring_again_starts_new_ones(
    make_group: MakeGroup, started: list[subprocess.Popen[str]]
) -> None:
    reward = MathScorer(num_workers=2, timeout_s=30.0)
    items = _items(make_group(0, ["1", "2", "1"], label="1"))
    assert reward.score(items) == [1.0, 0.0, 1.0]
    assert len(started) == 2 and all(process.poll() is None for process in started)
    reward.close()
    assert all(process.poll() is not None for process in started)
    assert reward.score(items) == [1.0, 0.0, 1.0]
    reward.close()
    assert all(process.poll() is not None for process in started)


def test_a_worker_imports_neither_torch_nor_this_package() -> None:
    code = (
        f"import runpy, sys; runpy.run_path({str(math_reward._WORKER)!r}); "
        "print(sorted({'torch', 'transformers', 'burnish'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
