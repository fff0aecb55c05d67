"""Order of the calls of one episode: that of their arrival, whichever reply is sampled first.

Parallel calls are parsed and sampled side by side. What depends on their order (the number of equal
prompts before a call, the turns that are left) is decided in the order of arrival, so that a
resumed run draws the same tokens.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass(eq=False)
class Arrival:
    """One call: its place in the order."""

    number: int
    """Number of calls that arrived before it."""
    _before: list[Arrival] = field(repr=False)
    _passed: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    async def turn(self) -> None:
        """Wait until every earlier call has passed."""
        for earlier in self._before:
            await earlier._passed.wait()
        self._before.clear()

    def passed(self) -> None:
        """Let later calls pass. Call it once the engine has the request, and at the latest when the
        call ends."""
        self._passed.set()

    @property
    def has_passed(self) -> bool:
        """Return whether later calls need not wait for this one."""
        return self._passed.is_set()


class Arrivals:
    """The calls of one episode that have arrived."""

    def __init__(self) -> None:
        self._count = 0
        self._open: list[Arrival] = []

    def arrive(self) -> Arrival:
        """Return the place of a new call. :meth:`Arrival.passed` must be called for it."""
        self._open = [arrival for arrival in self._open if not arrival.has_passed]
        arrival = Arrival(self._count, list(self._open))
        self._open.append(arrival)
        self._count += 1
        return arrival
