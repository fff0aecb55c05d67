"""What a number format can hold, and what a model trained in it costs in bytes. Pure arithmetic.

Every limit is computed from two counts, the exponent bits and the mantissa bits, by the rules of
IEEE 754 (binary formats with subnormals, rounding to nearest, ties to even). Nothing here touches a
tensor. Reading order: NumberFormat, FORMATS, markdown_table, then the bytes of the model state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class NumberFormat:
    """A binary floating-point format: 1 sign bit, ``exponent_bits``, ``mantissa_bits``.

    A normal number is 1.m x 2^e with ``mantissa_bits`` bits of m behind the point. All limits are
    exact Python floats, and hold for negative numbers with the sign turned.

    >>> FORMATS["fp16"].largest, FORMATS["fp16"].inf_from
    (65504.0, 65520.0)
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    """Stored bits behind the point; the leading 1 is not stored."""

    @property
    def bits(self) -> int:
        """Bits that carry something: sign, exponent, mantissa."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bytes(self) -> int:
        """Bytes of one stored number: the next power of two. tf32 has 19 bits and is kept in 4."""
        return 1 << (math.ceil(self.bits / 8) - 1).bit_length()

    @property
    def compute_only(self) -> bool:
        """Whether tensors are stored in a wider format and only products are taken in this one."""
        return self.bits < 8 * self.bytes

    @property
    def bias(self) -> int:
        """What is taken off the stored exponent; also the exponent of the largest numbers."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def largest(self) -> float:
        """The largest finite number: all mantissa bits set."""
        return (2.0 - self.epsilon) * 2.0**self.bias

    @property
    def inf_from(self) -> float:
        """Values from here on round to infinity.

        It lies half a spacing above ``largest``, whose last bit is 1, so the tie rounds away.
        """
        return (2.0 - self.epsilon / 2) * 2.0**self.bias

    @property
    def smallest_normal(self) -> float:
        """The smallest number with full precision."""
        return math.ldexp(1.0, 1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest number above 0, with one bit of precision left."""
        return self.smallest_normal * self.epsilon

    @property
    def flush_to_zero(self) -> float:
        """The largest value that rounds to 0: half of ``smallest_subnormal``, a tie to even."""
        return self.smallest_subnormal / 2

    @property
    def epsilon(self) -> float:
        """The spacing just above 1."""
        return math.ldexp(1.0, -self.mantissa_bits)

    @property
    def largest_exact_int(self) -> int:
        """Every whole number up to here is exact; the next one is not."""
        return 1 << (self.mantissa_bits + 1)

    @property
    def decimal_digits(self) -> int:
        """Significant decimal digits that always survive storing and reading back."""
        return len(str(2**self.mantissa_bits)) - 1  # the most whose 10^digits <= 2^mantissa_bits

    def spacing(self, value: float) -> float:
        """The distance from ``abs(value)`` to the next larger number (at ``largest``: what it would
        be).

        Raises ValueError for a value that rounds to infinity or is not a number.
        """
        size = abs(value)
        if not size < self.inf_from:
            raise ValueError(
                f"{value} has no neighbours in {self.name}, which is finite below {self.inf_from}; "
                "give a smaller value"
            )
        size = max(min(size, self.largest), self.smallest_normal)
        return math.ldexp(self.epsilon, math.frexp(size)[1] - 1)

    def smallest_visible_update(self, weight: float) -> float:
        """The size below which adding to a stored weight gives the same weight back: half a
        spacing.

        An update of exactly this size is lost at every second weight (a tie, to even). Relative to
        a normal weight it lies between ``epsilon / 4`` (just below a power of two) and
        ``epsilon / 2`` (at one). Towards 0 a power of two sees updates of half this size.
        """
        return self.spacing(weight) / 2


FORMATS: dict[str, NumberFormat] = {
    f.name: f
    for f in (
        NumberFormat("fp32", exponent_bits=8, mantissa_bits=23),
        NumberFormat("tf32", exponent_bits=8, mantissa_bits=10),
        NumberFormat("bf16", exponent_bits=8, mantissa_bits=7),
        NumberFormat("fp16", exponent_bits=5, mantissa_bits=10),
    )
}
"""By name, widest first. ``tf32`` is a way to multiply fp32 tensors, not a format of tensors; a GPU
may cut bits off on the way into it where the limits here assume rounding."""


def markdown_table() -> str:
    """The limits of every format as a Markdown table, one row a fact, for the documentation."""
    rows: list[tuple[str, Callable[[NumberFormat], str]]] = [
        (
            "Sign, exponent, mantissa bits",
            lambda f: f"1 + {f.exponent_bits} + {f.mantissa_bits}",
        ),
        ("Bytes of a number", lambda f: f"{f.bytes}{' (stored as fp32)' * f.compute_only}"),
        ("Largest finite number", lambda f: _below_power(f, f.largest)),
        ("Rounds to infinity from", lambda f: _below_power(f, f.inf_from)),
        ("Smallest normal number", lambda f: _power(f.smallest_normal)),
        ("Smallest subnormal number", lambda f: _power(f.smallest_subnormal)),
        ("Rounds to 0 up to", lambda f: _power(f.flush_to_zero)),
        ("Spacing above 1", lambda f: _power(f.epsilon)),
        ("1 + x is 1 up to x =", lambda f: _power(f.smallest_visible_update(1.0))),
        ("Whole numbers are exact up to", lambda f: f"{f.largest_exact_int:,}"),
        ("Decimal digits that survive", lambda f: str(f.decimal_digits)),
    ]
    lines = [["", *FORMATS], ["---", *("---:" for _ in FORMATS)]]
    lines += [[label, *(show(f) for f in FORMATS.values())] for label, show in rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _power(value: float) -> str:
    return f"2^{math.frexp(value)[1] - 1} ({value:.2e})"


def _below_power(f: NumberFormat, value: float) -> str:
    """``2^16 - 2^5 (65504)``: how far a value stands below the power of two that is out of
    reach."""
    top = f.bias + 1
    below = math.frexp(math.ldexp(1.0, top - 64) - math.ldexp(value, -64))[1] - 1 + 64
    return (
        f"2^{top} - 2^{below} ({value:.0f})"
        if value < 1e6
        else f"2^{top} - 2^{below} ({value:.3e})"
    )


@dataclass(frozen=True)
class ModelStateBytes:
    """Bytes per trained parameter that AdamW training holds, by what they are for."""

    weight: int
    """The weights that the model computes with."""
    gradient: int
    """What micro-batches are summed into."""
    master: int
    """fp32 weights beside half-precision ones; 0 where the weights are fp32 themselves."""
    exp_avg: int
    """Adam's first moment."""
    exp_avg_sq: int
    """Adam's second moment."""
    ema: int = 0
    """Moving average of the weights; 0 without one."""
    in_backward: int = 0
    """Not part of ``total``: a gradient on its way into the sum, held for one parameter tensor at a
    time."""
    in_step: int = 0
    """Not part of ``total``: the fp32 form of the gradient while the optimizer steps, in place of
    ``gradient``, which is freed as it is made."""

    @property
    def total(self) -> int:
        """What is held between a backward and the step after it, and bounds what is held between
        steps."""
        return self.weight + self.gradient + self.master + self.exp_avg + self.exp_avg_sq + self.ema


def model_state_bytes_per_parameter(
    dtype: str,
    grad_accum_dtype: str = "fp32",
    *,
    ema: bool = False,
    keep_half_gradient: bool = False,
) -> ModelStateBytes:
    """What ``burnish/train/optim.py`` holds per trained parameter, in bytes.

    fp32: 4 weight + 4 gradient + 8 moments = 16. bf16 or fp16 with sums in fp32: 2 weight +
    4 gradient sum + 4 master + 8 moments = 18. With sums in the half format itself: 2 + 2 + 4 + 8
    = 16, the usual count of mixed precision. Mixed precision halves activations and the bytes that
    a product moves, not the model state. ``keep_half_gradient`` counts a trainer that holds the
    whole half-precision gradient beside the fp32 sum: 2 + (2 + 4) + 4 + 8 = 20.

    Raises ValueError for a format that weights are not stored in, and for gradient sums in neither
    fp32 nor ``dtype``.
    """
    stored = [name for name, f in FORMATS.items() if not f.compute_only]
    if dtype not in stored:
        raise ValueError(
            f"dtype={dtype!r} is not a format that weights are stored in; use one of {stored}"
        )
    if grad_accum_dtype not in ("fp32", dtype):
        allowed = " or ".join(dict.fromkeys(("fp32", dtype)))
        raise ValueError(
            f"grad_accum_dtype={grad_accum_dtype!r} does not go with dtype={dtype!r}: gradients "
            f"arrive in {dtype} and are summed in that format or in fp32; use {allowed}"
        )
    full, own, total = (FORMATS[name].bytes for name in ("fp32", dtype, grad_accum_dtype))
    half, widened = own < full, own < total
    return ModelStateBytes(
        weight=own,
        gradient=total + (own if widened and keep_half_gradient else 0),
        master=full if half else 0,
        exp_avg=full,
        exp_avg_sq=full,
        ema=full if ema else 0,
        in_backward=own if widened and not keep_half_gradient else 0,
        in_step=full if half and not widened else 0,
    )
