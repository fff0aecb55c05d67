"""Feed generated inputs to the readers of untrusted text: ``make fuzz ARGS="--seconds 3600"``.

An input fails if the reader raises an error that is not allowed, or takes more user CPU than its
length allows. Each failure is reduced by hypothesis and printed with the command that reproduces
it. Exit code 1 if there was one.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [*map(str, (HERE.parent, HERE.parent / "support", HERE.parents[1]))]

import hypothesis  # noqa: E402
from fuzz.targets import TARGETS, Target  # noqa: E402
from hypothesis import HealthCheck, Phase, Verbosity, given, settings  # noqa: E402

EXAMPLES = 40
"""Inputs of one round. A round has a seed of its own."""
PRINTED = 3
"""Failures of one target that are printed."""


class TooSlowError(BaseException):
    """An input took more CPU than its length allows. No reader catches it."""


class BrokenError(AssertionError):
    """An input on which a reader breaks its promise."""


@dataclass(frozen=True)
class Failure:
    """The smallest input that hypothesis found."""

    value: Any
    error: str


def length_of(value: Any) -> int:
    """Return the number of characters of an input."""
    return len(value) if isinstance(value, str | bytes) else len(repr(value))


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TooSlowError after seconds of user CPU, in the main thread."""

    def stop(number: int, frame: object) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def check(target: Target, value: Any) -> None:
    """Give a reader one input. Raises BrokenError."""
    limit_s = target.cpu_s + target.cpu_us_per_char * length_of(value) / 1e6
    try:
        with limited(limit_s):
            target.check(value)
    except TooSlowError:
        raise BrokenError(f"took more than {limit_s:.1f} s of user CPU") from None
    except target.allowed:
        pass
    except Exception as error:
        raise BrokenError(traceback.format_exc(limit=-3)) from error


def fuzz(target: Target, seed: int, examples: int = EXAMPLES) -> Failure | None:
    """Return the failure that one round finds, or None."""
    last: list[Any] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        print_blob=False,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(target.inputs)
    def attempt(value: Any) -> None:
        try:
            check(target, value)
        except BrokenError:
            last[:] = [value]
            raise

    try:
        attempt()
    except BrokenError as error:
        return Failure(last[0], str(error))
    return None


def fuzz_for(seconds: float, names: Sequence[str], seed: int) -> Iterator[tuple[str, int]]:
    """Yield (target, seed) until the time is up; the next is the target with the least time."""
    spent, seeds = dict.fromkeys(names, 0.0), dict.fromkeys(names, seed)
    start = time.monotonic()
    while (began := time.monotonic()) < start + seconds:
        name = min(spent, key=lambda name: spent[name])
        yield name, seeds[name]
        seeds[name] += 1
        spent[name] += time.monotonic() - began


def main(argv: Sequence[str]) -> int:
    """Fuzz for a time; return the exit code."""
    options = _parser().parse_args(argv)
    names = options.target or list(TARGETS)
    pairs = fuzz_for(options.seconds, names, options.seed)
    if options.rounds is not None:
        last = options.seed + options.rounds
        pairs = ((name, seed) for seed in range(options.seed, last) for name in names)
    counts, failures = Counter[str](), Counter[str]()
    for name, seed in pairs:
        counts[name] += 1
        failure = fuzz(TARGETS[name], seed)
        if failure is None:
            continue
        failures[name] += 1
        if failures[name] <= PRINTED:
            print(f'FAILED make fuzz ARGS="--target {name} --seed {seed} --rounds 1"')
            print(f"{failure.value!r:.600}\n{failure.error}", flush=True)
    for name in names:
        print(f"{name:24s}{counts[name] * EXAMPLES:9d} inputs{failures[name]:7d} rounds failed")
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="time, which the targets share (default: 120)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first round (default: 0)")
    parser.add_argument(
        "--target", action="append", choices=list(TARGETS), help="only this one; repeatable"
    )
    parser.add_argument("--rounds", type=int, help="of each target, instead of --seconds")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
