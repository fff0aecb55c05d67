"""The error of rewards, for whatever checks them without torch."""


class RewardError(RuntimeError):
    """A reward failed or cannot be created. Names the reward, the place, the reply, the remedy."""
