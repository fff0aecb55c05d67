"""The error of rewards, for whatever checks them without torch."""

from burnish.errors import BurnishError


class RewardError(BurnishError, RuntimeError):
    """A reward failed or cannot be created. Names the reward, the place, the reply, the remedy."""
