"""What fp32, tf32, bf16 and fp16 can hold, against torch; what training in them costs in bytes."""

from __future__ import annotations

import doctest
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import burnish.formats
from burnish.config.model import PrecisionConfig
from burnish.config.train import TrainConfig
from burnish.formats import (
    FORMATS,
    NumberFormat,
    markdown_table,
    model_state_bytes_per_parameter,
)
from burnish.train.optim import Optimizer

quick = settings(max_examples=200)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDER = {"fp32": torch.float64, "bf16": torch.float32, "fp16": torch.float32}
"""The format that values are rounded from. Not fp64 for the halves: torch goes by way of fp32,
where the neighbours of a limit are lost before the rounding that is tested."""

stored = pytest.mark.parametrize("name", DTYPES)
halves = pytest.mark.parametrize("name", ["bf16", "fp16"])


def rounded(name: str, value: float) -> float:
    return torch.tensor(value, dtype=WIDER[name]).to(DTYPES[name]).item()


def neighbours(name: str, value: float) -> tuple[float, float]:
    """The numbers of the wider format just below and above a limit."""
    at = torch.tensor(value, dtype=WIDER[name])
    assert at.item() == value
    below, above = (torch.nextafter(at, torch.full_like(at, t)) for t in (-math.inf, math.inf))
    return below.item(), above.item()


def every_pattern(name: str) -> torch.Tensor:
    """All 65536 numbers of a half format, as fp64."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    return bits.view(DTYPES[name]).double()


def tf32_numbers(bits: list[int]) -> list[float]:
    """tf32 numbers as the fp32 numbers whose lowest 13 mantissa bits are 0."""
    assert all(b % 2**13 == 0 for b in bits)
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32).double().tolist()


def test_the_limits_of_fp16_are_the_ones_everyone_quotes() -> None:
    """P10. Largest (2 - 2^-10) x 2^15 = 65536 - 32; from half a spacing (16) above it, infinity."""
    f = FORMATS["fp16"]
    assert (f.bits, f.bytes, f.bias) == (16, 2, 15)
    assert (f.largest, f.inf_from) == (65504, 65520)
    assert (f.smallest_normal, f.smallest_subnormal, f.flush_to_zero) == (2**-14, 2**-24, 2**-25)
    assert (f.epsilon, f.largest_exact_int, f.decimal_digits) == (2**-10, 2048, 3)


@stored
def test_the_limits_are_those_of_torch(name: str) -> None:
    f, info = FORMATS[name], torch.finfo(DTYPES[name])
    assert f.largest == info.max == -info.min
    assert f.smallest_normal == info.smallest_normal
    assert f.epsilon == info.eps
    assert 10.0**-f.decimal_digits == pytest.approx(info.resolution)  # torch keeps it as a float
    assert f.bits == info.bits and f.bytes == DTYPES[name].itemsize
    assert not f.compute_only


@halves
def test_the_limits_are_the_ends_of_all_bit_patterns(name: str) -> None:
    """P10."""
    f, numbers = FORMATS[name], every_pattern(name)
    positive = numbers[numbers.isfinite() & (numbers > 0)].sort().values
    assert positive[-1].item() == f.largest
    assert positive[0].item() == f.smallest_subnormal
    assert positive[positive > 1][0].item() == 1 + f.epsilon
    spacings = positive.diff()
    assert spacings[positive[:-1] < f.smallest_normal].unique().tolist() == [f.smallest_subnormal]
    # from the smallest normal number on, one power of two after the other has as many numbers
    assert (positive >= f.smallest_normal).sum().item() == (2 * f.bias) * 2**f.mantissa_bits


@halves
def test_the_spacing_is_the_distance_between_neighbours_at_every_number(name: str) -> None:
    f, numbers = FORMATS[name], every_pattern(name)
    positive = numbers[numbers.isfinite() & (numbers >= 0)].unique().tolist()
    assert len(positive) == 2**15 - 2**f.mantissa_bits  # all but infinity and NaN
    for low, high in pairwise(positive):
        assert f.spacing(low) == f.spacing(-low) == high - low


@stored
def test_values_round_to_infinity_exactly_from_inf_from_on(name: str) -> None:
    """P10. In fp16, 65520 is infinite and the fp32 number below it is 65504."""
    f = FORMATS[name]
    below, _ = neighbours(name, f.inf_from)
    for sign in (1, -1):
        assert rounded(name, sign * f.inf_from) == sign * math.inf
        assert rounded(name, sign * below) == sign * f.largest
        assert rounded(name, sign * f.largest) == sign * f.largest


@stored
def test_values_round_to_zero_exactly_up_to_flush_to_zero(name: str) -> None:
    """P10. In fp16, 2^-25 is 0 and the fp32 number above it is 2^-24."""
    f = FORMATS[name]
    _, above = neighbours(name, f.flush_to_zero)
    for sign in (1, -1):
        assert rounded(name, sign * f.flush_to_zero) == 0
        assert rounded(name, sign * above) == sign * f.smallest_subnormal
        assert rounded(name, sign * f.smallest_subnormal) == sign * f.smallest_subnormal


@stored
def test_below_the_smallest_normal_number_bits_are_lost(name: str) -> None:
    """1 + epsilon times the smallest normal is kept, times half of it the last bit is gone."""
    f = FORMATS[name]
    full = (1 + f.epsilon) * f.smallest_normal
    assert rounded(name, full) == full
    assert rounded(name, full / 2) == f.smallest_normal / 2


@stored
def test_whole_numbers_are_exact_up_to_the_largest_exact_one_and_not_beyond(name: str) -> None:
    top = FORMATS[name].largest_exact_int
    near = list(range(max(0, top - 5000), top + 1))
    assert torch.tensor(near, dtype=WIDER[name]).to(DTYPES[name]).double().tolist() == near
    assert rounded(name, top + 1) == top


@stored
@given(data=st.data())
@quick
def test_decimal_digits_survive_and_one_more_does_not_always(
    name: str, data: st.DataObject
) -> None:
    f = FORMATS[name]
    digits = f.decimal_digits
    exponent = data.draw(st.integers(*((-4, 3) if name == "fp16" else (-30, 30))))
    whole = data.draw(st.integers(10 ** (digits - 1), 10**digits - 1))
    text = f"{whole / 10 ** (digits - 1) * 10.0**exponent:.{digits - 1}e}"
    assert f"{rounded(name, float(text)):.{digits - 1}e}" == text


@pytest.mark.parametrize(("name", "text"), [("fp32", "8.589973e+09"), ("bf16", "9.03e-01")])
def test_a_number_with_one_digit_too_many_comes_back_changed(name: str, text: str) -> None:
    digits = FORMATS[name].decimal_digits
    assert len(text.partition("e")[0]) == digits + 2  # one more digit, and the point
    assert f"{rounded(name, float(text)):.{digits}e}" != text


def test_tf32_has_the_range_of_fp32_and_the_precision_of_fp16() -> None:
    """Its numbers are fp32 bit patterns with the lowest 23 - 10 = 13 bits 0: the largest is
    0x7f7fe000, the smallest above 0 is 0x2000, and 1 is 0x3f800000."""
    f, fp32, fp16 = (FORMATS[name] for name in ("tf32", "fp32", "fp16"))
    largest, smallest, one, next_to_one = tf32_numbers([0x7F7FE000, 0x2000, 0x3F800000, 0x3F802000])
    assert (f.largest, f.smallest_subnormal) == (largest, smallest)
    assert one == 1 and f.epsilon == next_to_one - 1 == fp16.epsilon
    assert (f.bias, f.smallest_normal) == (fp32.bias, fp32.smallest_normal)
    assert f.largest_exact_int == fp16.largest_exact_int
    assert (f.bits, f.bytes, f.compute_only) == (19, 4, True)
    assert f.inf_from == (f.largest + 2.0**128) / 2


@stored
@given(data=st.data())
@quick
def test_an_update_below_the_smallest_visible_one_is_lost_and_above_it_is_seen(
    name: str, data: st.DataObject
) -> None:
    """P1: why master weights are fp32. The sums are taken in fp64, which holds them exactly."""
    f = FORMATS[name]
    exponent = data.draw(st.integers(-10, 10))
    mantissa = data.draw(st.integers(0, 2**f.mantissa_bits - 1))
    weight = math.ldexp(1 + mantissa * f.epsilon, exponent)
    seen = f.smallest_visible_update(weight)
    assert f.epsilon / 4 < seen / weight <= f.epsilon / 2
    # An eighth more or less than half a spacing is exact in fp32, so the sum is rounded once.
    assert rounded(name, weight + seen * 7 / 8) == weight
    assert rounded(name, weight + seen * 9 / 8) == weight + f.spacing(weight)
    tie_is_lost = mantissa % 2 == 0
    assert (rounded(name, weight + seen) == weight) == tie_is_lost


def test_a_small_update_moves_an_fp32_weight_and_never_a_half_one() -> None:
    """A weight of 0.02 and a step of 1e-6: 2^-6 <= 0.02 < 2^-5, so half a spacing is 2^-6 x
    eps / 2 = 2^-14 in bf16, 2^-17 in fp16 and 2^-30 in fp32."""
    seen = {name: FORMATS[name].smallest_visible_update(0.02) for name in DTYPES}
    assert seen == {"bf16": 2**-14, "fp16": 2**-17, "fp32": 2**-30}
    for name in DTYPES:
        weight = torch.tensor(0.02, dtype=DTYPES[name])
        moved = (weight + torch.tensor(1e-6, dtype=DTYPES[name])) != weight
        assert moved.item() == (name == "fp32")


def test_at_zero_the_smallest_visible_update_is_what_flushes_to_zero() -> None:
    for f in FORMATS.values():
        assert f.smallest_visible_update(0.0) == f.flush_to_zero


@pytest.mark.parametrize("value", [65520.0, -1e9, math.inf, math.nan])
def test_what_the_format_cannot_hold_has_no_spacing(value: float) -> None:
    assert FORMATS["fp16"].spacing(65519.9) == 32  # rounds to 65504
    with pytest.raises(ValueError, match=r"has no neighbours in fp16.*below 65520"):
        FORMATS["fp16"].spacing(value)


@given(exponent_bits=st.integers(2, 8), mantissa_bits=st.integers(1, 23))
@quick
def test_the_limits_keep_their_order_in_any_format(exponent_bits: int, mantissa_bits: int) -> None:
    f = NumberFormat("any", exponent_bits, mantissa_bits)
    assert 0 < f.flush_to_zero < f.smallest_subnormal < f.smallest_normal <= 1
    assert f.epsilon < 1 < f.largest < f.inf_from < 2.0 ** (f.bias + 1)
    assert f.inf_from - f.largest == f.spacing(f.largest) / 2
    assert f.bytes in (1, 2, 4) and 8 * f.bytes >= f.bits > 4 * f.bytes * (f.bytes > 1)


def test_the_table_for_the_documentation_has_every_format_and_the_known_limits() -> None:
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in markdown_table().splitlines()
    ]
    assert rows[0] == ["", "fp32", "tf32", "bf16", "fp16"]
    assert {len(row) for row in rows} == {5}
    fp16 = {row[0]: row[4] for row in rows}
    assert fp16["Sign, exponent, mantissa bits"] == "1 + 5 + 10"
    assert fp16["Largest finite number"] == "2^16 - 2^5 (65504)"
    assert fp16["Rounds to infinity from"] == "2^16 - 2^4 (65520)"
    assert fp16["Smallest normal number"] == "2^-14 (6.10e-05)"
    assert fp16["Smallest subnormal number"] == "2^-24 (5.96e-08)"
    assert fp16["Rounds to 0 up to"] == "2^-25 (2.98e-08)"
    assert fp16["Whole numbers are exact up to"] == "2,048"
    fp32 = {row[0]: row[1] for row in rows}
    assert fp32["Largest finite number"] == "2^128 - 2^104 (3.403e+38)"
    assert fp32["1 + x is 1 up to x ="] == "2^-24 (5.96e-08)"
    tf32 = {row[0]: row[2] for row in rows}
    assert tf32["Bytes of a number"] == "4 (stored as fp32)"


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_mixed_precision_costs_as_much_model_state_as_fp32(half: str) -> None:
    """P11. Adam: fp32 4 + 4 + 4 + 4 = 16; half 2 + 2 + 4 + 4 + 4 = 16, and 18 with the gradient
    summed in fp32 (20 where the half gradient is kept beside the sum)."""
    fp32 = model_state_bytes_per_parameter("fp32")
    assert (fp32.weight, fp32.gradient, fp32.master) == (4, 4, 0)
    assert (fp32.exp_avg, fp32.exp_avg_sq, fp32.total) == (4, 4, 16)
    assert (fp32.in_backward, fp32.in_step) == (0, 0)
    usual = model_state_bytes_per_parameter(half, half)
    assert (usual.weight, usual.gradient, usual.master) == (2, 2, 4)
    assert (usual.exp_avg, usual.exp_avg_sq, usual.total) == (4, 4, 16)
    assert (usual.in_backward, usual.in_step) == (0, 4)
    summed = model_state_bytes_per_parameter(half, "fp32")
    assert (summed.gradient, summed.total) == (4, 18)
    assert (summed.in_backward, summed.in_step) == (2, 0)
    both = model_state_bytes_per_parameter(half, "fp32", keep_half_gradient=True)
    assert (both.gradient, both.total, both.in_backward) == (6, 20, 0)


@pytest.mark.parametrize(
    ("dtype", "grad_accum_dtype"),
    [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "fp32"), ("fp16", "fp16")],
)
def test_the_optimizer_holds_the_bytes_that_are_counted(dtype: str, grad_accum_dtype: str) -> None:
    """P11. One layer of 6 x 5 weights, with the moments of one step and the gradient of the next.
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
        for state in optimizer.adamw.state.values():
            held += [state["exp_avg"], state["exp_avg_sq"]]
        num_bytes = sum({t.data_ptr(): t.nbytes for t in held}.values())
        optimizer.step(0)
    counted = model_state_bytes_per_parameter(dtype, grad_accum_dtype, ema=True)
    assert num_bytes == counted.total * 30


def test_a_moving_average_of_the_weights_is_fp32_whatever_the_dtype() -> None:
    for name in DTYPES:
        without = model_state_bytes_per_parameter(name)
        assert model_state_bytes_per_parameter(name, ema=True).total == without.total + 4


def test_formats_that_cannot_be_trained_in_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype='tf32' is not a format that weights are stored"):
        model_state_bytes_per_parameter("tf32")
    with pytest.raises(ValueError, match=r"use one of \['fp32', 'bf16', 'fp16'\]"):
        model_state_bytes_per_parameter("fp8")
    with pytest.raises(ValueError, match=r"summed in that format or in fp32; use fp32 or bf16"):
        model_state_bytes_per_parameter("bf16", "fp16")
    with pytest.raises(ValueError, match=r"use fp32$"):
        model_state_bytes_per_parameter("fp32", "bf16")


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(burnish.formats).failed == 0
