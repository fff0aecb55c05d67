"""The limits of number formats that docs/precision.md lists, against torch; and the bytes of
training in them."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from burnish.config.model import PrecisionConfig
from burnish.config.train import TrainConfig
from burnish.models.load import DTYPES
from burnish.train.optim import Optimizer

PAGE = Path(__file__).parent.parent / "docs" / "precision.md"
NAMES = ("fp32", "tf32", "bf16", "fp16")
WIDER = {"fp32": torch.float64, "bf16": torch.float32, "fp16": torch.float32}
"""The format that values are rounded from. Not fp64 for the halves: torch goes by way of fp32,
where the neighbours of a limit are lost before the rounding that is tested."""

stored = pytest.mark.parametrize("name", WIDER)


def table() -> dict[str, dict[str, str]]:
    """The cells of the page's table, by format and row."""
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\|([^|]+)\|" + 4 * r"([^|]+)\|" + "$", text, flags=re.MULTILINE)
    begin = next(i for i, row in enumerate(rows) if [c.strip() for c in row[1:]] == list(NAMES))
    cells = [[c.strip() for c in row] for row in rows[begin + 2 : begin + 13]]
    return {name: {row[0]: row[i] for row in cells} for i, name in enumerate(NAMES, 1)}


def limit(name: str, row: str) -> float:
    """``2^16 - 2^5 (65504)`` -> 65504.0; the number in brackets is checked too."""
    exact, _, rounded_to = table()[name][row].partition(" (")
    powers = re.findall(r"2\^(-?\d+)", exact)
    value = math.fsum(math.copysign(2.0 ** (int(p) - 64), -i) for i, p in enumerate(powers))
    value = math.ldexp(value, 64)
    assert value == pytest.approx(float(rounded_to.rstrip(")")), rel=5e-3)  # 3 digits
    return value


def rounded(name: str, value: float) -> float:
    return torch.tensor(value, dtype=WIDER[name]).to(DTYPES[name]).item()


def neighbours(name: str, value: float) -> tuple[float, float]:
    """The numbers of the wider format just below and above a limit."""
    at = torch.tensor(value, dtype=WIDER[name])
    assert at.item() == value
    below, above = (torch.nextafter(at, torch.full_like(at, t)) for t in (-math.inf, math.inf))
    return below.item(), above.item()


@stored
def test_the_limits_are_those_of_torch(name: str) -> None:
    """P10. In fp16: largest (2 - 2^-10) x 2^15 = 65536 - 32 = 65504."""
    cells, info = table()[name], torch.finfo(DTYPES[name])
    assert limit(name, "Largest finite number") == info.max == -info.min
    assert limit(name, "Smallest normal number") == info.smallest_normal
    assert limit(name, "Spacing above 1") == info.eps
    assert 10.0 ** -int(cells["Decimal digits preserved"]) == pytest.approx(info.resolution)
    assert int(cells["Bytes per number"]) == DTYPES[name].itemsize
    assert eval(cells["Sign, exponent, mantissa bits"]) == info.bits


@stored
def test_values_round_to_infinity_and_to_zero_exactly_from_the_limits_on(name: str) -> None:
    """P10. In fp16, 65520 is infinite and the fp32 number below it 65504; 2^-25 is 0 and the fp32
    number above it 2^-24."""
    infinite, zero = limit(name, "Rounds to infinity from"), limit(name, "Rounds to 0 up to")
    below, above = neighbours(name, infinite)[0], neighbours(name, zero)[1]
    for sign in (1, -1):
        assert rounded(name, sign * infinite) == sign * math.inf
        assert rounded(name, sign * below) == sign * limit(name, "Largest finite number")
        assert rounded(name, sign * zero) == 0
        assert rounded(name, sign * above) == sign * limit(name, "Smallest subnormal number")


@stored
def test_small_updates_are_lost_and_whole_numbers_exact_up_to_the_limits(name: str) -> None:
    lost = limit(name, "1 + x is 1 up to x =")
    assert rounded(name, 1 + lost) == 1 and rounded(name, 1 + lost * 9 / 8) > 1
    top = int(table()[name]["Integers are exact up to"].replace(",", ""))
    near = list(range(max(0, top - 5000), top + 1))
    assert torch.tensor(near, dtype=WIDER[name]).to(DTYPES[name]).double().tolist() == near
    assert rounded(name, top + 1) == top


def test_tf32_has_the_range_of_fp32_and_the_precision_of_fp16() -> None:
    """Its numbers are fp32 bit patterns with the lowest 23 - 10 = 13 bits 0: the largest is
    0x7f7fe000, the smallest above 0 is 0x2000, and 1 is 0x3f800000."""
    bits = torch.tensor([0x7F7FE000, 0x2000, 0x3F800000, 0x3F802000], dtype=torch.int32)
    largest, smallest, one, next_to_one = bits.view(torch.float32).double().tolist()
    assert limit("tf32", "Largest finite number") == largest
    assert limit("tf32", "Smallest subnormal number") == smallest
    assert limit("tf32", "Rounds to 0 up to") == smallest / 2
    assert limit("tf32", "Rounds to infinity from") == (largest + 2.0**128) / 2
    assert one == 1 and limit("tf32", "Spacing above 1") == next_to_one - 1
    cells = {name: table()[name] for name in NAMES}
    for row in ("1 + x is 1 up to x =", "Integers are exact up to"):
        assert cells["tf32"][row] == cells["fp16"][row]
    assert cells["tf32"]["Smallest normal number"] == cells["fp32"]["Smallest normal number"]
    assert cells["tf32"]["Bytes per number"] == "4 (stored as fp32)"


def test_a_small_update_moves_an_fp32_weight_and_never_a_half_one() -> None:
    """P1. A weight of 0.02 and a step of 1e-6: 2^-6 <= 0.02 < 2^-5, so half a spacing is 2^-6 x
    eps / 2 = 2^-14 in bf16, 2^-17 in fp16 and 2^-30 in fp32."""
    for name in WIDER:
        weight = torch.tensor(0.02, dtype=DTYPES[name])
        moved = (weight + torch.tensor(1e-6, dtype=DTYPES[name])) != weight
        assert moved.item() == (name == "fp32")


@pytest.mark.parametrize(
    ("dtype", "grad_accum_dtype", "expected"),
    [
        ("fp32", "fp32", 4 + 4 + 8),
        ("bf16", "fp32", 2 + 4 + 4 + 8),
        ("bf16", "bf16", 2 + 2 + 4 + 8),
        ("fp16", "fp32", 2 + 4 + 4 + 8),
        ("fp16", "fp16", 2 + 2 + 4 + 8),
    ],
)
def test_the_optimizer_holds_the_bytes_that_are_counted(
    dtype: str, grad_accum_dtype: str, expected: int
) -> None:
    """P11. One layer of 6 x 5 weights, with the moments of one step and the gradient of the next:
    weight, gradient sum, fp32 master of a half weight, two moments; and 4 for the moving average.
    The step counter of Adam (4 bytes a tensor) is not per parameter and is left out."""
    layer = torch.nn.Linear(5, 6, bias=False)
    optimizer = Optimizer(
        layer,
        TrainConfig(lr_warmup_ratio=0.0, ema_decay=0.9),
        lr=1e-3,
        total_steps=10,
        precision=PrecisionConfig(dtype=dtype, grad_accum_dtype=grad_accum_dtype),
    )
    for _ in range(2):
        layer(torch.ones(3, 5, dtype=DTYPES[dtype])).sum().backward()
        held = [*optimizer.params, *optimizer.masters, *(optimizer.ema or [])]
        held += [t.grad for t in held if t.grad is not None]
        moments = [optimizer.tensors()[kind] for kind in ("exp_avg", "exp_avg_sq")]
        held += [t for tensors in moments for t in tensors.values()]
        num_bytes = sum({t.data_ptr(): t.nbytes for t in held}.values())
        optimizer.step(0)
    assert num_bytes == (expected + 4) * 30
