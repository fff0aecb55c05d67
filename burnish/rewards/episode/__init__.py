"""Rewards that an environment or agent gave during an episode."""
