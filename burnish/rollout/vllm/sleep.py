"""Release the GPU memory of a vLLM engine for other processes, and allocate it again."""

from __future__ import annotations

from typing import Any


class Sleep:
    """Releases and reallocates parts of the memory of ``llm``, vLLM's LLMEngine."""

    def __init__(self, llm: Any, *, on_cpu: bool) -> None:
        """Manage ``llm``. With ``on_cpu`` nothing is released, because vLLM has no sleep there."""
        self._llm, self._on_cpu = llm, on_cpu
        self._asleep: set[str] = set()

    def begin(self, *, drop_weights: bool) -> bool:
        """Free the cache, and move the weights to host memory or drop them.

        Returns whether this changed anything.
        """
        if self._on_cpu or self._asleep:
            return False
        self._llm.sleep(2 if drop_weights else 1)
        self._asleep = {"weights", "kv_cache"}
        return True

    def wake(self, *tags: str) -> None:
        """Reallocate the memory of ``tags`` ("weights", "kv_cache") if it was freed."""
        if tags_asleep := sorted(self._asleep.intersection(tags)):
            self._llm.wake_up(tags_asleep)
            self._asleep -= set(tags_asleep)
