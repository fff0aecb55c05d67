"""A gate that another thread can shut between two steps of a rollout engine."""

from __future__ import annotations

import threading


class StepGate:
    """Open at first. Who steps asks it before every step."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._shut_by: int | None = None

    def shut(self) -> None:
        """No step begins from here on; one that is under way ends."""
        self._shut_by = threading.get_ident()
        self._open.clear()

    def open(self) -> None:
        """Whoever waits goes on. May be called twice."""
        self._shut_by = None
        self._open.set()

    def wait(self) -> None:
        """Wait until it is open. Raises RuntimeError for the thread that shut it, which nobody
        could wake."""
        if self._shut_by == threading.get_ident():
            raise RuntimeError(
                "the rollout engine is paused, and this thread did it; call resume()"
            )
        self._open.wait()
