"""Treatment of data rows over the length limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

Overlong = Literal["error", "truncate_left", "truncate_right", "drop"]


def shortenings(*, can_lose_start: bool, can_lose_end: bool) -> tuple[Overlong, ...]:
    """Return the settings that handle a row over the limit without an error. ``can_lose_start``:
    rows without their first tokens can be used; ``can_lose_end``: those without their last ones."""
    starts: tuple[Overlong, ...] = ("truncate_left",) if can_lose_start else ()
    ends: tuple[Overlong, ...] = ("truncate_right",) if can_lose_end else ()
    return (*starts, *ends, "drop")


def overlong_rules(overlong: Overlong, accepted: Sequence[Overlong]) -> Iterator[str]:
    """Yield an error if rows would lose a side that they need. ``accepted``: :func:`shortenings` of
    the data."""
    if overlong == "error" or overlong in accepted:
        return
    lost = {
        "truncate_right": "remove the end of a prompt or the labeled end of a row",
        "truncate_left": "use prompts that differ from those in the output",
    }
    yield (
        f"overlong={overlong} would {lost[overlong]}; use {' or '.join(accepted)}, or raise the "
        "length limit"
    )
