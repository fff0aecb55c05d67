"""Treatment of data rows over the length limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

Overlong = Literal["error", "truncate_left", "truncate_right", "drop"]


def overlong_rules(overlong: Overlong, *, can_lose_end: bool) -> Iterator[str]:
    """Yield an error if rows would lose an end that they need. ``can_lose_end``: rows without their
    last tokens can be trained on."""
    if overlong == "truncate_right" and not can_lose_end:
        yield (
            "overlong=truncate_right would remove the end of a prompt or the labeled end of a row; "
            "use truncate_left or drop"
        )
