"""A multi-turn environment: find a secret number from the answers "higher" and "lower"."""

import random
import re


class GuessNumber:
    """The policy guesses until it finds a number from 1 to ``highest``.

    With three turns, guessing at random finds one of seven numbers 3 times in 7 at best; halving
    the range finds all of them.
    """

    def __init__(self, highest: int = 7) -> None:
        self.highest = highest

    def reset(self, task: dict, seed: int) -> dict:
        """Choose the number. All members of a group have the same seed, so the same number."""
        self.secret = random.Random(seed).randint(1, self.highest)
        return {"messages": [{"role": "user", "content": "?"}]}

    def step(self, message: dict) -> dict:
        """Answer one guess. The episode ends when the number is found, or at the turn limit."""
        found = re.search(r"\d+", message["content"])
        if found is None:
            return {"messages": [{"role": "user", "content": "?"}]}
        guess = int(found[0])
        if guess == self.secret:
            return {"done": True, "rewards": {"found": 1.0}}
        return {"messages": [{"role": "user", "content": ">" if self.secret > guess else "<"}]}
