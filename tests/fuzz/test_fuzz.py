"""The readers of untrusted text on a fixed sample; ``make fuzz`` draws others."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fuzz import run
from fuzz.targets import CODE, MATH, TARGETS, Target, texts

SLOW = re.compile(r"\s+\Z")
"""A pattern that takes quadratic time for many spaces before another character."""


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_keeps_its_promise_on_the_fixed_sample(name: str) -> None:
    for seed in range(2):
        assert run.fuzz(TARGETS[name], seed) is None


def crash(text: str) -> None:
    if "½" in text and "\\boxed{" in text:
        raise KeyError(text)


@pytest.mark.parametrize(
    ("target", "error", "shortest"),
    [
        (Target(crash, texts(*MATH)), "KeyError", {"\\boxed{½", "½\\boxed{"}),
        (Target(SLOW.search, texts(*CODE), cpu_s=0.2, cpu_us_per_char=0), "user CPU", None),
    ],
    ids=["crash", "slow"],
)
def test_a_planted_mistake_is_reported_with_its_command(
    target: Target,
    error: str,
    shortest: set[str] | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(TARGETS, "planted", target)
    assert run.main(["--target", "planted", "--target", "dates", "--rounds", "3"]) == 1
    lines = capsys.readouterr().out.splitlines()
    command = next(line for line in lines if line.startswith("FAILED"))
    arguments = command.split('ARGS="')[1].rstrip('"').split()
    assert run.main(arguments) == 1
    repeated = capsys.readouterr().out
    assert command in repeated and error in repeated
    assert shortest is None or any(repr(text) in repeated for text in shortest)


def test_an_allowed_error_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = Target(crash, texts(*MATH), allowed=(KeyError,))
    assert all(run.fuzz(allowed, seed) is None for seed in range(6))


def test_the_time_is_shared_by_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of 4 s and of 1 s, in 16 s: after each two of 4 s, eight of 1 s."""
    now = 0.0
    monkeypatch.setattr(run.time, "monotonic", lambda: now)
    rounds: list[Any] = []
    for name, seed in run.fuzz_for(16.0, ["long", "short"], 7):
        rounds.append((name, seed))
        now += 4.0 if name == "long" else 1.0
    assert [seed for name, seed in rounds if name == "long"] == [7, 8]
    assert [seed for name, seed in rounds if name == "short"] == [7, 8, 9, 10, 11, 12, 13, 14]
