"""Handle Ctrl-C and SIGTERM as a request to stop after the current step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any


class StopSignals:
    """Context manager that stores the first signal in ``asked``. A second signal raises
    KeyboardInterrupt. Handlers are installed only in the main thread."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """``say`` is called with the name of the first signal when it arrives."""
        self.asked: int | None = None
        self._say = say
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self.asked is not None:
            raise KeyboardInterrupt
        self.asked = number
        self._say(signal.Signals(number).name)
