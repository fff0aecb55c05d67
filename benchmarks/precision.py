"""Measure the costs and effects of number formats: learning, time, memory, log-prob error; and the
figures.

    python benchmarks/precision.py learn [--seeds 0 1 2] [--dtypes fp32 bf16 fp16] [--control]
    python benchmarks/precision.py cost [--micro 1 4 8] [--device cpu|cuda]
    python benchmarks/precision.py gap
    python benchmarks/precision.py figures [--results DIR] [--to docs/figures]

``learn`` runs the demo's recipe in each format and compares the runs; ``cost`` takes train steps
in turn and sets what they cost beside what is usually claimed; ``gap`` compares log-probs with fp64
at fixed weights; ``figures`` draws what ``learn`` left. Each is a file beside this one, where its
settings are explained; all print markdown. ``--tiny`` tries them on a model made from scratch, in
seconds.
"""

from __future__ import annotations

import argparse
import sys

import precision_cost
import precision_figures
import precision_gap
import precision_learn


def main() -> int:
    """Parse and hand over to the part that was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="command", required=True)
    for module in (precision_learn, precision_cost, precision_gap, precision_figures):
        module.add_arguments(parts)
    args = parser.parse_args()
    return int(args.run(args) or 0)


if __name__ == "__main__":
    sys.exit(main())
