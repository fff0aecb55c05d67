"""Compare common claims about half precision with the results of ``precision.py cost``.

The claims are those of most introductions to mixed precision: half the memory, 20 to 50% faster
training, matrix products 2 to 8 times faster. A verdict is arithmetic on the measured ratios, by
the bounds that stand in the table. "Peak" is without Python and libraries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from common import markdown_table

HALF = 0.55
"""At most this much of the other's memory counts as half."""
FASTER = (0.20, 0.50)
"""How much faster a step is said to be."""
MATMUL = (2.0, 8.0)
"""How many times faster a matrix product is said to be."""
Case = dict[str, Any]


def claims_table(cases: list[Case], matmuls: list[dict[str, Any]]) -> Iterator[str]:
    """The lines of the table: one row per claim, half-precision format and fp32 to compare with."""
    names = list(dict.fromkeys(c["dtype"] for c in cases))
    pairs = [(h, b) for b in ("fp32", "tf32") for h in ("bf16", "fp16") if {h, b} <= set(names)]
    if not pairs:
        return
    rows = []
    for half, base in pairs:
        rows += [
            [f"half the memory (<= {HALF:g} x)", f"{half} / {base}", *_memory(cases, half, base)],
            ["20 to 50% faster", f"{half} / {base}", *_speed(cases, half, base)],
            [
                "matrix products 2 to 8 x faster",
                f"{half} / {base}",
                *_products(matmuls, half, base),
            ],
        ]
    yield from markdown_table(["claim", "compared", "measured", "holds?"], rows)


def _memory(cases: list[Case], half: str, base: str) -> tuple[str, str]:
    """Ratios at the largest micro-batch; the claim is about the peak."""
    largest = max(c["micro"] for c in cases)
    ours, theirs = (
        next(c for c in cases if c["dtype"] == name and c["micro"] == largest)
        for name in (half, base)
    )
    ratios = {
        "peak": ours["peak_mb"] / theirs["peak_mb"],
        "weights alone": ours["state_bytes"]["weights"] / theirs["state_bytes"]["weights"],
        "model state": sum(ours["state_bytes"].values()) / sum(theirs["state_bytes"].values()),
        "activations": ours["activation_bytes"] / theirs["activation_bytes"],
    }
    text = ", ".join(f"{name} {value:.2f} x" for name, value in ratios.items())
    halved = [name for name, value in ratios.items() if value <= HALF]
    if "peak" in halved:
        return text, "yes"
    return text, f"no; true of: {', '.join(halved) or 'nothing'}"


def _speed(cases: list[Case], half: str, base: str) -> tuple[str, str]:
    wall = {(c["dtype"], c["micro"]): c["wall_s"] for c in cases}
    gains = {m: wall[base, m] / wall[name, m] - 1 for name, m in wall if name == half}
    text = ", ".join(f"{gain:+.0%} at micro-batch {m}" for m, gain in gains.items())
    return text, _verdict(list(gains.values()), FASTER)


def _products(matmuls: list[dict[str, Any]], half: str, base: str) -> tuple[str, str]:
    ratios = {"x".join(map(str, m["shape"])): m[base] / m[half] for m in matmuls}
    text = ", ".join(f"{ratio:.2f} x at {shape}" for shape, ratio in ratios.items())
    return text, _verdict(list(ratios.values()), MATMUL)


def _verdict(values: list[float], bounds: tuple[float, float]) -> str:
    low, high = bounds
    if min(values) >= low:
        return "yes" if max(values) <= high else "yes, and more"
    return "no" if max(values) < low else "in part"
