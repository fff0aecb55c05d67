"""The root error of rewards, importable without torch."""

from burnish.errors import BurnishError


class RewardError(BurnishError, RuntimeError):
    """A reward failed or cannot be created.

    The message contains the reward's name, its source location, its result, and what to do.
    """
