"""Draw cases of the relations until the time is up: ``make hunt ARGS="--seconds 600 --seed 7"``.

Every failure is printed with the command that reproduces it. Exit code 1 if there was one."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
HERE = Path(__file__).resolve().parent
FOLDERS = (HERE.parent, HERE.parent / "support", HERE.parents[1])
sys.path[:0] = [*map(str, FOLDERS)]  # metamorphic.*, its support, and burnish of this tree

from metamorphic import (  # noqa: E402, F401
    relations_cluster,
    relations_columns,
    relations_data,
    relations_episodes,
    relations_folders,
    relations_heads,
    relations_messages,
    relations_models,
    relations_numerics,
    relations_plan,
    relations_requests,
    relations_rewards,
    relations_rows,
    relations_rules,
    relations_runs,
    relations_serving,
    relations_templates,
    relations_tools,
    relations_turns,
)
from metamorphic.base import CLOSERS, RELATIONS, Broken, check  # noqa: E402

FIRST = 8
"""Cases of a relation that are drawn first, until one holds."""
KEPT = 3
"""Failures of one relation that are printed in full."""


def main(argv: Sequence[str]) -> int:
    """Run the hunt; returns the exit code."""
    options = _parser().parse_args(argv)
    names = options.relation or list(RELATIONS)
    if unknown := sorted(set(names) - set(RELATIONS)):
        print(f"unknown: {', '.join(unknown)}; relations: {', '.join(RELATIONS)}")
        return 2
    counts = {name: Counter[str]() for name in names}
    try:
        for name, seed in _cases(names, options, counts):
            counts[name][_outcome(name, seed, counts[name])] += 1
    finally:
        for close in CLOSERS:
            close()
    for name, count in counts.items():
        print(
            f"{name:24s}", *(f"{count[word]:7d} {word}" for word in ("held", "refused", "failed"))
        )
    return 1 if any(count["failed"] for count in counts.values()) else 0


def _outcome(name: str, seed: int, before: Counter[str]) -> str:
    """Check one case and print a failure; returns held, refused or failed. ``before``: the outcomes
    of the relation so far."""
    try:
        result = check(name, seed)
    except Broken as error:
        print(f'FAILED make hunt ARGS="--relation {name} --case {seed}"', flush=True)
        if before["failed"] < KEPT:
            _explain(error)
        return "failed"
    return "held" if result == "holds" else "refused"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make hunt", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="time budget")
    parser.add_argument("--seed", type=int, default=0, help="of the first case of each relation")
    parser.add_argument("--relation", action="append", help="only this one (may be repeated)")
    parser.add_argument("--case", type=int, help="only the case of this seed")
    return parser


def _cases(
    names: Sequence[str], options: argparse.Namespace, counts: Mapping[str, Counter[str]]
) -> Iterator[tuple[str, int]]:
    """(relation, seed): each relation gets a share of the time, those of models a larger one. Those
    of which no case held are first, for a few cases: the first one of a relation is expensive, and
    may be refused. ``counts``: outcomes so far."""
    if options.case is not None:
        yield from ((name, options.case) for name in names)
        return
    end = time.monotonic() + options.seconds
    seeds = dict.fromkeys(names, options.seed * 1_000_000)
    spent = dict.fromkeys(names, 0.0)
    shares = {n: 4 if RELATIONS[n] in vars(relations_models).values() else 1 for n in names}
    while time.monotonic() < end:
        name = min(names, key=lambda n: (_has_held(counts[n]), spent[n] / shares[n]))
        start = time.process_time()
        yield name, seeds[name]
        seeds[name] += 1
        spent[name] += time.process_time() - start + 1e-3


def _has_held(count: Counter[str]) -> bool:
    """Return whether a case held, or enough were tried."""
    return count["held"] > 0 or sum(count.values()) >= FIRST


def _explain(error: Broken) -> None:
    cause = error.__cause__
    frames = traceback.extract_tb(cause.__traceback__) if cause else []
    own = [frame for frame in frames if Path(frame.filename).name != "base.py"]
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    print(f"  {error}{where}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
