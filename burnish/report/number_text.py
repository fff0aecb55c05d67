"""Numbers of metrics as text. ``BurnishCharts.format`` in charts.js gives the same texts."""

from __future__ import annotations

import math

_SIZES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def format_number(value: float, unit: str = "") -> str:
    """Return a value of a unit of the catalog as text, with about four digits.

    >>> [format_number(v) for v in (0.0, 1e-5, 0.00123, 0.5, 1234.5, 65536.0, 1.5e12)]
    ['0', '1e-5', '0.00123', '0.5', '1,234.5', '65,536', '1.5e12']
    >>> [format_number(v, "fraction") for v in (0.0, 0.5, 0.1234, 0.00001)]
    ['0%', '50%', '12.34%', '0.001%']
    >>> [format_number(v, "bytes") for v in (3 * 2**29, 2**20, 0)]
    ['1.5 GiB', '1 MiB', '0 B']
    """
    if not math.isfinite(value):
        return str(value)
    if unit == "fraction":
        return f"{_plain(100 * value)}%"
    if unit == "bytes":
        name, size = next((s for s in _SIZES if abs(value) >= s[1]), _SIZES[-1])
        return f"{_plain(value / size)} {name}"
    return _plain(value)


def _plain(value: float) -> str:
    size = abs(value)
    if value == 0 or 1e-3 <= size < 1e9:
        decimals = 0 if size >= 1e4 else 1 if size >= 1e3 else 3 - math.floor(math.log10(size or 1))
        text = f"{value:,.{max(0, decimals)}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    mantissa, _, exponent = f"{value:.3e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
