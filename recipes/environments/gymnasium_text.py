"""A gymnasium game as text: the policy walks over a frozen lake, one letter per turn.

An example of an adapter: docs/environments.md, "An adapter of your own". It needs gymnasium
(``pip install gymnasium``) in the interpreter of the environments, and nothing of Burnish.
"""

import re

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

ACTIONS = {"L": 0, "D": 1, "R": 2, "U": 3}
"""Letter of a move -> action of FrozenLake."""


class FrozenLake:
    """FrozenLake-v1 on a random map of ``size`` x ``size`` fields: F frozen, H hole, G goal.

    The policy reads the map, with @ at its place and rows divided by slashes (``@H/FG``), and
    replies with a letter: left, down, right or up. The goal gives the reward ``goal`` of 1; a hole
    ends the episode.
    """

    def __init__(self, size: int = 4, is_slippery: bool = False) -> None:
        self.size, self.is_slippery = size, is_slippery

    def reset(self, task: dict, seed: int) -> dict:
        """Draw the map from the seed, so that all samples of a prompt have the same."""
        self.map = generate_random_map(self.size, seed=seed)
        self.game = gymnasium.make("FrozenLake-v1", desc=self.map, is_slippery=self.is_slippery)
        self.place, _ = self.game.reset(seed=seed)
        return {"messages": [self.observation()]}

    def step(self, message: dict) -> dict:
        """Take the move of one response. Other responses change nothing and are counted."""
        found = re.search("[LDRU]", message["content"])
        if found is None:
            return {"messages": [self.observation()], "counts": {"invalid_moves": 1}}
        self.place, reward, terminated, truncated, _ = self.game.step(ACTIONS[found[0]])
        done = bool(terminated or truncated)
        return {
            "messages": [] if done else [self.observation()],
            "done": done,
            "rewards": {"goal": float(reward)},
        }

    def close(self) -> None:
        """Close the game at the end of the episode."""
        self.game.close()

    def observation(self) -> dict:
        """Return the state as a message."""
        fields = list("/".join(self.map))
        row, column = divmod(int(self.place), self.size)
        fields[row * (self.size + 1) + column] = "@"
        return {"role": "user", "content": "".join(fields)}
