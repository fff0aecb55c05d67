"""The memory that a vLLM engine on a GPU gives back to other processes, and takes again."""

from __future__ import annotations

from typing import Any


class Sleep:
    """Free and take back parts of the memory of ``llm``, vLLM's LLMEngine."""

    def __init__(self, llm: Any, *, on_cpu: bool) -> None:
        """``on_cpu``: vLLM has no sleep there, and nothing happens."""
        self._llm, self._on_cpu = llm, on_cpu
        self._asleep: set[str] = set()

    def begin(self, *, drop_weights: bool) -> bool:
        """Free the cache, and move the weights to host memory or drop them. Return whether this
        changed anything."""
        if self._on_cpu or self._asleep:
            return False
        self._llm.sleep(2 if drop_weights else 1)
        self._asleep = {"weights", "kv_cache"}
        return True

    def wake(self, *tags: str) -> None:
        """Take the memory of ``tags`` ("weights", "kv_cache") again, if it was freed."""
        if found := sorted(self._asleep.intersection(tags)):
            self._llm.wake_up(found)
            self._asleep -= set(found)
