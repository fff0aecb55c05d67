"""Environment of the recipe: the policy guesses a number, and is told if it is higher or lower.
``python -m doctest environment.py`` tests it: no output if it passes."""

from __future__ import annotations

import random
import re
from typing import Any


class Environment:
    """One episode. The recipe's ``options`` are the arguments of ``__init__``.

    >>> episode = Environment(highest=1)
    >>> episode.reset({}, seed=0)["messages"][0]["content"]
    'guess a number from 1 to 1'
    >>> episode.step({"role": "assistant", "content": "1"})
    {'done': True, 'rewards': {'found': 1.0}}
    """

    def __init__(self, highest: int = 3) -> None:
        self.highest = highest

    def reset(self, task: dict[str, Any], seed: int) -> dict[str, Any]:
        """Begin an episode: return the first messages. Samples of a group have the same seed."""
        self.secret = random.Random(seed).randint(1, self.highest)
        return self._say(f"guess a number from 1 to {self.highest}")

    def step(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer a message of the policy: return more messages, or the end and its rewards."""
        guess = re.search(r"\d+", message["content"])
        if guess is None:
            return self._say("a number")
        if int(guess[0]) == self.secret:
            return {"done": True, "rewards": {"found": 1.0}}
        return self._say("higher" if int(guess[0]) < self.secret else "lower")

    def _say(self, text: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}]}
