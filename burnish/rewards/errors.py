"""The error of rewards, for whatever checks them without torch."""


class RewardError(RuntimeError):
    """A reward that failed or cannot be made: which one, where, what came back, what to do."""
